"""One proxyd worker: the HTTP services, the mirrors they answer from, and its life between stub and keeper."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Iterable
from typing import Any

import psutil

from services.proxyd import worker_life
from services.proxyd.access import Access, AccessRules
from services.proxyd.io.http_protocol import InferenceProtocol
from services.proxyd.io.http_service import HttpService, LibraryLog
from services.proxyd.io.inference_api import InferenceApp
from services.proxyd.io.keeper_client import KeeperClient, ListenerNote, wanted_listeners
from services.proxyd.io.management_gate import ManagementGate
from services.proxyd.local_view import LocalView
from services.proxyd.mesh_view import MeshView
from services.proxyd.metrics import Metrics
from services.proxyd.requests_log import RequestsLog
from services.proxyd.worker_life import WorkerLife
from shared import codec
from shared.config import NodeConfig, changed_keys, is_loopback, load_config
from shared.errors import DaemonUnreachable, RequestRefused
from shared.ids import BootId, HolderId, ModelName, PeerId
from shared.io import log
from shared.io.bus import BusClient, BusServer, Mirror
from shared.io.daemon_process import supervisor_from_environment
from shared.io.drive import Drive, Tasks
from shared.io.keys_file import KeysFile, console_token
from shared.io.lease_client import LeaseClient
from shared.io.lifecycle import environment
from shared.messages.daemon import (
    ConfigReloaded,
    ExplainSubject,
    Explanation,
    ReloadConfig,
    StoryEntry,
)
from shared.messages.mesh import CountUnserved, ModelSpeed, ProxyChanged
from shared.messages.models import ModelPlaced, PlaceModel, RoutesChanged
from shared.paths import NodePaths

NAME = "proxyd"
MIRRORED = ("launcherd", "electiond", "gossipd", "tunneld")
WARM_UP_SECONDS = 0.5
"""A new worker first hears of the models from running daemons (20 ms), so that it takes over knowing them."""
CLOSE_SECONDS = 3.0
"""For running requests when the node goes down."""
ADDRESS_SECONDS = 30.0
PUBLISH_SECONDS = 1.0
PLACE_SECONDS = 5.0
SERVING = b"serving\n"
LATER = ("engine.queue_limit", "node.name", "api.request_wait_seconds")
"""Settings a running worker can't change in what already uses them."""


