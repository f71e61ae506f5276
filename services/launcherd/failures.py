"""How often a model failed, when it may be tried again, and what is said about it.

A crash is an engine that was ready and ended, hung, or failed to come back. Crashes are answered with restarts after
1, 2, 4 … s; the third within 60 s makes the model *failed*. A failed model is not tried again before its cool-down is
over (5 s, doubled with each failure up to 300 s) and somebody asks for it.

Source: DESIGN §7 (restarted with back-off; crash loops stop); FIELD (load-failure cool-down that doubles).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from services.launcherd.command_line import EngineOptions

CRASH_WINDOW_SECONDS = 60.0
CRASH_LIMIT = 3
COOL_DOWN_SECONDS = 5.0
COOL_DOWN_LIMIT_SECONDS = 300.0


@dataclass(slots=True)
class FailureRecord:
    """One model's failures."""

    crash_times: list[float] = field(default_factory=list)
    failures: int = 0
    until: float = 0.0
    """End of the cool-down, monotonic seconds."""
    code: str = ""
    reason: str = ""
    options: EngineOptions | None = None
    """What it was tried with: other options may be tried at once."""

    def crash(self, now: float) -> float | None:
        """Count a crash; seconds until the restart, or None when it was one too many."""
        self.crash_times = [at for at in self.crash_times if at > now - CRASH_WINDOW_SECONDS]
        self.crash_times.append(now)
        count = len(self.crash_times)
        return None if count >= CRASH_LIMIT else restart_delay_seconds(count)

    def fail(self, code: str, reason: str, options: EngineOptions, *, now: float, cooled: bool = True) -> None:
        """The model is given up for now. `cooled` false: it may be asked for again at once."""
        self.failures += 1
        self.code, self.reason, self.options = code, reason, options
        self.until = now + cool_down_seconds(self.failures) if cooled else now

    def cooling_seconds(self, now: float) -> float:
        """How long the model may not be tried again; 0 when it may."""
        return max(0.0, self.until - now)

    def recovered(self) -> None:
        """It was ready for longer than the crash window."""
        self.failures = 0
        self.crash_times.clear()


def restart_delay_seconds(crashes: int) -> float:
    """1, 2, 4 … s after the first, second, third crash in a row."""
    return float(2 ** (max(1, crashes) - 1))


def cool_down_seconds(failures: int) -> float:
    """5, 10, 20 … s, at most 300."""
    return min(COOL_DOWN_SECONDS * float(2 ** min(max(1, failures) - 1, 16)), COOL_DOWN_LIMIT_SECONDS)
