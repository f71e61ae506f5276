"""The machine: each row of its table, and what a restart of electiond alone may not change."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from services.electiond.elections import DECLINED_LIMIT, HOLD_SECONDS, IDLE_WORDS
from services.electiond.stimuli import LauncherReplaced, MembersReplaced, Memory, PlaceRequested, Publish, Reply
from shared.io.drive import Tick
from shared.messages.daemon import Refused
from shared.messages.models import (
    AssignmentsChanged,
    CatalogChanged,
    ModelPlaced,
    RoutesChanged,
    SlotChanged,
)
from tests.electiond.machine import Machine, config, launcher, published, settled
from tests.electiond.nodes import GB, device, inventory, local, member, model, name, served, slot

# -- starting ------------------------------------------------------------------------------------------------


def test_nothing_is_said_or_placed_until_both_have_reported() -> None:
    """Restarting electiond alone changes none of this."""
    stimuli = (config(), launcher(a=GB), MembersReplaced((member(),)))
    for order in itertools.permutations(stimuli):
        machine = Machine()
        assert machine.tell(order[0]) == []
        assert machine.tell(order[1]) == [] or order[2] == stimuli[0]
        machine.tell(order[2])
        assert machine.elections.settled
        assert machine.assigned == {"a": "allocation"}
        kinds = [type(item.message) for item in machine.said if isinstance(item, Publish)]
        assert AssignmentsChanged in kinds
        assert CatalogChanged in kinds


def test_after_a_while_it_goes_on_with_what_it_has() -> None:
    machine = Machine(config(), launcher(a=GB))
    assert machine.elections.next_deadline() == machine.now + HOLD_SECONDS
    machine.now += HOLD_SECONDS - 0.01
    assert machine.tell(Tick()) == []
    machine.now += 0.01
    machine.tell(Tick())
    assert machine.assigned == {"a": "allocation"}
    assert machine.elections.next_deadline() is None


def test_without_launcherd_it_waits_in_words() -> None:
    machine = Machine(config(), MembersReplaced((member(),)))
    machine.now += HOLD_SECONDS
    machine.tell(Tick())
    assert machine.assigned == {}
    assert machine.why == "waits for launcherd to report models and memory"


def test_a_launcherd_that_is_still_looking_through_its_folders_says_nothing_yet() -> None:
    scanning = LauncherReplaced(inventory=inventory(scanning=True), device=device(), slots=())
    machine = Machine(config(), scanning, MembersReplaced((member(),)))
    assert not machine.elections.settled
    machine.tell(inventory(local("a")))
    assert machine.assigned == {"a": "allocation"}


def test_a_request_that_comes_too_early_is_answered_when_more_is_known() -> None:
    machine = Machine(config(), PlaceRequested(1, name("a")))
    machine.tell(launcher(a=GB))
    effects = machine.tell(MembersReplaced((member(),)))
    assert isinstance(effects[-1], Reply)
    assert isinstance(effects[-1].message, ModelPlaced)


def test_an_idle_node_refuses_at_once() -> None:
    machine = Machine(config(configured=False))
    assert machine.tell(PlaceRequested(1, name("a"))) == [Reply(1, Refused(code="idle", detail=IDLE_WORDS))]


def running(origin: str, **fields: Any) -> SlotChanged:
    return slot("small", "ready", origin=origin, **fields)


@pytest.mark.parametrize("origin", ["request", "allocation", "promotion"])
@pytest.mark.parametrize("first", ["launcherd", "gossipd"])
def test_a_restart_of_electiond_leaves_what_runs_where_it_is(origin: str, first: str) -> None:
    """The rule alone would choose another, larger model."""
    reports = [launcher(small=GB, large=5 * GB, slots=(running(origin),)), MembersReplaced((member(),))]
    machine = Machine(config(), *(reports if first == "launcherd" else reversed(reports)))
    assert machine.assigned == {"small": origin}
    assert len(published(machine.said, AssignmentsChanged)) == 1
    assert [route.model for route in machine.elections.routes.routes] == ["small"]


@pytest.mark.parametrize("state", ["queued", "loading", "restarting"])
def test_a_restart_of_electiond_leaves_what_is_on_its_way(state: str) -> None:
    placed = launcher(small=GB, large=5 * GB, slots=(slot("small", state, origin="allocation"),))
    assert Machine(config(), placed, MembersReplaced((member(),))).assigned == {"small": "allocation"}
    asked = launcher(small=GB, large=5 * GB, slots=(slot("small", state, origin="request"),))
    machine = Machine(config(), asked, MembersReplaced((member(),)))
    assert machine.assigned == {}
    assert machine.why == "waits for small, which is being loaded already"
    machine.tell(slot("small", "ready", origin="request"))
    assert machine.assigned == {"small": "request"}


def test_a_restart_of_gossipd_changes_nothing() -> None:
    machine = settled(slot("a", "ready"), a=GB)
    before = machine.elections.routes
    assert before.routes
    assert machine.tell(MembersReplaced(())) == [], "a gossipd that has not spoken yet empties nothing"
    assert machine.tell(MembersReplaced((member(),))) == []
    assert machine.elections.routes == before


def test_a_restart_of_launcherd_changes_nothing() -> None:
    machine = settled(slot("a", "ready"), a=GB, b=GB)
    scanning = LauncherReplaced(inventory=inventory(scanning=True), device=None, slots=(slot("a", "ready"),))
    assert machine.tell(scanning) == []
    assert machine.tell(launcher(a=GB, b=GB, slots=(slot("a", "ready"),))) == []


def test_an_engine_that_launcherd_lost_is_withdrawn_from_routes_but_stays_assigned() -> None:
    machine = settled(slot("a", "ready"), a=GB)
    machine.tell(launcher(a=GB))
    assert machine.elections.routes.routes == ()
    assert machine.assigned == {"a": "allocation"}
    assert machine.status("a") == "loading"


# -- rows of the table ------------------------------------------------------------------------------------------


def test_an_idle_node_is_assigned_nothing() -> None:
    """An idle node (no mesh.toml) is assigned nothing."""
    machine = Machine(config(configured=False), launcher(a=GB), MembersReplaced((member(),)))
    assert machine.assigned == {}
    assert machine.elections.assigned.idle_reason == IDLE_WORDS
    reply = machine.tell(PlaceRequested(1, name("a")))[-1]
    assert reply == Reply(1, Refused(code="idle", detail=IDLE_WORDS))
    machine.tell(config())
    assert machine.assigned == {"a": "allocation"}
    machine.tell(config(configured=False))
    assert machine.assigned == {}


def test_named_models_are_assigned_and_replace_earlier_named_ones() -> None:
    machine = Machine(config("a"), launcher(a=GB, b=GB, big=50 * GB), MembersReplaced((member(),)))
    assert machine.assigned == {"a": "flag"}
    machine.tell(config("b"))
    assert machine.assigned == {"b": "flag"}
    machine.tell(config("a", "b", llm=2))
    assert machine.assigned == {"a": "flag", "b": "flag"}
    machine.tell(config("big"))
    assert machine.assigned == {}
    assert machine.why == "none of the named models (big) is on disk and fits"


def test_named_models_may_be_file_names_and_paths() -> None:
    machine = Machine(config("/models/a.gguf"), launcher(a=GB), MembersReplaced((member(),)))
    assert machine.assigned == {"a": "flag"}


def test_a_named_model_that_is_missing_is_a_wish_and_nothing_else_is_placed() -> None:
    machine = Machine(config("later"), launcher(a=GB), MembersReplaced((member(),)))
    assert machine.assigned == {}
    assert "later" in machine.why
    assert machine.status("later") == "needs_capacity"
    machine.tell(inventory(local("a"), local("later")))
    assert machine.assigned == {"later": "flag"}


def test_a_larger_named_model_that_appears_later_waits_for_its_turn() -> None:
    machine = Machine(config("a", "b"), launcher(a=GB), MembersReplaced((member(),)))
    machine.tell(inventory(local("a"), local("b", 3 * GB)))
    assert machine.assigned == {"a": "flag"}


def test_each_type_has_its_own_limit() -> None:
    machine = Machine(
        config("e1", "e2", "l1", "l2", llm=1, embedding=2),
        LauncherReplaced(
            inventory=inventory(
                local("e1", type="embedding"), local("e2", type="embedding"), local("l1", 2 * GB), local("l2")
            ),
            device=device(),
            slots=(),
        ),
        MembersReplaced((member(),)),
    )
    assert sorted(machine.assigned) == ["e1", "e2", "l1"]


def test_the_rule_places_one_model_and_keeps_it() -> None:
    """A node that names none is assigned, when nothing is assigned yet, the largest llm that fits."""
    machine = settled(a=GB, b=2 * GB)
    assert machine.assigned == {"b": "allocation"}
    machine.tell(inventory(local("a"), local("b", 2 * GB), local("c", 3 * GB)))
    assert machine.assigned == {"b": "allocation"}, "a larger model that appears later changes nothing"


def test_a_model_that_became_ready_on_request_becomes_an_assignment() -> None:
    machine = settled(a=GB, b=2 * GB)
    machine.tell(slot("a", "loading", origin="request"))
    assert machine.assigned == {"b": "allocation"}
    machine.tell(slot("a", "ready", origin="request"))
    assert machine.assigned == {"a": "request", "b": "allocation"}


@pytest.mark.parametrize("ended_by", ["owner", "idle"])
def test_an_unloaded_model_is_declined_and_the_node_is_left_to_its_owner(ended_by: str) -> None:
    """After its owner emptied a node, the mesh does not fill it again by itself."""
    machine = settled(slot("b", "ready"), a=GB, b=2 * GB)
    machine.tell(slot("b", "unloaded", reason="unloaded by meshctl", ended_by=ended_by))
    assert machine.assigned == {}
    assert machine.why == "the last model was unloaded; a model loads when it is asked for"
    assert machine.memory == Memory(declined=((name("b"), "unloaded by meshctl"),), held_by_owner=True)
    assert "It is not placed here by itself any more: unloaded by meshctl." in machine.elections.explain("b")


def test_an_evicted_model_is_declined_but_the_node_is_not_held() -> None:
    """An eviction for another model must not hold allocation off for ever."""
    machine = settled(slot("b", "ready"), a=GB, b=2 * GB, c=GB)
    machine.tell(slot("a", "queued", origin="request"))
    machine.tell(slot("b", "unloaded", reason="makes room for a", ended_by="eviction"))
    assert machine.assigned == {}
    assert machine.why == "waits for a, which is being loaded already"
    machine.tell(slot("a", "ready", origin="request"))
    assert machine.assigned == {"a": "request"}
    machine.tell(slot("a", "unloaded", slot_id="a", ended_by="idle", reason="unused"))
    assert "b" not in machine.assigned


def test_what_made_room_in_vain_comes_back() -> None:
    """The load that it was evicted for failed: the node must not stay empty until somebody asks."""
    machine = settled(slot("b", "ready"), a=GB, b=2 * GB, c=GB)
    machine.tell(slot("a", "queued", origin="request"))
    machine.tell(slot("b", "unloaded", reason="makes room for a", ended_by="eviction"))
    machine.tell(slot("a", "failed", origin="request", reason="crashed"))
    assert machine.assigned == {"b": "allocation"}, "not what has just failed"
    assert machine.memory == Memory()


def test_a_request_ends_the_hold() -> None:
    """After its owner emptied a node, the mesh does not fill it again by itself until something is asked for."""
    machine = settled(slot("b", "ready"), slot("b", "unloaded", ended_by="owner"), a=GB, b=2 * GB, c=GB)
    assert machine.memory.held_by_owner
    machine.tell(slot("a", "ready", origin="request"))
    assert not machine.memory.held_by_owner
    machine.tell(slot("a", "unloaded", origin="request", ended_by="eviction"))
    assert machine.assigned == {"c": "allocation"}


def test_a_load_that_nobody_waits_for_any_more_changes_nothing() -> None:
    """Not its owner's word: the model is not declined, and the rule goes on."""
    machine = settled(slot("b", "queued"), a=GB, b=2 * GB)
    machine.tell(slot("b", "unloaded", ended_by="dropped"))
    assert machine.assigned == {"b": "allocation"}
    machine.tell(slot("b", "ready"))
    machine.tell(PlaceRequested(1, name("a")))
    machine.tell(slot("a", "queued", origin="request"))
    assert machine.assigned == {"a": "request", "b": "allocation"}
    machine.tell(slot("a", "unloaded", origin="request", ended_by="dropped"))
    assert machine.assigned == {"b": "allocation"}
    assert machine.memory == Memory()


