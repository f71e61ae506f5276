"""Which of a link's connections a new stream takes."""

from __future__ import annotations

import pytest

from services.tunneld.link import Connected, ConnectionId, Link, Preference
from shared.ids import PeerId
from shared.multiaddrs import Transport


def link_with(*transports: Transport, retired: tuple[int, ...] = ()) -> Link:
    link = Link(PeerId("12B"))
    for number, transport in enumerate(transports):
        key = ConnectionId(number)
        link.connections[key] = Connected(key, link.peer_id, transport, "", True, "member")
    link.retired = {ConnectionId(number) for number in retired}
    return link


@pytest.mark.parametrize(
    ("preference", "control", "bulk"), [("auto", "quic", "tcp"), ("quic", "quic", "quic"), ("tcp", "tcp", "tcp")]
)
def test_preference(preference: Preference, control: Transport, bulk: Transport) -> None:
    link = link_with("quic", "tcp")
    chosen = [link.choose(preference, bulk=wide) for wide in (False, True)]
    assert [item.transport for item in chosen if item] == [control, bulk]


@pytest.mark.parametrize("only", ["quic", "tcp"])
def test_one_transport_carries_both_where_it_is_the_only_one(only: Transport) -> None:
    link = link_with(only)
    for preference in ("auto", "quic", "tcp"):
        for bulk in (False, True):
            chosen = link.choose(preference, bulk=bulk)
            assert chosen is not None
            assert chosen.transport == only


def test_a_retired_connection_is_only_the_last_resort() -> None:
    chosen = link_with("quic", "quic", retired=(0,)).choose("auto", bulk=False)
    assert chosen is not None
    assert chosen.connection_id == 1
    last = link_with("quic", retired=(0,)).choose("auto", bulk=False)
    assert last is not None
    assert last.connection_id == 0
    assert link_with().choose("auto", bulk=True) is None
