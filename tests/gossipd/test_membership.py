"""The membership machine: each row of its table, invariants checked after each step."""

from __future__ import annotations

import uuid
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gossipd.announcement import NodeFacts
from services.gossipd.membership import (
    DEMAND_SECONDS,
    HOLD_SECONDS,
    PERSIST_SECONDS,
    ConfigApplied,
    DrainAsked,
    Effect,
    Membership,
    MeshAdopted,
    PersistDemand,
    PersistIdentity,
    PublishDemand,
    PublishMember,
    PublishMesh,
    SignAnnouncement,
    SlotsReplaced,
    Stimulus,
)
from services.gossipd.mesh_identity import MeshIdentity
from shared import codec
from shared.ids import MeshId, ModelName, PeerId, SlotId
from shared.io.drive import Tick
from shared.messages.mesh import (
    CountUnserved,
    DemandChanged,
    MemberChanged,
    MeshIdentityChanged,
    RecordSigned,
    SignedRecord,
    TunnelChanged,
)
from shared.messages.models import (
    Assignment,
    AssignmentsChanged,
    DeviceChanged,
    InventoryChanged,
    LocalModel,
    SlotChanged,
)

T = TypeVar("T")
ME = PeerId("12D3me")
QWEN = ModelName("qwen")
STORED = MeshIdentity(mesh_id=MeshId("mesh"), incarnation=5, peer_id=ME)
TUNNEL = TunnelChanged(peer_id=ME, port=9340, addresses=("/ip4/10.0.0.2",))
DEVICE = DeviceChanged(device="cpu", vram_bytes=8, total_bytes=9, reserve_bytes=1, engine="e")
INVENTORY = InventoryChanged(models=(LocalModel(name=QWEN, type="llm", path="/q.gguf", file_size_bytes=4),))


def slot(state: str = "ready", **fields: Any) -> SlotChanged:
    return SlotChanged(
        slot_id=SlotId(fields.pop("slot_id", "s1")),
        model=ModelName(fields.pop("model", QWEN)),
        type="llm",
        state=state,  # type: ignore[arg-type]
        reason="",
        origin="flag",
        **fields,
    )


class Machine:
    """Membership with a clock of its own."""

    def __init__(self, identity: MeshIdentity = STORED, *, configured: bool = True, **counted: Any) -> None:
        self.core = Membership(identity, NodeFacts(node_name="desk", configured=configured), **counted)
        self.now = 100.0
        self.said: list[Effect] = []

    def tell(self, *stimuli: Stimulus | Tick) -> list[Effect]:
        effects: list[Effect] = []
        for stimulus in stimuli:
            effects += self.core.handle(stimulus, now=self.now)
            self.core.check_invariants()
        self.said += effects
        return effects

    def wait(self) -> list[Effect]:
        """Lets the next deadline come."""
        deadline = self.core.next_deadline()
        assert deadline is not None
        self.now = max(self.now, deadline)
        return self.tell(Tick())

    @property
    def totals(self) -> dict[str, int]:
        return {item.model: item.requests_total for item in self.core.demand.summary(now=self.now)}


def live(*more: Stimulus) -> Machine:
    """A machine that has heard everybody and announced itself."""
    machine = Machine()
    machine.tell(SlotsReplaced(()), INVENTORY, DEVICE, TUNNEL, *more)
    assert machine.core.own is not None
    return machine


def kinds(effects: list[Effect]) -> list[type[Effect]]:
    return [type(effect) for effect in effects]


def only(effects: list[Effect], kind: type[T]) -> T:
    (found,) = [effect for effect in effects if isinstance(effect, kind)]
    return found


# -- holding after a start ----------------------------------------------------------------------------------------