def test_a_slot_that_is_replaced_says_nothing_about_its_model() -> None:
    machine = Machine(config("a"), launcher(a=GB), MembersReplaced((member(),)))
    machine.tell(slot("a", "failed", origin="flag", reason="no engine"))
    machine.tell(slot("a", "unloaded", origin="flag", reason="an engine was installed since", ended_by="replaced"))
    assert machine.assigned == {"a": "flag"}


def test_a_declined_model_comes_back_when_somebody_asks() -> None:
    machine = settled(slot("b", "ready"), slot("b", "unloaded", ended_by="owner"), b=2 * GB)
    machine.tell(PlaceRequested(1, name("b")))
    assert machine.assigned == {"b": "request"}
    assert machine.memory.declined == ()


def test_a_declined_model_comes_back_when_its_owner_names_it_anew() -> None:
    machine = settled(slot("b", "ready"), slot("b", "unloaded", ended_by="owner"), b=2 * GB)
    machine.tell(config("b.gguf"))
    assert machine.assigned == {"b": "flag"}


def test_what_was_declined_stays_so_over_a_restart_of_electiond() -> None:
    reports = (launcher(a=GB, b=GB), MembersReplaced((member(),)))
    machine = Machine(config("a"), *reports)
    machine.tell(slot("a", "ready", origin="flag"))
    machine.tell(slot("a", "unloaded", ended_by="owner"))
    assert machine.assigned == {}
    again = machine.restarted(config("a"), *reports)
    assert again.assigned == {}, "the same configuration names nothing anew"
    assert machine.restarted(config("a", "b"), *reports).assigned == {"b": "flag"}
    emptied = settled(slot("b", "ready"), slot("b", "unloaded", ended_by="owner"), a=GB, b=2 * GB)
    assert emptied.restarted(config(), launcher(a=GB, b=2 * GB), MembersReplaced((member(),))).assigned == {}


