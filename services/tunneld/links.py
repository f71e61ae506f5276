"""Which peers to dial, over what, and when again: the policy of this node's links.

Theory of operation. gossipd says whom to keep connected (``PeersWanted``); a link to a peer is all connections with
it, whoever dialled. Two are wanted: one over QUIC for control, one over TLS on TCP for bulk, or what the configuration
says. Where one of them does not connect, the other carries both, and the missing one is tried again now and then.

A round of dialling tries a peer's addresses in ``dial_order``, a quarter of a second apart, until one connects; after
a round without success the peer is left alone for a jittered, doubling while. Both ends may dial at once: of two
connections over one transport both keep the one that the smaller peer id dialled and retire the other, that is, open
nothing new on it and close it when its streams have ended.

==========  ==============================================  ==================================================
link        while                                           leaves when
==========  ==============================================  ==================================================
connecting  a dial is on its way and nothing is connected   one connects; the round ends without success
connected   any connection is up                            the last one is lost
waiting     the round failed: retry in ... because ...      the time is over; new addresses; the peer dials
closed      nobody wants it, or it is banned                it is wanted, or dials
==========  ==============================================  ==================================================

Source: docs/spec/links.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from hashlib import blake2b

from services.tunneld.link import (
    CancelDial,
    CloseConnection,
    Connected,
    ConnectionId,
    ConnectionLost,
    Dial,
    DialDone,
    DialFailed,
    DialId,
    Effect,
    Link,
    Measured,
    MeshSet,
    Preference,
    PublishLink,
    Round,
    Stimulus,
)
from services.tunneld.link_view import sum_counters, transport_word, view_link, worth_saying
from shared.errors import SchemaError
from shared.ids import PeerId
from shared.io.drive import Tick
from shared.messages.trust import PeersWanted
from shared.messages.tunnel import LinkChanged, StreamCounters
from shared.multiaddrs import Address, Transport, dial_order, parse_address, parse_addresses

STAGGER_SECONDS = 0.25
"""Between two addresses of one round, as RFC 8305 (happy eyeballs) has it."""
BACK_OFF_SECONDS = 0.5
BACK_OFF_LIMIT_SECONDS = 30.0
JITTER = 0.25
"""A back-off is its length plus or minus this share, so that a mesh that lost a node does not return as one."""
OTHER_TRANSPORT_SECONDS = 60.0
"""How often at least the transport that did not connect is tried again while the other one works."""
ADDRESS_LIMIT = 16
"""Addresses tried per peer: what more a peer announces is not believed to help."""
PEER_LIMIT = 1024
DIAL_LIMIT = 16
"""Dials on their way at once, over all peers: stale addresses must not delay live ones."""


class Links:
    """The links machine of one node. ``seed`` makes the jitter differ between nodes."""

    def __init__(self, own: PeerId, *, transport: Preference = "auto", seed: bytes = b"") -> None:
        self._own = own
        self._transport: Preference = transport
        self._seed = seed
        self._links: dict[PeerId, Link] = {}
        self._peer_of: dict[ConnectionId, PeerId] = {}
        self._dials: dict[DialId, tuple[PeerId, Transport]] = {}
        self._dial_count = 0
        self._mesh = MeshSet(in_mesh=False)

    # -- asked by the shell -------------------------------------------------------------------------------------

    def connection_for(self, peer_id: PeerId, *, bulk: bool) -> ConnectionId | None:
        """The connection that new streams to the peer take, or None."""
        link = self._links.get(peer_id)
        chosen = link.choose(self._transport, bulk=bulk) if link else None
        return chosen.connection_id if chosen else None

    def why_not(self, peer_id: PeerId) -> str:
        """In words: why there is no connection with the peer."""
        link = self._links.get(peer_id)
        if link is None or link.published is None:
            return "it is not known here" if self._mesh.in_mesh else "this node is in no mesh with others"
        return link.published.reason

    def addresses_of(self, peer_id: PeerId) -> tuple[Address, ...]:
        """Where gossipd says that the peer is."""
        link = self._links.get(peer_id)
        return link.addresses if link else ()

    def links(self) -> list[LinkChanged]:
        """What was last published of each link, by peer id."""
        return [link.published for _, link in sorted(self._links.items()) if link.published is not None]

    def next_deadline(self) -> float | None:
        if len(self._dials) >= DIAL_LIMIT:
            return None
        times = [
            turn.next_at
            for link in self._links.values()
            if link.wanted
            for turn in link.rounds.values()
            if turn.next_at is not None
        ]
        return min(times, default=None)

    # -- the machine --------------------------------------------------------------------------------------------

    def handle(self, stimulus: Stimulus | Tick, *, now: float) -> list[Effect]:
        effects: list[Effect] = []
        match stimulus:
            case PeersWanted(peers=peers):
                effects += self._want({item.peer_id: item.addresses for item in peers[:PEER_LIMIT]}, now)
            case Connected():
                effects += self._connected(stimulus, now)
            case ConnectionLost(connection_id=connection_id, reason=reason):
                effects += self._lost(connection_id, reason, now)
            case DialFailed(dial_id=dial_id, reason=reason):
                self._dial_ended(dial_id, reason, now)
            case DialDone(dial_id=dial_id):
                self._dial_ended(dial_id, None, now)
            case Measured():
                self._measured(stimulus)
            case MeshSet():
                effects += self._set_mesh(stimulus)
            case Tick():
                pass
        effects += self._dial_due(now)
        effects += self._publish_changes(now)
        return effects

    def check_invariants(self) -> None:
        """Raises AssertionError when the machine contradicts itself."""
        flying = {dial for link in self._links.values() for turn in link.rounds.values() for dial in turn.flying}
        assert flying == set(self._dials)
        assert len(self._dials) <= DIAL_LIMIT
        known = {key for link in self._links.values() for key in link.connections}
        assert known == set(self._peer_of)
        for link in self._links.values():
            assert link.retired <= set(link.connections)
            assert not (link.connections and link.peer_id in self._mesh.banned)
            assert link.published is None or link.published.reason
            if link.connections:
                assert link.choose(self._transport, bulk=True) is not None
                assert link.choose(self._transport, bulk=False) is not None

    # -- wishes ---------------------------------------------------------------------------------------------------

    def _want(self, wanted: dict[PeerId, tuple[str, ...]], now: float) -> list[Effect]:
        effects: list[Effect] = []
        for peer_id, texts in wanted.items():
            if peer_id == self._own or peer_id in self._mesh.banned:
                continue
            addresses = parse_addresses(texts)
            own = tuple(item.without_peer() for item in addresses if item.peer_id in (None, peer_id))
            link = self._links.setdefault(peer_id, Link(peer_id))
            if not link.wanted or own != link.addresses:
                link.wanted = True
                link.addresses = own
                self._begin(link, now)
        for link in list(self._links.values()):
            if link.wanted and link.peer_id not in wanted:
                effects += self._unwant(link)
        return effects

    def _unwant(self, link: Link) -> list[Effect]:
        """Stop dialling; what the peer dialled stays as long as the peer likes."""
        link.wanted = False
        effects: list[Effect] = self._stop_dialling(link, tuple(link.rounds))
        link.rounds.clear()
        for key, item in link.connections.items():
            if item.dialled_here and key not in link.retired:
                effects.append(CloseConnection(key, "not needed any more", when_idle=True))
        return effects

    def _set_mesh(self, mesh: MeshSet) -> list[Effect]:
        effects: list[Effect] = []
        self._mesh = mesh
        for link in self._links.values():
            banned = link.peer_id in mesh.banned
            if not (banned or mesh.renewed or not mesh.in_mesh):
                continue
            reason = "banned from the mesh" if banned else "this node left the mesh"
            link.wanted = False
            link.lost_reason = reason
            effects += self._stop_dialling(link, tuple(link.rounds))
            link.rounds.clear()
            effects += [CloseConnection(key, reason) for key in link.connections]
            for key in link.connections:
                self._peer_of.pop(key, None)
            link.connections.clear()
            link.retired.clear()
            link.rtts.clear()
        return effects

    # -- connections ----------------------------------------------------------------------------------------------

    def _connected(self, new: Connected, now: float) -> list[Effect]:
        if not self._mesh.in_mesh or new.peer_id in self._mesh.banned or new.peer_id == self._own:
            return [CloseConnection(new.connection_id, "this node does not want the connection")]
        link = self._links.setdefault(new.peer_id, Link(new.peer_id))
        link.connections[new.connection_id] = new
        self._peer_of[new.connection_id] = new.peer_id
        link.grant = new.grant
        link.lost_reason = ""
        if new.dialled_here:
            address = _readable(new.remote)
            if address is not None:
                link.good[new.transport] = address
        effects: list[Effect] = []
        if new.dialled_here or link.peer_id < self._own:
            # Else both dialled at once and this node's dial is the one that stays: giving it up now could leave none,
            # for the peer gives up its own when ours arrives there.
            effects += self._stop_dialling(link, (new.transport,))
        turn = link.rounds.get(new.transport)
        if turn is not None:
            turn.left.clear()
            turn.next_at, turn.failures, turn.reason = None, 0, ""
        for transport, other in link.rounds.items():
            if link.best(transport) is None and not other.flying:
                # The peer is there, perhaps after a restart: what failed before may work now.
                other.next_at, other.failures = now, 0
        return effects + self._retire_doubles(link, new.transport)

    def _retire_doubles(self, link: Link, transport: Transport) -> list[Effect]:
        """Both ends keep the newest connection that the smaller peer id dialled, else the newest one."""
        live = [
            item
            for key, item in link.connections.items()
            if item.transport == transport and key not in link.retired
        ]
        mine_wins = self._own < link.peer_id
        keep = max(live, key=lambda item: (item.dialled_here is mine_wins, item.connection_id))
        effects: list[Effect] = []
        for item in live:
            if item is not keep:
                link.retired.add(item.connection_id)
                effects.append(CloseConnection(item.connection_id, "a second connection is not needed", when_idle=True))
        return effects

    def _lost(self, connection_id: ConnectionId, reason: str, now: float) -> list[Effect]:
        peer_id = self._peer_of.pop(connection_id, None)
        link = self._links.get(peer_id) if peer_id is not None else None
        if link is None:
            return []
        gone = link.connections.pop(connection_id)
        retired = connection_id in link.retired
        link.retired.discard(connection_id)
        link.rtts.pop(connection_id, None)
        link.ended = sum_counters((link.ended, link.counted.pop(connection_id, StreamCounters())))
        if not link.connections:
            link.lost_reason = reason
        if retired or not link.wanted:
            return []
        turn = link.rounds.setdefault(gone.transport, Round())
        # At once, but not all nodes in the same moment.
        turn.left.clear()
        turn.next_at = now + self._jitter(link.peer_id, turn.failures) * BACK_OFF_SECONDS
        return []

    def _measured(self, measured: Measured) -> None:
        peer_id = self._peer_of.get(measured.connection_id)
        if peer_id is None:
            return
        link = self._links[peer_id]
        if measured.rtt_seconds is not None:
            link.rtts[measured.connection_id] = measured.rtt_seconds
        link.counted[measured.connection_id] = measured.counters

    # -- dialling -------------------------------------------------------------------------------------------------

    def _transports(self) -> tuple[Transport, ...]:
        return {"auto": ("quic", "tcp"), "quic": ("quic",), "tcp": ("tcp",)}[self._transport]  # type: ignore[return-value]

    def _begin(self, link: Link, now: float) -> None:
        """New addresses: what was learned about the old ones no longer counts."""
        for transport in self._transports():
            turn = link.rounds.setdefault(transport, Round())
            if link.best(transport) is None:
                turn.left.clear()
                turn.failures = 0
                turn.next_at = now

    def _dial_due(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        if not self._mesh.in_mesh:
            return effects
        due = [
            (turn.next_at, link.peer_id, transport)
            for link in self._links.values()
            if link.wanted
            for transport, turn in link.rounds.items()
            if turn.next_at is not None and turn.next_at <= now
        ]
        for _, peer_id, transport in sorted(due):
            if len(self._dials) >= DIAL_LIMIT:
                break
            effects += self._dial_next(self._links[peer_id], transport, now)
        return effects

    def _dial_next(self, link: Link, transport: Transport, now: float) -> list[Effect]:
        turn = link.rounds[transport]
        if not turn.left and not turn.flying:
            usable = tuple(item for item in link.addresses if item.transport == transport)
            turn.left = list(dial_order(usable, known_good=link.good.get(transport))[:ADDRESS_LIMIT])
            if not turn.left:
                turn.next_at = None
                turn.reason = f"no address for {transport_word(transport)} is known"
                return []
        if not turn.left:
            turn.next_at = None
            return []
        address = turn.left.pop(0)
        self._dial_count += 1
        dial_id = DialId(self._dial_count)
        self._dials[dial_id] = (link.peer_id, transport)
        turn.flying[dial_id] = address
        turn.next_at = now + STAGGER_SECONDS if turn.left else None
        return [Dial(dial_id, link.peer_id, replace(address, peer_id=link.peer_id))]

    def _dial_ended(self, dial_id: DialId, reason: str | None, now: float) -> None:
        peer_id, transport = self._dials.pop(dial_id, (None, None))
        link = self._links.get(peer_id) if peer_id is not None else None
        if link is None or transport is None or transport not in link.rounds:
            return
        turn = link.rounds[transport]
        address = turn.flying.pop(dial_id, None)
        if reason is None or link.best(transport) is not None:
            return
        if address is not None:
            turn.reason = f"{address}: {reason}"
        if turn.left:
            turn.next_at = now
        elif not turn.flying:
            turn.failures += 1
            limit = OTHER_TRANSPORT_SECONDS if link.connections else BACK_OFF_LIMIT_SECONDS
            delay = min(limit, BACK_OFF_SECONDS * 2 ** min(turn.failures - 1, 16))
            turn.next_at = now + delay * (1 - JITTER + 2 * JITTER * self._jitter(link.peer_id, turn.failures))

    def _stop_dialling(self, link: Link, transports: Iterable[Transport]) -> list[Effect]:
        effects: list[Effect] = []
        for transport in transports:
            turn = link.rounds.get(transport)
            for dial_id in list(turn.flying) if turn else ():
                assert turn is not None
                turn.flying.pop(dial_id)
                self._dials.pop(dial_id, None)
                effects.append(CancelDial(dial_id))
        return effects

    def _jitter(self, peer_id: PeerId, count: int) -> float:
        """0 to 1, another one for each node, peer and attempt."""
        text = self._seed + f"{self._own} {peer_id} {count} {self._dial_count}".encode()
        return int.from_bytes(blake2b(text, digest_size=4).digest()) / 2**32

    # -- saying so ------------------------------------------------------------------------------------------------

    def _publish_changes(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for link in list(self._links.values()):
            said = view_link(link, self._transport, now=now)
            if link.published is None or worth_saying(link.published, said, now - link.published_at):
                link.published, link.published_at = said, now
                effects.append(PublishLink(said))
            if said.state == "closed" and not link.wanted:
                del self._links[link.peer_id]
        return effects


def _readable(remote: str) -> Address | None:
    try:
        return parse_address(remote)
    except SchemaError:
        return None
