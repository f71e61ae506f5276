"""The node's Ed25519 key on disk: ``state/node_key.pem``, 0600, created once, locked while in use."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from shared.errors import AlreadyRunning, StateError
from shared.ids import PeerId
from shared.peer_ids import peer_id_of

KEY_FILE = "node_key.pem"


class NodeKey:
    """Signs with the node's key. Holds an exclusive lock on the file as long as it lives.

    Raises: StateError for an unreadable or foreign file, AlreadyRunning when another process uses the key.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / KEY_FILE
        try:
            if not path.exists():
                _create(path)
            self._file = open(path, "rb")  # noqa: SIM115 (the lock lives as long as the file is open)
            if path.stat().st_mode & 0o077:
                path.chmod(0o600)
        except OSError as error:
            raise StateError(f"cannot use the node key {path}: {error.strerror or error}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise AlreadyRunning(
                f"the node key {path} is in use by another process; two nodes must not share one key"
            ) from None
        try:
            key = load_pem_private_key(self._file.read(), password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise StateError(
                f"{path} is not a private key ({error}); restore it from a backup, "
                "or move it away and the node gets a new identity"
            ) from error
        if not isinstance(key, Ed25519PrivateKey):
            raise StateError(f"{path} is not an Ed25519 key; restore it from a backup or move it away")
        self._key = key
        self.peer_id: PeerId = peer_id_of(key.public_key().public_bytes_raw())

    @property
    def private(self) -> Ed25519PrivateKey:
        """For handshakes and certificate requests. It never leaves this process."""
        return self._key

    def sign(self, payload: bytes) -> bytes:
        """64-byte Ed25519 signature."""
        return self._key.sign(payload)


def _create(path: Path) -> None:
    """Write a new key beside its final name first: a crash never leaves half a key."""
    pem = Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(pem)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
