"""What clients of Lemonade Server have done: launcherd is asked, for as long as it takes, and the client answered.

For the client it ends when it goes away. A load stays in launcherd's queue then; a download that a stream began, and
that nobody else on this port follows, is stopped, which is how those clients cancel one.

Imported at the first such request: its bodies are pydantic models, which take 40 ms to build.

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
from services.proxyd.io.exchange import ClientGone
from services.proxyd.lemonade_requests import (
    DeleteBody,
    LoadBody,
    LoadPlan,
    PinBody,
    PullBody,
    SetBody,
    UnloadBody,
    delete_message,
    dump_load,
    failure_of,
    pin_message,
    plan_load,
    read_body,
    set_limits,
    unload_message,
)
from services.proxyd.local_view import LocalView, is_ended
from services.proxyd.replies import STREAM_TYPE, Failure, to_json
from services.proxyd.resolution import IDLE
from services.proxyd.routes import LemonadeRoute
from shared.codec import Message, decode
from shared.config import type_limit
from shared.errors import DaemonUnreachable, RequestRefused, SchemaError
from shared.ids import ModelName
from shared.messages.daemon import Done, GetSnapshot, Snapshot
from shared.messages.downloads import CancelPull, DownloadChanged, PullModel
from shared.messages.models import MODEL_TYPES, ModelLoaded, RescanModels

BODY_LIMIT_BYTES = 1024 * 1024
WORK_SECONDS = 23 * 3600.0
"""A load waits for busy models, and a download for its bytes, however long they take; the bus allows a day."""
DECIDE_SECONDS = 10.0
SCAN_SECONDS = 5.0
NEWS_SECONDS = 0.1
"""A scan that found something is published before it is answered; one that found nothing is not published."""
EVENT_SECONDS = 0.2
"""How often a stream looks for news of its download."""
KEEP_ALIVE_SECONDS = 15.0
MIRROR_SECONDS = 1.0
MIRROR_POLL_SECONDS = 0.005
"""launcherd's answer and its publication of the same come over two sockets, a millisecond apart."""


