"""The verbs of a mesh against one real node: what they print, how they end, that a token shows only where it should."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.processes.node import Node, private_home

STRANGER = "12D3KooWM6CgA9iBFZmcYAHA6A2qvbAxqfkmrYiRQuz3XEsk4Ksv"


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with private_home() as home:
        (home / "mesh.toml").write_text('[node]\nname = "desk"\n')
        node = Node(home)
        try:
            yield node
        except BaseException:
            print(node.logs())
            raise
        finally:
            node.down()


def test_invite_starts_the_node_and_prints_nothing_but_the_token(node: Node) -> None:
    made = node.meshctl("invite", "--uses", "3", "--expires", "2h")
    (token,) = made.stdout.splitlines()
    assert token.startswith("meshd1.")
    assert "meshctl join TOKEN" in made.stderr
    assert "3 times" in made.stderr
    (listed,) = json.loads(node.meshctl("invite", "list", "--json").stdout)
    assert (listed["uses"], listed["used"], listed["revoked"], listed["grant"]) == (3, 0, False, "member")
    assert listed["invite_id"] in node.meshctl("invite", "list").stdout
    assert "is revoked" in node.meshctl("invite", "revoke", listed["invite_id"]).stdout
    assert "revoked" in node.meshctl("invite", "list").stdout
    status = node.meshctl("status", "--json").stdout + node.meshctl("story", "gossipd").stdout
    assert token[20:60] not in status + node.logs()
    assert not [path for path in node.home.rglob("*.json") if token[20:60] in path.read_text(errors="replace")]


def test_a_token_of_this_mesh_is_for_another_machine(node: Node) -> None:
    token = node.meshctl("invite", "--json").stdout
    refused = node.meshctl("join", json.loads(token)["token"], check=False)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "another machine" in refused.stderr
    assert json.loads(token)["token"][20:60] not in refused.stderr


@pytest.mark.parametrize(
    ("token", "status", "words"),
    [("nonsense", 1, "no meshd token"), ("meshd1.AAAA", 1, "incomplete or mistyped"), ("@/nowhere", 1, "cannot read")],
)
def test_what_is_no_token_is_said_so(node: Node, token: str, status: int, words: str) -> None:
    refused = node.meshctl("join", token, check=False)
    assert (refused.returncode, words in refused.stderr) == (status, True), refused.stderr
    as_json = node.meshctl("join", token, "--json", check=False)
    assert words in json.loads(as_json.stdout)["error"]["detail"]


def test_who_and_where_it_is(node: Node) -> None:
    said = json.loads(node.meshctl("whoami", "--json").stdout)
    assert (said["name"], said["grant"]) == ("desk", "issuer")
    shown = node.meshctl("whoami").stdout
    assert said["peer_id"] in shown
    assert "more days" in shown


def test_a_mesh_gets_a_name_once(node: Node) -> None:
    assert "first of mesh home" in node.meshctl("init", "--name", "home").stdout
    assert "already in mesh home" in node.meshctl("init", "--name", "home").stdout
    assert json.loads(node.meshctl("whoami", "--json").stdout)["mesh_name"] == "home"


def test_bans_and_trust(node: Node) -> None:
    assert "desk" in node.meshctl("peers").stdout
    assert STRANGER in node.meshctl("peers", "ban", STRANGER).stdout
    assert "may take part again" in node.meshctl("peers", "ban", "--lift", STRANGER[-6:]).stdout
    assert "trusted like a member" in node.meshctl("peers", "trust", STRANGER).stdout
    for words, code in ((("ban", "nobody"), "no_such_peer"), (("ban", "desk"), "itself")):
        refused = node.meshctl("peers", *words, "--json", check=False)
        assert (refused.returncode, json.loads(refused.stdout)["error"]["code"]) == (1, code)


def test_drain_and_leave(node: Node) -> None:
    assert "drain --off" in node.meshctl("drain").stdout
    (peer,) = json.loads(node.meshctl("peers", "--json").stdout)
    assert peer["state"] in ("draining", "alive")
    assert "again" in node.meshctl("drain", "--off").stdout
    assert "left home" in node.meshctl("leave").stdout
    who = json.loads(node.meshctl("whoami", "--json").stdout)
    assert (who["mesh_name"], who["grant"], who["root_fingerprint"]) == ("", None, "")
    assert "nobody to leave" in node.meshctl("leave").stdout


def test_a_join_that_failed_stays_visible_in_the_status(node: Node) -> None:
    with private_home() as home:
        other = Node(home)
        try:
            token = other.meshctl("invite").stdout.strip()
            other.down()
            refused = node.meshctl("join", token, check=False)
            assert (refused.returncode, "connect: failed" in refused.stderr) == (1, True), refused.stderr
            shown = node.meshctl("status").stdout
            assert "joining" in shown
            assert [step["state"] for step in node.status()["join"]][-1] == "failed"
            assert token[20:60] not in shown
        finally:
            other.down()
