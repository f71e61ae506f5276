"""docs/spec/membership.md 12."""

from __future__ import annotations

from services.gossipd.spreading import FANOUT, LOAD_SECONDS, Spreading
from shared.ids import PeerId

OWN = PeerId("own")
PEERS = [PeerId(f"p{index}") for index in range(10)]


def test_12_nothing_is_passed_on_in_a_small_mesh_where_all_have_it_first_hand() -> None:
    spreading = Spreading(OWN, 1)
    spreading.announcement(PEERS[0], PEERS[0], 0.0)
    assert spreading.due(PEERS, {PEERS[0]: frozenset(PEERS)}, 1.0) == []
    assert spreading.next_deadline() is None


def test_12_news_goes_to_a_few_that_may_lack_it() -> None:
    spreading = Spreading(OWN, 1)
    spreading.announcement(PEERS[0], PEERS[1], 0.0)
    spreading.load(PEERS[2], PEERS[1], 0.0)
    going = spreading.due(PEERS, {PEERS[0]: frozenset(PEERS[:5])}, 0.5)
    assert {to for to, _, _ in going} <= set(PEERS[5:])
    assert len(going) == FANOUT
    assert all(origins == [PEERS[0]] and not only_load for _, origins, only_load in going)
    assert all(only_load for _, _, only_load in spreading.due(PEERS, {}, LOAD_SECONDS))


def test_12_news_of_one_moment_travels_together() -> None:
    spreading = Spreading(OWN, 1)
    for origin in PEERS[:4]:
        spreading.announcement(origin, PEERS[9], 0.0)
    going = spreading.due(PEERS, {}, 1.0)
    assert len({to for to, _, _ in going}) == len(going) <= FANOUT + 4
