"""Drives a slot table without processes: engines start, end and answer when the test says so.

It keeps its own books of credits and engines, so that it can object when the table contradicts them.
"""

from __future__ import annotations

from collections import defaultdict

from services.launcherd.model_info import ModelFile
from services.launcherd.slot_events import (
    AcquireAsked,
    AssignmentsGiven,
    CallerGone,
    ConfigApplied,
    CreditsReported,
    CreditsReturned,
    DeviceMeasured,
    Effect,
    EngineEndpoint,
    EngineExited,
    EngineFailed,
    EngineHealthy,
    EngineHung,
    EngineReady,
    EngineStopped,
    InventoryScanned,
    KnownModel,
    LimitsAsked,
    LoadAsked,
    Memory,
    PinAsked,
    ProbeEngine,
    Publish,
    Remember,
    Reply,
    ReplyToken,
    StartEngine,
    Stimulus,
    StopEngine,
    SuspicionRaised,
    UnloadAsked,
    WithdrawAsked,
)
from services.launcherd.slots import SlotTable
from shared.config import EngineSection, ModelsSection, NodeConfig
from shared.ids import HolderId, ModelName, RequestId, SlotId
from shared.io.drive import Tick
from shared.messages.daemon import Refused
from shared.messages.leases import (
    AcquireLease,
    CreditsRecalled,
    CreditUse,
    EngineSuspected,
    LeaseGranted,
    ReportCredits,
    ReturnCredits,
    WithdrawAcquire,
)
from shared.messages.models import (
    Assignment,
    LoadModel,
    LoadOrigin,
    ModelType,
    PinModel,
    SetMaxLoadedModels,
    SlotChanged,
    UnloadModel,
)

GIB = 1024**3


def model(
    name: str,
    type: ModelType = "llm",
    size_bytes: int = GIB,
    builtin: bool = False,
    trained: int = 4096,
    recipe: str = "llamacpp",
) -> KnownModel:
    file = ModelFile(
        name=name,
        type=type,
        path=f"/models/{name}.gguf",
        parts=(f"/models/{name}.gguf",),
        architecture="llama",
        trained_context_tokens=trained,
        parameters=1_000_000,
        file_size_bytes=size_bytes,
        kv_bytes_per_token=0,
        compute_bytes=0,
        quantization="F16",
        chat_template=True,
    )
    return KnownModel(file=file, builtin=builtin, recipe=recipe)


DEFAULT_MODELS = (
    model("a"),
    model("b"),
    model("c"),
    model("big", size_bytes=8 * GIB),
    model("huge", size_bytes=80 * GIB),
    model("emb", "embedding"),
    model("guide", size_bytes=1000, builtin=True),
)

NPU_MODELS = (
    model("npu-llm", recipe="flm"),
    model("npu-hybrid", recipe="oga-hybrid"),
    model("npu-emb", "embedding", recipe="flm"),
    model("cpu-llm", recipe="oga-cpu"),
    model("a"),
)


def config(
    limits: tuple[int, ...] = (1,), *, parallel: int = 2, queue_limit: int = 8, idle_minutes: float = 0.0
) -> NodeConfig:
    return NodeConfig(
        models=ModelsSection(max_loaded_models=limits, idle_unload_minutes=idle_minutes),
        engine=EngineSection(parallel=parallel, queue_limit=queue_limit),
        configured=True,
    )


