"""The policy of links: whom to dial, what to keep of two connections, when to try again and what is said meanwhile."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from services.tunneld.link import (
    CancelDial,
    CloseConnection,
    Connected,
    ConnectionId,
    ConnectionLost,
    Dial,
    DialDone,
    DialFailed,
    Effect,
    Measured,
    MeshSet,
    Preference,
    PublishLink,
    Stimulus,
)
from services.tunneld.links import (
    BACK_OFF_LIMIT_SECONDS,
    DIAL_LIMIT,
    JITTER,
    OTHER_TRANSPORT_SECONDS,
    STAGGER_SECONDS,
    Links,
)
from shared.ids import PeerId
from shared.io.drive import Tick
from shared.messages.trust import PeerAddresses, PeersWanted
from shared.messages.tunnel import LinkChanged, StreamCounters
from shared.multiaddrs import Transport

A, B, C = PeerId("12A"), PeerId("12B"), PeerId("12C")
QUIC = "/ip4/10.0.0.2/udp/9340/quic-v1"
TCP = "/ip4/10.0.0.2/tcp/9340/tls"


@dataclass
class Desk:
    """Drives one machine by hand."""

    own: PeerId = A
    transport: Preference = "auto"
    now: float = 100.0
    effects: list[Effect] = field(default_factory=list)
    connections: int = 0

    def __post_init__(self) -> None:
        self.links = Links(self.own, transport=self.transport)
        self.tell(MeshSet(in_mesh=True))

    def tell(self, stimulus: Stimulus | Tick) -> list[Effect]:
        self.effects = self.links.handle(stimulus, now=self.now)
        self.links.check_invariants()
        return self.effects

    def want(self, *peers: tuple[PeerId, tuple[str, ...]]) -> list[Effect]:
        wanted = tuple(PeerAddresses(peer_id=peer, addresses=addresses) for peer, addresses in peers)
        return self.tell(PeersWanted(peers=wanted))

    def dials(self) -> list[Dial]:
        return [effect for effect in self.effects if isinstance(effect, Dial)]

    def closes(self) -> list[CloseConnection]:
        return [effect for effect in self.effects if isinstance(effect, CloseConnection)]

    def said(self) -> LinkChanged:
        return [effect.link for effect in self.effects if isinstance(effect, PublishLink)][-1]

    def link(self, peer: PeerId = B) -> LinkChanged:
        return next(link for link in self.links.links() if link.peer_id == peer)

    def connect(self, peer: PeerId = B, transport: Transport = "quic", *, dialled_here: bool = True) -> ConnectionId:
        self.connections += 1
        key = ConnectionId(self.connections)
        remote = QUIC if transport == "quic" else TCP
        self.tell(Connected(key, peer, transport, remote, dialled_here, "member"))
        return key

    def wait(self) -> float:
        """To the machine's own deadline; returns how long that took."""
        deadline = self.links.next_deadline()
        assert deadline is not None
        waited = max(0.0, deadline - self.now)
        self.now += waited
        self.tell(Tick())
        return waited


def test_a_wanted_peer_is_dialled_over_both_transports() -> None:
    desk = Desk()
    desk.want((B, (QUIC, TCP)))
    assert [str(dial.address) for dial in desk.dials()] == [f"{QUIC}/p2p/{B}", f"{TCP}/p2p/{B}"]
    assert desk.link().state == "connecting"


def test_control_takes_quic_and_bulk_tcp() -> None:
    desk = Desk()
    desk.want((B, (QUIC, TCP)))
    quic, tcp = desk.connect(transport="quic"), desk.connect(transport="tcp")
    assert (desk.links.connection_for(B, bulk=False), desk.links.connection_for(B, bulk=True)) == (quic, tcp)
    said = desk.link()
    assert (said.state, said.control, said.bulk) == ("connected", "quic", "tcp")
    assert said.reason == "control over QUIC, bulk over TCP, dialled from here"


