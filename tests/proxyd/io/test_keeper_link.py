"""Sockets and words between keeper and worker, over a real socket pair."""

from __future__ import annotations

import os
import socket
import time

import pytest

from services.proxyd.io.keeper_link import LINE_LIMIT_BYTES, Link, LinkClosed


def pair() -> tuple[Link, Link]:
    one, other = socket.socketpair()
    return Link(one), Link(other)


def test_messages_and_sockets_arrive_in_order() -> None:
    one, other = pair()
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    one.send({"type": "a"})
    one.send({"type": "b", "count": 2}, [listener.fileno() for listener in listeners[:2]])
    one.send({"type": "c"}, [listeners[2].fileno()])
    messages = []
    while len(messages) < 3:
        messages += other.receive()
    assert [message["type"] for message in messages] == ["a", "b", "c"]
    taken = other.take_descriptors(2) + other.take_descriptors(1)
    for listener, number in zip(listeners, taken, strict=True):
        received = socket.socket(fileno=number)
        assert received.getsockname() == listener.getsockname()
        # Else uvicorn would not switch Nagle's algorithm off for what is accepted there.
        assert received.proto == socket.IPPROTO_TCP
        assert not os.get_inheritable(number)
        assert os.path.sameopenfile(number, listener.fileno())
        received.close()
        listener.close()
    one.close()
    other.close()


def test_a_message_cut_anywhere_is_put_together() -> None:
    ours, theirs = socket.socketpair()
    link = Link(ours)
    data = b'{"type":"x","word":"\xc3\xa9"}\n{"type":"y"}\n'
    messages = []
    for index in range(len(data)):
        theirs.send(data[index : index + 1])
        messages += link.receive()
    assert [message["type"] for message in messages] == ["x", "y"]
    assert link.receive() == []
    theirs.close()
    link.close()


@pytest.mark.parametrize("data", [b"hello\n", b"[1]\n", b"\xff\n", b"x" * (LINE_LIMIT_BYTES + 10)])
def test_nonsense_ends_the_connection(data: bytes) -> None:
    ours, theirs = socket.socketpair()
    link = Link(ours)
    theirs.sendall(data)
    with pytest.raises(LinkClosed):
        _ = [link.receive() for _ in range(10)]
    theirs.close()
    link.close()


def test_the_end_and_missing_sockets_are_told() -> None:
    one, other = pair()
    with pytest.raises(LinkClosed):
        other.take_descriptors(1)
    one.close()
    with pytest.raises(LinkClosed):
        other.receive()
    with pytest.raises(LinkClosed):
        other.send({"type": "x"})
    other.close()


def test_sockets_nobody_took_are_closed_with_the_link() -> None:
    one, other = pair()
    reader, writer = os.pipe()
    one.send({"type": "x"}, [writer])
    os.close(writer)
    other.receive()
    other.close()
    assert os.read(reader, 1) == b"", "the last copy of the write end is closed"
    os.close(reader)
    one.close()


def test_a_stuck_peer_blocks_nobody_for_long() -> None:
    one, other = pair()
    started = time.monotonic()
    with pytest.raises(LinkClosed):
        _ = [one.send({"type": "x", "text": "y" * 60_000}) for _ in range(100)]  # type: ignore[func-returns-value]
    assert time.monotonic() - started < 5
    one.close()
    other.close()
