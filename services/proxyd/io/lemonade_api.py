"""The routes that clients of Lemonade Server know, as plain ASGI: bodies in, launcherd asked, answers out.

What is shown comes from the mirror and never waits for anybody; what is done is asked of launcherd, for as long as it
takes, and ends for the client when it goes away. A load stays in launcherd's queue then; a download that a
stream began, and that nobody else on this port follows, is stopped, which is how those clients cancel one.

Source: docs/spec/lemonade.md.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from services.proxyd import lemonade
from services.proxyd.interfaces import AccessCheck, AskLauncherd, Headers
from services.proxyd.io.data_plane import Receive, Scope, Send
from services.proxyd.io.system_facts import read_system_facts
from services.proxyd.lemonade import Activity, SystemFacts
from services.proxyd.lemonade_requests import (
    DeleteBody,
    LoadBody,
    PinBody,
    PullBody,
    SetBody,
    UnloadBody,
    delete_message,
    dump_load,
    failure_of,
    pin_message,
    plan_load,
    query_flag,
    read_body,
    set_limits,
    unknown_model,
    unload_message,
)
from services.proxyd.local_view import LocalView, is_ended
from services.proxyd.mesh_view import MeshView
from services.proxyd.replies import STREAM_TYPE, Failure, to_json
from services.proxyd.requests_log import RequestsLog
from services.proxyd.resolution import IDLE
from services.proxyd.routes import LemonadeRoute, model_id
from shared.codec import Message, decode
from shared.errors import DaemonUnreachable, RequestRefused, SchemaError
from shared.ids import ModelName
from shared.messages.daemon import Done, GetSnapshot, Snapshot
from shared.messages.downloads import CancelPull, DownloadChanged, PullModel
from shared.messages.models import ModelLoaded

BODY_LIMIT_BYTES = 1024 * 1024
WORK_SECONDS = 23 * 3600.0
"""A load waits for busy models, and a download for its bytes, however long they take; the bus allows a day."""
DECIDE_SECONDS = 10.0
EVENT_SECONDS = 0.2
"""How often a stream looks for news of its download."""
KEEP_ALIVE_SECONDS = 15.0
MIRROR_SECONDS = 1.0
MIRROR_POLL_SECONDS = 0.005
"""launcherd's answer and its publication of the same come over two sockets, a millisecond apart."""
RECENT_LOOKED_AT = 200
"""Finished requests that may tell when a model was last used; launcherd's own word is seconds old at most."""


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


