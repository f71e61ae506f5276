"""The client side of HTTP: answers in every framing and in every disorder."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable

import pytest

from services.proxyd.io.upstream import CutOff, NotReached, UpstreamPool, UpstreamResponse
from tests.proxyd.raw_upstream import Peer, RawUpstream, Received, refused_port
from tests.waiting import run_async, until

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
HEAD = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\n\r\n"


def talk(upstream: RawUpstream, *exchanges: Callable[[UpstreamPool], Awaitable[None]]) -> None:
    async def run() -> None:
        pool = UpstreamPool()
        try:
            for exchange in exchanges:
                await exchange(pool)
        finally:
            pool.close()

    run_async(run())


async def read_all(response: UpstreamResponse) -> bytes:
    body = b""
    while True:
        await response.more()
        part = response.take()
        body += part
        if not part and response.complete:
            return body


def one(upstream: RawUpstream, check: Callable[[UpstreamResponse], Awaitable[None]]) -> None:
    async def exchange(pool: UpstreamPool) -> None:
        response = await pool.request(("127.0.0.1", upstream.port), HEAD, b"x")
        await check(response)

    talk(upstream, exchange)


def sends(*parts: bytes, close: bool = False) -> Callable[[Peer, Received], None]:
    def handler(peer: Peer, _request: Received) -> None:
        for part in parts:
            peer.send(part)
        if close:
            peer.connection.shutdown(socket.SHUT_RDWR)

    return handler


@pytest.mark.parametrize(
    "parts",
    [
        (OK,),
        tuple(bytes([byte]) for byte in OK),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\no\r\n", b"1\r\nk\r\n0\r\n\r\n"),
        (b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n", OK),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK,),
    ],
)
def test_an_answer_in_any_framing_and_segments(upstream: RawUpstream, parts: tuple[bytes, ...]) -> None:
    upstream.handler = sends(*parts)

    async def check(response: UpstreamResponse) -> None:
        assert response.status == 200
        assert b"Link" not in dict(response.headers)
        assert await read_all(response) == b"ok"

    one(upstream, check)


def test_an_answer_without_length_ends_with_its_connection(upstream: RawUpstream) -> None:
    upstream.handler = sends(b"HTTP/1.1 200 OK\r\n\r\nok", close=True)

    async def check(response: UpstreamResponse) -> None:
        assert await read_all(response) == b"ok"

    one(upstream, check)


@pytest.mark.parametrize("framing", [b"Content-Length: 9", b"Transfer-Encoding: chunked"])
def test_what_arrived_before_a_cut_is_delivered_then_the_cut_is_told(upstream: RawUpstream, framing: bytes) -> None:
    body = b"2\r\nok\r\n" if b"chunked" in framing else b"ok"
    upstream.handler = sends(b"HTTP/1.1 200 OK\r\n%b\r\n\r\n%b" % (framing, body), close=True)

    async def check(response: UpstreamResponse) -> None:
        await response.more()
        assert response.take() == b"ok"
        with pytest.raises(CutOff, match="in the middle"):
            await response.more()

    one(upstream, check)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ((b"",), "before it answered"),
        ((b"HTTP/1.1 200 OK\r\nX: ",), "before it answered"),
        ((b"not http\r\n\r\n",), "not HTTP"),
        ((b"HTTP/1.1 200 OK\r\n" + b"X-A: " + b"a" * 300_000,), "bytes of headers"),
    ],
)
def test_no_answer_at_all(upstream: RawUpstream, parts: tuple[bytes, ...], words: str) -> None:
    upstream.handler = sends(*parts, close=len(parts[0]) < 100_000)

    async def exchange(pool: UpstreamPool) -> None:
        with pytest.raises(NotReached, match=words):
            await pool.request(("127.0.0.1", upstream.port), HEAD, b"x")
        await until(lambda: pool.connections == 0, 2, "the connection is given up")

    talk(upstream, exchange)


def test_nobody_listens(upstream: RawUpstream) -> None:
    async def exchange(pool: UpstreamPool) -> None:
        with pytest.raises(NotReached, match="refused"):
            await pool.request(("127.0.0.1", refused_port()), HEAD, b"x")

    talk(upstream, exchange)


def test_connections_are_reused_and_closed_when_the_engine_says_so(upstream: RawUpstream) -> None:
    async def exchange(pool: UpstreamPool) -> None:
        response = await pool.request(("127.0.0.1", upstream.port), HEAD, b"x")
        assert await read_all(response)

    def close_third(peer: Peer, _request: Received) -> None:
        closing = b"Connection: close\r\n" if len(upstream.requests) == 3 else b""
        peer.send(b"HTTP/1.1 200 OK\r\n%bContent-Length: 2\r\n\r\nok" % closing)

    upstream.handler = close_third
    talk(upstream, *[exchange] * 5)
    assert len(upstream.peers) == 2


def test_a_second_answer_to_one_request_is_not_given_to_the_next(upstream: RawUpstream) -> None:
    """Response smuggling: the connection is not used again."""

    def twice(peer: Peer, _request: Received) -> None:
        peer.send(OK + b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil")

    upstream.handler = twice

    async def exchange(pool: UpstreamPool) -> None:
        response = await pool.request(("127.0.0.1", upstream.port), HEAD, b"x")
        assert response.headers == [(b"Content-Length", b"2")]
        assert await read_all(response) == b"ok"

    talk(upstream, exchange, exchange)
    assert len(upstream.peers) == 2


def test_bytes_on_an_idle_connection_end_it(upstream: RawUpstream) -> None:
    async def exchange(pool: UpstreamPool) -> None:
        response = await pool.request(("127.0.0.1", upstream.port), HEAD, b"x")
        await read_all(response)

    async def surprise(pool: UpstreamPool) -> None:
        upstream.peers[0].send(b"HTTP/1.1 408 Request Timeout\r\n\r\n")
        await until(lambda: pool.connections == 0, 2, "the connection is given up")

    upstream.handler = sends(OK)
    talk(upstream, exchange, surprise, exchange)
    assert len(upstream.peers) == 2


def test_closing_an_unfinished_answer_closes_its_connection(upstream: RawUpstream) -> None:
    def hold(peer: Peer, _request: Received) -> None:
        peer.begin_stream()
        peer.event("one")
        peer.wait_gone()

    upstream.handler = hold

    async def check(response: UpstreamResponse) -> None:
        await response.more()
        response.close()
        await until(upstream.peers[0].gone.is_set, 2, "the engine sees it")

    one(upstream, check)
