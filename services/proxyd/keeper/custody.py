"""Who holds the listening sockets and which worker serves them: the keeper's decisions, pure.

Theory of operation. A worker says which listeners ``mesh.toml`` asks for; the keeper binds them and hands them to
every worker, so connections wait in the kernel's queue whenever no worker runs. A worker that serves makes all older
ones drain: until then they go on accepting, so a restart has no gap. When the keeper itself was killed, the sockets
live on in the workers, and a worker offers the next keeper the very same ones.

================  ==============================================================================================
listener          what happens
================  ==============================================================================================
unbound           bind; a taken port is tried again every second, and an offered socket ends the waiting
refused           others could reach it and there is no API key: looked at again when keys appear
bound             handed to each worker that joins; offers of other sockets are told to be released
changed           closed everywhere and bound anew; only the newest worker is believed
================  ==============================================================================================

Port 0 means any free one: the last one used is tried first, and given up after ``ANOTHER_PORT_SECONDS``.

Source: DESIGN.md §2 "Listening sockets outlive proxyd".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

OFFER_SECONDS = 0.3
"""A worker reconnects within 50 ms of a new keeper; a taken port that nobody offers by then is somebody else's."""
RETRY_SECONDS = 1.0
ANOTHER_PORT_SECONDS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedListener:
    """One port as configuration asks for it. ``needs_key``: others can reach it and may not without keys."""

    name: str
    host: str
    port: int
    needs_key: bool = False


@dataclass(frozen=True, slots=True)
class Offer:
    """A listening socket that a worker holds."""

    name: str
    host: str
    port: int


