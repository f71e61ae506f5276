"""The keys file: private, atomic, picked up while running, and never open by accident."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from shared.api_keys import KeyNotFound, verify_key
from shared.errors import StateError
from shared.io.keys_file import KeysFile, console_token, create_key, load_keys, revoke_key


def test_keys_are_created_listed_and_revoked_on_disk(tmp_path: Path) -> None:
    path = tmp_path / "home" / "api_keys.json"
    assert load_keys(path).keys == ()
    key, text = create_key(path, "laptop")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert text not in path.read_text()
    assert verify_key(load_keys(path), text) == key
    assert revoke_key(path, key.id) == key
    assert load_keys(path).keys == ()
    with pytest.raises(KeyNotFound):
        revoke_key(path, key.id)
    assert {name for name in os.listdir(path.parent) if not name.endswith(".lock")} == {path.name}


def test_two_writers_lose_no_key(tmp_path: Path) -> None:
    path = tmp_path / "api_keys.json"
    threads = [threading.Thread(target=create_key, args=(path, f"k{number}")) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {key.name for key in load_keys(path).keys} == {f"k{number}" for number in range(8)}


def test_a_running_server_sees_changes_within_a_second(tmp_path: Path) -> None:
    path = tmp_path / "api_keys.json"
    file = KeysFile(path)
    assert not file.ring(0.0).required
    key, text = create_key(path, "new")
    assert not file.ring(0.9).required, "looked at the disk more than once a second"
    assert verify_key(file.ring(1.0), text) == key
    revoke_key(path, key.id)
    assert verify_key(file.ring(2.0), text) is None


def test_an_unreadable_file_refuses_every_key_and_heals(tmp_path: Path) -> None:
    path = tmp_path / "api_keys.json"
    _, text = create_key(path, "a")
    good = path.read_bytes()
    file = KeysFile(path)
    assert verify_key(file.ring(0.0), text) is not None
    path.write_bytes(good[:-20])
    ring = file.ring(1.0)
    assert ring.required
    assert verify_key(ring, text) is None
    assert "delete it and create keys again" in ring.problem
    with pytest.raises(StateError, match="cannot read the API keys"):
        create_key(path, "b")
    path.write_bytes(good)
    assert verify_key(file.ring(2.0), text) is not None


def test_the_console_token_is_private_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "console_token"
    token = console_token(path)
    assert len(token) == 64
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert console_token(path) == token


def test_a_full_disk_is_a_clear_error(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    with pytest.raises(StateError, match=r"cannot write|cannot read"):
        create_key(blocker / "api_keys.json", "a")