class Worker:
    """State of the running worker; also what its bus server tells about it."""

    def __init__(self, paths: NodePaths, config: NodeConfig, stub: socket.socket) -> None:
        self.paths = paths
        self.config = config
        self._stub = stub
        self._tasks = Tasks()
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._warm = asyncio.Event()
        self._unheard = {"launcherd", "electiond"}
        self._serving = False
        self._notes: list[ListenerNote] = []
        self._life: Drive[worker_life.Stimulus, worker_life.Effect] = Drive(WorkerLife(), self._perform)
        self._bus = BusServer(NAME, paths, self, self._answer, self._tasks)
        self._electiond = BusClient("electiond", paths)
        self._launcherd = BusClient("launcherd", paths)
        self._gossipd = BusClient("gossipd", paths)
        self._view = MeshView()
        self._local = LocalView(self._view.mesh_name, self._view.local_name)
        self._requests = RequestsLog()
        self._node_name = config.node.name or socket.gethostname()
        self._metrics = Metrics(
            lambda name: self._view.model(name) is not None, self._view.slots.values, lambda: self._node_name
        )
        keys = KeysFile(paths.keys_file)
        self._access = Access(
            self._access_rules(), lambda: keys.ring(time.monotonic()), console_token(paths.console_token_file)
        )
        self._leases = LeaseClient(
            self._launcherd,
            self._tasks,
            HolderId(f"proxyd-{self._bus.boot_id}"),
            queue_limit=config.engine.queue_limit,
            wait_seconds=config.api.request_wait_seconds,
        )
        self._inference = InferenceApp(
            view=self._view,
            local=self._local,
            ask_launcherd=self._ask_launcherd,
            leases=self._leases,
            place=self._place,
            access=self._access,
            config=config.api,
            node_name=self._node_name,
            requests_log=self._requests,
            metrics=self._metrics,
            idle=lambda: not self.config.configured,
            data_socket=paths.data_socket,
            unserved=self._on_unserved,
        )
        self._gate = ManagementGate(self._access)
        self._services = {
            "api": HttpService("api", self._enter, InferenceProtocol),
            "console": HttpService("console", self._gate),
        }
        self._keeper = KeeperClient(
            paths.keeper_socket,
            wanted_listeners(config),
            on_listeners=self._on_listeners,
            on_release=self._on_release,
            on_drain=lambda: self._life.post(worker_life.NewerServes()),
            on_stop=lambda: self._life.post(worker_life.StopAsked()),
            on_connected=lambda connected: self._life.post(worker_life.KeeperSeen(connected)),
        )
        self._mirrors = [self._mirror(daemon) for daemon in MIRRORED]
        self._published = self._status()

    async def run(self) -> None:
        """Until this worker has ended. Raises what any of its tasks raises."""
        LibraryLog().install()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._life.post, worker_life.StopAsked())
        self._stub.setblocking(False)
        self._loop.add_reader(self._stub.fileno(), self._stub_readable)
        self._bus.start()
        self._loop.call_later(WARM_UP_SECONDS, self._warm.set)
        for mirror in self._mirrors:
            mirror.start(self._tasks)
        for work, name in (
            (self._life.run(), "worker life"),
            (self._keeper.run(), "keeper"),
            (self._watch_addresses(), "own addresses"),
            (self._publish_often(), "publish"),
            *((service.tick(), f"tick of {name}") for name, service in self._services.items()),
        ):
            self._tasks.start(work, name)
        ended = asyncio.ensure_future(self._ended.wait())
        failed = asyncio.ensure_future(self._tasks.watch())
        await asyncio.wait((ended, failed), return_when=asyncio.FIRST_COMPLETED)
        if failed.done():
            failed.result()
        failed.cancel()
        self._keeper.close()
        self._inference.close()
        await self._leases.close()
        await self._tasks.cancel()
        self._bus.close()
        log.info("worker_ended", pid=os.getpid())

    # -- what the bus server tells ------------------------------------------------------------------------

    def state_line(self) -> str:
        words = [f"{note.name} on {note.port}" for note in self._notes if note.port] or ["not listening"]
        words += self._reasons()
        words.append(f"{self._requests.active_count} requests in flight, {self._requests.requests_total} so far")
        return "; ".join(words)

    def snapshot(self) -> Iterable[codec.Message]:
        return (self._status(),)

    def story(self, limit: int) -> tuple[StoryEntry, ...]:
        entries = [*self._life.story(limit, self._loop.time()), *self._leases.story(limit)]
        return tuple(sorted(entries, key=lambda entry: -entry.age_seconds)[-limit:])

    async def _answer(self, request: codec.Message, _deadline_seconds: float) -> codec.Message:
        match request:
            case ExplainSubject(subject=subject):
                return Explanation(sentences=self._requests.explain(subject, now=time.monotonic()))
            case ReloadConfig():
                return self._reload()
        raise RequestRefused("not_for_me", f"proxyd does not serve {type(request).__name__}")

    def _reload(self) -> ConfigReloaded:
        new = load_config(self.paths.config_file, environment())
        changed = [key for key in changed_keys(self.config, new) if key.startswith(("api.", "console.", *LATER))]
        later = tuple(key for key in changed if key in LATER)
        ours = [key for key in changed if key not in LATER]
        was_idle = not self.config.configured
        self.config = new
        self._inference.config = new.api
        self._access.rules = self._access_rules()
        self._keeper.want(wanted_listeners(new))
        if was_idle and new.configured:
            ours.append("configured")
        return ConfigReloaded(changed=tuple(ours), needs_restart=later)

    # -- mirrors and clients ------------------------------------------------------------------------------

    def _mirror(self, daemon: str) -> Mirror:
        def on_snapshot(messages: list[codec.Message]) -> None:
            self._view.replace(daemon, messages)
            if daemon == "launcherd":
                self._local.replace(messages, now=time.time())
                self._leases.on_snapshot(messages)
            elif daemon == "electiond":
                self._inference.note_hosts()

        def on_message(message: codec.Message) -> None:
            self._view.apply(message)
            if daemon == "launcherd":
                self._local.apply(message, now=time.time())
                self._leases.on_message(message)
            elif isinstance(message, RoutesChanged):
                self._inference.note_hosts()

        def on_new_boot(_boot: BootId) -> None:
            self._heard(daemon)
            if daemon == "launcherd":
                self._leases.on_new_boot()

        return Mirror(daemon, self.paths, on_snapshot, on_message, on_new_boot)

    async def _ask_launcherd(self, message: codec.Message, deadline_seconds: float) -> codec.Message:
        return await self._launcherd.request(message, deadline_seconds=deadline_seconds)

    async def _place(self, model: ModelName, avoid: tuple[PeerId, ...]) -> ModelPlaced:
        reply = await self._electiond.request(PlaceModel(model=model, avoid=avoid), deadline_seconds=PLACE_SECONDS)
        if not isinstance(reply, ModelPlaced):
            raise DaemonUnreachable(f"electiond answered {type(reply).__name__} instead of a place for {model}")
        return reply

    def _on_unserved(self, model: ModelName) -> None:
        self._tasks.start(self._count_unserved(model), f"demand for {model}")

    async def _count_unserved(self, model: ModelName) -> None:
        """Nobody will grant a lease for this request, so the node it entered counts it. Source: docs/spec/demand.md."""
        try:
            await self._gossipd.request(CountUnserved(model=model))
        except (DaemonUnreachable, RequestRefused) as error:
            log.warning("demand_not_counted", model=model, reason=error.detail)

    def _heard(self, daemon: str) -> None:
        self._unheard.discard(daemon)
        if not self._unheard:
            self._warm.set()

    # -- listening ----------------------------------------------------------------------------------------

    def _enter(self, scope: Any, receive: Any, send: Any) -> Any:
        """The inference port's app: a probe of ``/live`` needs no key. No frame of its own in the byte path."""
        if scope.get("path") == "/live" and self._access.check_caller(scope["headers"], "inference") is None:
            return answer_live(send)
        return self._inference(scope, receive, send)

    def _on_listeners(self, notes: list[ListenerNote], new: dict[str, socket.socket], others: bool) -> None:
        self._notes = notes
        if not others:
            # Nobody answers: connections wait, and the app can say that it has just started.
            self._warm.set()
        self._access.rules = self._access_rules()
        self._tasks.start(self._listen(new), "listen")

    async def _listen(self, new: dict[str, socket.socket]) -> None:
        await self._warm.wait()
        if self._life_phase() not in ("serving", "alone"):
            for listener in new.values():
                listener.close()
            return
        for name, listener in new.items():
            await self._services[name].listen(name, listener)
        self._publish()
        if not self._serving and self._notes and not any(note.pending for note in self._notes):
            self._serving = True
            self._keeper.announce_serving()
            self._tell_stub(SERVING)
            log.ready(NAME, pid=os.getpid(), **{note.name: note.port or note.reason for note in self._notes})
            self._tasks.start(self._open_management(), "management API")

    def _on_release(self, name: str) -> None:
        if name in self._services:
            self._services[name].stop_listening(name)

    async def _open_management(self) -> None:
        # After inference serves, and in a thread: importing FastAPI takes 0.2 s of a fast core.
        management_api, node_queries = await asyncio.to_thread(_import_management)
        queries = node_queries.NodeQueries(self.paths)
        app = await asyncio.to_thread(
            management_api.build_management_api,
            queries,
            self._view.models,
            self._requests,
            self._metrics,
            time.monotonic,
        )
        self._gate.open(app)

    def _access_rules(self) -> AccessRules:
        api = self.config.api
        return AccessRules(
            own_names=own_names(),
            own_ports=frozenset(note.port for note in self._notes if note.port),
            allowed_hosts=frozenset(api.allowed_hosts),
            allowed_origins=frozenset(api.allowed_origins),
            keys_always=not is_loopback(api.host) and not api.allow_public_without_keys,
        )

    async def _watch_addresses(self) -> None:
        while True:
            await asyncio.sleep(ADDRESS_SECONDS)
            rules = self._access_rules()
            if rules != self._access.rules:
                self._access.rules = rules

    # -- what proxyd publishes ----------------------------------------------------------------------------

    def _status(self) -> ProxyChanged:
        ports = {note.name: note for note in self._notes}
        return ProxyChanged(
            api_url=_url(ports.get("api")),
            console_url=_url(ports.get("console")),
            worker_pid=os.getpid(),
            requests_total=self._requests.requests_total,
            requests_active=self._requests.active_count,
            reason="; ".join(self._reasons()),
            speeds=tuple(
                ModelSpeed(model=model, tokens_per_second=speed) for model, speed in self._requests.speeds().items()
            ),
        )

    def _reasons(self) -> list[str]:
        """Why a port is not served."""
        reasons = [note.reason for note in self._notes if note.reason]
        if not reasons and (not self._notes or any(note.pending for note in self._notes)):
            return ["waiting for the keeper to hand over the listening sockets; see 'meshctl logs keeper'"]
        return reasons

    def _publish(self) -> None:
        status = self._status()
        if status != self._published:
            self._published = status
            self._bus.publish(status)

    async def _publish_often(self) -> None:
        while True:
            await asyncio.sleep(PUBLISH_SECONDS)
            self._publish()

    # -- life ---------------------------------------------------------------------------------------------

    def _life_phase(self) -> worker_life.Phase:
        core = self._life.core
        assert isinstance(core, WorkerLife)
        return core.phase

    def _stub_readable(self) -> None:
        try:
            data = self._stub.recv(64)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._loop.remove_reader(self._stub.fileno())
            self._life.post(worker_life.StubGone())

    def _tell_stub(self, message: bytes) -> None:
        try:
            self._stub.send(message)
        except OSError:
            return  # Gone: its end is noticed by reading.

    def _perform(self, effect: worker_life.Effect) -> None:
        match effect:
            case worker_life.Drain(reason=reason):
                log.info("draining", pid=os.getpid(), reason=reason, connections=self._connections())
                self._tasks.start(self._end(None), "drain")
            case worker_life.Close():
                log.info("closing", pid=os.getpid(), connections=self._connections())
                self._tasks.start(self._end(CLOSE_SECONDS), "close")
            case worker_life.AskSupervisord():
                self._tasks.start(self._ask_supervisord(), "ask supervisord")
            case worker_life.End():
                self._ended.set()

    async def _end(self, grace_seconds: float | None) -> None:
        for name in self._services:
            self._keeper.let_go(name)
        await asyncio.gather(
            *(
                service.drain() if grace_seconds is None else service.close(grace_seconds)
                for service in self._services.values()
            )
        )
        self._life.post(worker_life.Finished())

    async def _ask_supervisord(self) -> None:
        self._life.post(worker_life.SupervisordSeen(await asyncio.to_thread(_supervisord_runs)))

    def _connections(self) -> int:
        return sum(service.connections for service in self._services.values())