def test_a_model_that_another_slot_of_it_carries_on_is_not_declined() -> None:
    machine = settled(slot("a", "ready", slot_id="old"), a=GB)
    machine.tell(slot("a", "restarting", slot_id="new"))
    machine.tell(slot("a", "unloaded", slot_id="old"))
    assert machine.assigned == {"a": "allocation"}


def test_a_failed_allocation_tries_the_next_until_none_is_left() -> None:
    """A model that the mesh placed and that failed to load is declined, and the next one is tried."""
    machine = settled(a=GB, b=2 * GB, c=3 * GB)
    for text, following in (("c", "b"), ("b", "a")):
        machine.tell(slot(text, "failed", reason="crashed"))
        assert machine.assigned == {following: "allocation"}
        machine.tell(slot(text, "unloaded", reason="its last word"))
        assert machine.assigned == {following: "allocation"}
    machine.tell(slot("a", "failed", reason="crashed"))
    assert machine.assigned == {}
    assert machine.why == "a, b, c: unloaded or failed; ask for it to load it again"


def test_a_requested_model_that_fails_is_withdrawn_until_it_is_asked_for_again() -> None:
    """A load by request that fails must not keep the node from what the mesh would place on it."""
    machine = settled(slot("a", "ready", origin="request"), a=GB, b=2 * GB)
    assert machine.assigned == {"a": "request", "b": "allocation"}
    machine.tell(slot("a", "failed", origin="request", reason="crashed 3 times"))
    assert machine.assigned == {"b": "allocation"}
    machine.tell(slot("a", "ready", origin="request"))
    assert machine.assigned == {"a": "request", "b": "allocation"}


