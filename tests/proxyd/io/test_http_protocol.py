"""Who is at the other end of a half-closed connection, and what uvicorn's replaced ``send`` must keep doing."""

from __future__ import annotations

import ipaddress
import socket
import sys

import pytest

from services.proxyd.io.http_protocol import client_presence, table_address
from tests.proxyd.plane import Plane
from tests.proxyd.raw_upstream import Peer, RawUpstream, Received
from tests.waiting import wait_until

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads the Linux socket table")


def pair(family: socket.AddressFamily, host: str) -> tuple[socket.socket, socket.socket]:
    listener = socket.create_server((host, 0), family=family)
    client = socket.create_connection(listener.getsockname()[:2])
    server, _ = listener.accept()
    listener.close()
    return client, server


@linux_only
@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_a_half_closed_client_is_told_from_one_that_is_gone(family: socket.AddressFamily, host: str) -> None:
    try:
        client, server = pair(family, host)
    except OSError:
        pytest.skip(f"no {host} on this machine")
    client_address, server_address = server.getpeername()[:2], server.getsockname()[:2]
    client.shutdown(socket.SHUT_WR)
    assert client_presence(client_address, server_address) == "present"
    client.close()
    wait_until(lambda: client_presence(client_address, server_address) == "gone", 2, "it is seen to be gone")
    server.close()


def test_of_clients_elsewhere_nothing_is_known() -> None:
    assert client_presence(("192.0.2.1", 5), ("192.0.2.2", 80)) == "unknown"
    assert client_presence(None, ("127.0.0.1", 80)) == "unknown"
    assert client_presence(("not an address", 1), ("127.0.0.1", 80)) == "unknown"


@pytest.mark.skipif(sys.byteorder != "little", reason="the table is in the machine's byte order")
def test_addresses_as_the_kernel_writes_them() -> None:
    v4, v6 = ipaddress.ip_address("127.0.0.1"), ipaddress.ip_address("::1")
    assert table_address(v4, 80, False) == "0100007F:0050"
    assert table_address(v4, 80, True) == "0000000000000000FFFF00000100007F:0050"
    assert table_address(v6, 80, False) == "00000000000000000000000001000000:0050"


def test_a_remote_client_is_probed_with_interim_answers_that_do_no_harm(
    plane: Plane, upstream: RawUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients elsewhere can't be looked up; here the table is made unreadable."""
    monkeypatch.setattr("services.proxyd.io.http_protocol._socket_table", lambda _age: "")
    plane.serve_model("m", upstream.port)

    def late(peer: Peer, _request: Received) -> None:
        if len(upstream.requests) == 1:
            wait_until(lambda: b"100 Continue" in seen[0] or _peek(client), 5, "it was probed")
            peer.json({"late": True})
        else:
            peer.wait_gone()

    def _peek(connection: socket.socket) -> bool:
        seen[0] += connection.recv(4096)
        return b"100 Continue" in seen[0]

    seen = [b""]
    upstream.handler = late
    request = b'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 13\r\n\r\n{"model":"m"}'
    client = socket.create_connection(("127.0.0.1", plane.port), timeout=10)
    client.sendall(request)
    client.shutdown(socket.SHUT_WR)
    wait_until(lambda: b'{"late": true}' in seen[0] or _peek_any(client, seen), 10, "the answer arrives")
    client.close()
    gone = socket.create_connection(("127.0.0.1", plane.port), timeout=10)
    gone.sendall(request)
    wait_until(lambda: len(upstream.requests) == 2, 5, "the engine has it")
    gone.close()
    assert upstream.peers[0].gone.wait(2.0)


def _peek_any(connection: socket.socket, seen: list[bytes]) -> bool:
    seen[0] += connection.recv(4096)
    return b'{"late": true}' in seen[0]


def test_an_http_1_0_client_gets_its_answer_and_the_end(plane: Plane, upstream: RawUpstream) -> None:
    plane.serve_model("m", upstream.port)
    client = socket.create_connection(("127.0.0.1", plane.port), timeout=10)
    client.sendall(b'POST /v1/completions HTTP/1.0\r\nHost: localhost\r\nContent-Length: 13\r\n\r\n{"model":"m"}')
    received = b""
    while data := client.recv(4096):
        received += data
    assert received.startswith(b"HTTP/1.1 200 OK\r\n")
    assert received.endswith(b'{"ok": true}')
    client.close()


def test_head_and_body_come_in_one_segment(plane: Plane, upstream: RawUpstream) -> None:
    plane.serve_model("m", upstream.port)
    client = socket.create_connection(("127.0.0.1", plane.port), timeout=10)
    client.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 13\r\n\r\n{"model":"m"}')
    assert client.recv(65536).endswith(b'{"ok": true}')
    client.close()