class World:
    def __init__(
        self,
        node: NodeConfig | None = None,
        *,
        capacity_bytes: int = 10 * GIB,
        models: tuple[KnownModel, ...] = DEFAULT_MODELS,
        memory: Memory | None = None,
        prefix: str = "s",
    ) -> None:
        self.config = node or config()
        self.now = 1000.0
        self.table = SlotTable(self.config, cores=4, prefix=prefix, memory=memory)
        self.replies: dict[int, object] = {}
        self.published: list[object] = []
        self.slots: dict[SlotId, SlotChanged] = {}
        self.effects: list[Effect] = []
        self.loading: dict[SlotId, StartEngine] = {}
        self.running: dict[SlotId, str] = {}
        self.stopping: dict[SlotId, str] = {}
        self.probes: list[SlotId] = []
        self.memory = Memory()
        self.credits: dict[SlotId, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        self.stop_order: list[str] = []
        self._tokens = 0
        self._requests = 0
        self._ports = 20_000
        self.acquired: dict[int, tuple[str, RequestId, str]] = {}
        self.do(
            DeviceMeasured(device="cpu", total_bytes=capacity_bytes + GIB, reserve_bytes=GIB, engine="embedded test")
        )
        self.do(InventoryScanned(models=models))

    # -- plumbing --------------------------------------------------------------------------------------------

    def do(self, stimulus: Stimulus | Tick) -> list[Effect]:
        effects = self.table.handle(stimulus, now=self.now)
        for effect in effects:
            self._perform(effect)
        self.effects += effects
        self.table.check_invariants()
        return effects

    def _perform(self, effect: Effect) -> None:
        match effect:
            case StartEngine(slot_id=slot_id):
                assert not self.loading, "two loads at once"
                self.loading[slot_id] = effect
            case StopEngine(slot_id=slot_id):
                if slot_id in self.loading:
                    self.stopping[slot_id] = self.loading.pop(slot_id).model.name
                else:
                    if "hung" not in effect.reason:
                        assert not sum(self.credits[slot_id].values()), "a leased model is stopped"
                    self.stopping[slot_id] = self.running.pop(slot_id)
                self.credits.pop(slot_id, None)
                self.stop_order.append(self.stopping[slot_id])
            case ProbeEngine(slot_id=slot_id):
                self.probes.append(slot_id)
            case Reply(token=token, message=message):
                assert token not in self.replies, "answered twice"
                self.replies[token] = message
                if isinstance(message, LeaseGranted):
                    holder = self.acquired[token][0]
                    assert message.slot_id in self.running, "a lease on an engine that does not run"
                    self.credits[message.slot_id][holder] += message.credits
                    assert sum(self.credits[message.slot_id].values()) <= message.parallel
            case Publish(message=message):
                self.published.append(message)
                if isinstance(message, SlotChanged):
                    self.slots[message.slot_id] = message
            case Remember(memory=memory):
                self.memory = memory

    def advance(self, seconds: float) -> None:
        """Let time pass, with every timer of the table on its way."""
        end = self.now + seconds
        for _ in range(10_000):
            deadline = self.table.next_deadline()
            if deadline is None or deadline > end:
                break
            self.now = max(self.now, deadline)
            self.do(Tick())
        else:
            raise AssertionError("the table's timer does not move on")
        self.now = end

    def _token(self) -> ReplyToken:
        self._tokens += 1
        return ReplyToken(self._tokens)

    # -- what people, clients and engines do -----------------------------------------------------------------

    def load(
        self,
        name: str,
        *,
        wait: bool = True,
        context_tokens: int = 0,
        origin: LoadOrigin = "request",
        pinned: bool | None = None,
    ) -> int:
        token = self._token()
        request = LoadModel(
            model=ModelName(name), wait=wait, context_tokens=context_tokens, origin=origin, pinned=pinned
        )
        self.do(LoadAsked(token=token, request=request))
        return token

    def unload(self, name: str | None, *, wait: bool = True) -> int:
        token = self._token()
        model_name = ModelName(name) if name is not None else None
        self.do(UnloadAsked(token=token, request=UnloadModel(model=model_name, wait=wait)))
        return token

    def pin(self, name: str, pinned: bool = True) -> object:
        token = self._token()
        self.do(PinAsked(token=token, request=PinModel(model=ModelName(name), pinned=pinned)))
        return self.replies[token]

    def set_limits(self, *limits: int) -> object:
        token = self._token()
        self.do(LimitsAsked(token=token, request=SetMaxLoadedModels(limits=limits)))
        return self.replies[token]

    def become_client(self) -> None:
        self.do(UnloadAsked(token=self._token(), request=UnloadModel(wait=False), of_client=True))

    def acquire(self, name: str, holder: str = "proxy", *, load: bool = True) -> int:
        token = self._token()
        self._requests += 1
        request_id = RequestId(f"r{self._requests}")
        self.acquired[token] = (holder, request_id, name)
        request = AcquireLease(holder=HolderId(holder), request_id=request_id, model=ModelName(name), load=load)
        self.do(AcquireAsked(token=token, request=request))
        return token

    def withdraw(self, acquired: int) -> None:
        holder, request_id, _ = self.acquired[acquired]
        request = WithdrawAcquire(holder=HolderId(holder), request_id=request_id)
        self.do(WithdrawAsked(token=self._token(), request=request))

    def gone(self, token: int) -> None:
        self.do(CallerGone(token=ReplyToken(token)))

    def give_back(self, slot_id: SlotId, holder: str = "proxy", count: int | None = None) -> None:
        """Return credits, all by default."""
        count = self.credits[slot_id][holder] if count is None else count
        self.credits[slot_id][holder] -= count
        self._requests += 1
        request = ReturnCredits(
            holder=HolderId(holder), request_id=RequestId(f"back{self._requests}"), slot_id=slot_id, count=count
        )
        self.do(CreditsReturned(token=self._token(), request=request))

    def report(self, holder: str = "proxy", **uses: tuple[int, int, int]) -> object:
        """Uses by model name: (credits, in_use, started_total)."""
        token = self._token()
        lines = tuple(
            CreditUse(
                slot_id=self.slot(name).slot_id,
                model=ModelName(name),
                credits=credits,
                in_use=in_use,
                started_total=started,
                last_use_age_seconds=0.0 if in_use else 1.0,
            )
            for name, (credits, in_use, started) in uses.items()
        )
        self.do(
            CreditsReported(
                token=token, request=ReportCredits(holder=HolderId(holder), daemon="proxyd", pid=1, uses=lines)
            )
        )
        return self.replies[token]

    def alive(self, *holders: str) -> None:
        """Holders report what they really hold, all of it in use."""
        for holder in holders or ("proxy",):
            uses = tuple(
                CreditUse(
                    slot_id=slot_id,
                    model=ModelName(self.running[slot_id]),
                    credits=held[holder],
                    in_use=held[holder],
                    started_total=0,
                    last_use_age_seconds=0.0,
                )
                for slot_id, held in self.credits.items()
                if held[holder] and slot_id in self.running
            )
            request = ReportCredits(holder=HolderId(holder), daemon="proxyd", pid=1, uses=uses)
            self.do(CreditsReported(token=self._token(), request=request))

    def live_for(self, seconds: float, *holders: str) -> None:
        """Time passes with the holders reporting each second."""
        end = self.now + seconds
        while self.now < end:
            self.alive(*holders)
            self.advance(min(1.0, end - self.now))

    def suspect(self, name: str) -> None:
        request = EngineSuspected(slot_id=self.slot(name).slot_id, detail="connection reset")
        self.do(SuspicionRaised(token=self._token(), request=request))

    def assign(self, *wishes: tuple[str, LoadOrigin]) -> None:
        given = tuple(
            Assignment(model=ModelName(name), origin=origin, reason=f"assigned by {origin}") for name, origin in wishes
        )
        self.do(AssignmentsGiven(assignments=given))

    def reconfigure(self, node: NodeConfig) -> None:
        self.config = node
        self.do(ConfigApplied(config=node))

    def endpoint(self) -> EngineEndpoint:
        self._ports += 1
        port = self._ports
        return EngineEndpoint(pid=port, port=port, base_url=f"http://127.0.0.1:{port}", api_key="key", log_path="/log")

    def ready(self, name: str | None = None) -> SlotId:
        """The loading engine is ready."""
        slot_id, start = next(iter(self.loading.items()))
        assert name in (None, start.model.name), f"{start.model.name} is loading, not {name}"
        del self.loading[slot_id]
        self.running[slot_id] = start.model.name
        self.do(EngineReady(slot_id=slot_id, endpoint=self.endpoint(), load_seconds=1.5))
        return slot_id

    def fail(self, code: str = "engine_exited", detail: str = "the engine ended with exit status 1") -> SlotId:
        slot_id = next(iter(self.loading))
        del self.loading[slot_id]
        self.do(EngineFailed(slot_id=slot_id, code=code, detail=detail))
        return slot_id

    def crash(self, name: str) -> SlotId:
        slot_id = self.running_id(name)
        del self.running[slot_id]
        self.credits.pop(slot_id, None)
        self.do(EngineExited(slot_id=slot_id, how="was ended by SIGKILL", last_words="out of luck"))
        return slot_id

    def hang(self, name: str) -> SlotId:
        slot_id = self.running_id(name)
        self.do(EngineHung(slot_id=slot_id, detail="no answer for 15 s"))
        return slot_id

    def healthy(self, name: str) -> None:
        self.do(EngineHealthy(slot_id=self.running_id(name)))

    def stopped(self, name: str | None = None) -> SlotId:
        slot_id = next(slot_id for slot_id, model in self.stopping.items() if name in (None, model))
        del self.stopping[slot_id]
        self.do(EngineStopped(slot_id=slot_id))
        return slot_id

    def bring_up(self, name: str) -> SlotId:
        """Load a model, with everything that has to happen for it."""
        token = self.load(name)
        while self.stopping:
            self.stopped()
        slot_id = self.ready(name)
        assert token in self.replies
        return slot_id

    # -- what is seen ----------------------------------------------------------------------------------------

    def running_id(self, name: str) -> SlotId:
        return next(slot_id for slot_id, model in self.running.items() if model == name)

    def slot(self, name: str) -> SlotChanged:
        """The newest slot of a model, as published."""
        return [slot for slot in self.slots.values() if slot.model == name][-1]

    def state(self, name: str) -> str:
        found = [slot for slot in self.slots.values() if slot.model == name]
        return found[-1].state if found else ""

    def reply(self, token: int) -> object:
        return self.replies.get(token)

    def granted(self, token: int) -> bool:
        return isinstance(self.replies.get(token), LeaseGranted)

    def recalls(self) -> list[tuple[str, str, bool]]:
        """(holder, reason, active) of every recall so far."""
        return [
            (message.holder, message.reason, message.active)
            for message in self.published
            if isinstance(message, CreditsRecalled)
        ]


def refused(reply: object) -> Refused:
    assert isinstance(reply, Refused), reply
    return reply


def running(world: World) -> set[str]:
    """Names of the models whose engine runs."""
    return set(world.running.values())