class LemonadeApi:
    """``answer`` gives the JSON of one request, or None when it has sent a stream itself."""

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
        self._access = access
        self._ask_launcherd = ask
        self._idle = idle
        self._facts: SystemFacts | None = None
        self._followed: Counter[str] = Counter()
        """Streams that follow each download."""

    async def answer(self, route: LemonadeRoute, scope: Scope, receive: Receive, send: Send) -> Any:
        """Raises: Failure, ClientGone."""
        if route.changes_machine:
            self._require_change(scope)
        match route.operation:
            case "health":
                return lemonade.health(self._local, self._activity())
            case "stats":
                return lemonade.stats(self._log.latest_answered, self._log.requests_total)
            case "system-info":
                return lemonade.system_info(self._local, await self._system_facts())
            case "models":
                return lemonade.models_list(self._local, show_all=query_flag(scope["query_string"], "show_all"))
            case "model":
                return self._one_model(model_id(scope["path"]))
            case "load":
                return await self._load(scope, receive)
            case "unload":
                return await self._unload(scope, receive)
            case "pull":
                return await self._pull(scope, receive, send)
            case "delete":
                message = delete_message(read_body(DeleteBody, await _read(scope, receive)), self._local)
                await self._ask_while_connected(message, receive)
                await self._mirrored(lambda: self._local.on_disk(message.model) is None)
                return {"status": "success", "message": f"Deleted model: {message.model}", "model_name": message.model}
            case "set":
                limits = set_limits(read_body(SetBody, await _read(scope, receive)))
                before = self._local.limits
                await self._ask(limits, DECIDE_SECONDS)
                await self._mirrored(lambda: self._local.limits is not before)
                shown = limits.limits[0] if len(limits.limits) == 1 else list(limits.limits)
                return {"status": "success", "updated": {"max_loaded_models": shown}}
            case "pin":
                pin = pin_message(read_body(PinBody, await _read(scope, receive)), self._local)
                await self._ask(pin, DECIDE_SECONDS)
                return {"status": "success", "model_name": pin.model, "pinned": pin.pinned}

    # -- from the mirror ----------------------------------------------------------------------------------

    def _activity(self) -> dict[ModelName, Activity]:
        found = lemonade.activity_here(
            self._log.active(), self._log.recent(RECENT_LOOKED_AT), now=time.monotonic(), unix_now=time.time()
        )
        return {self._mesh.local_name(name): activity for name, activity in found.items()}

    async def _system_facts(self) -> SystemFacts:
        if self._facts is None:
            self._facts = await asyncio.to_thread(read_system_facts)
        return self._facts

    def _one_model(self, name: str) -> dict[str, Any]:
        entry = lemonade.model_entry(self._local, name)
        if entry is None:
            raise unknown_model(name, self._local)
        return entry

    # -- what launcherd does ------------------------------------------------------------------------------

    async def _load(self, scope: Scope, receive: Receive) -> dict[str, Any]:
        body = read_body(LoadBody, await _read(scope, receive))
        if self._idle():
            raise Failure(IDLE.status, IDLE.code, IDLE.message, retry_after_seconds=IDLE.retry_after_seconds)
        plan = plan_load(body, self._local)
        if plan.pull is not None:
            self._require_change(scope)
            done = await self._ask_while_connected(plan.pull, receive)
            plan = plan.after_pull(_subject(done, plan.pull))
        loaded = await self._ask_while_connected(plan.load, receive)
        if isinstance(loaded, ModelLoaded):
            await self._mirrored(lambda: loaded.slot_id in self._local.slots and self._runs(loaded.model))
        return dump_load(plan, self._local)

    async def _unload(self, scope: Scope, receive: Receive) -> dict[str, Any]:
        message = unload_message(read_body(UnloadBody, await _read(scope, receive)), self._local)
        if message.model is not None and not await self._has_slot(message.model):
            raise Failure(404, "not_loaded", f"{message.model} is not loaded on this node", param="model_name")
        await self._ask_while_connected(message, receive)
        await self._mirrored(lambda: not self._runs(message.model))
        if message.model is None:
            return {"status": "success", "message": "All models unloaded successfully"}
        return {"status": "success", "message": "Model unloaded successfully", "model_name": message.model}

    async def _has_slot(self, model: ModelName) -> bool:
        """By the mirror, and where that has none by launcherd's own word: its answer may overtake the news."""
        if any(seen.slot.model == model for seen in self._local.slots.values()):
            return True
        snapshot = await self._ask(GetSnapshot(), DECIDE_SECONDS)
        view = LocalView()
        view.replace(_published(snapshot), now=0.0)
        return any(seen.slot.model == model for seen in view.slots.values())

    async def _mirrored(self, is_so: Callable[[], bool]) -> None:
        """Until the mirror knows of what launcherd has just done: who asks `health` next finds it there."""
        until = time.monotonic() + MIRROR_SECONDS
        while True:
            if is_so() or time.monotonic() >= until:
                return
            await asyncio.sleep(MIRROR_POLL_SECONDS)

    def _runs(self, model: ModelName | None) -> bool:
        return any(model in (None, seen.slot.model) for seen in self._local.loaded())

    async def _pull(self, scope: Scope, receive: Receive, send: Send) -> dict[str, Any] | None:
        body = read_body(PullBody, await _read(scope, receive))
        pull = body.pull()
        if not body.stream:
            name = _subject(await self._ask_while_connected(pull, receive), pull)
            await self._mirrored(lambda: self._local.on_disk(name) is not None)
            return {"status": "success", "model_name": name, "message": f"Installed model: {name}"}
        await _PullStream(self, pull, scope, receive, send).run()
        return None

    def _require_change(self, scope: Scope) -> None:
        client = scope.get("client")
        refusal = self._access.check_change(client[0] if client else "", scope["headers"])
        if refusal is not None:
            raise Failure(refusal.status, refusal.code, refusal.message, headers=refusal.headers)

    async def _ask(self, message: Message, seconds: float) -> Message:
        """Raises: Failure."""
        try:
            return await self._ask_launcherd(message, seconds)
        except RequestRefused as error:
            raise failure_of(error) from None
        except DaemonUnreachable as error:
            raise Failure(503, error.code, error.detail, retry_after_seconds=1.0) from None

    async def _ask_while_connected(self, message: Message, receive: Receive) -> Message:
        """The answer, however long it takes. Raises: Failure, ClientGone."""
        return await _while_connected(self._ask(message, WORK_SECONDS), receive)

    # -- for streams of downloads -------------------------------------------------------------------------

    def cors(self, headers: Headers) -> list[tuple[bytes, bytes]]:
        return self._access.response_headers(headers, "inference")

    def begin_pull(self, pull: PullModel) -> tuple[asyncio.Task[Message], bool]:
        """The question, and whether this stream begins the download."""
        known = self.download(pull)
        began = not self._followed[pull.model] and (known is None or is_ended(known))
        self._followed[pull.model] += 1
        task = asyncio.get_running_loop().create_task(self._ask(pull, WORK_SECONDS), name=f"pull {pull.model}")
        return task, began

    def download(self, pull: PullModel) -> DownloadChanged | None:
        return self._local.download_of(pull.model, pull.checkpoint)

    async def end_pull(self, pull: PullModel, name: str, *, cancel: bool) -> None:
        """The stream has ended. ``cancel``: its client went away before the download, of ``name``, was done."""
        self._followed[pull.model] -= 1
        if self._followed[pull.model] > 0:
            return
        del self._followed[pull.model]
        if cancel:
            try:
                await self._ask(CancelPull(model=name), DECIDE_SECONDS)
            except Failure:
                return  # It ended in the same moment, or launcherd is away: a restarted one resumes it and says so.


