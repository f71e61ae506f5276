"""The one loop that runs a core: one queue in, one timer, effects out, in order.

A core is a state machine ``handle(stimulus, *, now) -> list[effect]`` with ``next_deadline() -> float | None``.
The shell posts stimuli and performs effects; time is the event loop's monotonic clock. Whatever a core raises is a
broken invariant: the daemon logs it and exits, and supervisord starts it again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from shared.messages.daemon import StoryEntry

S = TypeVar("S")
E = TypeVar("E")
S_in = TypeVar("S_in", contravariant=True)


STORY_LIMIT = 500
QUEUE_LIMIT = 100_000
"""Stimuli waiting to be handled. Cores handle 10,000 and more a second; reaching this is a broken invariant."""

SECRET_FIELDS = ("api_key", "token", "key", "private_key")
"""Fields whose text never shows in a story."""
SHOWN_ITEMS = 4
"""Longer lists show as their length."""


@dataclass(frozen=True, slots=True)
class Tick:
    """The core's own deadline has come."""


class Core(Protocol[S_in, E]):
    def handle(self, stimulus: S_in | Tick, *, now: float) -> list[E]: ...

    def next_deadline(self) -> float | None: ...


class Drive(Generic[S, E]):
    """Runs one core. ``perform`` is called for every effect, in order, and must not block.

    ``quiet`` names stimulus classes that are kept out of the story unless they caused effects.
    """

    def __init__(
        self, core: Core[S, E], perform: Callable[[E], None], *, quiet: tuple[type[Any], ...] = (Tick,)
    ) -> None:
        self.core = core
        self._perform = perform
        self._quiet = quiet
        self._queue: deque[S | Tick] = deque()
        self._wake = asyncio.Event()
        self._story: deque[tuple[float, str, tuple[str, ...]]] = deque(maxlen=STORY_LIMIT)

    def post(self, stimulus: S) -> None:
        """Hand in a stimulus; it is handled in order of arrival by :meth:`run`."""
        if len(self._queue) >= QUEUE_LIMIT:
            raise RuntimeError(f"{QUEUE_LIMIT} stimuli are waiting: the core does not keep up")
        self._queue.append(stimulus)
        self._wake.set()

    async def run(self) -> None:
        """Handle stimuli for ever. Raises what the core or ``perform`` raises."""
        loop = asyncio.get_running_loop()
        while True:
            while self._queue:
                self._step(self._queue.popleft(), loop.time())
            self._wake.clear()
            deadline = self.core.next_deadline()
            if deadline is None:
                await self._wake.wait()
                continue
            delay = deadline - loop.time()
            if delay > 0:
                try:
                    async with asyncio.timeout(delay):
                        await self._wake.wait()
                except TimeoutError:
                    pass
            if not self._queue:
                self._step(Tick(), loop.time())
            if delay <= 0:
                # A core that is always late must not keep everything else from running.
                await asyncio.sleep(0)

    def _step(self, stimulus: S | Tick, now: float) -> None:
        effects = self.core.handle(stimulus, now=now)
        if effects or not isinstance(stimulus, self._quiet):
            self._story.append((now, brief(stimulus), tuple(brief(effect) for effect in effects)))
        for effect in effects:
            self._perform(effect)

    def story(self, limit: int, now: float) -> tuple[StoryEntry, ...]:
        """The newest ``limit`` entries, oldest first."""
        return tuple(
            StoryEntry(age_seconds=round(now - at, 3), stimulus=stimulus, effects=effects)
            for at, stimulus, effects in list(self._story)[-limit:]
        )


def brief(value: Any, limit: int = 300) -> str:
    """A one-line, bounded rendering; secrets never show, however deep they are."""
    text = _shown(value, limit)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _shown(value: Any, limit: int) -> str:
    names = getattr(type(value), "__dataclass_fields__", None)
    if names is not None:
        items = [(name, getattr(value, name)) for name in names]
        return f"{type(value).__name__}({', '.join(_pair(name, item, limit) for name, item in items)})"
    match value:
        case str():
            return value if len(value) <= limit else value[:limit]
        case bytes():
            return f"<{len(value)} bytes>"
        case tuple() | list() if len(value) <= SHOWN_ITEMS:
            return f"({', '.join(_shown(item, limit) for item in value)})"
        case dict() if len(value) <= SHOWN_ITEMS:
            return f"{{{', '.join(_pair(str(name), item, limit) for name, item in value.items())}}}"
        case tuple() | list() | dict() | set() | frozenset():
            return f"<{len(value)}>"
    return repr(value)


def _pair(name: str, item: Any, limit: int) -> str:
    hidden = name in SECRET_FIELDS and isinstance(item, str | bytes) and item
    return f"{name}={'…' if hidden else _shown(item, limit)}"


class Tasks:
    """Background work whose failure is never lost: the first unexpected exception ends :meth:`watch`."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._failed: asyncio.Future[None] | None = None
        self._early: BaseException | None = None

    def start(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or task.exception() is None:
            return
        failure = task.exception()
        assert failure is not None
        if self._failed is None:
            self._early = self._early or failure
        elif not self._failed.done():
            self._failed.set_exception(failure)

    async def watch(self) -> None:
        """Wait until a task fails and raise its exception."""
        if self._early is not None:
            raise self._early
        self._failed = asyncio.get_running_loop().create_future()
        await self._failed

    async def cancel(self) -> None:
        """Cancel everything and wait for it."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
