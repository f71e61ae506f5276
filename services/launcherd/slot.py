"""One slot: the right to hold one loaded model, from the wish to load it until its engine is gone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from services.launcherd.command_line import EngineOptions
from services.launcherd.slot_events import EngineEndpoint, KnownModel, ReplyToken
from shared.ids import ModelName, SlotId
from shared.messages.models import LoadOrigin, Processor, SlotChanged, SlotEnd, SlotState

COUNTER_SECONDS = 0.25
"""Counters and reasons of a slot are published at most so often; its state at once."""
RUNNING: frozenset[SlotState] = frozenset({"ready", "draining"})
"""States whose engine serves requests."""
OCCUPYING: frozenset[SlotState] = frozenset({"ready", "draining", "stopping", "restarting"})
"""States that take a place and memory; a loading slot has its place already."""
COMING: frozenset[SlotState] = frozenset({"queued", "loading", "ready", "restarting"})
"""States that will serve new requests."""


@dataclass(slots=True)
class Drain:
    """Why a slot has to go. It still serves requests whose order is below `before`."""

    by: SlotEnd
    before: int
    reason: str


@dataclass(slots=True, kw_only=True)
class Slot:
    """All times are monotonic seconds."""

    slot_id: SlotId
    model: KnownModel
    options: EngineOptions
    need_bytes: int
    origin: LoadOrigin
    order: int
    state: SlotState
    reason: str
    since: float
    last_use_at: float
    processors: tuple[Processor, ...] = ("cpu",)
    """What its engine computes on."""
    pinned: bool = False
    placed: bool = False
    """Only an assignment wants it."""
    asked: bool = False
    """Somebody asked for the load itself, not only for a request to be served."""
    awaited: bool = False
    """A request has waited for it."""
    attempt: int = 0
    """1: its first load failed."""
    restarts: int = 0
    restart_at: float = 0.0
    """Not to be started before."""
    settling: int = 0
    """How often it was tried again because the device may free memory late."""
    loaders: list[ReplyToken] = field(default_factory=list)
    endpoint: EngineEndpoint | None = None
    drain: Drain | None = None
    """Why it goes, for draining slots and most that are stopping."""
    ended_by: SlotEnd = ""
    hung: str = ""
    """What was seen when its engine hung: it is being stopped in order to be restarted."""
    ready_at: float | None = None
    load_seconds: float = 0.0
    requests_total: int = 0
    suspected: bool = False
    probing: bool = False
    probe_at: float = 0.0
    published: SlotChanged | None = None
    published_at: float = 0.0

    @property
    def name(self) -> ModelName:
        return self.model.name

    def move(self, state: SlotState, reason: str, now: float) -> None:
        """Every change of state goes through here."""
        if state != self.state:
            self.state = state
            self.since = now
        self.reason = reason

    def view(self, *, in_use: int, waiting: int, now: float) -> SlotChanged:
        """The slot as it is published."""
        endpoint = self.endpoint
        return SlotChanged(
            slot_id=self.slot_id,
            model=self.name,
            type=self.model.file.type,
            state=self.state,
            reason=self.reason,
            origin=self.origin,
            need_bytes=self.need_bytes,
            pid=endpoint.pid if endpoint else 0,
            port=endpoint.port if endpoint else 0,
            parallel=self.options.parallel,
            in_use=in_use,
            waiting=waiting,
            context_tokens=self.options.context_tokens,
            requests_total=self.requests_total,
            restarts=self.restarts,
            state_age_seconds=round(now - self.since, 3),
            last_use_age_seconds=round(now - self.last_use_at, 3),
            load_seconds=round(self.load_seconds, 3),
            log_path=endpoint.log_path if endpoint else "",
            ended_by=self.ended_by,
            recipe=self.model.recipe,
            processors=self.processors,
            pinned=self.pinned,
            checkpoint=self.model.checkpoint or self.model.file.path,
            backend=self.options.backend,
            engine_args=self.options.extra_args,
        )

    def news(self, in_use: int, waiting: int) -> Literal["state", "counters", ""]:
        """How the slot differs from what was published last."""
        old = self.published
        pid = self.endpoint.pid if self.endpoint else 0
        if old is None or (old.state, old.origin, old.pid, old.pinned) != (self.state, self.origin, pid, self.pinned):
            return "state"
        same = (
            old.in_use == in_use
            and old.requests_total == self.requests_total
            and old.waiting == waiting
            and old.reason == self.reason
        )
        return "" if same else "counters"
