"""A slot table whose launcherd may be killed at any moment, and whose every effect is held against the rules.

What `World` checks already: never two loads at once; a leased model is never stopped; credits of a slot never exceed
`parallel`; every token is answered once. Here in addition, whenever an engine is started or stopped: limits, memory,
one engine per model, the NPU, pins. The truth about engines and credits is this world's, not the table's: it survives
`restart`, as processes and holders survive launcherd.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress

from services.launcherd.options import options_need_bytes
from services.launcherd.recipes import processors
from services.launcherd.slot_events import (
    AcquireAsked,
    AssignmentsGiven,
    CallerGone,
    CreditsReported,
    DeviceMeasured,
    Effect,
    EngineAdopted,
    InventoryScanned,
    KnownModel,
    Memory,
    Reply,
    ReplyToken,
    SlotMemory,
    StartEngine,
    Stimulus,
    StopEngine,
)
from services.launcherd.slots import SlotTable
from shared.config import NodeConfig, type_limit
from shared.ids import HolderId, ModelName, RequestId, SlotId
from shared.io.drive import Tick
from shared.messages.leases import AcquireLease, CreditUse, LeaseGranted, ReportCredits
from shared.messages.models import Assignment
from tests.launcherd.table import GIB, World

RESERVE_BYTES = GIB


class Killed(Exception):
    """launcherd ended in the middle of its effects."""


class RestartingWorld(World):
    def __init__(self, node: NodeConfig, *, capacity_bytes: int, models: tuple[KnownModel, ...]) -> None:
        self.known = {model.name: model for model in models}
        self.on_disk = models
        self.capacity_bytes = capacity_bytes
        self.engine = "embedded test"
        self.assigned: tuple[Assignment, ...] = ()
        self.idle_holders: set[str] = set()
        """They hold credits without using them."""
        self.silent: set[str] = set()
        self.started: dict[SlotId, StartEngine] = {}
        self.kill_after: int | None = None
        """launcherd performs so many effects more of its next step."""
        self.restarts = 0
        super().__init__(node, capacity_bytes=capacity_bytes, models=models)

    # -- the rules, effect by effect -------------------------------------------------------------------------

    def do(self, stimulus: Stimulus | Tick) -> list[Effect]:
        if isinstance(stimulus, AssignmentsGiven):
            self.assigned = stimulus.assignments
        if self.kill_after is None:
            return super().do(stimulus)
        effects, left = self.table.handle(stimulus, now=self.now), self.kill_after
        self.kill_after = None
        for effect in effects[:left]:
            self._perform(effect)
        raise Killed

    def _perform(self, effect: Effect) -> None:
        if isinstance(effect, StopEngine):
            self._check_stop(effect)
        super()._perform(effect)
        if isinstance(effect, StartEngine):
            self.started[effect.slot_id] = effect
            self._check_start(effect)
        if isinstance(effect, Reply) and isinstance(effect.message, LeaseGranted):
            for holder in self.silent:
                self.credits[effect.message.slot_id].pop(holder, None)

    def _check_start(self, start: StartEngine) -> None:
        names = self.running | self.stopping
        assert start.model.name not in names.values(), "two engines for one model"
        others = {slot_id: self.known[ModelName(name)] for slot_id, name in names.items()}
        others = {slot_id: model for slot_id, model in others.items() if not model.builtin}
        if start.model.builtin:
            return
        kind = start.model.file.type
        limit = type_limit(self.table.book.limits_set or self.config.models.max_loaded_models, kind)
        same = sum(model.file.type == kind for model in others.values())
        assert limit == -1 or same < limit, f"{same + 1} engines of type {kind}, {limit} may be"
        if self.on_npu(start.model):
            assert not any(self.on_npu(model) for model in others.values()), "two models on the NPU"
        need = sum(self.need_bytes(slot_id) for slot_id in others) + self.need_bytes(start.slot_id)
        assert need <= self.capacity_bytes, f"{need} bytes where {self.capacity_bytes} are"

    def _check_stop(self, stop: StopEngine) -> None:
        name = self.running.get(stop.slot_id, "")
        if name in self.table.book.pinned:
            assert "unused for" not in stop.reason, f"pinned and stopped: {stop.reason}"
            if "makes room for" in stop.reason:
                assert "whose first load failed" in stop.reason, f"pinned and evicted: {stop.reason}"

    def on_npu(self, model: KnownModel) -> bool:
        return "npu" in processors(model.recipe, "cpu")

    def need_bytes(self, slot_id: SlotId) -> int:
        start = self.started[slot_id]
        return options_need_bytes(start.model, start.options)

    # -- what else happens to a node -------------------------------------------------------------------------

    def measure(self, capacity_bytes: int, engine: str) -> None:
        self.capacity_bytes, self.engine = capacity_bytes, engine
        total = capacity_bytes + RESERVE_BYTES
        reason = "" if engine else "no inference engine is installed"
        self.do(
            DeviceMeasured(
                device="cpu", total_bytes=total, reserve_bytes=RESERVE_BYTES, engine=engine, engine_reason=reason
            )
        )

    def put_on_disk(self, names: set[str]) -> None:
        self.on_disk = tuple(model for name, model in self.known.items() if name in names)
        self.do(InventoryScanned(models=self.on_disk))

    def falls_silent(self, holder: str) -> None:
        """The holder holds nothing any more, without a word to launcherd; what it is granted now reaches nobody."""
        self.silent.add(holder)
        for holders in self.credits.values():
            holders.pop(holder, None)

    def lose_grant(self, token: int) -> None:
        """The lease never reached its holder: it was gone when the reply came."""
        lease = self.replies[token]
        assert isinstance(lease, LeaseGranted)
        holder = self.acquired[token][0]
        if self.credits[lease.slot_id][holder] >= lease.credits:
            self.credits[lease.slot_id][holder] -= lease.credits
            self.do(CallerGone(token=ReplyToken(token), granted=lease, holder=HolderId(holder)))

    def alive(self, *holders: str) -> None:
        """Holders report what they really hold; some use none of it."""
        for holder in holders or ("proxy",):
            idle = holder in self.idle_holders
            uses = tuple(
                CreditUse(
                    slot_id=slot_id,
                    model=ModelName(self.running[slot_id]),
                    credits=held[holder],
                    in_use=0 if idle else held[holder],
                    started_total=0,
                    last_use_age_seconds=1000.0 if idle else 0.0,
                )
                for slot_id, held in self.credits.items()
                if held[holder] and slot_id in self.running
            )
            request = ReportCredits(holder=HolderId(holder), daemon="proxyd", pid=1, uses=uses)
            token = self._token()
            self.do(CreditsReported(token=token, request=request))
            revoked = getattr(self.replies.get(token), "revoked", ())
            for slot_id in revoked:
                assert not self.credits[slot_id].pop(holder, 0), f"credits on {slot_id} are taken from {holder}"

    def unanswered(self) -> list[int]:
        """Tokens that are still owed a reply."""
        return [token for token in range(1, self._tokens + 1) if token not in self.replies]

    # -- kill -9 ---------------------------------------------------------------------------------------------

    def dies(self, step: Callable[[], object], effects: int) -> bool:
        """Do something; launcherd ends after so many effects of the first stimulus. False if there was none."""
        self.kill_after = effects
        with suppress(Killed):
            step()
            self.kill_after = None
            return False
        return True

    def restart(self, gone: Collection[str]) -> None:
        """A new launcherd from what the old one wrote down last.

        It adopts every engine process, whatever the old one was doing with it, but those of the models in `gone`.
        Callers lost their connection: who waited for a lease asks again, everybody else has got an error.
        """
        self.restarts += 1
        memory = self.memory
        waiting = {token: asked for token, asked in self.acquired.items() if token not in self.replies}
        for token in range(1, self._tokens + 1):
            self.replies.setdefault(token, None)
        on_disk = {model.name for model in self.on_disk}
        loading = {slot_id: start.model.name for slot_id, start in self.loading.items()}
        engines: dict[SlotId, str] = {**self.running, **loading, **self.stopping}
        alive = {slot_id: name for slot_id, name in engines.items() if name in on_disk and name not in gone}
        self._new_table(memory, alive)
        for holder, request_id, name in waiting.values():
            token = self._token()
            self.acquired[token] = (holder, request_id, name)
            request = AcquireLease(holder=HolderId(holder), request_id=RequestId(request_id), model=ModelName(name))
            self.do(AcquireAsked(token=token, request=request))
        self.do(AssignmentsGiven(assignments=self.assigned))

    def _new_table(self, memory: Memory, alive: Mapping[SlotId, str]) -> None:
        self.slots.clear()
        self.loading.clear()
        self.stopping.clear()
        self.probes.clear()
        self.running = dict(alive)
        for slot_id in [slot_id for slot_id in self.credits if slot_id not in alive]:
            del self.credits[slot_id]
        self.table = SlotTable(self.config, cores=4, prefix=f"s{self.restarts}", memory=memory)
        for slot_id, name in alive.items():
            model = self.known[ModelName(name)]
            remembered = memory.slots.get(slot_id)
            if remembered is None:
                # As launcherd does: the engine's record tells its parallel and context, nothing else is known.
                remembered = SlotMemory(model=model.name, options=self.started[slot_id].options, origin="request")
            endpoint = self.endpoint()
            self.do(EngineAdopted(slot_id=slot_id, model=model, memory=remembered, endpoint=endpoint))
        self.measure(self.capacity_bytes, self.engine)
        self.do(InventoryScanned(models=self.on_disk))
