"""Waiting for conditions, bounded: a test polls until something holds or says what did not happen."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
POLL_SECONDS = 0.01


def wait_until(condition: Callable[[], T], seconds: float, what: str) -> T:
    """Polls until ``condition()`` is true and returns its value. Raises: AssertionError naming ``what``."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:g} s: {what}")
        time.sleep(POLL_SECONDS)


async def until(condition: Callable[[], T], seconds: float, what: str) -> T:
    """:func:`wait_until` inside an event loop, which runs on meanwhile."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:g} s: {what}")
        await asyncio.sleep(POLL_SECONDS)


def run_async(work: Coroutine[Any, Any, T], seconds: float = 20.0) -> T:
    """Runs a coroutine in a loop of its own, within a deadline."""

    async def bounded() -> T:
        async with asyncio.timeout(seconds):
            return await work

    return asyncio.run(bounded())
