"""What is counted about a connection, and how it says that it ended."""

from __future__ import annotations

import datetime

from services.tunneld.io.connection import Connection
from services.tunneld.io.stream import TunnelStream
from shared.certificates import VerifiedPeer
from shared.ids import MeshId, PeerId
from shared.messages.tunnel import StreamCounters
from tests.tunneld.bounded import bounded


class Bare(Connection):
    """A connection that carries nothing."""

    transport = "tcp"

    async def open_stream(self) -> TunnelStream:
        raise NotImplementedError

    def close(self, reason: str) -> None:
        self.resolve(reason)

    def silent_seconds(self) -> float:
        return 0.0

    def suspect(self) -> None: ...


class Done:
    """A stream that is over."""

    bytes_sent = 3
    bytes_received = 4

    async def read(self) -> bytes:
        return b""

    async def write(self, data: bytes) -> None: ...

    async def finish(self) -> None: ...

    def abort(self, reason: str = "") -> None: ...


def bare() -> Bare:
    peer = VerifiedPeer(PeerId("12B"), MeshId("m"), "member", datetime.datetime.now(datetime.UTC))
    return Bare(peer, "/ip4/10.0.0.1/tcp/1/tls", "", dialled_here=True)


@bounded
async def test_streams_and_their_bytes_are_counted_when_they_are_over() -> None:
    connection = bare()
    connection.stream_began(opened_here=True)
    connection.stream_began(opened_here=False)
    assert connection.open_streams == 2
    connection.stream_ended(Done())
    connection.count_refused()
    assert connection.open_streams == 1
    assert connection.counters == StreamCounters(
        bytes_sent=3, bytes_received=4, streams_opened=1, streams_accepted=1, refused=1
    )


@bounded
async def test_the_first_reason_counts_and_there_always_is_one() -> None:
    connection = bare()
    connection.close("one\nline")
    connection.close("another")
    assert await connection.closed == "one line"
    nameless = bare()
    nameless.close("")
    assert await nameless.closed == "the connection ended"


@bounded
async def test_a_round_trip_is_the_smallest_and_never_negative() -> None:
    connection = bare()
    assert connection.rtt_seconds() is None
    connection.measured(0.3)
    connection.measured(0.2)
    assert connection.rtt_seconds() == 0.2
    connection.measured(-1.0)
    assert connection.rtt_seconds() == 0.0
