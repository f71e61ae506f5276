"""The stateless rule of eviction, as properties and as examples."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.launcherd.eviction import Occupant, Wanted, make_room
from shared.ids import ModelName, SlotId
from shared.messages.models import ModelType


def occupant(
    name: str,
    need_bytes: int = 1,
    last_use_at: float = 0.0,
    type: ModelType = "llm",
    *,
    busy: bool = False,
    leaving: bool = False,
    chosen: bool = False,
    protected: str = "",
    builtin: bool = False,
    pinned: bool = False,
    npu: bool = False,
) -> Occupant:
    return Occupant(
        slot_id=SlotId(name),
        model=ModelName(name),
        type=type,
        need_bytes=need_bytes,
        last_use_at=last_use_at,
        busy=busy,
        leaving=leaving,
        chosen=chosen,
        protected=protected,
        builtin=builtin,
        pinned=pinned,
        npu=npu,
    )


def wanted(need_bytes: int = 1, *, builtin: bool = False, everything: bool = False) -> Wanted:
    return Wanted(model=ModelName("new"), type="llm", need_bytes=need_bytes, builtin=builtin, everything=everything)


def victims(occupants: list[Occupant], want: Wanted, limit: int = -1, capacity_bytes: int = 100) -> set[str]:
    room = make_room(want, occupants, limit=limit, capacity_bytes=capacity_bytes)
    assert not room.blocked
    return set(room.victims)


def test_room_that_is_there_is_used() -> None:
    room = make_room(wanted(), [occupant("a")], limit=2, capacity_bytes=2)
    assert (room.start_now, room.victims) == (True, ())


def test_the_least_recently_used_of_the_type_goes_for_the_limit() -> None:
    assert victims([occupant("a", 1, 5.0), occupant("b", 1, 3.0), occupant("e", 1, 0.0, "embedding")], wanted(), 2) == {
        "b"
    }


def test_models_of_the_same_type_go_first_for_memory_then_others() -> None:
    held = [occupant("e", 4, 0.0, "embedding"), occupant("a", 4, 9.0)]
    assert victims(held, wanted(5), capacity_bytes=10) == {"a"}
    assert victims(held, wanted(9), capacity_bytes=10) == {"a", "e"}


def test_no_more_goes_than_has_to() -> None:
    held = [occupant("small", 1, 0.0), occupant("large", 8, 1.0)]
    assert victims(held, wanted(9), capacity_bytes=10) == {"large"}


def test_what_leaves_anyway_is_waited_for_instead_of_evicting_more() -> None:
    room = make_room(wanted(), [occupant("a", leaving=True), occupant("b")], limit=2, capacity_bytes=100)
    assert (room.start_now, room.victims) == (False, ())


def test_idle_goes_before_busy_and_chosen_before_others() -> None:
    assert victims([occupant("a", busy=True), occupant("b", 1, 9.0)], wanted(), 2) == {"b"}
    assert victims([occupant("a", busy=True), occupant("b", 1, 9.0, busy=True, chosen=True)], wanted(), 2) == {"b"}


def test_protected_models_stay_and_say_why() -> None:
    room = make_room(wanted(), [occupant("a", protected="stays")], limit=1, capacity_bytes=100)
    assert (room.start_now, room.victims, room.blocked) == (False, (), "a stays")


def test_the_models_own_older_slot_always_goes() -> None:
    own = occupant("new", protected="")
    assert victims([own, occupant("b")], wanted(), -1) == {"new"}


def test_a_failed_load_evicts_everything_builtin_models_too() -> None:
    held = [occupant("a"), occupant("guide", builtin=True), occupant("e", 1, 0.0, "embedding")]
    assert victims(held, wanted(everything=True)) == {"a", "guide", "e"}


def test_builtin_models_neither_take_nor_give_a_place() -> None:
    assert make_room(wanted(builtin=True), [occupant("a")], limit=1, capacity_bytes=1).start_now
    assert make_room(wanted(), [occupant("guide", builtin=True)], limit=1, capacity_bytes=1).start_now


OCCUPANTS = st.lists(
    st.builds(
        occupant,
        st.sampled_from("abcdefgh"),
        st.integers(0, 10),
        st.floats(0, 100),
        st.sampled_from(["llm", "embedding"]),
        busy=st.booleans(),
        leaving=st.booleans(),
        builtin=st.just(False),
    ),
    unique_by=lambda item: item.model,
    max_size=8,
)


@given(OCCUPANTS, st.integers(0, 20), st.sampled_from([-1, 1, 2, 3]), st.randoms())
def test_what_remains_always_fits_and_the_order_of_slots_does_not_matter(
    occupants: list[Occupant], need_bytes: int, limit: int, random: object
) -> None:
    room = make_room(wanted(need_bytes), occupants, limit=limit, capacity_bytes=20)
    gone = set(room.victims) | {item.slot_id for item in occupants if item.leaving}
    remain = occupants if room.start_now else [item for item in occupants if item.slot_id not in gone]
    assert sum(item.need_bytes for item in remain) + need_bytes <= 20
    assert limit == -1 or sum(item.type == "llm" for item in remain) < limit
    again = make_room(wanted(need_bytes), list(reversed(occupants)), limit=limit, capacity_bytes=20)
    assert set(again.victims) == set(room.victims)


def test_pinned_models_are_passed_over() -> None:
    assert victims([occupant("a", pinned=True), occupant("b", 1, 5.0)], wanted(), 2) == {"b"}


def test_only_pins_in_the_way_is_said_apart() -> None:
    pinned = make_room(wanted(), [occupant("a", pinned=True)], limit=1, capacity_bytes=100)
    assert (pinned.blocked, pinned.pinned) == ("a is pinned", True)
    mixed = [occupant("a", pinned=True), occupant("b", protected="belongs here as well")]
    both = make_room(wanted(), mixed, limit=2, capacity_bytes=100)
    assert (both.blocked, both.pinned) == ("a is pinned; b belongs here as well", False)


def test_a_pinned_model_in_the_way_for_memory() -> None:
    room = make_room(wanted(5), [occupant("a", 6, pinned=True, type="embedding")], limit=-1, capacity_bytes=10)
    assert room.pinned
    assert not room.victims


def test_everything_means_pinned_models_too() -> None:
    assert victims([occupant("a", pinned=True), occupant("b", npu=True)], wanted(everything=True)) == {"a", "b"}


def test_the_npu_takes_one_model_whatever_its_type_and_limit() -> None:
    want = Wanted(model=ModelName("new"), type="llm", need_bytes=1, npu=True)
    others = [occupant("n", npu=True, type="audio"), occupant("c"), occupant("e", type="embedding")]
    assert victims(others, want, -1) == {"n"}
    assert victims(others, want, 1) == {"n", "c"}
    assert victims([occupant("n", npu=True)], wanted(), 1) == {"n"}
    assert make_room(want, others[1:], limit=-1, capacity_bytes=10).start_now


def test_an_npu_model_is_not_given_back_when_another_victim_was_enough_for_memory() -> None:
    want = Wanted(model=ModelName("new"), type="llm", need_bytes=5, npu=True)
    others = [occupant("n", 1, npu=True, type="audio"), occupant("c", 9)]
    assert victims(others, want, -1, 12) == {"n", "c"}
