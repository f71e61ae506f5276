"""The two files of trust: ``state/authority.json`` (credentials, 0600) and ``state/invites.json`` (decisions, 0600).

The credentials are one file that is replaced whole: at every moment it holds one mesh's root, keys and certificates.
The decisions name the mesh they are of; after a crash between the two files those of another mesh are ignored.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from services.gossipd.credentials import Credentials
from services.gossipd.trust import Trust
from shared.errors import StateError

CREDENTIALS_FILE = "authority.json"
DECISIONS_FILE = "invites.json"


class AuthorityFiles:
    """Reads and atomically replaces the files. ``folder`` exists."""

    def __init__(self, folder: Path) -> None:
        self.credentials_path = folder / CREDENTIALS_FILE
        self.decisions_path = folder / DECISIONS_FILE

    def load(self) -> Trust:
        """What was kept; empty on the first start. Raises: StateError for a damaged file: neither is ever replaced
        silently, a node would lose its mesh or an issuer its bans."""
        for left in self.credentials_path.parent.glob("*.tmp"):
            if left.name.startswith((self.credentials_path.stem, self.decisions_path.stem)):
                with contextlib.suppress(OSError):
                    left.unlink()
        text = _read(self.credentials_path)
        credentials = Credentials.from_json(text, str(self.credentials_path)) if text else Credentials()
        return Trust(credentials, _read(self.decisions_path), str(self.decisions_path))

    def save_credentials(self, credentials: Credentials) -> None:
        """Raises: StateError: whoever cannot keep a key must not use it."""
        _replace(self.credentials_path, credentials.to_json())

    def save_decisions(self, trust: Trust) -> None:
        """Raises: StateError: a ban or a used invite that is forgotten would count no more."""
        _replace(self.decisions_path, trust.to_json())


def _read(path: Path) -> str:
    """Empty when there is no such file. Raises: StateError."""
    try:
        if path.stat().st_mode & 0o077:
            path.chmod(0o600)
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not text"
        raise StateError(f"cannot read {path}: {why}; fix its permissions or restore it from a backup") from None
    if not text:
        raise StateError(f"{path} is empty; restore it from a backup, or move it away")
    return text


def _replace(path: Path, text: str) -> None:
    """Write beside it, force it to the disk, then take its place. Raises: StateError."""
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise StateError(f"cannot write {path}: {error.strerror or error}; free some space there") from error
