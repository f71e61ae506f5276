"""services.proxyd.io.mesh_api: a mesh of two real nodes, made, joined, drained, judged and left over HTTP alone."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.engines.scripted_engine import Script
from tests.processes.mesh import alive, new_node, peers
from tests.processes.node import Node, wait_for

STRANGER = "12D3KooWM6CgA9iBFZmcYAHA6A2qvbAxqfkmrYiRQuz3XEsk4Ksv"


class Console:
    """A node's management port, with its token."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.address = urlsplit(wait_for(lambda: node.status()["addresses"]["console"], 20, "the management port"))
        wait_for(lambda: self.ask("GET", "/live")[0] == 200, 20, "the management API")

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection(self.address.hostname or "", self.address.port, timeout=90)
        headers = {"Content-Type": "application/json"}
        if method == "POST":
            headers["X-Mesh-Token"] = (self.node.home / "console_token").read_text().strip()
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def get(self, path: str) -> Any:
        status, body = self.ask("GET", path)
        assert status == 200, body
        return body

    def post(self, path: str, body: Any = None) -> Any:
        status, answer = self.ask("POST", path, body)
        assert status == 200, answer
        return answer

    def refused(self, path: str, body: Any = None) -> tuple[int, str, str]:
        status, answer = self.ask("POST", path, body)
        return status, answer["error"]["code"], answer["error"]["message"]


@pytest.fixture(scope="module")
def consoles() -> Iterator[tuple[Console, Console]]:
    """``desk`` runs in a mesh of its own, ``attic`` is idle: it has no mesh.toml."""
    script = Script(tokens=2)
    with new_node("desk", (), {}, script) as desk, new_node("attic", (), {}, script) as attic:
        desk.up()
        attic.up()
        (attic.home / "mesh.toml").unlink()
        attic.meshctl("config", "reload")
        wait_for(lambda: attic.status()["overall"] == "idle", 10, "a node without mesh.toml to be idle")
        yield Console(desk), Console(attic)


@pytest.fixture(scope="module")
def token(consoles: tuple[Console, Console]) -> str:
    made = consoles[0].post("/api/mesh/invite", {"uses": 3, "expires_seconds": 3600})
    assert made["token"].startswith("meshd1.")
    assert (made["invite"]["uses"], made["invite"]["grant"]) == (3, "member")
    return str(made["token"])


def test_invites_are_listed_without_their_secret_and_revoked(consoles: tuple[Console, Console], token: str) -> None:
    desk, _ = consoles
    spare = desk.post("/api/mesh/invite", {"grant": "guest"})
    listed = desk.get("/api/mesh/invites")["invites"]
    assert {item["grant"] for item in listed} == {"member", "guest"}
    assert token[20:60] not in json.dumps(listed)
    said = desk.post(f"/api/mesh/invites/{spare['invite']['invite_id']}/revoke")
    assert "is revoked" in said["detail"]
    revoked = {item["grant"]: item["revoked"] for item in desk.get("/api/mesh/invites")["invites"]}
    assert revoked == {"member": False, "guest": True}
    assert desk.refused(f"/api/mesh/invites/{'x' * 65}/revoke")[:2] == (404, "no_such_invite")


def test_a_node_joins_and_tells_its_steps_and_the_token_is_in_no_log(
    consoles: tuple[Console, Console], token: str
) -> None:
    desk, attic = consoles
    assert attic.get("/api/mesh/join") == {"steps": []}
    joined = attic.post("/api/mesh/join", {"token": token})
    assert (joined["grant"], joined["already"]) == ("member", False)
    assert (attic.node.home / "mesh.toml").exists(), "an idle node takes part from now on"
    steps = {step["name"]: step["state"] for step in attic.get("/api/mesh/join")["steps"]}
    assert steps["admitted"] == "done"
    wait_for(lambda: len(alive(desk.node)) == len(alive(attic.node)) == 2, 20, "both nodes to see each other")
    assert attic.get("/api/mesh/whoami")["grant"] == "member"
    assert desk.get("/api/mesh/whoami")["mesh_id"] == attic.get("/api/mesh/whoami")["mesh_id"] == joined["mesh_id"]
    for console in consoles:
        said = json.dumps([console.get("/api/mesh/story/proxyd"), console.get("/api/mesh/story/gossipd")])
        logs = "".join(path.read_text(errors="replace") for path in (console.node.home / "logs").iterdir())
        assert token[20:60] not in said + logs + json.dumps(console.get("/api/mesh/status"))


def test_what_cannot_be_joined_is_said_so(consoles: tuple[Console, Console], token: str) -> None:
    desk, attic = consoles
    assert desk.refused("/api/mesh/join", {"token": token})[:2] == (409, "own_mesh")
    for body, code in (({"token": "nonsense"}, "token_foreign"), ({"token": ""}, "bad_request"), ({}, "bad_request")):
        assert attic.refused("/api/mesh/join", body)[:2] == (400, code)
    long = token + "x" * 70_000
    status, _, words = attic.refused("/api/mesh/join", {"token": long})
    assert (status, token[20:60] in words) == (400, False), "an error does not repeat the token"


def test_another_node_is_asked_by_an_issuer_only(consoles: tuple[Console, Console], token: str) -> None:
    desk, attic = consoles
    name = next(peer["name"] for peer in peers(desk.node) if not peer["is_self"])
    assert desk.get(f"/api/mesh/logs/gossipd?lines=3&node={name}")["lines"]
    assert desk.post("/api/mesh/drain", {"node": name})["lines"] == ["draining"]
    assert desk.post("/api/mesh/drain", {"node": name, "off": True})["lines"] == ["takes requests again"]
    assert "all models" in desk.post("/api/mesh/models/unload", {"node": name})["lines"][0]
    assert desk.refused("/api/mesh/models/load", {"node": name, "model": "none"})[:2] == (404, "model_not_found")
    assert desk.refused("/api/mesh/drain", {"node": "nobody"})[:2] == (404, "no_such_peer")
    status, code, words = attic.refused("/api/mesh/drain", {"node": "desk"})
    assert (status, code, "issuer's grant" in words) == (403, "not_allowed", True)
    link = "The link with " + next(peer["peer_id"] for peer in peers(desk.node) if not peer["is_self"])
    assert desk.get(f"/api/mesh/why/{name}")["sentences"]["tunneld"][0].startswith(link)


def test_drain_ban_and_trust(consoles: tuple[Console, Console], token: str) -> None:
    desk, attic = consoles
    assert "no new requests" in desk.post("/api/mesh/drain", {})["detail"]
    assert "again" in desk.post("/api/mesh/drain", {"off": True})["detail"]
    assert STRANGER in desk.post("/api/mesh/peers/ban", {"peer": STRANGER})["detail"]
    assert "may take part again" in desk.post("/api/mesh/peers/ban", {"peer": STRANGER, "lift": True})["detail"]
    assert "trusted" in desk.post("/api/mesh/peers/trust", {"peer": STRANGER})["detail"]
    assert desk.refused("/api/mesh/peers/ban", {"peer": "nobody"})[:2] == (404, "no_such_peer")
    assert attic.refused("/api/mesh/peers/ban", {"peer": "desk"})[:2] == (403, "not_an_issuer")


def test_leave(consoles: tuple[Console, Console], token: str) -> None:
    desk, attic = consoles
    assert "This node left" in attic.post("/api/mesh/leave")["detail"]
    assert attic.get("/api/mesh/whoami")["grant"] is None
    wait_for(lambda: len(alive(desk.node)) == 1, 20, "the other node to hear the goodbye")