def test_a_late_word_about_a_declined_model_does_not_bring_it_back() -> None:
    machine = settled(slot("b", "failed"), a=GB, b=2 * GB)
    machine.tell(slot("b", "restarting"))
    assert machine.assigned == {"a": "allocation"}


def test_a_named_model_that_fails_stays_its_owners_wish() -> None:
    machine = Machine(config("a"), launcher(a=GB, b=GB), MembersReplaced((member(),)))
    machine.tell(slot("a", "failed", origin="flag", reason="crashed"))
    assert machine.assigned == {"a": "flag"}
    assert machine.status("a") == "failed"


def test_a_placed_model_is_assigned_with_origin_request() -> None:
    machine = settled(slot("b", "ready"), a=GB, b=2 * GB)
    effects = machine.tell(PlaceRequested(7, name("a")))
    assert machine.assigned == {"a": "request", "b": "allocation"}
    assert effects[-1] == Reply(
        7, ModelPlaced(model=name("a"), peer_id="me", reason="node-me has the file and the room")
    )  # type: ignore[arg-type]
    assert published(effects, AssignmentsChanged), "launcherd hears of it before the caller does"
    assert machine.tell(PlaceRequested(8, name("a")))[:-1] == [], "asking again changes nothing"


def test_another_node_that_can_is_chosen_when_this_one_cannot() -> None:
    machine = settled(small=GB)
    big = member("b", model("huge", 50 * GB), is_self=False, vram_bytes=99 * GB)
    machine.tell(big)
    reply = machine.tell(PlaceRequested(1, name("huge")))[-1]
    assert isinstance(reply, Reply)
    assert isinstance(reply.message, ModelPlaced)
    assert reply.message.peer_id == "b"
    assert machine.assigned == {"small": "allocation"}