# -- stimuli -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    """``started_seconds``: the worker's start on the machine's monotonic clock, which orders workers."""

    worker: int
    started_seconds: float
    serving: bool
    offers: tuple[Offer, ...] = ()
    wanted: tuple[WantedListener, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerWants:
    """A worker read a changed configuration."""

    worker: int
    wanted: tuple[WantedListener, ...]


@dataclass(frozen=True, slots=True)
class WorkerServing:
    worker: int


@dataclass(frozen=True, slots=True)
class WorkerLeft:
    worker: int


@dataclass(frozen=True, slots=True)
class Bound:
    name: str
    port: int


@dataclass(frozen=True, slots=True)
class BindFailed:
    name: str
    port: int
    in_use: bool
    detail: str


@dataclass(frozen=True, slots=True)
class KeysSeen:
    exist: bool


@dataclass(frozen=True, slots=True)
class NodeStopping:
    pass


@dataclass(frozen=True, slots=True)
class Tick:
    pass


Stimulus = WorkerJoined | WorkerWants | WorkerServing | WorkerLeft | Bound | BindFailed | KeysSeen | NodeStopping | Tick

# -- effects -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BindPort:
    name: str
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class KeepOffer:
    """Hold the socket this worker offers; the others offered with it are closed here."""

    name: str
    worker: int


@dataclass(frozen=True, slots=True)
class DropSocket:
    """Close the socket held here."""

    name: str


@dataclass(frozen=True, slots=True)
class SendListeners:
    worker: int


@dataclass(frozen=True, slots=True)
class TellRelease:
    """The worker must close its socket: another one is wanted, perhaps on the same port."""

    worker: int
    name: str


@dataclass(frozen=True, slots=True)
class TellDrain:
    """Also tells where to log from now on: supervisord no longer reads what a replaced process writes."""

    worker: int
    successor: int


@dataclass(frozen=True, slots=True)
class TellStop:
    worker: int


@dataclass(frozen=True, slots=True)
class RememberPorts:
    ports: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Report:
    """A line for the log: ``reason`` is empty when the listener is bound."""

    name: str
    host: str
    port: int
    reason: str


Effect = BindPort | KeepOffer | DropSocket | SendListeners | TellRelease | TellDrain | TellStop | RememberPorts | Report


@dataclass(slots=True)
class ListenerState:
    wanted: WantedListener
    remembered_port: int = 0
    port: int = 0
    """Where it listens; 0 while it does not."""
    reason: str = ""
    """Why it does not listen; empty while that is being found out."""
    attempt_at: float = math.inf
    any_port_at: float = math.inf
    attempts: int = 0


@dataclass(slots=True)
class _Worker:
    started_seconds: float
    serving: bool
    draining: bool = False


@dataclass(slots=True)
class Custody:
    """The state machine. ``handle`` is the only way to change it."""

    remembered_ports: Mapping[str, int]
    """Of earlier lives, by listener."""
    listeners: dict[str, ListenerState] = field(default_factory=dict)
    _workers: dict[int, _Worker] = field(default_factory=dict)
    _keys_exist: bool = False
    _stopping: bool = False
    _believed_seconds: float = -math.inf
    """Start of the newest worker whose wishes were taken."""

    def next_deadline(self) -> float | None:
        """When :class:`Tick` is due."""
        due = min((state.attempt_at for state in self.listeners.values()), default=math.inf)
        return None if due == math.inf else due

    def handle(self, stimulus: Stimulus, *, now: float) -> list[Effect]:
        """``now`` in monotonic seconds."""
        match stimulus:
            case WorkerJoined():
                return self._join(stimulus, now)
            case WorkerWants(worker=worker, wanted=wanted):
                state = self._workers.get(worker)
                return [] if state is None else self._want(wanted, state.started_seconds, (), worker, now)
            case WorkerServing(worker=worker):
                return self._serving(worker)
            case WorkerLeft(worker=worker):
                self._workers.pop(worker, None)
                return []
            case Bound(name=name, port=port):
                return self._bound(self.listeners[name], port)
            case BindFailed():
                return self._bind_failed(stimulus, now)
            case KeysSeen(exist=exist):
                self._keys_exist = exist
                return []
            case NodeStopping():
                self._stopping = True
                return [TellStop(worker) for worker in self._workers]
            case Tick():
                return self._tick(now)

    @property
    def waits_for_key(self) -> bool:
        """Whether :class:`KeysSeen` could make a difference."""
        return any(state.port == 0 and state.wanted.needs_key for state in self.listeners.values())

    def others_serve(self, worker: int) -> bool:
        """Whether connections are answered while ``worker`` prepares."""
        return any(state.serving for other, state in self._workers.items() if other != worker)

    def _want(
        self,
        wanted: tuple[WantedListener, ...],
        started_seconds: float,
        offers: tuple[Offer, ...],
        worker: int,
        now: float,
    ) -> list[Effect]:
        effects: list[Effect] = []
        if started_seconds >= self._believed_seconds:
            self._believed_seconds = started_seconds
            for new in wanted:
                effects += self._change(new)
        offered = [effect for offer in offers for effect in self._offered(offer, worker)]
        # All are held before anybody is told: what is told is every listener, and its socket must be here.
        effects += sorted(offered, key=lambda effect: not isinstance(effect, KeepOffer))
        for state in self.listeners.values():
            if state.port == 0 and state.attempts == 0 and state.attempt_at == math.inf:
                state.any_port_at = now + ANOTHER_PORT_SECONDS
                effects += self._attempt(state, now)
        return effects

    def _change(self, new: WantedListener) -> list[Effect]:
        state = self.listeners.get(new.name)
        if state is None:
            self.listeners[new.name] = ListenerState(new, self.remembered_ports.get(new.name, 0))
            return []
        old, state.wanted = state.wanted, new
        if new == old:
            return []
        refused = new.needs_key and not self._keys_exist
        if state.port and new.host == old.host and new.port in (0, state.port) and not refused:
            return []
        effects: list[Effect] = []
        if state.port:
            effects.append(DropSocket(new.name))
            effects += [TellRelease(worker, new.name) for worker in self._workers]
        state.port, state.reason, state.attempts, state.attempt_at = 0, "", 0, math.inf
        return effects

    def _offered(self, offer: Offer, worker: int) -> list[Effect]:
        state = self.listeners.get(offer.name)
        if state is not None and state.port == 0 and self._is_wanted(state.wanted, offer):
            return [KeepOffer(offer.name, worker), *self._bound(state, offer.port)]
        if state is None or state.port == 0:
            return [TellRelease(worker, offer.name)]
        return []

    def _attempt(self, state: ListenerState, now: float) -> list[Effect]:
        wanted = state.wanted
        if wanted.needs_key and not self._keys_exist:
            state.attempt_at = now + RETRY_SECONDS
            return self._explain(
                state,
                f"{wanted.name} is not served: other machines can reach {wanted.host} and there is no API key. Run "
                f"'meshctl keys create', or set {wanted.name}.host to 127.0.0.1, or say "
                "api.allow_public_without_keys = true in mesh.toml",
            )
        state.attempt_at = math.inf
        port = wanted.port
        if port == 0 and now < state.any_port_at:
            port = state.remembered_port
        return [BindPort(wanted.name, wanted.host, port)]

    def _bind_failed(self, failure: BindFailed, now: float) -> list[Effect]:
        state = self.listeners[failure.name]
        if state.port:
            return []
        state.attempts += 1
        if failure.in_use and state.attempts == 1:
            # Most likely a worker holds it and is about to offer or to release it.
            state.attempt_at = now + OFFER_SECONDS
            return []
        state.attempt_at = now + RETRY_SECONDS
        where = f"{state.wanted.host} port {failure.port}"
        if failure.in_use:
            return self._explain(
                state,
                f"{where} is taken by another program: 'ss -ltnp sport = :{failure.port}' shows which. Stop it, or set "
                f"{failure.name}.port in mesh.toml; tried again every second",
            )
        return self._explain(
            state, f"cannot listen on {where}: {failure.detail}; check {failure.name}.host in mesh.toml"
        )

    def _explain(self, state: ListenerState, reason: str) -> list[Effect]:
        if reason == state.reason:
            return []
        state.reason = reason
        report = Report(state.wanted.name, state.wanted.host, state.wanted.port, reason)
        return [report, *self._tell_everybody()]

    def _bound(self, state: ListenerState, port: int) -> list[Effect]:
        state.port, state.reason, state.attempt_at, state.attempts = port, "", math.inf, 0
        state.remembered_port = port
        # Also those that are not bound just now: a keeper that dies half way must not lose the other port.
        known = {**self.remembered_ports, **{name: other.remembered_port for name, other in self.listeners.items()}}
        return [
            *self._tell_everybody(),
            Report(state.wanted.name, state.wanted.host, port, ""),
            RememberPorts(tuple((name, port) for name, port in known.items() if port)),
        ]

    def _tell_everybody(self) -> list[Effect]:
        return [SendListeners(worker) for worker, state in self._workers.items() if not state.draining]

    def _join(self, joined: WorkerJoined, now: float) -> list[Effect]:
        effects = self._want(joined.wanted, joined.started_seconds, joined.offers, joined.worker, now)
        self._workers[joined.worker] = _Worker(joined.started_seconds, joined.serving)
        if self._stopping:
            return [*effects, TellStop(joined.worker)]
        effects.append(SendListeners(joined.worker))
        if joined.serving:
            effects += self._serving(joined.worker)
        serving = [(state.started_seconds, worker) for worker, state in self._workers.items() if state.serving]
        if serving and joined.started_seconds < max(serving)[0]:
            effects.append(self._drain(joined.worker, max(serving)[1]))
        return effects

    def _is_wanted(self, wanted: WantedListener, offer: Offer) -> bool:
        if wanted.needs_key and not self._keys_exist:
            return False
        return offer.host == wanted.host and wanted.port in (0, offer.port)

    def _serving(self, worker: int) -> list[Effect]:
        server = self._workers.get(worker)
        if server is None:
            return []
        server.serving = True
        return [
            self._drain(other, worker)
            for other, state in self._workers.items()
            if state.started_seconds < server.started_seconds
        ]

    def _drain(self, worker: int, successor: int) -> Effect:
        self._workers[worker].draining = True
        return TellDrain(worker, successor)

    def _tick(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for state in self.listeners.values():
            if state.port == 0 and state.attempt_at <= now:
                effects += self._attempt(state, now)
        return effects
