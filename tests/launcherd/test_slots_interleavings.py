"""Any order of loads, requests, releases, crashes, evictions and limit changes keeps the rules, and nobody starves.

The rules are checked by `World` at every effect: never two loads at once; a leased model is never stopped; credits of
a slot never exceed `parallel`; every token is answered once. Here in addition: what runs never exceeds limits and
memory when an engine is started, and once everything answers, every request is granted or refused.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.launcherd.options import options_need_bytes
from services.launcherd.slot_events import Effect, KnownModel, StartEngine
from shared.messages.models import LoadOrigin
from tests.launcherd.table import DEFAULT_MODELS, GIB, World, config

MODELS = {model.file.name: model for model in DEFAULT_MODELS}
NAMES = st.sampled_from(sorted(MODELS))
HOLDERS = st.sampled_from(["h1", "h2", "h3"])
CAPACITY_BYTES = 10 * GIB
CODES = st.sampled_from(["engine_exited", "load_timed_out", "model_file_missing", "engine_port_taken"])
ORIGINS: st.SearchStrategy[LoadOrigin] = st.sampled_from(["flag", "request", "allocation"])


class CheckedWorld(World):
    """Objects to an engine that is started without room for it."""

    def _perform(self, effect: Effect) -> None:
        super()._perform(effect)
        if isinstance(effect, StartEngine):
            engines = [MODELS[name] for name in (*self.running.values(), *self.stopping.values())]
            engines = [model for model in engines if not model.builtin]
            if not effect.model.builtin:
                self._check_room(effect, engines)

    def _check_room(self, effect: StartEngine, engines: list[KnownModel]) -> None:
        limit = self.config.slot_limit(effect.model.file.type)
        same = sum(model.file.type == effect.model.file.type for model in engines)
        assert limit == -1 or same < limit, f"{same + 1} engines of type {effect.model.file.type}"
        assert effect.model.name not in [model.name for model in engines], "two engines for one model"
        need = sum(self.needs.get(model.name, 0) for model in engines)
        self.needs[effect.model.name] = options_need_bytes(effect.model.file, effect.options)
        assert need + self.needs[effect.model.name] <= CAPACITY_BYTES

    @property
    def needs(self) -> dict[str, int]:
        if not hasattr(self, "_needs"):
            self._needs: dict[str, int] = {}
        return self._needs


class Interleavings(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = CheckedWorld(config((1,), parallel=2, queue_limit=6), capacity_bytes=CAPACITY_BYTES)

    @rule(name=NAMES, holder=HOLDERS, load=st.booleans())
    def acquire(self, name: str, holder: str, load: bool) -> None:
        self.world.acquire(name, holder, load=load)

    @rule(name=NAMES, context_tokens=st.sampled_from([0, 512]), wait=st.booleans())
    def load(self, name: str, context_tokens: int, wait: bool) -> None:
        self.world.load(name, context_tokens=context_tokens, wait=wait)

    @rule(name=st.one_of(st.none(), NAMES))
    def unload(self, name: str | None) -> None:
        self.world.unload(name)

    @precondition(lambda self: self.world.loading)
    @rule()
    def ready(self) -> None:
        self.world.ready()

    @precondition(lambda self: self.world.loading)
    @rule(code=CODES)
    def fail(self, code: str) -> None:
        self.world.fail(code)

    @precondition(lambda self: self.world.stopping)
    @rule()
    def stopped(self) -> None:
        self.world.stopped()

    @precondition(lambda self: self.world.running)
    @rule(data=st.data())
    def crash(self, data: st.DataObject) -> None:
        self.world.crash(data.draw(st.sampled_from(sorted(self.world.running.values()))))

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

    @rule(data=st.data(), holder=HOLDERS)
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
        if token in self.world.replies:
            return
        if gone:
            self.world.gone(token)
            self.world.replies[token] = None
        else:
            self.world.withdraw(token)

    @rule(holder=HOLDERS)
    def die(self, holder: str) -> None:
        """A holder falls silent for longer than it may."""
        for holders in self.world.credits.values():
            holders.pop(holder, None)
        self.world.live_for(5.1, *({"h1", "h2", "h3"} - {holder}))

    @rule(seconds=st.sampled_from([0.1, 0.9, 3.0, 61.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.live_for(seconds, "h1", "h2", "h3")

    @rule(names=st.lists(NAMES, max_size=3, unique=True), origin=ORIGINS)
    def assign(self, names: list[str], origin: LoadOrigin) -> None:
        self.world.assign(*((name, origin) for name in names))

    @rule(limits=st.sampled_from([(1,), (2,), (-1,), (3, 1)]))
    def reconfigure(self, limits: tuple[int, ...]) -> None:
        self.world.reconfigure(config(limits, parallel=2, queue_limit=6))

    @invariant()
    def there_is_a_way_on(self) -> None:
        """What waits, waits for something that is under way: an engine, a holder, a timer."""
        world = self.world
        waits = any(slot.state == "queued" for slot in world.slots.values())
        assert not waits or world.loading or world.running or world.stopping or world.table.next_deadline() is not None

    def teardown(self) -> None:
        """Engines answer, holders return what they have: then every request gets its answer."""
        world = self.world
        for _ in range(400):
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
            world.live_for(0.5, "h1", "h2", "h3")
            if all(token in world.replies for token in world.acquired):
                return
        waiting = [world.acquired[token] for token in world.acquired if token not in world.replies]
        states = [(slot.model, slot.state, slot.reason) for slot in world.slots.values()]
        raise AssertionError(f"starved: {waiting}; slots: {states}")


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
