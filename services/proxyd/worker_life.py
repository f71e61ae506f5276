"""When a worker serves, lets a newer one take over, and ends: pure.

============  ==================================================  ================================================
phase         what it does                                        leaves it on
============  ==================================================  ================================================
serving       accepts and answers                                 stub gone: alone. Newer worker serves: draining
alone         the same, its stub has ended or died                newer worker serves, or ``ALONE_SECONDS``: draining
draining      accepts nothing, finishes what runs, unbounded      last connection gone: ended
stopping      accepts nothing, ends what runs within seconds      closed: ended
============  ==================================================  ================================================

SIGTERM (sent by the stub while it lives) and the keeper's word that the node goes down lead to stopping from
anywhere. A worker without a stub whose keeper is gone too asks for supervisord: if that is gone, the node is.

Source: DESIGN.md §2: a restart keeps new requests waiting at most 0.5 s whatever streams still run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shared.io.drive import Tick

ALONE_SECONDS = 10.0
"""A replacement serves within 2 s. Without one, ``supervisorctl stop proxyd`` was meant."""
KEEPER_GONE_SECONDS = 2.0
"""How long a keeper may be away before supervisord is asked for; a restarted one is back within 0.5 s."""

Phase = Literal["serving", "alone", "draining", "stopping", "ended"]


@dataclass(frozen=True, slots=True)
class StubGone:
    pass


@dataclass(frozen=True, slots=True)
class NewerServes:
    pass


@dataclass(frozen=True, slots=True)
class StopAsked:
    """SIGTERM, or the keeper says that the node goes down."""


@dataclass(frozen=True, slots=True)
class KeeperSeen:
    connected: bool


@dataclass(frozen=True, slots=True)
class SupervisordSeen:
    runs: bool


@dataclass(frozen=True, slots=True)
class Finished:
    """No connection is left after :class:`Drain` or :class:`Close`."""


Stimulus = StubGone | NewerServes | StopAsked | KeeperSeen | SupervisordSeen | Finished


@dataclass(frozen=True, slots=True)
class Drain:
    """Stop accepting; answer what is there, without time limit."""

    reason: str


@dataclass(frozen=True, slots=True)
class Close:
    """Stop accepting; end what is there within seconds."""


@dataclass(frozen=True, slots=True)
class AskSupervisord:
    pass


@dataclass(frozen=True, slots=True)
class End:
    pass


Effect = Drain | Close | AskSupervisord | End


class WorkerLife:
    """The state machine of one worker."""

    def __init__(self) -> None:
        self.phase: Phase = "serving"
        self._stub_gone = False
        self._alone_until: float | None = None
        self._ask_at: float | None = None

    def next_deadline(self) -> float | None:
        due = [at for at in (self._alone_until, self._ask_at) if at is not None]
        return min(due) if due else None

    def handle(self, stimulus: Stimulus | Tick, *, now: float) -> list[Effect]:
        """``now`` in monotonic seconds."""
        match stimulus:
            case StubGone():
                self._stub_gone = True
                if self.phase == "serving":
                    self.phase = "alone"
                    self._alone_until = now + ALONE_SECONDS
                return []
            case NewerServes():
                return self._drain("a newer worker serves")
            case StopAsked():
                return self._stop()
            case KeeperSeen(connected=connected):
                self._ask_at = None if connected else now + KEEPER_GONE_SECONDS
                return []
            case SupervisordSeen(runs=runs):
                if self._ask_at is None or not self._stub_gone:
                    return []
                return [] if runs else self._stop()
            case Finished():
                if self.phase in ("draining", "stopping"):
                    self.phase = "ended"
                    self._alone_until = self._ask_at = None
                    return [End()]
                return []
            case Tick():
                return self._tick(now)

    def _tick(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        if self._alone_until is not None and self._alone_until <= now:
            effects += self._drain(f"no newer worker came within {ALONE_SECONDS:g} s of the stub's end")
        if self._ask_at is not None and self._ask_at <= now:
            self._ask_at = now + KEEPER_GONE_SECONDS
            if self._stub_gone:
                effects.append(AskSupervisord())
        return effects

    def _drain(self, reason: str) -> list[Effect]:
        if self.phase not in ("serving", "alone"):
            return []
        self.phase = "draining"
        self._alone_until = None
        return [Drain(reason)]

    def _stop(self) -> list[Effect]:
        if self.phase in ("stopping", "ended"):
            return []
        self.phase = "stopping"
        self._alone_until = self._ask_at = None
        return [Close()]
