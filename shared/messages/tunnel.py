"""What tunneld carries and reports: links to peers, and small messages between the daemons of two nodes."""

from __future__ import annotations

from typing import Literal

from shared.ids import ModelName, PeerId
from shared.messages.registry import message, part
from shared.messages.trust import Grant

LinkState = Literal["connecting", "connected", "waiting", "closed"]
PeerChannel = Literal["gossip", "peer_down", "peer_leaving", "enroll"]
"""Which stream type carries it."""


@part
class StreamCounters:
    """Since the link was made."""

    bytes_sent: int = 0
    bytes_received: int = 0
    streams_opened: int = 0
    streams_accepted: int = 0
    refused: int = 0


@message
class LinkChanged:
    """tunneld: the link to one peer. ``closed`` is the last word until it is wanted again."""

    peer_id: PeerId
    state: LinkState
    reason: str
    """In words: how it is connected, why it waits, why it closed."""
    grant: Grant | None = None
    control: Literal["", "quic", "tcp"] = ""
    bulk: Literal["", "quic", "tcp"] = ""
    remote_address: str = ""
    """As a multiaddr without ``/p2p``."""
    dialled_here: bool = False
    rtt_seconds: float | None = None
    """Windowed minimum."""
    retry_in_seconds: float | None = None
    counters: StreamCounters = StreamCounters()


@message
class SendToPeers:
    """Request to tunneld: hand ``payload`` to the same daemon of each peer. Reply ``Done`` once it is queued.

    Best effort like any datagram: what a peer that is not connected should get is dropped and counted.
    """

    peers: tuple[PeerId, ...]
    payload: bytes
    channel: PeerChannel = "gossip"


@message
class FromPeer:
    """tunneld: a payload that a connected, verified peer sent. Published once, in no snapshot."""

    peer_id: PeerId
    payload: bytes
    channel: PeerChannel = "gossip"
    grant: Grant = "member"


# -- the data plane: first frame on tunneld's unix stream socket, and its answer --------------------------------


@message
class OpenHttp:
    """proxyd asks for one request to an engine of ``peer_id``; after ``StreamOpened`` HTTP/1.1 bytes follow."""

    peer_id: PeerId
    model: ModelName
    request_id: str
    deadline_seconds: float


@message
class StreamOpened:
    """The peer's tunneld holds a lease: bytes may flow. ``queue_seconds``: how long that took there."""

    queue_seconds: float = 0.0


# -- a node asks another ------------------------------------------------------------------------------------

AdminAction = Literal["logs", "load", "unload", "drain", "probe"]


@message
class AdminRequest:
    """First frame of an ADMIN stream, and a request to tunneld with ``peer``. Reply ``AdminReply`` or ``Refused``."""

    peer: PeerId
    action: AdminAction
    subject: str = ""
    """A model for load and unload, a daemon for logs. ``probe`` (dial me) has none; answer ``PeerProbed``."""
    lines: int = 100


@message
class AdminReply:
    lines: tuple[str, ...] = ()


# -- can that node be reached, and can it reach us ----------------------------------------------------------

ProbeSubject = Literal[
    "token", "name", "route", "container", "tcp", "udp", "mtu", "clock", "version", "mesh", "back"
]
ProbeLevel = Literal["ok", "warn", "fail"]


@part
class ProbeCheck:
    """One condition for two nodes to meet. ``fix`` is one line, empty when all is well."""

    name: ProbeSubject
    level: ProbeLevel
    detail: str
    fix: str = ""


@message
class ProbePeer:
    """Request to tunneld: try ``addresses``, tell at each step what works, keep no connection. Reply ``PeerProbed``.

    In the mesh the handshakes are those of nodes; with ``root_fingerprint`` of another mesh, those of one that joins.
    """

    addresses: tuple[str, ...]
    root_fingerprint: str = ""
    peer_id: PeerId | None = None
    back: bool = True
    """Ask the peer, too, whether it can dial this node."""


@message
class PeerProbed:
    """Reply to the request above, and of a peer to ``AdminRequest`` ``probe``."""

    checks: tuple[ProbeCheck, ...]
    back: tuple[ProbeCheck, ...] = ()
    """What the peer found when it dialled this node."""