def test_the_first_announcement_waits_until_the_node_is_known() -> None:
    """A restart of gossipd alone never tells the mesh that a busy node serves nothing."""
    machine = Machine()
    for stimulus in (TUNNEL, AssignmentsChanged(assignments=()), SlotsReplaced((slot(),)), INVENTORY):
        assert machine.tell(stimulus) == []
        assert not machine.core.settled
    effects = machine.tell(DEVICE)
    assert kinds(effects) == [SignAnnouncement, PublishMember]
    announcement = only(effects, PublishMember).member.announcement
    assert [item.model for item in announcement.hosted] == [QWEN]
    assert (announcement.vram_bytes, announcement.addresses) == (8, ("/ip4/10.0.0.2",))
    assert (announcement.incarnation, announcement.seq) == (5, 1)
    assert machine.core.settled


def test_a_launcherd_that_only_begins_to_look_is_not_known_yet() -> None:
    machine = Machine()
    assert machine.tell(TUNNEL, DEVICE, InventoryChanged(models=(), scanning=True)) == []
    assert kinds(machine.tell(INVENTORY)) == [SignAnnouncement, PublishMember]
    assert machine.tell(InventoryChanged(models=(), scanning=True)) == [], "nor does its restart take models away"


def test_the_wait_is_bounded() -> None:
    machine = Machine()
    machine.tell(TUNNEL)
    assert machine.core.next_deadline() == machine.now + HOLD_SECONDS
    assert kinds(machine.wait()) == [SignAnnouncement, PublishMember]
    assert machine.core.next_deadline() is None


def test_without_an_id_of_its_own_a_node_says_nothing() -> None:
    machine = Machine(MeshIdentity(incarnation=1))
    machine.tell(INVENTORY)
    machine.wait()
    assert machine.said == []
    assert machine.core.settled
    assert kinds(machine.tell(TUNNEL)) == [PersistIdentity, SignAnnouncement, PublishMember]


# -- rows of the table --------------------------------------------------------------------------------------------


def test_another_own_id_is_persisted() -> None:
    """TunnelChanged | own id differs from the stored one | PersistIdentity"""
    machine = live()
    assert machine.tell(TUNNEL) == []
    effects = machine.tell(TunnelChanged(peer_id=PeerId("other"), port=1, addresses=()))
    assert only(effects, PersistIdentity).identity.peer_id == "other"
    assert only(effects, PublishMember).member.announcement.peer_id == "other"


REPORTS = {
    "addresses": TunnelChanged(peer_id=ME, port=9340, addresses=("/ip4/10.0.0.3",)),
    "models": InventoryChanged(models=()),
    "memory": DeviceChanged(device="gpu", vram_bytes=9, total_bytes=9, reserve_bytes=0, engine="e"),
    "slot": slot(),
    "slots": SlotsReplaced((slot(),)),
    "assignments": AssignmentsChanged(assignments=(Assignment(model=QWEN, origin="flag", reason=""),)),
    "name": ConfigApplied(configured=True, node_name="laptop", requested_models=(), random_bytes=bytes(16)),
    "wish": ConfigApplied(configured=True, node_name="desk", requested_models=(QWEN,), random_bytes=bytes(16)),
}


@pytest.mark.parametrize("report", REPORTS.values(), ids=REPORTS)
def test_a_report_that_changes_the_announcement_is_announced_once(report: Stimulus) -> None:
    """any report of a daemon | own announcement's content differs | SignAnnouncement, PublishMember"""
    machine = live()
    effects = machine.tell(report)
    assert kinds(effects) == [SignAnnouncement, PublishMember]
    announced = only(effects, SignAnnouncement).announcement
    assert only(effects, PublishMember).member == MemberChanged(
        announcement=announced, state="alive", reason="this node", is_self=True
    )
    assert announced.seq == 2
    assert machine.tell(report) == [], "the same again is no news"


def test_states_that_change_nothing_are_not_announced() -> None:
    machine = live()
    assert machine.tell(slot("loading")) == []
    assert kinds(machine.tell(slot("ready"))) == [SignAnnouncement, PublishMember]
    assert machine.tell(slot("ready", in_use=3)) == []
    assert kinds(machine.tell(slot("draining"))) == [SignAnnouncement, PublishMember]
    assert machine.tell(slot("unloaded")) == []


