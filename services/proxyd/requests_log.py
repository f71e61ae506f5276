"""What became of each request: those in flight, a ring of the newest finished ones, and totals.

One record per request, filled in while it runs and filed once, whole, when it ends; it belongs to the node, so it
outlives the model it went to.

Source: TRAPS 27 (statistics of concurrent requests never mix), FIELD "why".
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

from services.proxyd.usage import Usage
from shared.ids import ModelName, RequestId

RECENT_LIMIT = 500
"""Finished requests kept for `why REQUEST`: minutes at a high rate, about 0.3 MB."""

Outcome = Literal["active", "ok", "refused", "client_gone", "engine_failed", "error"]
"""How it ended. `refused`: answered with an error before an engine had it; `error`: the engine answered one."""


@dataclass(slots=True, kw_only=True, eq=False)
class RequestRecord:
    """One request. Times are seconds; `started` is on the monotonic clock, the others are durations."""

    request_id: RequestId
    route: str
    started: float
    model: ModelName | None = None
    streaming: bool = False
    outcome: Outcome = "active"
    status: int = 0
    """HTTP status that was sent, 0 before."""
    reason: str = ""
    """In words: what it waits for, or why it failed."""
    node: str = ""
    """Whose engine has it."""
    elsewhere: bool = False
    """That is not this node."""
    attempts: int = 0
    queue_seconds: float = 0.0
    """Waiting for the model and for a free place on its engine."""
    first_byte_seconds: float | None = None
    """From the request's last byte to the answer's first."""
    overhead_seconds: float = 0.0
    """Spent in proxyd itself before the answer's first byte."""
    total_seconds: float = 0.0
    request_bytes: int = 0
    response_bytes: int = 0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    tokens_per_second: float | None = None
    """As the engine measured its own generation."""
    cached_tokens: int | None = None
    prompt_seconds: float | None = None

    def answered(self, status: int, usage: Usage) -> None:
        """An engine's answer was sent to its end."""
        self.outcome = "ok" if status < 400 else "error"
        self.prompt_tokens = usage.prompt_tokens
        self.completion_tokens = usage.completion_tokens
        self.tokens_per_second = usage.tokens_per_second
        self.cached_tokens = usage.cached_tokens
        self.prompt_seconds = usage.prompt_seconds


class RequestsLog:
    """In-flight and recent requests by id. Ids given by clients may repeat: the newest one wins."""

    def __init__(self, recent_limit: int = RECENT_LIMIT) -> None:
        self._active: dict[int, RequestRecord] = {}
        self._recent: deque[RequestRecord] = deque(maxlen=recent_limit)
        self.requests_total = 0
        self.latest_answered: RequestRecord | None = None
        """The newest one that an engine answered to its end: whole, and never changed again."""
        self.outcomes: dict[str, int] = {}

    def begin(self, record: RequestRecord) -> None:
        self._active[id(record)] = record
        self.requests_total += 1

    def finish(self, record: RequestRecord) -> None:
        """File a finished record. Filing it twice is a broken invariant."""
        del self._active[id(record)]
        outcome = record.outcome
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
        self._recent.append(record)
        if outcome == "ok":
            self.latest_answered = record

    @property
    def active_count(self) -> int:
        return len(self._active)

    def active(self) -> list[RequestRecord]:
        """In flight, oldest first."""
        return list(self._active.values())

    def recent(self, limit: int) -> list[RequestRecord]:
        """The newest `limit` finished ones, newest first."""
        return [record for record, _ in zip(reversed(self._recent), range(limit), strict=False)]

    def speeds(self) -> dict[ModelName, float]:
        """Tokens per second of each model's newest finished request that told it."""
        newest: dict[ModelName, float] = {}
        for record in reversed(self._recent):
            if record.model is not None and record.tokens_per_second:
                newest.setdefault(record.model, record.tokens_per_second)
        return newest

    def find(self, request_id: str) -> RequestRecord | None:
        """In flight first, then the newest finished one."""
        for record in reversed(self._active.values()):
            if record.request_id == request_id:
                return record
        return next((record for record in reversed(self._recent) if record.request_id == request_id), None)

    def explain(self, request_id: str, *, now: float) -> tuple[str, ...]:
        """What is known of one request, in sentences; empty when it is not known (any more)."""
        record = self.find(request_id)
        return () if record is None else explain_record(record, now=now)


def explain_record(record: RequestRecord, *, now: float) -> tuple[str, ...]:
    """The story of one record, in sentences."""
    model = f" for {record.model}" if record.model else ""
    first = f"Request {record.request_id} ({record.route}{model})"
    if record.outcome == "active":
        sentences = [f"{first} has been here for {now - record.started:.1f} s"]
        if record.first_byte_seconds is not None:
            sentences.append(f"its answer began after {record.first_byte_seconds:.2f} s and is being sent")
        elif record.reason:
            sentences.append(f"it waits: {record.reason}")
        else:
            engine = f"the engine on {record.node}" if record.elsewhere else "the engine"
            sentences.append(f"{engine} works on it and has not answered yet")
        return tuple(sentences)
    ended = {
        "ok": "was answered",
        "refused": "was refused",
        "client_gone": "ended because its client went away",
        "engine_failed": "failed because its engine did",
        "error": "was answered with the engine's error",
    }[record.outcome]
    begun = record.outcome in ("client_gone", "engine_failed")
    status = (
        "" if not record.status else f" (status {record.status} was sent)" if begun else f" with status {record.status}"
    )
    sentences = [f"{first} {ended}{status} after {record.total_seconds:.2f} s"]
    if record.reason:
        sentences.append(record.reason)
    if record.elsewhere:
        sentences.append(f"it went to {record.node}")
    if record.queue_seconds >= 0.005:
        sentences.append(f"it waited {record.queue_seconds:.2f} s for the model")
    if record.attempts > 1:
        sentences.append(f"it took {record.attempts} attempts")
    if record.completion_tokens is not None:
        rate = f" at {record.tokens_per_second:.1f} tokens/s" if record.tokens_per_second else ""
        sentences.append(f"{record.completion_tokens} tokens were generated{rate}")
    return tuple(sentences)