async def run_worker(paths: NodePaths, config: NodeConfig, stub: socket.socket) -> None:
    """Serve until replaced or stopped. Raises: StateError."""
    await Worker(paths, config, stub).run()


async def answer_live(send: Any) -> None:
    """200 for whoever asks whether this process answers."""
    body = b'{"status": "ok"}'
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def own_names() -> frozenset[str]:
    """Names and addresses by which clients may rightly call this machine."""
    host = socket.gethostname().lower()
    addresses = {
        address.address.partition("%")[0].lower()
        for interface in psutil.net_if_addrs().values()
        for address in interface
        if address.family in (socket.AF_INET, socket.AF_INET6)
    }
    return frozenset(addresses | {host, f"{host.partition('.')[0]}.local", host.partition(".")[0]})


def _url(note: ListenerNote | None) -> str:
    """Where a program on this machine reaches the listener; empty while nothing listens."""
    if note is None or not note.port:
        return ""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "localhost": "127.0.0.1"}.get(note.host, note.host)
    return f"http://[{host}]:{note.port}" if ":" in host else f"http://{host}:{note.port}"


def _import_management() -> tuple[Any, Any]:
    from services.proxyd.io import management_api, node_queries

    return management_api, node_queries


def _supervisord_runs() -> bool:
    import xmlrpc.client

    supervisor = supervisor_from_environment()
    if supervisor is None:
        return False
    try:
        return not supervisor.is_stopping()
    except (OSError, xmlrpc.client.Error):
        return False
