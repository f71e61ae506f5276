"""The wait of one request for its model: placed by electiond, loaded by launcherd, or only busy.

Source: DESIGN §8: the request waits while the mesh places and loads it; headers held up to ``silent_wait_seconds``;
503 with the reason at ``request_wait_seconds``, or at once where nothing can make it ready.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from services.proxyd.interfaces import Place
from services.proxyd.mesh_view import MeshView, NotReady, Ready, Resolution, Unsettled
from services.proxyd.replies import Failure
from services.proxyd.requests_log import RequestRecord
from services.proxyd.resolution import failure_of, failure_of_refusal
from services.proxyd.routes import InferenceRoute
from shared.config import ApiSection
from shared.errors import DaemonUnreachable, RequestRefused
from shared.ids import ModelName
from shared.io.lease_client import Lease, LeaseClient

SETTLE_SECONDS = 5.0
"""How long a freshly started proxyd waits to hear of the models before it calls one unknown."""
SETTLE_POLL_SECONDS = 0.05
PLACE_SECONDS = 1.0
"""electiond answers in a millisecond; when it does not answer, this node loads the model without asking."""
COMMENT_POLL_SECONDS = 1.0
COMMENT_SECONDS = 15.0
"""A comment at least so often keeps proxies and clients from giving up on a silent stream."""
RETRY_AFTER_SECONDS = 30.0
SILENT_LAUNCHERD_SECONDS = 4.0
"""A restart takes less."""

Say = Callable[[str], Awaitable[None]]


class LeaseWait:
    """One request's wait. ``run`` once; cancel it to leave the queue."""

    def __init__(
        self,
        view: MeshView,
        leases: LeaseClient,
        place: Place,
        config: ApiSection,
        route: InferenceRoute,
        name: ModelName | None,
        record: RequestRecord,
    ) -> None:
        self._view = view
        self._leases = leases
        self._place = place
        self._config = config
        self._route = route
        self._name = name
        self._record = record

    async def run(self, say: Say | None) -> Lease:
        """The lease. ``say`` (streams only) is called with the reason once the silent time is over.

        Raises: Failure.
        """
        work = asyncio.get_running_loop().create_task(self._obtain(), name="obtain lease")
        kept = False
        try:
            await self._stand_by(work, say)
            lease = work.result()
            kept = True
            return lease
        except RequestRefused as error:
            raise failure_of_refusal(self._record.model or "the model", error) from None
        except DaemonUnreachable as error:
            raise Failure(503, error.code, error.detail, retry_after_seconds=RETRY_AFTER_SECONDS) from None
        finally:
            if not kept:
                work.cancel()
                work.add_done_callback(self._drop)

    def _drop(self, work: asyncio.Task[Lease]) -> None:
        if not work.cancelled() and work.exception() is None:
            self._leases.release(work.result())

    async def _stand_by(self, work: asyncio.Task[Lease], say: Say | None) -> None:
        """Until ``work`` is done: keep the reason current, and tell it. Raises: Failure when time is up."""
        started = self._record.started
        deadline = started + self._config.request_wait_seconds
        speak_at = started + self._config.silent_wait_seconds if say is not None else deadline
        said = ""
        said_at = 0.0
        while True:
            self._record.reason = self._reason()
            now = time.monotonic()
            timeout = min(deadline, max(speak_at, now + 0.001), now + COMMENT_POLL_SECONDS) - now
            done, _ = await asyncio.wait({work}, timeout=max(0.0, timeout))
            if done:
                return
            now = time.monotonic()
            reason = self._record.reason = self._reason()
            if now >= deadline:
                raise Failure(
                    503,
                    "wait_timeout",
                    f"{self._record.model or 'the model'} was not ready within "
                    f"{self._config.request_wait_seconds:g} s: {reason}",
                    retry_after_seconds=RETRY_AFTER_SECONDS,
                )
            if say is not None and now >= speak_at:
                if reason != said or now - said_at >= COMMENT_SECONDS:
                    await say(reason)
                    said, said_at = reason, now
                speak_at = now + COMMENT_POLL_SECONDS

    def _reason(self) -> str:
        model = self._record.model
        if model is None:
            return "no model is ready yet"
        silent = self._leases.silent_seconds()
        if silent > SILENT_LAUNCHERD_SECONDS:
            return f"launcherd, which runs the engines, has not answered for {silent:.0f} s; see 'meshctl ps'"
        reason = self._view.waiting_reason(model)
        waiting = self._leases.waiting(model)
        return f"{reason}; {waiting} requests wait" if waiting > 1 else reason

    async def _obtain(self) -> Lease:
        """Raises: Failure, RequestRefused, DaemonUnreachable."""
        wanted = await self._settled()
        if isinstance(wanted, Unsettled):
            raise Failure(503, "starting", wanted.reason, retry_after_seconds=1)
        if not isinstance(wanted, Ready | NotReady):
            raise failure_of(wanted, self._route)
        model = self._record.model = wanted.model
        if isinstance(wanted, NotReady):
            if not wanted.starting_here:
                await self._have_placed(model)
        elif not wanted.local:
            await self._have_placed(model)
        return await self._leases.acquire(model, self._record.request_id)

    async def _settled(self) -> Resolution:
        until = time.monotonic() + SETTLE_SECONDS
        while True:
            wanted = self._view.resolve(self._name, self._route.type)
            if not isinstance(wanted, Unsettled):
                return wanted
            if time.monotonic() >= until:
                return self._view.resolve(self._name, self._route.type, settled=True)
            await asyncio.sleep(SETTLE_POLL_SECONDS)

    async def _have_placed(self, model: ModelName) -> None:
        """electiond decides where the model goes; without electiond, here. Raises: Failure, RequestRefused."""
        try:
            async with asyncio.timeout(PLACE_SECONDS):
                placed = await self._place(model)
        except (DaemonUnreachable, TimeoutError):
            return
        if self._view.self_id and placed.peer_id != self._view.self_id:
            # Requests reach other nodes through tunnels, which this version does not have.
            raise Failure(
                503,
                "placed_elsewhere",
                f"{model} is being placed on {self._view.node_name(placed.peer_id)}: {placed.reason}",
                retry_after_seconds=RETRY_AFTER_SECONDS,
            )
