"""What other nodes said of themselves: signed records, checked, the newest of each kept, forwarded as they came.

A record counts only when the key inside its peer id signed it, its mesh is this one and its number is higher than what
is held. Everything else is refused with a reason; nothing that a peer sends raises.
Source: docs/spec/membership.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from shared import codec
from shared.errors import SchemaError
from shared.ids import MeshId, PeerId
from shared.messages.mesh import Announcement, LoadRecord, SignedRecord
from shared.peer_ids import public_key_of

ANNOUNCEMENT_BYTES = 2 * 1024 * 1024
"""A catalog of 2,000 models is about 1 MB."""
LOAD_BYTES = 1024 * 1024
NAME_CHARACTERS = 256
ADDRESSES_LIMIT = 64
NUMBER_LIMIT = 2**62
"""Of incarnations and sequence numbers: room to count further in 64 bits."""
NODES_LIMIT = 1_000
"""Nodes that are known at once, dead ones included."""

Number = tuple[int, int]
"""``(incarnation, seq)``."""
NEVER: Number = (-1, -1)

Verify = Callable[[SignedRecord], bool]


def signed_by_its_node(record: SignedRecord) -> bool:
    """Whether the Ed25519 key inside ``record.peer_id`` made the signature."""
    try:
        Ed25519PublicKey.from_public_bytes(public_key_of(record.peer_id)).verify(record.signature, record.payload)
    except (InvalidSignature, SchemaError, ValueError):
        return False
    return True


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a record does not count. ``code`` is stable; old news is no fault and has the code ``old``."""

    code: str
    reason: str


@dataclass(slots=True)
class Held:
    """Both records of one node."""

    signed: SignedRecord
    announcement: Announcement
    signed_load: SignedRecord | None = None
    load: LoadRecord | None = None

    @property
    def number(self) -> Number:
        return self.announcement.incarnation, self.announcement.seq

    @property
    def load_number(self) -> Number:
        return (self.load.incarnation, self.load.seq) if self.load else NEVER


class RecordStore:
    """The records of all other nodes of one mesh. ``verify`` is :func:`signed_by_its_node` or a memo of it."""

    def __init__(self, own: PeerId, mesh_id: MeshId, verify: Verify = signed_by_its_node) -> None:
        self.own = own
        self.mesh_id = mesh_id
        self._verify = verify
        self.held: dict[PeerId, Held] = {}

    def take(self, record: SignedRecord) -> Announcement | LoadRecord | Refusal:
        """The decoded record when it is news and everything about it is right; it is kept then."""
        if len(record.payload) > ANNOUNCEMENT_BYTES:
            return Refusal(
                "too_large", f"a record of {len(record.payload)} bytes, over the {ANNOUNCEMENT_BYTES} allowed"
            )
        held = self.held.get(record.peer_id)
        if held and record in (held.signed, held.signed_load):
            return Refusal("old", "held already")
        try:
            said = codec.decode(record.payload)
        except SchemaError as error:
            return Refusal("malformed", error.detail)
        if not isinstance(said, Announcement | LoadRecord):
            return Refusal("malformed", f"a {type(said).__name__} is no record")
        refusal = self._judge(record, said, held)
        if refusal is not None:
            return refusal
        if isinstance(said, Announcement):
            if held is None:
                self.held[said.peer_id] = Held(record, said)
            else:
                held.signed, held.announcement = record, said
        elif held is not None:
            held.signed_load, held.load = record, said
        return said

    def _judge(self, record: SignedRecord, said: Announcement | LoadRecord, held: Held | None) -> Refusal | None:
        if said.peer_id != record.peer_id:
            return Refusal("forged", f"a record in the name of {said.peer_id[:64]} inside one of {record.peer_id[:64]}")
        if said.mesh_id != self.mesh_id:
            return Refusal("wrong_mesh", f"a record of mesh {said.mesh_id[:64] or '(none)'}")
        if not (0 <= said.incarnation < NUMBER_LIMIT and 0 <= said.seq < NUMBER_LIMIT):
            return Refusal("malformed", f"record number ({said.incarnation}, {said.seq}) is out of range")
        if isinstance(said, Announcement):
            if len(said.name) > NAME_CHARACTERS or len(said.addresses) > ADDRESSES_LIMIT:
                return Refusal(
                    "too_large", f"more than {ADDRESSES_LIMIT} addresses or a name of {len(said.name)} characters"
                )
            known = held.number if held else NEVER
        else:
            if len(record.payload) > LOAD_BYTES:
                return Refusal(
                    "too_large", f"a load record of {len(record.payload)} bytes, over the {LOAD_BYTES} allowed"
                )
            if held is None:
                return Refusal("old", "the load of a node that is not known yet")
            known = held.load_number
        if (said.incarnation, said.seq) <= known:
            return Refusal("old", f"number ({said.incarnation}, {said.seq}) is not above {known}")
        if held is None and said.peer_id != self.own and len(self.held) >= NODES_LIMIT:
            return Refusal("too_many", f"already {NODES_LIMIT} nodes are known")
        if not self._verify(record):
            return Refusal("forged", f"the signature is not by the key of {record.peer_id[:64]}")
        return None

    def forget(self, peer_id: PeerId) -> None:
        self.held.pop(peer_id, None)

    def bundle(self, peers: list[PeerId], *, loads_only: bool = False) -> list[SignedRecord]:
        """The records of ``peers``, announcements before loads."""
        known = [self.held[peer_id] for peer_id in peers if peer_id in self.held]
        announced = [] if loads_only else [held.signed for held in known]
        return announced + [held.signed_load for held in known if held.signed_load is not None]
