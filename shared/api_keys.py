"""API keys: made once, shown once, kept only as a hash. Pure; ``shared/io/keys_file.py`` keeps them on disk.

A key is ``mesh-<id>-<secret>``. The id (8 hex digits) is public: it names the key in lists and logs. The secret is
256 random bits, so a plain SHA-256 is enough at rest: slow password hashes protect guessable secrets, and nobody
guesses 256 bits. That keeps the check at about a microsecond per request.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shared.errors import MeshError, StateError

ID_BYTES = 4
SECRET_BYTES = 32
KEY_BYTES = ID_BYTES + SECRET_BYTES
"""Random bytes that :func:`new_key` needs."""
PREFIX = "mesh"
NAME_LIMIT = 64


class KeyNotFound(MeshError):
    """No API key has this id or name."""

    code = "key_not_found"


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """One key as it is kept: everything but its secret."""

    id: str
    name: str
    """What its owner calls it; for people only."""
    sha256: str
    """Of the whole key text, hex."""
    created_unix_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRing:
    """All keys of a node. ``problem`` says why they could not be read: then every key is refused, none waved in."""

    keys: tuple[ApiKey, ...] = ()
    problem: str = ""

    @property
    def required(self) -> bool:
        """Whether a request must carry a key."""
        return bool(self.keys) or bool(self.problem)


def new_key(name: str, *, random: bytes, now_unix_seconds: float) -> tuple[ApiKey, str]:
    """A key and its full text, which is shown once and never again. ``random``: ``KEY_BYTES`` random bytes.

    Raises: StateError for a name that would garble a list.
    """
    if len(random) != KEY_BYTES:
        raise ValueError(f"a key is made from {KEY_BYTES} random bytes, not {len(random)}")
    if len(name) > NAME_LIMIT or not name.isprintable():
        raise StateError(f"a key's name is at most {NAME_LIMIT} printable characters; choose a shorter, plain one")
    key_id = random[:ID_BYTES].hex()
    text = f"{PREFIX}-{key_id}-{random[ID_BYTES:].hex()}"
    return ApiKey(id=key_id, name=name, sha256=_digest(text), created_unix_seconds=now_unix_seconds), text


def add_key(ring: KeyRing, key: ApiKey) -> KeyRing:
    """``ring`` with one more key. Raises: StateError when the id is taken (draw again)."""
    if any(other.id == key.id for other in ring.keys):
        raise StateError(f"key id {key.id} exists already; create the key again")
    return KeyRing(keys=(*ring.keys, key))


def verify_key(ring: KeyRing, presented: str) -> ApiKey | None:
    """The key that ``presented`` is, or None. Compares digests in constant time."""
    digest = _digest(presented)
    found = None
    for key in ring.keys:
        if hmac.compare_digest(key.sha256, digest):
            found = key
    return found


def revoke_key(ring: KeyRing, id_or_name: str) -> tuple[KeyRing, ApiKey]:
    """``ring`` without that key, and the key. Raises: KeyNotFound, also for a name that several keys share."""
    matches = [key for key in ring.keys if key.id == id_or_name] or [
        key for key in ring.keys if key.name == id_or_name and key.name
    ]
    if len(matches) > 1:
        ids = ", ".join(key.id for key in matches)
        raise KeyNotFound(f"{len(matches)} keys are named {id_or_name!r}; give one of their ids: {ids}")
    if not matches:
        raise KeyNotFound(f"no API key has the id or name {id_or_name!r}; 'meshctl keys list' shows all")
    return KeyRing(keys=tuple(key for key in ring.keys if key is not matches[0])), matches[0]


def to_document(ring: KeyRing) -> dict[str, Any]:
    """What the keys file holds, as JSON types."""
    return {
        "version": 1,
        "keys": [
            {"id": key.id, "name": key.name, "sha256": key.sha256, "created_unix_seconds": key.created_unix_seconds}
            for key in ring.keys
        ],
    }


def from_document(document: Any) -> KeyRing:
    """The ring of a keys file. Raises: StateError, saying what is wrong with it."""
    if not isinstance(document, Mapping) or not isinstance(document.get("keys"), list):
        raise StateError("it holds no list of keys")
    keys = []
    for entry in document["keys"]:
        if not isinstance(entry, Mapping):
            raise StateError("an entry is not an object")
        key_id, name, digest = entry.get("id"), entry.get("name", ""), entry.get("sha256")
        created = entry.get("created_unix_seconds", 0.0)
        if not isinstance(key_id, str) or not isinstance(name, str) or not isinstance(created, int | float):
            raise StateError("an entry lacks its id")
        if not isinstance(digest, str) or len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
            raise StateError(f"key {key_id[:16]} has no valid hash")
        keys.append(ApiKey(id=key_id, name=name, sha256=digest, created_unix_seconds=float(created)))
    return KeyRing(keys=tuple(keys))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
