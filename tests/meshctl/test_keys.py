"""services.meshctl.keys: what taking the last key back means."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.meshctl.conftest import Meshctl


@pytest.mark.parametrize(
    ("api", "words"),
    [
        ("", "requests need none now"),
        ('host = "0.0.0.0"\n', "no request is served until there is a new one"),
        ('host = "0.0.0.0"\nallow_public_without_keys = true\n', "requests need none now"),
    ],
    ids=["loopback", "public", "public-on-purpose"],
)
def test_revoking_the_last_key_says_who_gets_in_now(meshctl: Meshctl, mesh_home: Path, api: str, words: str) -> None:
    (mesh_home / "mesh.toml").write_text("[api]\n" + api)
    assert meshctl("keys", "create", "--name", "laptop").status == 0
    ran = meshctl("keys", "revoke", "laptop")
    assert ran.status == 0
    assert words in ran.err
