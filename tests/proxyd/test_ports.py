"""Which ports are served, and what is said when one is not."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from shared.io.keys_file import create_key, revoke_key
from shared.messages.daemon import ConfigReloaded, ReloadConfig
from tests.proxyd.supervised import Supervised, ask_proxyd, supervised
from tests.waiting import run_async, wait_until


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def status_text(node: Supervised) -> str:
    """What the management port says of the node; empty while it does not answer."""
    try:
        return node.get("/api/mesh/status", port="console")[1].decode()
    except (OSError, KeyError):
        return ""


def test_a_public_bind_without_keys_is_refused_and_opens_with_the_first_key(mesh_home: Path) -> None:
    with supervised(mesh_home, MESH_API_HOST="0.0.0.0") as node:
        wait_until(lambda: "api is not served" in node.log(), 20, "the refusal in the log")
        assert "meshctl keys create" in node.log()
        wait_until(lambda: "console" in node.ports() and node.get("/live", port="console")[0] == 200, 20, "3131 works")
        assert "api" not in node.ports()
        _, text = create_key(node.paths.keys_file, "test")
        wait_until(lambda: "api" in node.ports(), 10, "the API is served once a key exists")
        wait_until(node.is_live, 10, "it answers")
        assert node.get("/v1/models")[0] == 401
        assert node.get("/v1/models", {"Authorization": f"Bearer {text}"})[0] == 200
        revoke_key(node.paths.keys_file, "test")
        bearer = {"Authorization": f"Bearer {text}"}
        wait_until(lambda: node.get("/v1/models", bearer)[0] == 401, 5, "the revoked key is refused")
        assert node.get("/v1/models")[0] == 401, "without any key a public bind stays closed"


def test_a_public_bind_without_keys_is_served_when_configuration_says_so(mesh_home: Path) -> None:
    config = "[api]\nhost = '0.0.0.0'\nallow_public_without_keys = true\n"
    with supervised(mesh_home, config=config) as node:
        node.wait_live()
        assert node.get("/v1/models")[0] == 200


def test_a_taken_port_is_explained_and_served_once_it_is_free(mesh_home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as squatter:
        port = int(squatter.getsockname()[1])
        with supervised(mesh_home, MESH_API_PORT=str(port)) as node:
            wait_until(lambda: "taken by another program" in node.log(), 20, "the reason in the log")
            assert f"ss -ltnp sport = :{port}" in node.log()
            wait_until(lambda: "taken by another program" in status_text(node), 20, "and in the status")
            assert node.ports().get("api") is None
            squatter.close()
            node.wait_live()
            assert node.ports()["api"] == port


def test_any_free_port_stays_the_same_over_a_whole_restart(mesh_home: Path) -> None:
    with supervised(mesh_home) as node:
        node.wait_live()
        wait_until(lambda: len(set(node.ports().values())) == 2, 10, "both ports")
        ports = node.ports()
    with supervised(mesh_home) as node:
        node.wait_live()
        wait_until(lambda: node.get("/live", port="console")[0] == 200, 10, "both ports answer")
        assert node.ports() == ports


def test_a_remembered_port_that_is_taken_is_given_up_for_another(mesh_home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as squatter:
        taken = int(squatter.getsockname()[1])
        (mesh_home / "state").mkdir()
        (mesh_home / "state" / "ports.json").write_text(json.dumps({"api": taken}))
        with supervised(mesh_home) as node:
            wait_until(lambda: node.ports().get("api") not in (None, taken), 20, "another port")
            wait_until(node.is_live, 10, "it answers")


def test_a_reload_moves_the_port_and_restarts_nothing(mesh_home: Path) -> None:
    first, second = free_port(), free_port()
    with supervised(mesh_home, config=f"[api]\nport = {first}\n", MESH_API_PORT="") as node:
        node.wait_live()
        assert node.ports()["api"] == first
        worker = node.workers()
        (mesh_home / "mesh.toml").write_text(f"[api]\nport = {second}\n")
        reply = run_async(ask_proxyd(node, ReloadConfig()))
        assert isinstance(reply, ConfigReloaded)
        assert (reply.changed, reply.needs_restart) == (("api.port",), ())
        wait_until(lambda: node.ports()["api"] == second, 10, "the new port")
        wait_until(node.is_live, 10, "it answers")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", first), 1)
        assert node.workers() == worker


def test_a_broken_configuration_is_one_clear_line(mesh_home: Path) -> None:
    with supervised(mesh_home, config="[api]\nprot = 1\n") as node:
        wait_until(lambda: "did you mean port?" in node.log(), 20, "the reason in the log")
        (mesh_home / "mesh.toml").write_text("")
        node.wait_live()


def test_a_second_proxyd_for_the_same_home_is_refused(mesh_home: Path) -> None:
    from tests.daemons import start_daemon_process

    with supervised(mesh_home) as node:
        node.wait_live()
        second = start_daemon_process("proxyd", mesh_home)
        assert second.wait_exit() == 1
        assert "already runs" in second.log()
        assert node.is_live()
