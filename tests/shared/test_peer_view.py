"""shared.peer_view: what gossipd and tunneld know about a node, side by side."""

from __future__ import annotations

from dataclasses import replace

from shared.ids import MeshId, PeerId
from shared.messages.mesh import Announcement, MemberChanged
from shared.messages.trust import JoinChanged, JoinStep
from shared.messages.tunnel import LinkChanged, StreamCounters
from shared.peer_view import NO_WORD, join_steps, link_words, peers_of

ME, OTHER, STRANGER = PeerId("me"), PeerId("other"), PeerId("stranger")
CONNECTED = LinkChanged(
    peer_id=OTHER,
    state="connected",
    reason="control over QUIC, bulk over TCP, dialled from here",
    grant="member",
    control="quic",
    bulk="tcp",
    remote_address="/ip4/10.0.0.2/tcp/9340/tls",
    rtt_seconds=0.00043,
    counters=StreamCounters(bytes_sent=5, bytes_received=7),
)
WAITING = LinkChanged(peer_id=OTHER, state="waiting", reason="no answer within 5 s", retry_in_seconds=3.0)


def member(peer_id: PeerId, name: str) -> MemberChanged:
    said = Announcement(
        peer_id=peer_id,
        incarnation=1,
        seq=1,
        mesh_id=MeshId("mesh"),
        version="0.1.0",
        name=name,
        role="host",
        state="active",
    )
    return MemberChanged(
        announcement=said, state="alive", reason="probed", is_self=peer_id == ME, grant="guest", trusted=False
    )


MEMBERS = (member(ME, "desk"), member(OTHER, "attic"))


def test_a_link_is_shown_with_the_node_it_leads_to() -> None:
    own, other = peers_of(MEMBERS, [CONNECTED])
    assert own.link is None
    assert (other.name, other.grant, other.trusted) == ("attic", "guest", False)
    assert other.link is not None
    assert (other.link.transport, other.link.rtt_ms, other.link.address) == ("quic+tcp", 0.43, CONNECTED.remote_address)
    assert (other.link.bytes_sent, other.link.bytes_received) == (5, 7)
    assert link_words(other.link) == "quic+tcp 0.4 ms"


def test_without_tunneld_there_is_no_link_to_show() -> None:
    assert [peer.link for peer in peers_of(MEMBERS, [])] == [None, None]
    assert link_words(None) == ""


def test_one_transport_for_both_is_named_once() -> None:
    (_, other) = peers_of(MEMBERS, [replace(CONNECTED, control="tcp", rtt_seconds=None)])
    assert link_words(other.link) == "tcp"


def test_what_is_not_connected_says_why() -> None:
    (_, other) = peers_of(MEMBERS, [WAITING])
    assert other.link is not None
    assert (other.link.transport, other.link.retry_in_seconds) == ("", 3.0)
    assert link_words(other.link) == "waiting: no answer within 5 s"


def test_a_peer_that_is_dialled_and_never_spoke_is_listed() -> None:
    shown = peers_of(MEMBERS, [replace(WAITING, peer_id=STRANGER)])[-1]
    assert (shown.peer_id, shown.name, shown.state, shown.reason) == (STRANGER, "", "unknown", NO_WORD)
    assert link_words(shown.link) == "waiting: no answer within 5 s"
    closed = replace(WAITING, peer_id=STRANGER, state="closed")
    assert [peer.peer_id for peer in peers_of(MEMBERS, [closed])] == [ME, OTHER]


def test_the_steps_of_a_join() -> None:
    assert join_steps(None) == join_steps(JoinChanged()) == ()
    (step,) = join_steps(JoinChanged(steps=(JoinStep(name="connect", state="waiting", detail="dialling"),)))
    assert (step.name, step.state, step.detail) == ("connect", "waiting", "dialling")