class _PullStream:
    """``pull`` with ``stream``: one event for each news of the download, the last one ``complete`` or ``error``."""

    def __init__(self, api: LemonadeApi, pull: PullModel, scope: Scope, receive: Receive, send: Send) -> None:
        self._api = api
        self._pull = pull
        self._scope = scope
        self._receive = receive
        self._send = send
        self._told: DownloadChanged | None = None
        self._told_at = 0.0

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        task, began = self._api.begin_pull(self._pull)
        gone = loop.create_task(_disconnected(self._receive), name="client watch")
        try:
            await self._begin()
            while not task.done() and not gone.done():
                await asyncio.wait({task, gone}, timeout=EVENT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                await self._tell_news()
            if task.done():
                await self._end(task)
        finally:
            gone.cancel()
            unfinished = not task.done()
            task.cancel()
            name = self._told.model if self._told is not None else self._pull.model
            await self._api.end_pull(self._pull, name, cancel=unfinished and began)

    async def _begin(self) -> None:
        headers = [
            (b"content-type", STREAM_TYPE),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
            *self._api.cors(self._scope["headers"]),
        ]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._put(b": looking\n\n")

    async def _tell_news(self) -> None:
        now = time.monotonic()
        download = self._api.download(self._pull)
        # What an earlier download of the same model came to is no news.
        if download is not None and not is_ended(download) and download != self._told:
            self._told = download
            await self._event("progress", lemonade.progress(download))
        elif now - self._told_at >= KEEP_ALIVE_SECONDS:
            await self._put(b": waiting\n\n")

    async def _end(self, task: asyncio.Task[Message]) -> None:
        try:
            name = _subject(task.result(), self._pull)
        except Failure as failure:
            await self._event("error", {"error": failure.message, "code": failure.code}, more=False)
        else:
            await self._event("complete", lemonade.complete(name, self._api.download(self._pull)), more=False)

    async def _event(self, name: str, data: dict[str, Any], *, more: bool = True) -> None:
        await self._put(b"event: %b\ndata: %b\n\n" % (name.encode(), to_json(data)), more=more)

    async def _put(self, data: bytes, *, more: bool = True) -> None:
        self._told_at = time.monotonic()
        await self._send({"type": "http.response.body", "body": data, "more_body": more})


def _published(snapshot: Message) -> list[Message]:
    messages = []
    for item in snapshot.items if isinstance(snapshot, Snapshot) else ():
        try:
            messages.append(decode(item))
        except SchemaError:
            continue  # A newer launcherd's message that this version does not know yet.
    return messages


def _subject(done: Message, pull: PullModel) -> str:
    """What launcherd calls the model that it was asked to get."""
    return done.subject if isinstance(done, Done) and done.subject else pull.model


async def _read(scope: Scope, receive: Receive) -> bytes:
    """The whole body. Raises: Failure when it is too large, ClientGone."""
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value) > BODY_LIMIT_BYTES:
            raise _too_large()
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size > BODY_LIMIT_BYTES:
            raise _too_large()
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def _too_large() -> Failure:
    return Failure(413, "body_too_large", f"a request body has at most {BODY_LIMIT_BYTES} bytes here")


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _while_connected(work: Coroutine[Any, Any, Message], receive: Receive) -> Message:
    loop = asyncio.get_running_loop()
    task = loop.create_task(work, name="ask launcherd")
    gone = loop.create_task(_disconnected(receive), name="client watch")
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        gone.cancel()
        task.cancel()
