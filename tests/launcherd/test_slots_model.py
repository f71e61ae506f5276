"""Any order of what can happen to a node's models keeps the rules of docs/spec/slots.md, and nobody starves.

Loads, requests, returned and lost leases, callers and holders that vanish, crashes, hangs, failed loads, unloads, pins,
limits, memory, files, assignments, time, and launcherd killed at any effect. The rules are checked by
`RestartingWorld` at every effect; here: what must hold between steps, and that in the end everybody was answered.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from shared.config import NodeConfig
from shared.messages.leases import LeaseGranted
from shared.messages.models import LoadOrigin
from tests.launcherd.restarting_world import RestartingWorld
from tests.launcherd.table import GIB, config, model

MODELS = (
    model("a"),
    model("b"),
    model("c"),
    model("big", size_bytes=8 * GIB),
    model("huge", size_bytes=80 * GIB),
    model("emb", "embedding"),
    model("emb2", "embedding"),
    model("rank", "reranking"),
    model("npu-llm", recipe="flm"),
    model("npu-llm2", recipe="oga-hybrid"),
    model("npu-emb", "embedding", recipe="flm"),
    model("guide", size_bytes=1000, builtin=True),
)
ALL = {known.file.name for known in MODELS}
NAMES = st.sampled_from(sorted(ALL))
HOLDERS = ("h1", "h2", "h3")
PARALLEL = 2
CAPACITY_BYTES = 10 * GIB
CODES = st.sampled_from(
    [
        "engine_exited", "load_timed_out", "engine_port_taken", "model_file_broken", "load_failed",
        "model_file_missing", "engine_missing", "option_refused", "state_not_writable",
    ]
)  # fmt: skip
ORIGINS: st.SearchStrategy[LoadOrigin] = st.sampled_from(["flag", "request", "allocation"])
IDLE_MINUTES = st.sampled_from([0.0, 1.0])
ENGINES = st.sampled_from(["embedded test"] * 4 + [""])
GONE = st.sets(NAMES, max_size=4)
LIMITS = st.sampled_from([(1,), (2,), (-1,), (3, 1), (2, 1, 1)])


class SlotTableModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.limits: tuple[int, ...] = (1,)
        self.idle_minutes = 0.0
        self.world = RestartingWorld(self.configured(), capacity_bytes=CAPACITY_BYTES, models=MODELS)

    def configured(self) -> NodeConfig:
        return config(self.limits, parallel=PARALLEL, queue_limit=6, idle_minutes=self.idle_minutes)

    @initialize(limits=LIMITS, idle_minutes=IDLE_MINUTES, idle=st.sets(st.sampled_from(HOLDERS)))
    def begin(self, limits: tuple[int, ...], idle_minutes: float, idle: set[str]) -> None:
        self.world.idle_holders |= idle
        self.reconfigure(limits, idle_minutes)

    # -- requests --------------------------------------------------------------------------------------------

    @rule(name=NAMES, holder=st.sampled_from(HOLDERS), load=st.sampled_from([True] * 4 + [False]))
    def acquire(self, name: str, holder: str, load: bool) -> None:
        self.world.acquire(name, holder, load=load)

    @rule(data=st.data(), holder=st.sampled_from(HOLDERS))
    def give_back(self, data: st.DataObject, holder: str) -> None:
        held = [slot_id for slot_id, holders in self.world.credits.items() if holders[holder]]
        if held:
            slot_id = data.draw(st.sampled_from(held))
            count = data.draw(st.integers(1, self.world.credits[slot_id][holder]))
            self.world.give_back(slot_id, holder, count)

    @precondition(lambda self: self.world.acquired)
    @rule(data=st.data(), gone=st.booleans())
    def withdraw(self, data: st.DataObject, gone: bool) -> None:
        token = data.draw(st.sampled_from(sorted(self.world.acquired)))
        if token not in self.world.replies:
            if gone:
                self.world.gone(token)
                self.world.replies[token] = None
            else:
                self.world.withdraw(token)

    @rule(data=st.data())
    def lose_grant(self, data: st.DataObject) -> None:
        granted = [token for token, reply in self.world.replies.items() if isinstance(reply, LeaseGranted)]
        if granted:
            self.world.lose_grant(data.draw(st.sampled_from(granted[-3:])))

    @rule(holder=st.sampled_from(HOLDERS))
    def rest(self, holder: str) -> None:
        """The holder keeps its credits and runs nothing, or runs something on each of them again."""
        self.world.idle_holders ^= {holder}

    @rule(holder=st.sampled_from(HOLDERS))
    def die(self, holder: str) -> None:
        """A holder falls silent for longer than it may, and comes back with nothing."""
        self.world.falls_silent(holder)
        self.world.live_for(5.1, *({*HOLDERS} - {holder}))
        self.world.silent.clear()

    # -- people and the mesh ---------------------------------------------------------------------------------

    @rule(
        name=NAMES,
        context_tokens=st.sampled_from([0, 512]),
        wait=st.booleans(),
        origin=ORIGINS,
        pinned=st.sampled_from([None, None, True, False]),
    )
    def load(self, name: str, context_tokens: int, wait: bool, origin: LoadOrigin, pinned: bool | None) -> None:
        self.world.load(name, context_tokens=context_tokens, wait=wait, origin=origin, pinned=pinned)

    @rule(name=st.sampled_from([*sorted(ALL), None]), wait=st.booleans())
    def unload(self, name: str | None, wait: bool) -> None:
        self.world.unload(name, wait=wait)

    @rule(name=NAMES, pinned=st.booleans())
    def pin(self, name: str, pinned: bool) -> None:
        self.world.pin(name, pinned)

    @rule(limits=LIMITS)
    def set_limits(self, limits: tuple[int, ...]) -> None:
        self.world.set_limits(*limits)

    @rule(limits=LIMITS, idle_minutes=IDLE_MINUTES)
    def reconfigure(self, limits: tuple[int, ...], idle_minutes: float) -> None:
        self.limits, self.idle_minutes = limits, idle_minutes
        self.world.reconfigure(self.configured())

    @rule(names=st.lists(NAMES, max_size=3, unique=True), origin=ORIGINS, client=st.sampled_from([False] * 5 + [True]))
    def assign(self, names: list[str], origin: LoadOrigin, client: bool) -> None:
        if client:
            self.world.assign()
            self.world.become_client()
        else:
            self.world.assign(*((name, origin) for name in names))

    # -- engines, device and disk ----------------------------------------------------------------------------

    @rule(steps=st.integers(1, 6))
    def engines_go_on(self, steps: int) -> None:
        """What loads becomes ready and what stops is gone, a few times over."""
        for _ in range(steps):
            if self.world.stopping:
                self.world.stopped()
            elif self.world.loading:
                self.world.ready()

    @rule(name=NAMES, holder=st.sampled_from(HOLDERS))
    def use(self, name: str, holder: str) -> None:
        """A request, and its model is brought up for it as far as nothing else is in the way."""
        self.world.acquire(name, holder)
        self.engines_go_on(3)

    @precondition(lambda self: self.world.loading)
    @rule()
    def ready(self) -> None:
        self.world.ready()

    @precondition(lambda self: self.world.loading)
    @rule(code=CODES)
    def fail(self, code: str) -> None:
        self.world.fail(code)

    @precondition(lambda self: self.world.stopping)
    @rule(data=st.data())
    def stopped(self, data: st.DataObject) -> None:
        self.world.stopped(data.draw(st.sampled_from(sorted(self.world.stopping.values()))))

    @precondition(lambda self: self.world.running)
    @rule(data=st.data(), asked=st.booleans(), fails=st.booleans())
    def crash(self, data: st.DataObject, asked: bool, fails: bool) -> None:
        """An engine ends; perhaps somebody asks for the model meanwhile, perhaps it does not come back."""
        name = data.draw(st.sampled_from(sorted(self.world.running.values())))
        self.world.crash(name)
        if asked:
            self.world.load(name)
        if fails:
            self.world.live_for(2.1, *HOLDERS)
            if self.world.loading:
                self.world.fail()

    @precondition(lambda self: self.world.running)
    @rule(data=st.data())
    def hang(self, data: st.DataObject) -> None:
        self.world.hang(data.draw(st.sampled_from(sorted(self.world.running.values()))))

    @precondition(lambda self: self.world.running)
    @rule(data=st.data(), healthy=st.booleans())
    def suspect(self, data: st.DataObject, healthy: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.world.running.values())))
        self.world.suspect(name)
        if healthy:
            self.world.healthy(name)

    @rule(names=st.sets(NAMES, max_size=3))
    def lose_files(self, names: set[str]) -> None:
        self.world.put_on_disk(ALL - names)

    @rule(capacity_bytes=st.sampled_from([CAPACITY_BYTES, 3 * GIB]), engine=ENGINES)
    def measure(self, capacity_bytes: int, engine: str) -> None:
        self.world.measure(capacity_bytes, engine)

    @rule(seconds=st.sampled_from([0.1, 0.9, 3.0, 61.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.live_for(seconds, *HOLDERS)

    # -- kill -9 ---------------------------------------------------------------------------------------------

    @rule(gone=GONE)
    def restart(self, gone: set[str]) -> None:
        """`gone`: models whose engines do not outlive it."""
        pinned, limits = set(self.world.table.book.pinned), self.world.table.book.limits_set
        self.world.restart(gone)
        assert self.world.table.book.pinned == pinned, "pins hold over restarts"
        assert self.world.table.book.limits_set == limits, "limits hold over restarts"

    @rule(gone=GONE, name=NAMES, holder=st.sampled_from(HOLDERS), effects=st.integers(0, 4))
    def restart_amid_a_request(self, gone: set[str], name: str, holder: str, effects: int) -> None:
        if self.world.dies(lambda: self.world.acquire(name, holder), effects):
            self.world.restart(gone)
            self.engines_go_on(1)

    @precondition(lambda self: self.world.loading or self.world.stopping)
    @rule(gone=GONE, effects=st.integers(0, 4))
    def restart_amid_an_ending(self, gone: set[str], effects: int) -> None:
        """Killed between an engine's news and what was to follow from it."""
        step = self.world.stopped if self.world.stopping else self.world.ready
        if self.world.dies(step, effects):
            self.world.restart(gone)

    # -- between steps ---------------------------------------------------------------------------------------

    @invariant()
    def there_is_a_way_on(self) -> None:
        """What waits, waits for something that is under way: an engine, a holder, a timer."""
        world = self.world
        waits = any(slot.state == "queued" for slot in world.slots.values())
        assert not waits or world.loading or world.running or world.stopping or world.table.next_deadline() is not None

    @invariant()
    def no_request_waits_beside_a_free_credit(self) -> None:
        """A model that was loaded for a request runs that request before anything else happens to it."""
        book = self.world.table.book
        for slot in book.slots.values():
            if slot.state == "ready" and not slot.suspected and book.leases.ledgers[slot.slot_id].free:
                assert not book.leases.waiting(slot.name), f"{slot.name} is ready and a request waits for it"

    @invariant()
    def pins_are_shown(self) -> None:
        book = self.world.table.book
        assert all(slot.pinned == (slot.name in book.pinned) for slot in book.slots.values())

    def teardown(self) -> None:
        """Engines answer and holders return what they have: then every caller gets an answer."""
        world = self.world
        world.idle_holders.clear()
        world.measure(CAPACITY_BYTES, "embedded test")
        for _ in range(500):
            world.now += 0.01
            for name in list(world.running.values()):
                world.healthy(name)
            if world.loading:
                world.ready()
            while world.stopping:
                world.stopped()
            for slot_id, holders in list(world.credits.items()):
                for holder, count in list(holders.items()):
                    if count and slot_id in world.running:
                        world.give_back(slot_id, holder)
            world.live_for(0.5, *HOLDERS)
            if not world.unanswered() and not world.loading and not world.stopping:
                return
        waiting = [world.acquired.get(token, token) for token in world.unanswered()]
        states = [(slot.model, slot.state, slot.reason) for slot in world.slots.values()]
        raise AssertionError(f"starved: {waiting}; slots: {states}")


def run(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        SlotTableModel,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_the_rules_hold_in_any_order_of_events() -> None:
    run(examples=100, steps=40)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_rules_hold_in_thousands_of_orders() -> None:
    run(examples=4000, steps=60)
