"""Coroutine tests that cannot hang."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any

from shared.io.lifecycle import run_loop

LIMIT_SECONDS = 30.0


def bounded(work: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs a coroutine test on the loop that daemons run on, ``LIMIT_SECONDS`` at most."""

    @wraps(work)
    def run(*args: Any, **named: Any) -> None:
        async def within() -> None:
            async with asyncio.timeout(LIMIT_SECONDS):
                await work(*args, **named)

        run_loop(within())

    return run


async def until(condition: Callable[[], Any], seconds: float = 20.0) -> None:
    """Waits for something that nobody announces. Raises AssertionError when it does not happen."""
    for _ in range(int(seconds / 0.005)):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not happen")
