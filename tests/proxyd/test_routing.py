"""Rendezvous hashing with bounded load: who moves when hosts come and go, and who is spared when full."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from services.proxyd.routing import (
    COOL_DOWN_FIRST_SECONDS,
    COOL_DOWN_MOST_SECONDS,
    SILENT_SECONDS,
    CoolDowns,
    choose_host,
    rendezvous_weight,
)
from shared.ids import ModelName, PeerId
from shared.messages.models import RouteHost

M = ModelName("m")
ME = PeerId("me")
IDS = st.lists(st.text(min_size=1, max_size=8), min_size=2, max_size=6, unique=True)


def hosts(*names: str, load: float = 0.0) -> list[RouteHost]:
    return [RouteHost(peer_id=PeerId(name), load=load) for name in names]


def chosen(session: str | None, candidates: list[RouteHost], **more: object) -> str:
    host = choose_host(M, session, candidates, self_id=ME, **more)  # type: ignore[arg-type]
    assert host is not None
    return host.peer_id


@given(IDS, st.text(max_size=20), st.randoms())
def test_the_order_of_hosts_changes_nothing(names: list[str], session: str, random: object) -> None:
    candidates = hosts(*names)
    shuffled = list(candidates)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert chosen(session, candidates) == chosen(session, shuffled)


@given(IDS, st.text(max_size=20))
def test_a_host_that_leaves_moves_only_its_own_sessions(names: list[str], session: str) -> None:
    before = chosen(session, hosts(*names))
    for gone in names:
        if gone != before:
            assert chosen(session, hosts(*(name for name in names if name != gone))) == before


def test_sessions_spread_evenly() -> None:
    shares = Counter(chosen(f"session-{number}", hosts("a", "b", "c")) for number in range(3000))
    assert all(850 < share < 1150 for share in shares.values())


def test_without_a_session_the_own_engine_comes_first() -> None:
    assert chosen(None, hosts("a", "me", "b")) == "me"


def test_an_overloaded_host_is_skipped_and_keeps_its_sessions_for_later() -> None:
    session = next(f"s{n}" for n in range(100) if chosen(f"s{n}", hosts("a", "b")) == "a")
    full = [RouteHost(peer_id=PeerId("a"), load=2.0), RouteHost(peer_id=PeerId("b"), load=0.1)]
    assert chosen(session, full) == "b"
    assert chosen(None, [RouteHost(peer_id=ME, load=3.0), RouteHost(peer_id=PeerId("b"), load=0.2)]) == "b"


def test_a_host_with_a_free_place_is_never_too_full() -> None:
    session = next(f"s{n}" for n in range(100) if chosen(f"s{n}", hosts("a", "b")) == "a")
    uneven = [RouteHost(peer_id=PeerId("a"), load=0.75), RouteHost(peer_id=PeerId("b"), load=0.0)]
    assert chosen(session, uneven) == "a"


def test_excluded_hosts_are_not_chosen() -> None:
    assert chosen("s", hosts("a", "b"), excluded={PeerId("a")}) == "b"
    assert choose_host(M, "s", hosts("a"), self_id=ME, excluded={PeerId("a")}) is None
    assert choose_host(M, "s", [], self_id=ME) is None


def test_a_doubtful_host_is_taken_only_when_there_is_no_other() -> None:
    sessions = [f"s{n}" for n in range(20)]
    doubtful = {PeerId("a")}
    assert {chosen(session, hosts("a", "b"), doubtful=doubtful) for session in sessions} == {"b"}
    assert chosen("s", hosts("a", "b"), doubtful=doubtful, excluded={PeerId("b")}) == "a"
    assert chosen(None, hosts("me", "b"), doubtful={ME}) == "b"


def test_weights_are_the_same_in_every_process() -> None:
    """Golden value: a salted hash would differ."""
    assert rendezvous_weight(M, "s", PeerId("a")) == 0x2F0E2D0734C82746


def test_a_cool_down_doubles_with_each_failure_and_ends_with_a_success() -> None:
    cool_downs = CoolDowns()
    cool_downs.failed(ME, M, now=0.0)
    assert cool_downs.cooling(M, now=COOL_DOWN_FIRST_SECONDS / 2) == {ME}
    assert cool_downs.cooling(M, now=COOL_DOWN_FIRST_SECONDS) == set()
    cool_downs.failed(ME, M, now=10.0)
    assert cool_downs.cooling(M, now=10.0 + 1.5 * COOL_DOWN_FIRST_SECONDS) == {ME}
    for number in range(20):
        cool_downs.failed(ME, M, now=1000.0 * number)
    assert cool_downs.cooling(M, now=19_000.0 + COOL_DOWN_MOST_SECONDS - 1) == {ME}
    assert cool_downs.cooling(M, now=19_000.0 + COOL_DOWN_MOST_SECONDS) == set()
    cool_downs.failed(ME, M, now=90_000.0)
    cool_downs.succeeded(ME, M)
    assert cool_downs.cooling(M, now=90_000.0) == set()
    cool_downs.failed(ME, M, now=90_001.0)
    assert cool_downs.cooling(M, now=90_001.0 + COOL_DOWN_FIRST_SECONDS) == set(), "it begins anew"


def test_many_requests_cut_by_one_death_count_as_one_failure() -> None:
    cool_downs = CoolDowns()
    for _ in range(20):
        cool_downs.failed(ME, M, now=0.0)
    assert cool_downs.cooling(M, now=COOL_DOWN_FIRST_SECONDS) == set()


def test_an_engine_that_fails_says_nothing_of_its_neighbour_but_a_node_out_of_reach_does() -> None:
    cool_downs, other = CoolDowns(), ModelName("other")
    cool_downs.failed(ME, M, now=0.0)
    assert cool_downs.cooling(other, now=0.1) == set()
    cool_downs.failed(ME, None, now=0.0)
    assert cool_downs.cooling(other, now=0.1) == {ME}
    cool_downs.succeeded(ME, other)
    assert cool_downs.cooling(other, now=0.1) == set()
    assert cool_downs.cooling(M, now=0.1) == {ME}


def test_a_silent_host_is_doubtful_for_its_model_while_it_is_silent() -> None:
    cool_downs = CoolDowns()
    cool_downs.silent(ME, M, now=0.0)
    assert cool_downs.cooling(M, now=0.1) == {ME}
    assert cool_downs.cooling(ModelName("other"), now=0.1) == set()
    assert cool_downs.cooling(M, now=SILENT_SECONDS) == set()
