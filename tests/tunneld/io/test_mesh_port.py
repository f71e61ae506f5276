"""docs/spec/identity.md, rule 5: the mesh port is one number, held for UDP and TCP, and not listened on."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from services.tunneld.io.mesh_port import MeshPort, bind_mesh_port, interface_addresses
from shared.errors import StateError
from shared.ids import PeerId
from shared.peer_ids import multiaddrs

HOST = "127.0.0.1"


@contextmanager
def bound(remembered: Path, port: int = 0, host: str = HOST) -> Iterator[MeshPort]:
    with closing(bind_mesh_port(host, port, remembered)) as made:
        yield made


def test_one_number_for_udp_and_tcp_and_nobody_listens(tmp_path: Path) -> None:
    with bound(tmp_path / "port") as made:
        assert made.udp.getsockname() == made.tcp.getsockname() == (HOST, made.port)
        assert (made.udp.type, made.tcp.type) == (socket.SOCK_DGRAM, socket.SOCK_STREAM)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((HOST, made.port), timeout=2)


@pytest.mark.parametrize("held", ["tcp", "udp"])
def test_a_taken_port_is_named_with_how_to_find_its_owner(tmp_path: Path, held: str) -> None:
    with bound(tmp_path / "port") as other:
        port = other.port
        (other.udp if held == "tcp" else other.tcp).close()
        with pytest.raises(StateError) as caught:
            bind_mesh_port(HOST, port, tmp_path / "port")
        said = f"mesh port {port} (UDP and TCP on {HOST}) cannot be bound: Address already in use"
        assert said in caught.value.detail
        assert "set another one with MESH_PORT or mesh.port" in caught.value.detail
    with bound(tmp_path / "port", port) as made:
        assert made.port == port, "neither half stays bound after the failure"


def test_a_free_port_is_remembered(tmp_path: Path) -> None:
    remembered = tmp_path / "port"
    with bound(remembered) as made:
        first = made.port
    with bound(remembered) as again:
        assert again.port == first
        with bound(tmp_path / "other") as other:
            assert other.port != first


def test_a_remembered_port_that_is_taken_gives_way(tmp_path: Path) -> None:
    remembered = tmp_path / "port"
    with bound(remembered) as first, bound(remembered) as second:
        assert second.port != first.port
        assert int(remembered.read_text()) == second.port


@pytest.mark.parametrize("content", [b"", b"port", b"-5", b"0", b"99999", b"\xff", b"9" * 5000])
def test_a_damaged_memory_costs_only_the_number(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "port").write_bytes(content)
    with bound(tmp_path / "port") as made:
        assert 0 < made.port <= 65535


def test_a_memory_that_cannot_be_written_costs_only_the_number(tmp_path: Path) -> None:
    with bound(tmp_path / "gone" / "port") as made:
        assert made.port


def test_a_host_that_is_not_ours_is_named(tmp_path: Path) -> None:
    for port in (0, 50123):
        with pytest.raises(StateError, match=r"192\.0\.2\.1"):
            bind_mesh_port("192.0.2.1", port, tmp_path / "port")


def test_localhost_is_a_host_too(tmp_path: Path) -> None:
    with bound(tmp_path / "port", host="localhost") as made:
        assert multiaddrs(interface_addresses("localhost"), made.port, PeerId("p"))[0].startswith("/ip4/127.0.0.1/udp/")


def test_a_wildcard_is_reached_at_every_interface() -> None:
    assert "127.0.0.1" in interface_addresses("0.0.0.0")
    assert all(":" not in address for address in interface_addresses("0.0.0.0"))
    assert set(interface_addresses("0.0.0.0")) <= set(interface_addresses("::"))
    assert interface_addresses("10.1.2.3") == ("10.1.2.3",)
