"""The way to a place, over real sockets of this machine."""

from __future__ import annotations

import socket

from shared.io.probe import read_path
from shared.probe import Place
from tests.tunneld.bounded import bounded


@bounded
async def test_a_port_that_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as tcp:
        port = tcp.getsockname()[1]
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
            udp.bind(("127.0.0.1", port))
            path = await read_path(Place("dns4", "localhost", port))
    assert (path.ip, path.local_ip, path.tcp, path.udp_refused) == ("127.0.0.1", "127.0.0.1", "ok", False)
    assert (path.name_error, path.route_error) == ("", "")


@bounded
async def test_a_port_that_nothing_has() -> None:
    with socket.create_server(("127.0.0.1", 0)) as tcp:
        port = tcp.getsockname()[1]
    path = await read_path(Place("ip4", "127.0.0.1", port))
    assert (path.tcp, path.udp_refused) == ("refused", True)
    assert path.interface
    assert path.mtu_bytes is None or path.mtu_bytes >= 1280


@bounded
async def test_a_name_that_is_none() -> None:
    path = await read_path(Place("dns", "no-such-machine.invalid", 9340))
    assert path.name_error
    assert not path.ip
