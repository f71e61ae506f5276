"""``doctor --peer``: of two nodes that do not meet it says which way fails, and the line that mends it."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import Encoding

from services.meshctl.doctor_peer import find_target
from services.meshctl.node import Node as Client
from shared.certificates import fingerprint
from shared.errors import ConfigError
from shared.ids import InviteId
from shared.invites import Invite, SignedInvite, mint
from tests.meshctl.conftest import Meshctl
from tests.processes.mesh import mesh_of, new_node
from tests.processes.node import Node, wait_for
from tests.tunneld.meshes import TestMesh

MESH = TestMesh()


def invite_of(port: int, *, good_for_seconds: float = 3600.0) -> SignedInvite:
    invite = Invite(
        invite_id=InviteId("i1"),
        mesh_id=MESH.mesh_id,
        mesh_name="home",
        root_fingerprint=fingerprint(MESH.root),
        addresses=(f"/ip4/127.0.0.1/udp/{port}/quic-v1",) if port else (),
        grant="member",
        expires_unix_seconds=int(time.time() + good_for_seconds),
        uses=1,
        issuer_der=MESH.issuer.public_bytes(Encoding.DER),
    )
    return mint(invite, MESH.issuer_key)


# -- without a node -------------------------------------------------------------------------------------------


def test_without_a_node_the_path_is_looked_at_and_it_says_what_was_not(meshctl: Meshctl) -> None:
    with socket.create_server(("127.0.0.1", 0)) as there:
        ran = meshctl("doctor", "--peer", f"localhost:{there.getsockname()[1]}")
    assert ran.status == 0, ran.out + ran.err
    assert "TCP port" in ran.out
    assert "this node is not running" in ran.out
    assert "-> meshctl up" in ran.out
    assert "there: not proved; back: not proved." in ran.out


def test_a_refused_port_and_a_name_that_is_none(meshctl: Meshctl) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    said = meshctl("doctor", "--peer", f"/ip4/127.0.0.1/tcp/{port}/tls", "--json")
    assert said.status == 1
    levels = {check["name"]: (check["level"], check["fix"]) for check in said.json()["there"]}
    assert levels["tcp"][0] == "fail"
    assert "meshctl up" in levels["tcp"][1]
    nowhere = meshctl("doctor", "--peer", "no-such-machine.invalid")
    assert (nowhere.status, "the name is not found" in nowhere.out, "9340" in nowhere.out) == (1, True, True)


@pytest.mark.parametrize(
    ("hours", "changed", "words"),
    [(1, False, "good for 1.0 more hours"), (-2, False, "expired 2.0 hours ago"), (1, True, "changed after it was")],
)
def test_a_token_is_judged_before_anything_is_dialled(hours: int, changed: bool, words: str, meshctl: Meshctl) -> None:
    with socket.create_server(("127.0.0.1", 0)) as there:
        signed = invite_of(there.getsockname()[1], good_for_seconds=hours * 3600 + 5 * hours)
        if changed:
            signed = SignedInvite(signed.invite, signed.body, signed.signature[:-1] + b"\0")
        ran = meshctl("doctor", "--peer", signed.token)
    assert words in ran.out
    assert ran.status == (0 if hours > 0 and not changed else 1)
    assert "mesh home" in ran.out
    assert signed.token[20:60] not in ran.out + ran.err


@pytest.mark.parametrize("cut", [8, 40, 200])
def test_a_cut_token_is_said_to_be_one_and_not_looked_up_as_a_name(cut: int, meshctl: Meshctl) -> None:
    token = invite_of(9).token[:cut]
    ran = meshctl("doctor", "--peer", token)
    assert ran.status == 1
    assert "incomplete or mistyped" in ran.out
    assert token not in ran.out + ran.err


def test_a_token_from_a_file(meshctl: Meshctl, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(invite_of(0).token + "\n")
    ran = meshctl("doctor", "--peer", f"@{tmp_path}/token", "--json")
    (check,) = ran.json()["there"]
    assert (check["name"], check["detail"]) == ("token", "the token names no address")


def test_what_names_no_node(mesh_home: Path, meshctl: Meshctl) -> None:
    node = Client({"MESH_HOME": str(mesh_home)})
    with pytest.raises(ConfigError, match="no token, no address"):
        find_target(node, "what is this", now_unix_seconds=0.0)
    assert meshctl("doctor", "--peer", "/ip4/1.2.3.4/sctp/1").status == 1
    assert find_target(node, "desk.lan:1", now_unix_seconds=0.0).addresses == ("/dns/desk.lan/udp/1/quic-v1",)
    assert find_target(node, "[fd00::1]", now_unix_seconds=0.0).addresses == ("/ip6/fd00::1/udp/9340/quic-v1",)


# -- with real nodes ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[Node]]:
    with mesh_of([[], []], None) as pair:
        yield pair


def mesh_address(node: Node) -> str:
    return str(node.status()["addresses"]["mesh"][0])


def test_both_ways_between_nodes_of_a_mesh(nodes: list[Node]) -> None:
    one, other = nodes
    address = mesh_address(other)
    host_and_port = f"127.0.0.1:{other.status()['ports']['mesh']}"
    for name in ("n1", address.rpartition("/")[2][-6:], host_and_port):
        ran = one.meshctl("doctor", "--peer", name, check=False)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert "there: works; back: works." in ran.stdout
    said = json.loads(other.meshctl("doctor", "--peer", "n0", "--json").stdout)
    assert (said["ok"], said["peer"]) == (True, "n0")
    assert {"tcp", "udp", "clock", "version", "mesh"} <= {check["name"] for check in said["there"]}
    assert {"tcp", "udp", "mesh"} <= {check["name"] for check in said["back"]}
    itself = one.meshctl("doctor", "--peer", "n0", check=False)
    assert (itself.returncode, "this node itself" in itself.stderr) == (1, True)


def test_a_node_outside_and_a_token(nodes: list[Node]) -> None:
    token = nodes[0].meshctl("invite").stdout.strip()
    with new_node("outside", [], {}, None) as outside:
        outside.up()
        ran = outside.meshctl("doctor", "--peer", token)
        assert "admits nodes" in ran.stdout
        assert "once this node is in that mesh" in ran.stdout
        assert token[20:60] not in ran.stdout + ran.stderr + outside.logs()
        invites = json.loads(nodes[0].meshctl("invite", "list", "--json").stdout)
        assert [item["used"] for item in invites].count(0) == 1
        # Now it is in a mesh of its own.
        outside.meshctl("init", "--name", "elsewhere")
        foreign = outside.meshctl("invite").stdout.strip()
        wait_for(lambda: mesh_address(outside), 10, "the address of the mesh port")
        refused = nodes[0].meshctl("doctor", "--peer", mesh_address(outside), check=False)
        assert refused.returncode == 1
        assert "of another mesh" in refused.stdout
        assert "--switch" in refused.stdout
        # What a token of that mesh says is proved the way those who join do.
        assert "admits nodes" in nodes[0].meshctl("doctor", "--peer", foreign).stdout


def test_a_node_that_is_down(nodes: list[Node]) -> None:
    """Last: afterwards there is no second node."""
    one, other = nodes
    address = mesh_address(other)
    other.down()
    ran = one.meshctl("doctor", "--peer", address, check=False)
    assert ran.returncode == 1
    assert "nothing listens there" in ran.stdout
    assert "there: fails" in ran.stdout