def test_a_configured_transport_carries_everything() -> None:
    desk = Desk(transport="tcp")
    desk.want((B, (QUIC, TCP)))
    assert [dial.address.transport for dial in desk.dials()] == ["tcp"]
    desk = Desk(transport="quic")
    desk.want((B, (QUIC, TCP)))
    assert [dial.address.transport for dial in desk.dials()] == ["quic"]
    key = desk.connect(transport="quic")
    assert desk.links.connection_for(B, bulk=True) == key
    assert desk.links.next_deadline() is None


def test_where_one_transport_fails_the_other_carries_both_and_the_first_is_tried_again() -> None:
    desk = Desk()
    desk.want((B, (QUIC, TCP)))
    quic, tcp = desk.dials()
    key = desk.connect(transport="tcp")
    desk.tell(DialDone(tcp.dial_id))
    desk.tell(DialFailed(quic.dial_id, "no answer in 3 s"))
    assert desk.links.connection_for(B, bulk=False) == key
    assert "no QUIC: /ip4/10.0.0.2/udp/9340/quic-v1: no answer in 3 s" in desk.link().reason
    for _ in range(10):
        waited = desk.wait()
        assert [dial.address.transport for dial in desk.dials()] == ["quic"]
        desk.tell(DialFailed(desk.dials()[0].dial_id, "no answer in 3 s"))
    assert OTHER_TRANSPORT_SECONDS * (1 - JITTER) <= waited <= OTHER_TRANSPORT_SECONDS * (1 + JITTER)


def test_when_a_peer_is_back_over_one_transport_the_other_is_tried_at_once() -> None:
    desk = Desk()
    desk.want((B, (QUIC, TCP)))
    _, tcp = desk.dials()
    desk.tell(DialFailed(tcp.dial_id, "refused"))
    assert desk.dials() == []
    desk.connect(transport="quic")
    assert [dial.address.transport for dial in desk.dials()] == ["tcp"]


def test_addresses_of_a_round_are_tried_a_moment_apart_and_the_first_that_connects_ends_it() -> None:
    desk = Desk(transport="tcp")
    places = tuple(f"/ip4/10.0.0.{last}/tcp/1/tls" for last in (2, 3, 4))
    desk.want((B, places))
    assert len(desk.dials()) == 1
    assert desk.wait() == STAGGER_SECONDS
    assert [dial.address.host for dial in desk.dials()] == ["10.0.0.3"]
    desk.connect(transport="tcp")
    assert len([effect for effect in desk.effects if isinstance(effect, CancelDial)]) == 2
    assert desk.links.next_deadline() is None


def test_a_failed_address_makes_room_for_the_next_one_at_once() -> None:
    desk = Desk(transport="tcp")
    desk.want((B, ("/ip4/10.0.0.2/tcp/1/tls", "/ip4/10.0.0.3/tcp/1/tls")))
    desk.tell(DialFailed(desk.dials()[0].dial_id, "refused"))
    assert [dial.address.host for dial in desk.dials()] == ["10.0.0.3"]


def test_back_off_doubles_up_to_its_limit_and_says_why() -> None:
    desk = Desk(transport="tcp")
    desk.want((B, (TCP,)))
    waits = []
    for _ in range(10):
        desk.tell(DialFailed(desk.dials()[0].dial_id, "connection refused"))
        said = desk.link()
        assert (said.state, said.reason) == ("waiting", f"{TCP}: connection refused")
        waits.append(desk.wait())
    assert all(0.5 * 2**n * 0.75 <= wait <= 0.5 * 2**n * 1.25 for n, wait in enumerate(waits[:6]))
    assert max(waits) <= BACK_OFF_LIMIT_SECONDS * (1 + JITTER)


def test_new_addresses_end_the_back_off() -> None:
    desk = Desk(transport="tcp")
    desk.want((B, (TCP,)))
    desk.tell(DialFailed(desk.dials()[0].dial_id, "refused"))
    desk.want((B, (TCP,)))
    assert desk.dials() == [], "the same list changes nothing"
    desk.want((B, (TCP, "/ip4/10.0.0.9/tcp/1/tls")))
    assert len(desk.dials()) == 1


