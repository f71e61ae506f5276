"""services.meshctl.up: the first line must work when it is pasted."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from services.meshctl.node import Node
from services.meshctl.up import first_lines
from shared.io.keys_file import create_key, revoke_key
from shared.node_status import Addresses
from shared.status_view import build_status


def test_the_curl_has_a_key_only_while_one_is_asked_for(mesh_home: Path) -> None:
    node = Node({"MESH_HOME": str(mesh_home)})
    view = dataclasses.replace(build_status({}, {}, ()), addresses=Addresses(api="http://127.0.0.1:9"))
    assert "Authorization" not in first_lines(node, view)[0]
    key, _secret = create_key(node.paths.keys_file, "laptop")
    assert "Authorization" in first_lines(node, view)[0]
    revoke_key(node.paths.keys_file, key.id)
    assert "Authorization" not in first_lines(node, view)[0], "the file stays, without a key in it"