class LemonadeWork:
    """``answer`` gives the JSON of one request, or None when it has sent a stream itself."""

    def __init__(
        self, *, local: LocalView, access: AccessCheck, ask: AskLauncherd, idle: Callable[[], bool]
    ) -> None:
        self._local = local
        self._access = access
        self._ask_launcherd = ask
        self._idle = idle
        self._followed: Counter[str] = Counter()
        """Streams that follow each download."""

    async def answer(self, route: LemonadeRoute, scope: Scope, receive: Receive, send: Send) -> Any:
        """Raises: Failure, ClientGone."""
        if route.changes_machine:
            self._require_change(scope)
        body = await _read(scope, receive)
        match route.operation:
            case "load":
                return await self._load(read_body(LoadBody, body), scope, receive)
            case "unload":
                return await self._unload(read_body(UnloadBody, body), receive)
            case "pull":
                return await self._pull(read_body(PullBody, body), scope, receive, send)
            case "delete":
                return await self._delete(read_body(DeleteBody, body), receive)
            case "set":
                return await self._set(read_body(SetBody, body))
            case "pin":
                pin = pin_message(read_body(PinBody, body), self._local)
                await self._ask(pin, DECIDE_SECONDS)
                return {"status": "success", "model_name": self._local.mesh_name(pin.model), "pinned": pin.pinned}
        raise AssertionError(route)

    # -- what launcherd does ------------------------------------------------------------------------------

    async def _load(self, body: LoadBody, scope: Scope, receive: Receive) -> dict[str, Any]:
        if self._idle():
            raise Failure(IDLE.status, IDLE.code, IDLE.message, retry_after_seconds=IDLE.retry_after_seconds)
        plan = await self._plan(body)
        if plan.pull is not None:
            self._require_change(scope)
            done = await self._ask_while_connected(plan.pull, receive)
            plan = plan.after_pull(_subject(done, plan.pull))
        loaded = await self._ask_while_connected(plan.load, receive)
        if isinstance(loaded, ModelLoaded):
            await self._mirrored(lambda: loaded.slot_id in self._local.slots and self._runs(loaded.model))
        return dump_load(plan, self._local)

    async def _plan(self, body: LoadBody) -> LoadPlan:
        """What a load takes. Of a model that nobody knows the file may have come a moment ago. Raises: Failure."""
        try:
            return plan_load(body, self._local)
        except Failure as failure:
            if failure.status != 404:
                raise
            before = self._local.inventory
            try:
                await self._ask(RescanModels(), SCAN_SECONDS)
            except Failure:
                raise failure from None
        await self._mirrored(lambda: self._local.inventory is not before, NEWS_SECONDS)
        return plan_load(body, self._local)

    async def _unload(self, body: UnloadBody, receive: Receive) -> dict[str, Any]:
        message = unload_message(body, self._local)
        if message.model is not None and not await self._has_slot(message.model):
            name = self._local.mesh_name(message.model)
            raise Failure(404, "not_loaded", f"{name} is not loaded on this node", param="model_name")
        await self._ask_while_connected(message, receive)
        await self._mirrored(lambda: not self._runs(message.model))
        if message.model is None:
            return {"status": "success", "message": "All models unloaded successfully"}
        name = self._local.mesh_name(message.model)
        return {"status": "success", "message": "Model unloaded successfully", "model_name": name}

    async def _has_slot(self, model: ModelName) -> bool:
        """By the mirror, and where that has none by launcherd's own word: its answer may overtake the news."""
        if any(seen.slot.model == model for seen in self._local.slots.values()):
            return True
        snapshot = await self._ask(GetSnapshot(), DECIDE_SECONDS)
        view = LocalView()
        view.replace(_published(snapshot), now=0.0)
        return any(seen.slot.model == model for seen in view.slots.values())

    async def _mirrored(self, is_so: Callable[[], bool], seconds: float = MIRROR_SECONDS) -> None:
        """Until the mirror knows of what launcherd has just done: who asks `health` next finds it there."""
        until = time.monotonic() + seconds
        while True:
            if is_so() or time.monotonic() >= until:
                return
            await asyncio.sleep(MIRROR_POLL_SECONDS)

    def _runs(self, model: ModelName | None) -> bool:
        return any(model in (None, seen.slot.model) for seen in self._local.loaded())

    async def _pull(self, body: PullBody, scope: Scope, receive: Receive, send: Send) -> dict[str, Any] | None:
        pull = body.pull()
        if not body.stream:
            name = _subject(await self._ask_while_connected(pull, receive), pull)
            await self._mirrored(lambda: self._local.on_disk(name) is not None)
            return {"status": "success", "model_name": name, "message": f"Installed model: {name}"}
        await _PullStream(self, pull, scope, receive, send).run()
        return None

    async def _delete(self, body: DeleteBody, receive: Receive) -> dict[str, Any]:
        message = delete_message(body, self._local)
        name = self._local.mesh_name(message.model)
        await self._ask_while_connected(message, receive)
        await self._mirrored(lambda: message.model not in self._local.inventory)
        return {"status": "success", "message": f"Deleted model: {name}", "model_name": name}

    async def _set(self, body: SetBody) -> dict[str, Any]:
        message = set_limits(body)
        wanted = {type: type_limit(message.limits, type) for type in MODEL_TYPES}
        await self._ask(message, DECIDE_SECONDS)
        # Not said again where nothing changes.
        await self._mirrored(lambda: self._local.limits == wanted)
        limits = message.limits
        return {"status": "success", "updated": {"max_loaded_models": limits[0] if len(limits) == 1 else list(limits)}}

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

    def download(self, pull: PullModel, name: str = "") -> DownloadChanged | None:
        """``name``: what launcherd calls the model, where that is known already."""
        return self._local.download_of(name, pull.model, pull.checkpoint)

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

    def __init__(self, api: LemonadeWork, pull: PullModel, scope: Scope, receive: Receive, send: Send) -> None:
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
        download = self._api.download(self._pull, self._told.model if self._told is not None else "")
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
            await self._event("complete", lemonade.complete(name, self._api.download(self._pull, name)), more=False)

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