def test_a_lost_connection_is_dialled_again_within_a_back_off() -> None:
    desk = Desk(transport="quic")
    desk.want((B, (QUIC,)))
    first = desk.dials()[0]
    key = desk.connect()
    desk.tell(DialDone(first.dial_id))
    desk.tell(ConnectionLost(key, "silent for 3 s"))
    assert (desk.link().state, desk.link().reason) == ("waiting", "silent for 3 s")
    assert desk.wait() <= 0.5
    assert len(desk.dials()) == 1


def test_of_two_connections_both_ends_keep_the_one_the_smaller_id_dialled() -> None:
    smaller, larger = Desk(own=A), Desk(own=B)
    kept = smaller.connect(B, dialled_here=True)
    retired = smaller.connect(B, dialled_here=False)
    assert smaller.closes() == [CloseConnection(retired, "a second connection is not needed", when_idle=True)]
    assert smaller.links.connection_for(B, bulk=False) == kept
    retired = larger.connect(A, dialled_here=True)
    kept = larger.connect(A, dialled_here=False)
    assert larger.closes() == [CloseConnection(retired, "a second connection is not needed", when_idle=True)]
    assert larger.links.connection_for(A, bulk=False) == kept
    larger.tell(ConnectionLost(retired, "a second connection is not needed"))
    assert larger.dials() == []
    assert larger.link(A).state == "connected"


def test_of_two_dials_on_their_way_only_the_losing_one_is_given_up() -> None:
    """Both give up their own when the other's arrives: that would leave none."""
    for own, peer, given_up in ((A, B, 0), (B, A, 1)):
        desk = Desk(own=own, transport="quic")
        desk.want((peer, (QUIC,)))
        desk.connect(peer, dialled_here=False)
        assert len([effect for effect in desk.effects if isinstance(effect, CancelDial)]) == given_up


def test_a_newer_connection_of_the_same_dialler_replaces_the_older() -> None:
    """A peer that restarted dials again while its old connection has not timed out here yet."""
    desk = Desk(own=B)
    old = desk.connect(A, dialled_here=False)
    new = desk.connect(A, dialled_here=False)
    assert desk.links.connection_for(A, bulk=False) == new
    assert [close.connection_id for close in desk.closes()] == [old]


def test_a_banned_peer_is_cut_off_and_not_dialled_again() -> None:
    desk = Desk()
    desk.want((B, (QUIC,)), (C, (QUIC,)))
    key = desk.connect(B)
    desk.tell(MeshSet(in_mesh=True, banned=frozenset({B})))
    assert desk.closes() == [CloseConnection(key, "banned from the mesh")]
    assert desk.said().reason == "banned from the mesh"
    desk.want((B, (QUIC,)))
    assert desk.dials() == []
    late = desk.connect(B)
    assert [close.connection_id for close in desk.closes()] == [late]


def test_leaving_the_mesh_ends_all_links_and_dials() -> None:
    desk = Desk()
    desk.want((B, (QUIC,)), (C, (QUIC,)))
    key = desk.connect(B)
    desk.tell(MeshSet(in_mesh=False))
    assert [close.connection_id for close in desk.closes()] == [key]
    assert any(isinstance(effect, CancelDial) for effect in desk.effects)
    assert (desk.links.next_deadline() is None and desk.links.links() == []) or all(
        link.state == "closed" for link in desk.links.links()
    )


def test_500_stale_addresses_do_not_keep_a_live_peer_waiting() -> None:
    """TRAPS 4: one peer announces hundreds of dead addresses."""
    desk = Desk(transport="tcp")
    stale = tuple(f"/ip4/10.1.{n // 250}.{n % 250 + 1}/tcp/1/tls" for n in range(500))
    desk.want((B, stale))
    assert len(desk.dials()) == 1
    desk.want((B, stale), (C, (TCP,)))
    assert [dial.peer_id for dial in desk.dials()] == [C]
    tried = 2
    for _ in range(200):
        if desk.links.next_deadline() is None:
            break
        desk.wait()
        tried += len(desk.dials())
    assert tried <= DIAL_LIMIT + 1


