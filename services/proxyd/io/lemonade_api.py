"""The routes that clients of Lemonade Server know, as plain ASGI.

What is shown comes from the mirror and never waits for anybody. What is done is in :mod:`lemonade_work`, imported for
the first request that wants it.

Source: docs/spec/lemonade.md.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from services.proxyd import lemonade
from services.proxyd.interfaces import AccessCheck, AskLauncherd
from services.proxyd.io.data_plane import Receive, Scope, Send
from services.proxyd.io.system_facts import read_system_facts
from services.proxyd.lemonade import Activity, SystemFacts
from services.proxyd.local_view import LocalView
from services.proxyd.mesh_view import MeshView
from services.proxyd.requests_log import RequestsLog
from services.proxyd.routes import LemonadeRoute, model_id
from shared.ids import ModelName

if TYPE_CHECKING:
    from services.proxyd.io.lemonade_work import LemonadeWork

RECENT_LOOKED_AT = 200
"""Finished requests that may tell when a model was last used; launcherd's own word is seconds old at most."""


class LemonadeApi:
    """``answer`` gives the JSON of one request, or None when a stream was sent."""

    def __init__(
        self,
        *,
        local: LocalView,
        mesh: MeshView,
        requests_log: RequestsLog,
        access: AccessCheck,
        ask: AskLauncherd,
        idle: Callable[[], bool],
    ) -> None:
        self._local = local
        self._mesh = mesh
        self._log = requests_log
        self._make_work: Callable[[type[LemonadeWork]], LemonadeWork] = lambda kind: kind(
            local=local, access=access, ask=ask, idle=idle
        )
        self._work: LemonadeWork | None = None
        self._facts: SystemFacts | None = None

    async def answer(self, route: LemonadeRoute, scope: Scope, receive: Receive, send: Send) -> Any:
        """Raises: Failure, ClientGone."""
        match route.operation:
            case "health":
                return lemonade.health(self._local, self._activity())
            case "stats":
                return lemonade.stats(self._log.latest_answered, self._log.requests_total)
            case "system-info":
                return lemonade.system_info(self._local, await self._system_facts())
            case "models":
                show_all = lemonade.query_flag(scope["query_string"], "show_all")
                return lemonade.models_list(self._local, show_all=show_all)
            case "model":
                name = model_id(scope["path"])
                entry = lemonade.model_entry(self._local, name)
                if entry is None:
                    raise lemonade.unknown_model(name, self._local)
                return entry
        if self._work is None:
            kind = await asyncio.to_thread(_import_work)
            self._work = self._work or self._make_work(kind)
        return await self._work.answer(route, scope, receive, send)

    def _activity(self) -> dict[ModelName, Activity]:
        found = lemonade.activity_here(
            self._log.active(), self._log.recent(RECENT_LOOKED_AT), now=time.monotonic(), unix_now=time.time()
        )
        return {self._mesh.local_name(name): activity for name, activity in found.items()}

    async def _system_facts(self) -> SystemFacts:
        if self._facts is None:
            self._facts = await asyncio.to_thread(read_system_facts)
        return self._facts


def _import_work() -> type[LemonadeWork]:
    from services.proxyd.io.lemonade_work import LemonadeWork

    return LemonadeWork
