"""supervisord's event protocol: however the bytes are cut, and nothing but events."""

from __future__ import annotations

import pytest

from services.proxyd.keeper.events import Event, EventReader, is_node_stopping, notice_of


def packet(name: str, payload: str) -> bytes:
    head = f"ver:3.0 server:supervisor serial:1 pool:keeper poolserial:1 eventname:{name} len:{len(payload)}\n"
    return (head + payload).encode()


EXITED = packet("PROCESS_STATE_EXITED", "processname:gossipd groupname:gossipd from_state:RUNNING expected:0 pid:42")
STOPPING = packet("SUPERVISOR_STATE_CHANGE_STOPPING", "")


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_events_however_the_bytes_are_cut(size: int) -> None:
    data = EXITED + STOPPING + EXITED
    reader, events = EventReader(), []
    for start in range(0, len(data), size):
        events += reader.feed(data[start : start + size])
    assert [event.name for event in events] == [
        "PROCESS_STATE_EXITED",
        "SUPERVISOR_STATE_CHANGE_STOPPING",
        "PROCESS_STATE_EXITED",
    ]
    assert events[0].fields["processname"] == "gossipd"
    assert [is_node_stopping(event) for event in events] == [False, True, False]


@pytest.mark.parametrize("data", [b"hello\n", b"len:x\n", b"len:-5\n", b"len:99999999\n", b"\n", b"x" * 200_000])
def test_anything_else_is_an_error(data: bytes) -> None:
    with pytest.raises(ValueError):
        EventReader().feed(data)


def test_what_a_person_should_read() -> None:
    crash = notice_of(Event("PROCESS_STATE_EXITED", {"processname": "gossipd", "expected": "0", "pid": "42"}))
    assert crash is not None
    assert (crash.level, crash.event, crash.daemon) == ("warning", "daemon_exited", "gossipd")
    assert "meshctl logs gossipd" in crash.reason
    ended = notice_of(Event("PROCESS_STATE_EXITED", {"processname": "gossipd", "expected": "1", "pid": "42"}))
    assert ended is not None
    assert ended.level == "info"
    levels = {
        name: notice.level if (notice := notice_of(Event(name, {"processname": "x"}))) else None
        for name in (
            "PROCESS_STATE_STARTING",
            "PROCESS_STATE_RUNNING",
            "PROCESS_STATE_BACKOFF",
            "PROCESS_STATE_FATAL",
            "PROCESS_STATE_STOPPED",
            "TICK_5",
        )
    }
    assert levels == {
        "PROCESS_STATE_STARTING": None,
        "PROCESS_STATE_RUNNING": "info",
        "PROCESS_STATE_BACKOFF": "warning",
        "PROCESS_STATE_FATAL": "error",
        "PROCESS_STATE_STOPPED": "info",
        "TICK_5": None,
    }
