"""docs/spec/identity.md, rules 1 to 3."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, NoEncryption, PrivateFormat

from services.tunneld.io.node_key import KEY_FILE, NodeKey
from shared.errors import AlreadyRunning, StateError
from shared.paths import REPOSITORY
from shared.peer_ids import public_key_of


def test_a_new_key_is_private_and_kept(tmp_path: Path) -> None:
    key = NodeKey(tmp_path)
    path = tmp_path / KEY_FILE
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [item.name for item in tmp_path.iterdir()] == [KEY_FILE]
    first = key.peer_id
    del key
    assert NodeKey(tmp_path).peer_id == first, "the same id after a restart"
    assert NodeKey(elsewhere(tmp_path)).peer_id != first


def elsewhere(tmp_path: Path) -> Path:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    return folder


def test_the_id_is_the_public_key_that_verifies_what_it_signs(tmp_path: Path) -> None:
    key = NodeKey(tmp_path)
    Ed25519PublicKey.from_public_bytes(public_key_of(key.peer_id)).verify(key.sign(b"payload"), b"payload")


def test_a_key_that_others_could_read_is_closed(tmp_path: Path) -> None:
    del_me = NodeKey(tmp_path)
    del del_me
    (tmp_path / KEY_FILE).chmod(0o644)
    NodeKey(tmp_path)
    assert stat.S_IMODE((tmp_path / KEY_FILE).stat().st_mode) == 0o600


def test_a_second_process_with_the_same_key_refuses_to_start(tmp_path: Path) -> None:
    """TRAPS 7. Two processes never share one node key: the second refuses to start."""
    key = NodeKey(tmp_path)
    script = "import sys, pathlib; from services.tunneld.io.node_key import NodeKey; NodeKey(pathlib.Path(sys.argv[1]))"
    command = [sys.executable, "-c", script, str(tmp_path)]
    second = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=30, check=False)
    assert second.returncode != 0
    assert "is in use by another process; two nodes must not share one key" in second.stderr
    with pytest.raises(AlreadyRunning):
        NodeKey(tmp_path)
    assert key.sign(b"x"), "the first is unharmed"
    del key
    assert subprocess.run(command, cwd=REPOSITORY, timeout=30, check=False).returncode == 0, "and gone it is free"


def pem(key: Ed25519PrivateKey, encryption: object = NoEncryption()) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption)  # type: ignore[arg-type]


GOOD = pem(Ed25519PrivateKey.generate())


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 119,
        GOOD[:60],
        GOOD.replace(b"PRIVATE", b"PUBLIC"),
        pem(Ed25519PrivateKey.generate(), BestAvailableEncryption(b"secret")),
        generate_private_key(SECP256R1()).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
    ],
    ids=["empty", "zeros", "cut off", "no private key", "encrypted", "another kind"],
)
def test_a_damaged_key_is_refused_and_never_replaced(tmp_path: Path, content: bytes) -> None:
    """A damaged key file is never replaced silently: the node would become somebody else."""
    path = tmp_path / KEY_FILE
    path.write_bytes(content)
    with pytest.raises(StateError, match="restore it from a backup"):
        NodeKey(tmp_path)
    assert path.read_bytes() == content


def test_an_unusable_place_is_a_state_error(tmp_path: Path) -> None:
    (tmp_path / KEY_FILE).mkdir()
    with pytest.raises(StateError, match="cannot use the node key"):
        NodeKey(tmp_path)
    with pytest.raises(StateError, match="cannot use the node key"):
        NodeKey(tmp_path / "gone")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is a Linux device")
def test_a_full_disk_leaves_no_half_key(tmp_path: Path) -> None:
    (tmp_path / f"node_key.{os.getpid()}.tmp").symlink_to("/dev/full")
    with pytest.raises(StateError, match="No space left on device"):
        NodeKey(tmp_path)
    assert list(tmp_path.iterdir()) == []
