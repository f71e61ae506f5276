"""The API keys of a node on disk: JSON, 0600, replaced atomically. proxyd reads it, ``meshctl keys`` writes it."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from shared import api_keys
from shared.api_keys import ApiKey, KeyRing
from shared.errors import StateError

RECHECK_SECONDS = 1.0
"""How long a created or revoked key may take to count. A check costs one stat()."""


def load_keys(path: Path) -> KeyRing:
    """The keys in ``path``; none when there is no file. Raises: StateError."""
    try:
        return api_keys.from_document(json.loads(path.read_bytes()))
    except FileNotFoundError:
        return KeyRing()
    except (OSError, ValueError, StateError) as error:
        raise StateError(
            f"cannot read the API keys in {path}: {error}. Fix its permissions, or delete it and create keys again"
        ) from error


def create_key(path: Path, name: str) -> tuple[ApiKey, str]:
    """Make a key and keep its hash. The text is returned once. Raises: StateError."""
    key, text = api_keys.new_key(
        name, random=secrets.token_bytes(api_keys.KEY_BYTES), now_unix_seconds=round(time.time(), 3)
    )
    _update(path, lambda ring: api_keys.add_key(ring, key))
    return key, text


def revoke_key(path: Path, id_or_name: str) -> ApiKey:
    """Forget a key. Raises: KeyNotFound, StateError."""
    revoked: list[ApiKey] = []

    def change(ring: KeyRing) -> KeyRing:
        smaller, key = api_keys.revoke_key(ring, id_or_name)
        revoked.append(key)
        return smaller

    _update(path, change)
    return revoked[0]


def write_private(path: Path, data: bytes) -> None:
    """Replace ``path`` by a 0600 file with ``data``, all or nothing. Raises: StateError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise _cannot_write(path, error) from error


def console_token(path: Path) -> str:
    """The node's own token, made on first use. Whoever can read the file may change things. Raises: StateError."""
    for _ in range(2):
        try:
            token = path.read_text(encoding="ascii").strip()
            if token:
                return token
        except FileNotFoundError:
            pass
        except (OSError, UnicodeDecodeError) as error:
            raise StateError(f"cannot read the token in {path}: {error}; delete the file to get a new one") from error
        write_private(path, secrets.token_hex(32).encode() + b"\n")
    raise StateError(f"{path} stays empty; is the disk full?")


def _cannot_write(path: Path, error: OSError) -> StateError:
    return StateError(f"cannot write {path}: {error.strerror or error}; free some space or fix its permissions")


def _update(path: Path, change: Callable[[KeyRing], KeyRing]) -> None:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _cannot_write(path, error) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ring = change(load_keys(path))
        write_private(path, json.dumps(api_keys.to_document(ring), indent=1).encode() + b"\n")
    finally:
        os.close(lock)


class KeysFile:
    """The current keys for a server: read again when the file changed, looked at once a second at most.

    A file that cannot be read refuses every key (``KeyRing.problem``) instead of opening the door.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._checked_at = float("-inf")
        self._signature: tuple[int, int, int] | None = None
        self._ring = KeyRing()

    def ring(self, now: float) -> KeyRing:
        """``now`` in monotonic seconds."""
        if now - self._checked_at >= RECHECK_SECONDS:
            self._checked_at = now
            self._look()
        return self._ring

    def _look(self) -> None:
        try:
            stat = os.stat(self._path)
            signature = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
        except FileNotFoundError:
            self._signature, self._ring = None, KeyRing()
            return
        except OSError as error:
            self._signature, self._ring = None, KeyRing(problem=f"cannot read {self._path}: {error.strerror or error}")
            return
        if signature == self._signature:
            return
        try:
            self._ring = load_keys(self._path)
            self._signature = signature
        except StateError as error:
            self._signature, self._ring = None, KeyRing(problem=error.detail)
