"""A link: all connections with one peer, whoever dialled, and what is under way to get them. Data only.

Source: docs/spec/links.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NewType

from shared.ids import PeerId
from shared.messages.trust import Grant, PeersWanted
from shared.messages.tunnel import LinkChanged, StreamCounters
from shared.multiaddrs import Address, Transport

ConnectionId = NewType("ConnectionId", int)
DialId = NewType("DialId", int)
Preference = Literal["auto", "quic", "tcp"]


@dataclass(frozen=True, slots=True)
class Connected:
    """A verified connection, dialled by either side."""

    connection_id: ConnectionId
    peer_id: PeerId
    transport: Transport
    remote: str
    dialled_here: bool
    grant: Grant


@dataclass(frozen=True, slots=True)
class ConnectionLost:
    connection_id: ConnectionId
    reason: str


@dataclass(frozen=True, slots=True)
class DialFailed:
    dial_id: DialId
    reason: str


@dataclass(frozen=True, slots=True)
class DialDone:
    """It led to ``Connected``, which was said before."""

    dial_id: DialId


@dataclass(frozen=True, slots=True)
class Measured:
    """How a connection does."""

    connection_id: ConnectionId
    rtt_seconds: float | None
    counters: StreamCounters


@dataclass(frozen=True, slots=True)
class MeshSet:
    """Whether this node has credentials of a mesh, and who is banned from it. A new mesh ends all links."""

    in_mesh: bool
    banned: frozenset[PeerId] = frozenset()
    renewed: bool = False
    """It is another mesh than before."""


Stimulus = PeersWanted | Connected | ConnectionLost | DialFailed | DialDone | Measured | MeshSet


@dataclass(frozen=True, slots=True)
class Dial:
    dial_id: DialId
    peer_id: PeerId
    address: Address


@dataclass(frozen=True, slots=True)
class CancelDial:
    dial_id: DialId


@dataclass(frozen=True, slots=True)
class CloseConnection:
    connection_id: ConnectionId
    reason: str
    when_idle: bool = False
    """Let its streams end first."""


@dataclass(frozen=True, slots=True)
class PublishLink:
    link: LinkChanged


Effect = Dial | CancelDial | CloseConnection | PublishLink


@dataclass(slots=True)
class Round:
    """Dialling of one transport: what is left to try, what is on its way."""

    left: list[Address] = field(default_factory=list)
    flying: dict[DialId, Address] = field(default_factory=dict)
    next_at: float | None = None
    """When to start the next dial or round; None: not before something changes."""
    failures: int = 0
    reason: str = ""


@dataclass(slots=True)
class Link:
    peer_id: PeerId
    addresses: tuple[Address, ...] = ()
    wanted: bool = False
    grant: Grant | None = None
    connections: dict[ConnectionId, Connected] = field(default_factory=dict)
    retired: set[ConnectionId] = field(default_factory=set)
    rounds: dict[Transport, Round] = field(default_factory=dict)
    good: dict[Transport, Address] = field(default_factory=dict)
    rtts: dict[ConnectionId, float] = field(default_factory=dict)
    counted: dict[ConnectionId, StreamCounters] = field(default_factory=dict)
    ended: StreamCounters = field(default_factory=StreamCounters)
    """Sum over the connections that are gone."""
    lost_reason: str = ""
    published: LinkChanged | None = None
    published_at: float = 0.0

    def best(self, transport: Transport) -> Connected | None:
        live = [item for key, item in self.connections.items() if key not in self.retired]
        return next((item for item in live if item.transport == transport), None)

    def choose(self, preference: Preference, *, bulk: bool) -> Connected | None:
        """The connection that a new stream takes: control prefers QUIC, bulk TCP, unless configured otherwise."""
        first: Transport = "tcp" if preference == "tcp" or (bulk and preference == "auto") else "quic"
        second: Transport = "quic" if first == "tcp" else "tcp"
        return self.best(first) or self.best(second) or next(iter(self.connections.values()), None)
