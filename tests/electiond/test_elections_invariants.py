"""Whatever is reported in whatever order, the machine of electiond never contradicts itself."""

from __future__ import annotations

from typing import get_args

from hypothesis import given, settings
from hypothesis import strategies as st

from services.electiond.stimuli import LauncherReplaced, MembersReplaced, PlaceRequested, Stimulus
from shared.io.drive import Tick
from shared.messages.models import SlotEnd
from tests.electiond.machine import Machine, config, launcher
from tests.electiond.nodes import GB, device, inventory, local, member, model, name, served, slot

TEXTS = st.sampled_from("abcd")
STIMULI = st.one_of(
    st.builds(lambda names, on: config(*names, configured=on), st.lists(TEXTS, max_size=2), st.booleans()),
    st.builds(lambda names: inventory(*map(local, names)), st.lists(TEXTS, max_size=4, unique=True)),
    st.builds(
        lambda names, slots: LauncherReplaced(
            inventory=inventory(*map(local, names)), device=device(), slots=tuple(slot(*item) for item in slots)
        ),
        st.lists(TEXTS, max_size=4, unique=True),
        st.lists(st.tuples(TEXTS, st.sampled_from(["queued", "ready", "failed"])), max_size=2),
    ),
    st.builds(
        lambda text, state, origin, ended_by: slot(text, state, origin=origin, ended_by=ended_by),
        TEXTS,
        st.sampled_from(["queued", "loading", "ready", "draining", "stopping", "restarting", "failed", "unloaded"]),
        st.sampled_from(["flag", "request", "allocation", "promotion"]),
        st.sampled_from(get_args(SlotEnd)),
    ),
    st.builds(
        lambda peer, state: member(peer, model("d"), is_self=False, state=state, hosted=(served("d"),)),
        st.sampled_from("xy"),
        st.sampled_from(["alive", "suspect", "dead", "left"]),
    ),
    st.builds(lambda text: PlaceRequested(1, name(text)), TEXTS),
    st.just(MembersReplaced((member(),))),
    st.just(Tick()),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(STIMULI, max_size=25))
def test_no_sequence_of_reports_breaks_the_invariants(stimuli: list[Stimulus]) -> None:
    machine = Machine(config(), launcher(a=GB, b=GB), MembersReplaced((member(),)))
    for stimulus in stimuli:
        machine.tell(stimulus)
        assert machine.assigned or machine.why, "no assignment without a reason"
