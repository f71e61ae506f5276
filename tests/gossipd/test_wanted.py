"""docs/spec/membership.md 14, 15."""

from __future__ import annotations

from services.gossipd.wanted import FULL_MESH_NODES, HOSTS_LIMIT, LOST_LIMIT, lost_turn, near
from shared.ids import PeerId


def peers(count: int) -> list[PeerId]:
    return [PeerId(f"p{index}") for index in range(count)]


def test_14_in_a_small_mesh_all_want_all() -> None:
    everybody = peers(FULL_MESH_NODES + 1)
    assert near(everybody[0], everybody[1:]) == set(everybody[1:])


def test_14_in_a_large_mesh_few_are_wanted_and_everybody_is_reached() -> None:
    everybody = peers(100)
    wanted = {peer: near(peer, everybody) for peer in everybody}
    assert all(len(some) == 7 and peer not in some for peer, some in wanted.items())
    seen, edge, rounds = {everybody[0]}, {everybody[0]}, 0
    while edge:
        edge = {far for peer in edge for far in wanted[peer]} - seen
        seen |= edge
        rounds += bool(edge)
    assert seen == set(everybody)
    assert rounds <= 7


def test_14_hosts_are_wanted_up_to_a_limit() -> None:
    everybody = peers(100)
    assert len(near(everybody[0], everybody, everybody)) == 7 + HOSTS_LIMIT


def test_15_every_lost_peer_has_its_turn() -> None:
    lost = peers(50)
    assert lost_turn(lost[:5], 3) == lost[:5]
    assert all(len(lost_turn(lost, turn)) == LOST_LIMIT for turn in range(9))
    assert {peer for turn in range(4) for peer in lost_turn(lost, turn)} == set(lost)