def test_a_slots_requests_are_counted_once() -> None:
    """SlotChanged | requests_total of a known slot rose | counts demand"""
    machine = live(slot(requests_total=3))
    assert machine.totals == {"qwen": 3}
    machine.tell(slot(requests_total=3), slot(requests_total=5), slot("unloaded", requests_total=6))
    assert machine.totals == {"qwen": 6}
    machine.tell(SlotsReplaced((slot(slot_id="s2", requests_total=2),)))
    assert machine.totals == {"qwen": 8}, "a new slot counts from 0"


def test_a_launcherd_that_restarted_a_little_behind_is_not_counted_again() -> None:
    machine = live(slot(requests_total=100))
    machine.tell(SlotsReplaced((slot(requests_total=97),)), slot(requests_total=100), slot(requests_total=101))
    assert machine.totals == {"qwen": 101}


def test_counts_survive_a_restart_of_gossipd() -> None:
    before = live(slot(requests_total=10))
    kept = before.core.persist_demand()
    after = Machine(counted=kept.totals, counted_slots=kept.slots)
    after.tell(TUNNEL, SlotsReplaced((slot(requests_total=12),)), INVENTORY, DEVICE)
    assert after.totals == {"qwen": 12}


def test_unserved_requests_are_counted() -> None:
    """CountUnserved | this node entered a request nobody serves | counts demand"""
    machine = live()
    machine.tell(CountUnserved(model=ModelName("x")), CountUnserved(model=ModelName("x"), count=4))
    machine.tell(CountUnserved(model=ModelName("x"), count=-9), CountUnserved(model=ModelName("y"), count=0))
    assert machine.totals == {"x": 5}


def test_what_was_counted_before_tunneld_spoke_counts_once() -> None:
    machine = Machine(MeshIdentity(incarnation=1))
    machine.tell(CountUnserved(model=QWEN, count=5), TUNNEL)
    assert machine.totals == {"qwen": 5}
    assert machine.core.persist_demand().totals == {QWEN: 5}


def test_the_first_configuration_of_an_idle_node_makes_a_mesh() -> None:
    """ConfigApplied | first configuration of an idle node | PersistIdentity, PublishMesh, as above"""
    machine = Machine(MeshIdentity(incarnation=5, peer_id=ME), configured=False)
    machine.tell(INVENTORY, DEVICE, TUNNEL)
    assert machine.core.own is not None
    assert (machine.core.own.state, machine.core.own.mesh_id) == ("idle", "")
    applied = ConfigApplied(configured=True, node_name="desk", requested_models=(), random_bytes=bytes(range(16)))
    effects = machine.tell(applied)
    assert kinds(effects) == [PersistIdentity, PublishMesh, SignAnnouncement, PublishMember]
    identity = only(effects, PersistIdentity).identity
    assert uuid.UUID(identity.mesh_id).version == 4
    assert identity.incarnation == 5, "the same life"
    assert only(effects, PublishMesh).mesh == MeshIdentityChanged(mesh_id=identity.mesh_id)
    announcement = only(effects, PublishMember).member.announcement
    assert (announcement.state, announcement.mesh_id) == ("active", identity.mesh_id)
    assert machine.tell(applied) == []
    idle = ConfigApplied(configured=False, node_name="desk", requested_models=(), random_bytes=bytes(16))
    assert kinds(machine.tell(idle)) == [SignAnnouncement, PublishMember], "idle again, in the same mesh"
    assert machine.core.identity == identity


def test_another_mesh_counts_at_once_and_is_kept() -> None:
    machine = live()
    effects = machine.tell(MeshAdopted(MeshId("other"), "home"))
    assert only(effects, PersistIdentity).identity.mesh_id == "other"
    assert only(effects, PublishMesh).mesh == MeshIdentityChanged(mesh_id=MeshId("other"), mesh_name="home")
    assert only(effects, SignAnnouncement).announcement.mesh_id == "other"
    assert machine.tell(MeshAdopted(MeshId("other"), "home")) == []


def test_draining_is_announced_and_kept() -> None:
    machine = live()
    effects = machine.tell(DrainAsked(True))
    assert only(effects, PersistIdentity).identity.draining
    assert only(effects, SignAnnouncement).announcement.state == "draining"
    assert machine.tell(DrainAsked(True)) == []
    assert only(machine.tell(DrainAsked(False)), SignAnnouncement).announcement.state == "active"


