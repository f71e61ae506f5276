"""What gossipd's machine is told, and what it has done. Declarations only; ``gossip.py`` has the table."""

from __future__ import annotations

from dataclasses import dataclass

from services.gossipd.membership import Effect as OwnEffect
from services.gossipd.membership import Stimulus as OwnStimulus
from services.gossipd.roster import PersistPeers, PublishWanted, TrustKnown
from shared.ids import PeerId
from shared.messages.mesh import LoadRecord
from shared.messages.tunnel import FromPeer, LinkChanged, PeerChannel


@dataclass(frozen=True, slots=True)
class LinksReplaced:
    """All links, from a snapshot of tunneld."""

    links: tuple[LinkChanged, ...]


@dataclass(frozen=True, slots=True)
class SayGoodbye:
    """This node leaves its mesh or stops: tell the others. Answered by ``GoodbyeSaid``."""


Stimulus = OwnStimulus | FromPeer | LinkChanged | LinksReplaced | TrustKnown | SayGoodbye


@dataclass(frozen=True, slots=True)
class Send:
    """Hand ``payload`` to the gossipd of each of ``peers``, best effort."""

    peers: tuple[PeerId, ...]
    payload: bytes
    channel: PeerChannel = "gossip"


@dataclass(frozen=True, slots=True)
class SignLoad:
    """Have tunneld sign this and hand the result back as ``RecordSigned``."""

    load: LoadRecord


@dataclass(frozen=True, slots=True)
class GoodbyeSaid:
    """The goodbye is on its way, or there is nobody to tell."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """What a peer sent does not count: to be counted, and logged when it is first seen."""

    code: str
    peer_id: PeerId
    reason: str


Effect = OwnEffect | Send | SignLoad | PublishWanted | PersistPeers | GoodbyeSaid | Refuse
