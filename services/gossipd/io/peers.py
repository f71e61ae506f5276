"""What the membership of a mesh needs of the world: signatures and sending by tunneld, a file of known peers, words.

Sending is best effort: what tunneld cannot take is counted and dropped, digests repair it.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable
from pathlib import Path

from services.gossipd.io.state_files import replace_file
from services.gossipd.io.trust_desk import TrustDesk
from services.gossipd.membership import SignAnnouncement
from services.gossipd.roster import PersistPeers, PublishWanted, TrustKnown
from services.gossipd.stimuli import Effect, GoodbyeSaid, Refuse, SayGoodbye, Send, SignLoad, Stimulus
from shared import codec
from shared.errors import DaemonUnreachable, MeshError, RequestRefused
from shared.ids import PeerId
from shared.io import log
from shared.io.bus import BusClient, BusServer
from shared.io.drive import Tasks
from shared.messages.mesh import Announcement, LoadRecord, MemberChanged, RecordSigned, SignRecord
from shared.messages.trust import PeerAddresses
from shared.messages.tunnel import SendToPeers

SIGN_SECONDS = 5.0
SEND_SECONDS = 1.0
QUEUE_MESSAGES = 2_000
GOODBYE_SECONDS = 1.5
"""A node that stops waits no longer for its goodbye to be signed and handed over."""
PEERS_LIMIT = 1_000


class Peers:
    """Performs the effects that concern other nodes. ``post`` hands stimuli to the machine."""

    post: Callable[[Stimulus], None]

    def __init__(self, folder: Path, tunneld: BusClient, tasks: Tasks, bus: BusServer) -> None:
        self._file = folder / "peers.json"
        self._tunneld = tunneld
        self._tasks = tasks
        self._bus = bus
        self._to_sign: dict[type[Announcement] | type[LoadRecord], Announcement | LoadRecord] = {}
        self._sign = asyncio.Event()
        self._queue: deque[Send] = deque()
        self._sendable = asyncio.Event()
        self._sent = asyncio.Event()
        self._said = asyncio.Event()
        self._once = log.LogOnce()
        self._shown: dict[PeerId, str] = {}

    def start(self, desk: TrustDesk) -> None:
        self.trust(desk)
        self._tasks.start(self._sign_latest(), "signatures")
        self._tasks.start(self._send_all(), "messages to peers")

    def trust(self, desk: TrustDesk) -> None:
        """Bans, grants and bootstrap peers, as the trust desk has them now."""
        message = desk.keeping.message()
        self.post(
            TrustKnown(
                banned=frozenset(message.banned),
                trusted=frozenset(message.trusted),
                grant=desk.trust.credentials.grant(),
                bootstrap=desk.bootstrap,
            )
        )

    # -- effects ------------------------------------------------------------------------------------------------

    def perform(self, effect: Effect) -> None:
        match effect:
            case SignAnnouncement(announcement=announcement):
                self._to_sign[Announcement] = announcement
                self._sign.set()
            case SignLoad(load=load):
                self._to_sign[LoadRecord] = load
                self._sign.set()
            case Send():
                if len(self._queue) >= QUEUE_MESSAGES:
                    self._queue.popleft()
                    self._bus.count("not_sent")
                self._queue.append(effect)
                self._sent.clear()
                self._sendable.set()
            case PublishWanted(wanted=wanted):
                self._bus.publish(wanted)
            case PersistPeers(peers=peers):
                self._save(peers)
            case GoodbyeSaid():
                self._said.set()
            case Refuse(code=code, peer_id=peer_id, reason=reason):
                self._bus.count(f"gossip_{code}")
                self._once(f"{code} {peer_id}", "gossip_refused", code=code, peer=peer_id, reason=reason)

    def tell(self, member: MemberChanged) -> None:
        """A line in the log when somebody comes or goes."""
        said = member.announcement
        if self._shown.get(said.peer_id) != member.state:
            self._shown[said.peer_id] = member.state
            log.info(f"peer_{member.state}", name=said.name, peer=said.peer_id, reason=member.reason)

    async def goodbye(self) -> None:
        """Returns when the goodbye was handed to tunneld, or after ``GOODBYE_SECONDS``."""
        self._said.clear()
        self.post(SayGoodbye())
        try:
            async with asyncio.timeout(GOODBYE_SECONDS):
                await self._said.wait()
                if self._queue:
                    await self._sent.wait()
        except TimeoutError:
            log.warning("goodbye_not_sent", reason="tunneld did not take it in time; the others will notice by probing")

    # -- tunneld ------------------------------------------------------------------------------------------------

    async def _sign_latest(self) -> None:
        """Have tunneld sign the newest record of each kind; older ones nobody needs any more."""
        while True:
            await self._sign.wait()
            self._sign.clear()
            while self._to_sign:
                kind = next(iter(self._to_sign))
                record = self._to_sign.pop(kind)
                try:
                    reply = await self._tunneld.request(
                        SignRecord(payload=codec.encode(record)), deadline_seconds=SIGN_SECONDS
                    )
                except (DaemonUnreachable, RequestRefused) as error:
                    log.warning("not_signed", seq=record.seq, reason=error.detail)
                    self._to_sign.setdefault(kind, record)
                    if isinstance(error, RequestRefused):
                        await asyncio.sleep(SIGN_SECONDS)
                    continue
                if isinstance(reply, RecordSigned):
                    self.post(reply)

    async def _send_all(self) -> None:
        while True:
            await self._sendable.wait()
            self._sendable.clear()
            while self._queue:
                item = self._queue[0]
                asked = SendToPeers(peers=item.peers, payload=item.payload, channel=item.channel)
                try:
                    await self._tunneld.request(asked, deadline_seconds=SEND_SECONDS)
                except MeshError as error:
                    self._bus.count("not_sent")
                    self._once(f"send {error.code}", "not_sent", reason=error.detail)
                if self._queue and self._queue[0] is item:
                    self._queue.popleft()
            self._sent.set()

    # -- the file of known peers ----------------------------------------------------------------------------------

    def load(self) -> dict[PeerId, tuple[str, ...]]:
        """Peers of before; without the file, or with a damaged one, others find this node or it is invited again."""
        try:
            value = json.loads(self._file.read_text(encoding="utf-8"))
            known = {
                PeerId(str(peer_id)): tuple(str(address) for address in addresses)
                for peer_id, addresses in value.items()
            }
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
            log.warning("peers_lost", path=self._file, reason=error)
            return {}
        return dict(list(known.items())[:PEERS_LIMIT])

    def _save(self, peers: tuple[PeerAddresses, ...]) -> None:
        try:
            replace_file(self._file, json.dumps({peer.peer_id: list(peer.addresses) for peer in peers}, indent=1))
        except OSError as error:
            log.warning("peers_not_saved", path=self._file, reason=error.strerror or error)


def explain_member(member: MemberChanged) -> tuple[str, ...]:
    """Another node, in words."""
    said = member.announcement
    rtt = f", {member.rtt_seconds * 1000:.0f} ms away" if member.rtt_seconds is not None else ""
    hosted = ", ".join(item.model for item in said.hosted)
    return (
        f"{said.name} ({said.peer_id}) is {member.state}: {member.reason}. Heard {member.age_seconds:.0f} s ago{rtt}.",
        f"It takes part as {said.role} with grant {member.grant}, start number {said.incarnation}; "
        + (f"it serves {hosted}." if hosted else "it serves no model now."),
    )
