"""Two or more of gossipd's machines by hand: real keys, signed records, effects to look at."""

from __future__ import annotations

from dataclasses import replace
from hashlib import blake2b
from typing import Any, TypeVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from services.gossipd.announcement import NodeFacts
from services.gossipd.gossip import Gossip
from services.gossipd.membership import Membership, PublishMember, SignAnnouncement, SlotsReplaced
from services.gossipd.mesh_identity import MeshIdentity
from services.gossipd.roster import TrustKnown
from services.gossipd.stimuli import Effect, Send, SignLoad, Stimulus
from shared import codec
from shared.ids import MeshId, PeerId
from shared.io.drive import Tick
from shared.messages.gossip import Records
from shared.messages.mesh import Announcement, LoadRecord, RecordSigned, SignedRecord, TunnelChanged
from shared.messages.models import DeviceChanged, InventoryChanged
from shared.messages.tunnel import FromPeer, LinkChanged
from shared.peer_ids import peer_id_of

T = TypeVar("T")
MESH = MeshId("mesh")


class Other:
    """A node that exists as a key."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.key = Ed25519PrivateKey.from_private_bytes(blake2b(name.encode(), digest_size=32).digest())
        self.peer_id = peer_id_of(self.key.public_key().public_bytes_raw())

    def announcement(self, incarnation: int = 1, seq: int = 1, **more: Any) -> Announcement:
        made = Announcement(
            peer_id=self.peer_id,
            incarnation=incarnation,
            seq=seq,
            mesh_id=MESH,
            version="1",
            name=self.name,
            role="standby",
            state="active",
            addresses=(f"/ip4/10.0.0.9/udp/9340/quic-v1/p2p/{self.peer_id}",),
        )
        return replace(made, **more)

    def load(self, incarnation: int = 1, seq: int = 1, **more: Any) -> LoadRecord:
        return replace(LoadRecord(peer_id=self.peer_id, incarnation=incarnation, seq=seq, mesh_id=MESH), **more)

    def sign(self, record: Announcement | LoadRecord) -> SignedRecord:
        payload = codec.encode(record)
        return SignedRecord(payload=payload, signature=self.key.sign(payload), peer_id=self.peer_id)

    def signed(self, incarnation: int = 1, seq: int = 1, **more: Any) -> SignedRecord:
        return self.sign(self.announcement(incarnation, seq, **more))


class Here:
    """This node's machine with a clock and its tunneld, which signs at once."""

    def __init__(self, *others: Other, connected: bool = True) -> None:
        self.me = Other("here")
        membership = Membership(
            MeshIdentity(mesh_id=MESH, incarnation=5, peer_id=self.me.peer_id), NodeFacts("here", configured=True)
        )
        self.core = Gossip(membership, seed=7)
        self.now = 1000.0
        self.tell(TrustKnown(grant="member"), SlotsReplaced(()), InventoryChanged(models=()))
        self.tell(DeviceChanged(device="cpu", vram_bytes=8, total_bytes=9, reserve_bytes=1, engine="e"))
        self.tell(TunnelChanged(peer_id=self.me.peer_id, port=9340, addresses=("/here",)))
        for other in others:
            if connected:
                self.connect(other)
            self.hear(other, Records(records=(other.signed(),)))

    def tell(self, *stimuli: Stimulus | Tick) -> list[Effect]:
        effects: list[Effect] = []
        for stimulus in stimuli:
            effects += self._step(stimulus)
        return effects

    def _step(self, stimulus: Stimulus | Tick) -> list[Effect]:
        effects = self.core.handle(stimulus, now=self.now)
        self.core.check_invariants()
        for effect in list(effects):
            match effect:
                case SignAnnouncement(announcement=record):
                    effects += self._step(RecordSigned(record=self.me.sign(record)))
                case SignLoad(load=record):
                    effects += self._step(RecordSigned(record=self.me.sign(record)))
        return effects

    def hear(self, other: Other, message: codec.Message, **more: Any) -> list[Effect]:
        return self.tell(FromPeer(peer_id=other.peer_id, payload=codec.encode(message), **more))

    def connect(self, other: Other, rtt_seconds: float = 0.01) -> list[Effect]:
        return self.tell(
            LinkChanged(peer_id=other.peer_id, state="connected", reason="", grant="member", rtt_seconds=rtt_seconds)
        )

    def lose(self, other: Other) -> list[Effect]:
        return self.tell(LinkChanged(peer_id=other.peer_id, state="waiting", reason="lost"))

    def wait(self, seconds: float) -> list[Effect]:
        """Every tick that is due within ``seconds``."""
        end, effects = self.now + seconds, list[Effect]()
        for _ in range(10_000):
            deadline = self.core.next_deadline()
            if deadline is None or deadline > end:
                break
            self.now = max(self.now, deadline)
            effects += self.tell(Tick())
        else:
            raise AssertionError("the machine's deadline never moves on")
        self.now = end
        return effects

    def state(self, other: Other) -> str:
        peer = self.core.roster.swim.peers.get(other.peer_id)
        return peer.state if peer else "unknown"


def sent(effects: list[Effect], kind: type[T]) -> list[tuple[tuple[PeerId, ...], T]]:
    """Everything of one kind that goes to peers."""
    found = []
    for effect in effects:
        if isinstance(effect, Send):
            message = codec.decode(effect.payload)
            if isinstance(message, kind):
                found.append((effect.peers, message))
    return found


def shown(effects: list[Effect], other: Other) -> list[str]:
    """The states that were published of a node."""
    return [
        effect.member.state
        for effect in effects
        if isinstance(effect, PublishMember) and effect.member.announcement.peer_id == other.peer_id
    ]
