"""What the gossipds of two nodes say to each other, on channels ``gossip``, ``peer_down`` and ``peer_leaving``.

No clock reading crosses the wire. Every message may be lost, doubled or late; all of them are safe to repeat.
Source: docs/spec/membership.md.
"""

from __future__ import annotations

from typing import Literal

from shared.ids import MeshId, PeerId
from shared.messages.mesh import MemberState, SignedRecord
from shared.messages.registry import message, part


@message
class Probe:
    """Are you there? Answer ``ProbeAck`` with the same ``nonce``."""

    nonce: int


@message
class ProbeRequest:
    """Probe ``subject`` for me; ``ProbeAck`` with this ``nonce`` when it answered, silence when it did not."""

    nonce: int
    subject: PeerId


@message
class ProbeAck:
    """``subject`` answered just now: the sender itself, or whom it was asked to probe."""

    nonce: int
    subject: PeerId


@message
class Records:
    """Announcements and load records, each as its node signed it."""

    records: tuple[SignedRecord, ...]


@part
class DigestEntry:
    """What the sender holds of one node: the numbers of both records, and what it thinks of the node."""

    peer_id: PeerId
    incarnation: int
    seq: int
    load_incarnation: int = 0
    load_seq: int = 0
    state: MemberState = "alive"


@message
class Digest:
    """Everything that the sender holds, by number; the receiver sends what is newer and asks for what it lacks."""

    mesh_id: MeshId
    entries: tuple[DigestEntry, ...]


@message
class RecordsWanted:
    """Send both records of these nodes. Answer ``Records``."""

    peers: tuple[PeerId, ...]


@message
class PeerDown:
    """A claim: ``accuser`` got no answer from ``subject`` in its ``incarnation``. The subject refutes it."""

    accuser: PeerId
    subject: PeerId
    incarnation: int
    state: Literal["suspect", "dead"] = "dead"


@message
class PeerLeaving:
    """A goodbye: the announcement in state ``leaving`` that the leaving node itself signed."""

    record: SignedRecord