def test_demand_is_published_within_a_second_and_then_as_rates_fade() -> None:
    """Tick | demand changed, or rates fade | PublishDemand, PersistDemand"""
    machine = live()
    start = machine.now
    for _ in range(100):
        assert machine.tell(CountUnserved(model=QWEN)) == []
    first = machine.wait()
    assert machine.now == start + DEMAND_SECONDS
    (demand,) = only(first, PublishDemand).demand.demand
    assert (demand.requests_total, demand.per_minute_1m) == (100, 100.0)
    persisted, faded = [], []
    while machine.core.next_deadline() is not None:
        for effect in machine.wait():
            (persisted if isinstance(effect, PersistDemand) else faded).append(effect)
        assert machine.now < start + 700, "it ends when all rates are 0"
    assert [item.totals for item in persisted if isinstance(item, PersistDemand)] == [{QWEN: 100}]
    assert len(faded) == pytest.approx(610 / PERSIST_SECONDS, abs=3)
    last = faded[-1]
    assert isinstance(last, PublishDemand)
    assert last.demand.demand[0].per_minute_10m == 0.0


def test_counts_are_persisted_within_ten_seconds() -> None:
    """A kill loses at most 10 s of counts."""
    machine = live(slot(requests_total=1))
    saved: list[PersistDemand] = []
    while not saved:
        saved += [effect for effect in machine.wait() if isinstance(effect, PersistDemand)]
    assert machine.now <= 100 + PERSIST_SECONDS
    assert (saved[0].totals, saved[0].slots) == ({QWEN: 1}, {"s1": 1})


def test_only_the_current_records_signature_is_kept() -> None:
    """RecordSigned | for the current number | keeps the record for peers"""
    machine = live()

    def signed() -> RecordSigned:
        payload = codec.encode(machine.core.own)
        return RecordSigned(record=SignedRecord(payload=payload, signature=b"s", peer_id=ME))

    first = signed()
    assert machine.tell(first) == []
    assert machine.core.record == first.record
    machine.tell(slot())
    second = signed()
    machine.tell(second, first)
    assert machine.core.record == second.record


def test_a_snapshot_is_everything_that_was_published() -> None:
    machine = live(CountUnserved(model=QWEN, count=2))
    mesh, member, demand = machine.core.snapshot(now=machine.now)
    assert mesh == MeshIdentityChanged(mesh_id=MeshId("mesh"))
    assert isinstance(member, MemberChanged)
    assert member.announcement == machine.core.own
    assert isinstance(demand, DemandChanged)
    assert demand.demand[0].requests_total == 2
    assert len(Machine().core.snapshot(now=0.0)) == 2, "no member before there is one"


STIMULI = st.one_of(
    st.sampled_from(list(REPORTS.values())),
    st.builds(
        lambda state, at, total: slot(state, slot_id=f"s{at}", requests_total=total),
        st.sampled_from(["queued", "loading", "ready", "draining", "failed", "unloaded"]),
        st.integers(0, 2),
        st.integers(0, 50),
    ),
    st.builds(lambda peer: TunnelChanged(peer_id=PeerId(peer), port=1, addresses=()), st.sampled_from(["p", "q"])),
    st.builds(lambda count: CountUnserved(model=QWEN, count=count), st.integers(-5, 5)),
    st.just(Tick()),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(STIMULI, st.floats(0, 20)), max_size=30))
def test_no_sequence_breaks_the_invariants_and_numbers_only_rise(steps: list[tuple[Stimulus, float]]) -> None:
    machine = Machine(MeshIdentity(incarnation=1))
    for stimulus, seconds in steps:
        machine.now += seconds
        machine.tell(stimulus)
    numbers = [
        (effect.announcement.incarnation, effect.announcement.seq)
        for effect in machine.said
        if isinstance(effect, SignAnnouncement)
    ]
    assert numbers == sorted(set(numbers))
