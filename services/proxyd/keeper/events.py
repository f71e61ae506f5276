"""supervisord's event listener protocol, the pure part. Source: supervisor documentation, "Events"."""

from __future__ import annotations

from dataclasses import dataclass

READY = b"READY\n"
HANDLED = b"RESULT 2\nOK"
EVENT_LIMIT_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Event:
    name: str
    """``PROCESS_STATE_EXITED``, ``SUPERVISOR_STATE_CHANGE_STOPPING`` …"""
    fields: dict[str, str]


@dataclass(frozen=True, slots=True)
class Notice:
    """A line for the log."""

    level: str
    """``info``, ``warning`` or ``error``."""
    event: str
    daemon: str
    reason: str


class EventReader:
    """Bytes of stdin to events, however they are cut."""

    def __init__(self) -> None:
        self._buffer = b""

    def feed(self, data: bytes) -> list[Event]:
        """Raises: ValueError when it is not the event protocol."""
        self._buffer += data
        events = []
        while b"\n" in self._buffer:
            line, _, rest = self._buffer.partition(b"\n")
            header = parse_tokens(line.decode())
            size = int(header["len"]) if header.get("len", "").isdigit() else -1
            if not 0 <= size <= EVENT_LIMIT_BYTES:
                raise ValueError(f"not an event header: {line[:100]!r}")
            if len(rest) < size:
                break
            events.append(Event(header.get("eventname", ""), parse_tokens(rest[:size].decode())))
            self._buffer = rest[size:]
        if len(self._buffer) > 2 * EVENT_LIMIT_BYTES:
            raise ValueError("an event is too long")
        return events


def parse_tokens(text: str) -> dict[str, str]:
    """``name:value name:value`` to a dict."""
    return dict(token.split(":", 1) for token in text.split() if ":" in token)


def is_node_stopping(event: Event) -> bool:
    return event.name == "SUPERVISOR_STATE_CHANGE_STOPPING"


def notice_of(event: Event) -> Notice | None:
    """What a person should read about this event; None for the usual course of things."""
    daemon = event.fields.get("processname", "")
    match event.name:
        case "PROCESS_STATE_EXITED":
            pid = event.fields.get("pid", "?")
            if event.fields.get("expected") == "1":
                return Notice("info", "daemon_exited", daemon, f"pid {pid} ended in order; supervisord starts it again")
            return Notice(
                "warning",
                "daemon_exited",
                daemon,
                f"pid {pid} ended unexpectedly (see 'meshctl logs {daemon}'); supervisord starts it again",
            )
        case "PROCESS_STATE_BACKOFF":
            tries = event.fields.get("tries", "?")
            return Notice(
                "warning",
                "daemon_start_failed",
                daemon,
                f"attempt {tries} ended at once (see 'meshctl logs {daemon}'); supervisord tries again",
            )
        case "PROCESS_STATE_FATAL":
            return Notice(
                "error",
                "daemon_gave_up",
                daemon,
                f"supervisord stopped trying: 'meshctl logs {daemon}' says why; then 'meshctl restart {daemon}'",
            )
        case "PROCESS_STATE_RUNNING":
            return Notice("info", "daemon_runs", daemon, f"pid {event.fields.get('pid', '?')}")
        case "PROCESS_STATE_STOPPED":
            return Notice("info", "daemon_stopped", daemon, "supervisord was asked to stop it")
        case "SUPERVISOR_STATE_CHANGE_STOPPING":
            return Notice("info", "node_stopping", "supervisord", "going down with everything it runs")
    return None
