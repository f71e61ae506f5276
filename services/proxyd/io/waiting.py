"""The wait of one request for its turn: on which node, placed by electiond, loaded by launcherd, or only busy.

Hosts of the model are tried in the order of ``choose_host``, each once; what fails or refuses is passed over for this
request, and one that cannot be reached cools down for all. When none is left they are tried again a moment later.

Source: DESIGN §8: the request waits while the mesh places and loads it; headers held up to ``silent_wait_seconds``;
503 with the reason at ``request_wait_seconds``, or at once where nothing can make it ready.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from services.proxyd.io.data_plane import DataPlane, Turn
from services.proxyd.io.remote import RemoteLease
from services.proxyd.io.upstream import NotReached
from services.proxyd.mesh_view import NotReady, Ready, Resolution, Unsettled
from services.proxyd.replies import Failure
from services.proxyd.requests_log import RequestRecord
from services.proxyd.resolution import failure_of, failure_of_refusal
from services.proxyd.routes import InferenceRoute
from shared.errors import DaemonUnreachable, RequestRefused
from shared.ids import ModelName, PeerId

SETTLE_SECONDS = 5.0
"""How long a freshly started proxyd waits to hear of the models before it calls one unknown."""
SETTLE_POLL_SECONDS = 0.05
PLACE_SECONDS = 1.0
"""electiond answers in a millisecond; when it does not answer, this node loads the model without asking."""
COMMENT_POLL_SECONDS = 1.0
COMMENT_SECONDS = 15.0
"""A comment at least so often keeps proxies and clients from giving up on a silent stream."""
RETRY_AFTER_SECONDS = 30.0
RETRY_SECONDS = 0.5
"""Before hosts that could all not be reached are tried again."""
SILENT_LAUNCHERD_SECONDS = 4.0
"""A restart takes less."""

Say = Callable[[str], Awaitable[None]]


class TurnWait:
    """One request's wait. ``run`` once; cancel it to leave the queue. ``session`` is asked for where hosts differ."""

    def __init__(
        self,
        plane: DataPlane,
        route: InferenceRoute,
        name: ModelName | None,
        record: RequestRecord,
        session: Callable[[], str | None],
    ) -> None:
        self._plane = plane
        self._view = plane.view
        self._leases = plane.leases
        self._config = plane.config
        self._route = route
        self._name = name
        self._record = record
        self._session = session
        self._tried: set[PeerId] = set()
        self._trouble = ""

    async def run(self, say: Say | None) -> Turn:
        """The turn. ``say`` (streams only) is called with the reason once the silent time is over.

        Raises: Failure.
        """
        work = asyncio.get_running_loop().create_task(self._obtain(), name="obtain a turn")
        kept = False
        try:
            await self._stand_by(work, say)
            turn = work.result()
            kept = True
            return turn
        except RequestRefused as error:
            raise failure_of_refusal(self._record.model or "the model", error) from None
        except DaemonUnreachable as error:
            raise Failure(503, error.code, error.detail, retry_after_seconds=RETRY_AFTER_SECONDS) from None
        finally:
            if not kept:
                work.cancel()
                work.add_done_callback(self._drop)

    def _drop(self, work: asyncio.Task[Turn]) -> None:
        if not work.cancelled() and work.exception() is None:
            self._plane.release(work.result())

    async def _stand_by(self, work: asyncio.Task[Turn], say: Say | None) -> None:
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
        if self._trouble:
            return self._trouble
        reason = self._view.waiting_reason(model)
        waiting = self._leases.waiting(model)
        return f"{reason}; {waiting} requests wait" if waiting > 1 else reason

    async def _obtain(self) -> Turn:
        """Raises: Failure, RequestRefused, DaemonUnreachable."""
        while True:
            wanted = await self._settled()
            if isinstance(wanted, Unsettled):
                raise Failure(503, "starting", wanted.reason, retry_after_seconds=1)
            if not isinstance(wanted, Ready | NotReady):
                raise failure_of(wanted, self._route)
            model = self._record.model = wanted.model
            peer_id = await self._where(wanted)
            if peer_id in ("", self._view.self_id):
                return await self._leases.acquire(model, self._record.request_id)
            try:
                return await self._open(peer_id, model)
            except NotReached as error:
                self._plane.cool_downs.failed(peer_id, now=time.monotonic())
                self._tried.add(peer_id)
                self._trouble = f"{self._view.node_name(peer_id)}, which serves {model}, {error.detail}"
            except RequestRefused as error:
                self._tried.add(peer_id)
                if not self._others(wanted):
                    raise RequestRefused(
                        error.code, f"{self._view.node_name(peer_id)}: {error.detail}", error.retry_after_seconds
                    ) from None
            if not self._others(wanted):
                self._tried.clear()
                await asyncio.sleep(RETRY_SECONDS)

    def _others(self, wanted: Ready | NotReady) -> bool:
        """Whether a host is left that this request has not tried."""
        return isinstance(wanted, Ready) and any(host.peer_id not in self._tried for host in wanted.hosts)

    async def _where(self, wanted: Ready | NotReady) -> PeerId:
        """The node to ask next; "" or this node's id: here. Raises: RequestRefused."""
        if isinstance(wanted, NotReady):
            return self._view.self_id if wanted.starting_here else await self._have_placed(wanted.model)
        if len(wanted.hosts) == 1:
            return wanted.hosts[0].peer_id
        chosen = self._plane.choose(wanted, self._session(), self._tried)
        return chosen if chosen is not None else wanted.hosts[0].peer_id

    async def _open(self, peer_id: PeerId, model: ModelName) -> RemoteLease:
        left = self._record.started + self._config.request_wait_seconds - time.monotonic()
        return await self._plane.tunnels.open(peer_id, model, self._record.request_id, max(1.0, left))

    async def _settled(self) -> Resolution:
        until = time.monotonic() + SETTLE_SECONDS
        while True:
            wanted = self._view.resolve(self._name, self._route.type)
            if not isinstance(wanted, Unsettled):
                return wanted
            if time.monotonic() >= until:
                return self._view.resolve(self._name, self._route.type, settled=True)
            await asyncio.sleep(SETTLE_POLL_SECONDS)

    async def _have_placed(self, model: ModelName) -> PeerId:
        """electiond decides where the model goes; without electiond, here. Raises: RequestRefused."""
        try:
            async with asyncio.timeout(PLACE_SECONDS):
                placed = await self._plane.place(model)
        except (DaemonUnreachable, TimeoutError):
            return self._view.self_id
        return placed.peer_id
