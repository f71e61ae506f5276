"""``pin`` and ``unpin`` on a real node."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.processes.node import Node, private_home

GUIDE = "meshd-guide"


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with private_home() as home:
        node = Node(home)
        try:
            node.meshctl("up")
            yield node
        except BaseException:
            print(node.logs())
            raise
        finally:
            node.down()


def test_a_pin_is_shown_everywhere_and_outlives_launcherd(node: Node) -> None:
    assert "is pinned" in node.meshctl("pin", GUIDE).stdout
    node.meshctl("load", GUIDE)
    node.meshctl("restart", "launcherd")
    row = next(model for model in json.loads(node.meshctl("ps", "--json").stdout) if model["name"] == GUIDE)
    assert row["here"]["pinned"] is True
    assert "pinned" in node.meshctl("ps").stdout
    assert "It is pinned" in node.meshctl("why", GUIDE).stdout
    assert json.loads(node.meshctl("unpin", GUIDE, "--json").stdout)["pinned"] is False
    assert "pinned" not in node.meshctl("ps").stdout


def test_a_model_that_is_not_there_cannot_be_pinned(node: Node) -> None:
    refused = node.meshctl("pin", "no-such-model", check=False)
    assert (refused.returncode, "no-such-model" in refused.stderr) == (1, True)
