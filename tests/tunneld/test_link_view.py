"""When a change of a link is worth saying."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.tunneld.link_view import REPORT_SECONDS, sum_counters, transport_word, worth_saying
from shared.ids import PeerId
from shared.messages.tunnel import LinkChanged, StreamCounters

SAID = LinkChanged(peer_id=PeerId("12B"), state="connected", reason="control over QUIC", rtt_seconds=0.02)


def changed(**fields: object) -> LinkChanged:
    return replace(SAID, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("new", "expected"),
    [
        (changed(), False),
        (changed(reason="control over TCP"), True),
        (changed(state="waiting"), True),
        (changed(rtt_seconds=0.023), False),
        (changed(rtt_seconds=0.03), True),
        (changed(rtt_seconds=0.01), True),
        (changed(rtt_seconds=None), True),
        (changed(retry_in_seconds=3.0), False),
        (changed(counters=StreamCounters(bytes_sent=1)), False),
    ],
)
def test_what_is_worth_saying_at_once(new: LinkChanged, expected: bool) -> None:
    assert worth_saying(SAID, new, 0.0) is expected


def test_counters_are_said_now_and_then() -> None:
    new = changed(counters=StreamCounters(bytes_sent=1))
    assert worth_saying(SAID, new, REPORT_SECONDS)
    assert not worth_saying(SAID, SAID, REPORT_SECONDS * 2)


def test_counters_add_up_field_by_field() -> None:
    one = StreamCounters(bytes_sent=1, bytes_received=2, streams_opened=3, streams_accepted=4, refused=5)
    assert sum_counters((one, one)) == StreamCounters(
        bytes_sent=2, bytes_received=4, streams_opened=6, streams_accepted=8, refused=10
    )
    assert [transport_word(name) for name in ("quic", "tcp")] == ["QUIC", "TCP"]