def test_a_connection_that_the_peer_dialled_stays_though_nobody_here_wants_it() -> None:
    desk = Desk()
    key = desk.connect(B, dialled_here=False)
    assert desk.links.connection_for(B, bulk=True) == key
    desk.want((C, (QUIC,)))
    assert desk.closes() == []
    desk.tell(ConnectionLost(key, "the peer closed it: goodbye"))
    assert desk.said() == LinkChanged(
        peer_id=B, state="closed", reason="the peer closed it: goodbye", grant="member", counters=StreamCounters()
    )
    assert [link.peer_id for link in desk.links.links()] == [C]


def test_what_is_no_longer_wanted_is_let_go() -> None:
    desk = Desk()
    desk.want((B, (QUIC, TCP)))
    keys = [desk.connect(B), desk.connect(B, "tcp")]
    desk.want()
    assert desk.closes() == [CloseConnection(key, "not needed any more", when_idle=True) for key in keys]


def test_counters_outlive_connections_and_round_trips_are_said_when_they_change() -> None:
    desk = Desk(transport="quic")
    desk.want((B, (QUIC,)))
    key = desk.connect(B)
    desk.tell(Measured(key, 0.010, StreamCounters(bytes_sent=5)))
    assert desk.said().rtt_seconds == 0.010
    assert desk.tell(Measured(key, 0.011, StreamCounters(bytes_sent=9))) == []
    desk.now += 11
    desk.tell(Measured(key, 0.011, StreamCounters(bytes_sent=9)))
    assert desk.said().counters.bytes_sent == 9
    desk.tell(ConnectionLost(key, "gone"))
    again = desk.connect(B)
    desk.tell(Measured(again, 0.5, StreamCounters(bytes_sent=1)))
    assert desk.link().counters.bytes_sent == 10


def test_an_address_of_somebody_else_is_not_dialled_for_a_peer() -> None:
    desk = Desk(transport="tcp")
    other = "12D3KooWM6CgA9iBFZmcYAHA6A2qvbAxqfkmrYiRQuz3XEsk4Ksv"
    desk.want((B, (f"{TCP}/p2p/{other}",)))
    assert desk.dials() == []
    assert desk.link().reason == "no address for TCP is known"


def test_why_not_is_always_in_words() -> None:
    desk = Desk()
    assert desk.links.why_not(B) == "it is not known here"
    desk.tell(MeshSet(in_mesh=False))
    assert desk.links.why_not(B) == "this node is in no mesh with others"


STEPS = st.lists(st.tuples(st.integers(0, 8), st.integers(0, 5), st.booleans()), max_size=60)


@settings(max_examples=200, deadline=None)
@given(STEPS)
def test_any_order_of_events_keeps_the_machine_consistent(steps: list[tuple[int, int, bool]]) -> None:
    desk = Desk()
    peers = (B, C, PeerId("129"), PeerId("12Z"))
    dials: list[Dial] = []
    for kind, number, flag in steps:
        peer = peers[number % 4]
        transport: Transport = "quic" if flag else "tcp"
        desk.now += number / 7
        match kind:
            case 0:
                desk.want(*((name, (QUIC, TCP)) for name in peers[: number % 5]))
            case 1 | 2:
                desk.connect(peer, transport, dialled_here=number % 2 == 0)
            case 3:
                desk.tell(ConnectionLost(ConnectionId(number), "lost"))
            case 4 if dials:
                desk.tell(DialFailed(dials.pop(number % len(dials)).dial_id, "refused"))
            case 5 if dials:
                desk.tell(DialDone(dials.pop(number % len(dials)).dial_id))
            case 6:
                desk.tell(MeshSet(in_mesh=number != 0, banned=frozenset({peer} if flag else ())))
            case 7:
                desk.tell(Measured(ConnectionId(number), 0.1 * number, StreamCounters(bytes_sent=number)))
            case _:
                desk.tell(Tick())
        dials += desk.dials()
