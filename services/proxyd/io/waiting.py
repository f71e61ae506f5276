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
from services.proxyd.io.upstream import NotReached
from services.proxyd.mesh_view import NotReady, Ready, Resolution, Unsettled
from services.proxyd.replies import Failure
from services.proxyd.requests_log import RequestRecord
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
UNREACHABLE_SECONDS = 30.0
"""A tunneld restarts in one, and membership drops a dead node within 10."""
REACHED_SECONDS = 15.0
"""A request that waited so long on a node did so in its queue."""
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
        self._tried: dict[PeerId, None] = {}
        """In order."""
        self._refusal: RequestRefused | DaemonUnreachable | None = None
        self._unreached_since: float | None = None
        self._asked_at = 0.0
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
            raise self._plane.refusal(self._record.model, error) from None
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
        if self._trouble:
            return self._trouble
        silent = self._leases.silent_seconds()
        if silent > SILENT_LAUNCHERD_SECONDS:
            return f"launcherd, which runs the engines, has not answered for {silent:.0f} s; see 'meshctl ps'"
        reason = self._view.waiting_reason(model)
        waiting = self._leases.waiting(self._view.local_name(model))
        return f"{reason}; {waiting} requests wait" if waiting > 1 else reason

    async def _obtain(self) -> Turn:
        """Raises: Failure, RequestRefused, DaemonUnreachable."""
        while True:
            wanted = await self._settled()
            if isinstance(wanted, Unsettled):
                raise Failure(503, "starting", wanted.reason, retry_after_seconds=1)
            if not isinstance(wanted, Ready | NotReady):
                raise self._plane.failure(wanted, self._route)
            self._record.model = wanted.model
            peer_id, name_there = await self._where(wanted)
            if peer_id is None:
                await asyncio.sleep(RETRY_SECONDS)
                continue
            self._asked_at = time.monotonic()
            try:
                return await self._turn_at(peer_id, wanted.model, name_there)
            except NotReached as error:
                self._unreached(wanted, peer_id, error)
            except (RequestRefused, DaemonUnreachable) as error:
                self._passed_over(wanted, peer_id, error)
            if isinstance(wanted, Ready) and not self._others(wanted):
                self._tried.clear()
                await asyncio.sleep(RETRY_SECONDS)

    def _unreached(self, wanted: Ready | NotReady, peer_id: PeerId, error: NotReached) -> None:
        """Raises: Failure when no host could be reached for too long; the refusal of another host."""
        now = time.monotonic()
        self._plane.cool_downs.failed(peer_id, None, now=now)
        self._tried[peer_id] = None
        serves = "serves" if isinstance(wanted, Ready) else "is to load"
        self._trouble = f"{self._view.node_name(peer_id)}, which {serves} {wanted.model}, {error.detail}"
        if self._refusal is not None and isinstance(wanted, Ready) and not self._others(wanted):
            raise self._refusal from None
        if self._unreached_since is None or now - self._asked_at > REACHED_SECONDS:
            self._unreached_since = now
        if now - self._unreached_since >= UNREACHABLE_SECONDS:
            raise Failure(
                503,
                "hosts_unreachable",
                f"no node that serves {wanted.model} could be reached for {now - self._unreached_since:.0f} s: "
                f"{self._trouble}. 'meshctl peers' tells who is connected",
                retry_after_seconds=RETRY_AFTER_SECONDS,
            )

    def _passed_over(
        self, wanted: Ready | NotReady, peer_id: PeerId, error: RequestRefused | DaemonUnreachable
    ) -> None:
        """The next host's turn. Raises: the refusal, when there is none."""
        again = peer_id in self._tried
        self._tried[peer_id] = None
        self._refusal = error
        if peer_id != self._view.self_id and isinstance(error, RequestRefused):
            detail = f"{self._view.node_name(peer_id)}: {error.detail}"
            self._refusal = RequestRefused(error.code, detail, error.retry_after_seconds)
        unloaded = isinstance(error, RequestRefused) and error.code == "unloaded" and not isinstance(wanted, Ready)
        # A person has just unloaded it: asking again would undo that.
        if again or unloaded or (isinstance(wanted, Ready) and not self._others(wanted)):
            raise self._refusal from None

    def _others(self, wanted: Ready) -> bool:
        """Whether a host is left that this request has not tried."""
        return any(host.peer_id not in self._tried for host in wanted.hosts)

    async def _where(self, wanted: Ready | NotReady) -> tuple[PeerId | None, ModelName | None]:
        """The node to ask next and its name for the model; None while electiond is away and only it can say.

        Raises: RequestRefused.
        """
        if isinstance(wanted, Ready):
            if len(wanted.hosts) == 1:
                host = wanted.hosts[0]
            else:
                host = self._plane.choose(wanted, self._session(), self._tried) or wanted.hosts[0]
            return host.peer_id, host.name_there
        if wanted.starting_here and self._view.self_id not in self._tried:
            return self._view.self_id, None
        return await self._have_placed(wanted.model)

    async def _turn_at(self, peer_id: PeerId, model: ModelName, name_there: ModelName | None) -> Turn:
        """Raises: NotReached, RequestRefused, DaemonUnreachable."""
        if peer_id == self._view.self_id:
            self._trouble = ""
            return await self._leases.acquire(name_there or self._view.local_name(model), self._record.request_id)
        if self._unreached_since is None:
            self._trouble = f"{self._view.node_name(peer_id)} has no free place for {model} yet"
        left = self._record.started + self._config.request_wait_seconds - time.monotonic()
        return await self._plane.tunnels.open(
            peer_id, model, self._record.request_id, max(1.0, left), name_there=name_there
        )

    async def _settled(self) -> Resolution:
        until = time.monotonic() + SETTLE_SECONDS
        while True:
            wanted = self._view.resolve(self._name, self._route.type)
            if not isinstance(wanted, Unsettled):
                return wanted
            if time.monotonic() >= until:
                return self._view.resolve(self._name, self._route.type, settled=True)
            await asyncio.sleep(SETTLE_POLL_SECONDS)

    async def _have_placed(self, model: ModelName) -> tuple[PeerId | None, ModelName | None]:
        """electiond decides where the model goes; without electiond, here if the file is. Raises: RequestRefused."""
        try:
            async with asyncio.timeout(PLACE_SECONDS):
                placed = await self._plane.place(model, tuple(self._tried))
        except (DaemonUnreachable, TimeoutError):
            if self._view.on_disk_here(model):
                return self._view.self_id, None
            self._trouble = f"electiond, which says where {model} runs, does not answer; see 'meshctl ps'"
            return None, None
        except RequestRefused as error:
            if self._refusal is None and self._unreached_since is not None and self._tried:
                # Not refused by any, only out of reach for now.
                self._tried.clear()
                return None, None
            # What the node said that was to load it tells more than that there is no other.
            raise self._refusal or error from None
        return placed.peer_id or self._view.self_id, placed.name_there