@pytest.mark.parametrize(
    ("asked", "code", "words"),
    [
        (
            "qwen-8b",
            "model_not_found",
            "no node of the mesh has a model 'qwen-8b'; did you mean qwen3-8b? See GET /v1/models",
        ),
        ("zzz", "model_not_found", "no node of the mesh has a model 'zzz'. See GET /v1/models"),
        (
            "huge",
            "needs_capacity",
            "huge needs 55.0 GB and the largest node that has it, node-me, offers 8.0 GB on cpu",
        ),
        ("wish", "needs_capacity", "no node has the file of wish; put wish.gguf into a models folder"),
    ],
)
def test_what_cannot_be_placed_is_refused_with_the_way_out(asked: str, code: str, words: str) -> None:
    machine = Machine(
        config("wish"),
        LauncherReplaced(inventory=inventory(local("qwen3-8b"), local("huge", 50 * GB)), device=device(), slots=()),
        MembersReplaced((member(),)),
    )
    reply = machine.tell(PlaceRequested(1, name(asked)))[-1]
    assert isinstance(reply, Reply)
    assert isinstance(reply.message, Refused)
    assert reply.message.code == code
    assert reply.message.detail.startswith(words)


def test_a_name_of_megabytes_is_refused_shortly() -> None:
    reply = settled(a=GB).tell(PlaceRequested(1, name("x" * 3_000_000)))[-1]
    assert isinstance(reply, Reply)
    assert isinstance(reply.message, Refused)
    assert len(reply.message.detail) < 400


# -- derived ------------------------------------------------------------------------------------------------------


def test_only_what_differs_is_published() -> None:
    machine = settled(a=GB)
    assert machine.tell(inventory(local("a"))) == []
    assert machine.tell(member()) == []
    ready = machine.tell(slot("a", "ready"))
    assert len(published(ready, RoutesChanged)) == len(published(ready, CatalogChanged)) == 1
    assert published(ready, AssignmentsChanged) == []
    assert machine.tell(slot("a", "ready", in_use=3, requests_total=9)) == [], "counters are nobody's news"


def test_a_host_that_stops_is_withdrawn_from_routes_at_once() -> None:
    machine = settled(slot("a", "ready"), a=GB)
    for state in ("draining", "stopping", "restarting", "failed"):
        machine.tell(slot("a", "ready"))
        assert machine.elections.routes.routes
        machine.tell(slot("a", state, origin="request"))
        assert machine.elections.routes.routes == (), state


def test_a_peers_death_takes_its_models_along() -> None:
    there = {"hosted": (served("x"),), "vram_bytes": 9 * GB}
    machine = settled(member("b", model("x"), is_self=False, **there), a=GB)
    assert machine.status("x") == "ready"
    machine.tell(member("b", model("x"), is_self=False, state="dead", **there))
    assert [item.name for item in machine.elections.catalog.models] == ["a"]
    assert machine.elections.routes.routes == ()


def test_explain_says_status_place_and_last_decision() -> None:
    machine = settled(slot("a", "ready"), a=GB)
    assert machine.elections.explain("a.gguf") == (
        "a is ready: served by node-me.",
        "It belongs on this node: the largest model on node-me's disk that fits (1.1 GB of 8.0 GB) and that no other "
        "node serves.",
        "Last decision: assigned to this node, the largest model on node-me's disk that fits (1.1 GB of 8.0 GB) and "
        "that no other node serves.",
    )
    assert machine.elections.explain("nothing") == ()


def test_declined_models_are_bounded() -> None:
    machine = settled(a=GB)
    for number in range(DECLINED_LIMIT + 5):
        machine.tell(slot(f"m{number}", "ready", origin="request"))
        machine.elections.handle(slot(f"m{number}", "unloaded"), now=machine.now)
    assert len(machine.memory.declined) <= DECLINED_LIMIT
