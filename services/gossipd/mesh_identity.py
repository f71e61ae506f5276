"""Which mesh this node belongs to, and which life of the node this is.

An unnamed mesh is a random UUID, made once by the first configured start and kept; a named one is derived from its
name and root key. The incarnation rises at each start of gossipd, so that a node's newest word always wins.
Source: docs/spec/identity.md.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import asdict, dataclass, replace

from shared.errors import StateError
from shared.ids import MeshId, PeerId

NO_MESH = MeshId("")
NO_PEER = PeerId("")


@dataclass(frozen=True, slots=True)
class MeshIdentity:
    """Persisted as ``state/mesh.json``. ``mesh_id`` is empty while the node is idle and in no mesh."""

    mesh_id: MeshId = NO_MESH
    mesh_name: str = ""
    incarnation: int = 0
    peer_id: PeerId = NO_PEER
    """Last known own id: gossipd works before tunneld does."""
    draining: bool = False
    """Whether its owner took this node out of service."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str, source: str) -> MeshIdentity:
        """Raises: StateError; the file is never silently replaced, a node would lose its mesh."""
        try:
            value = json.loads(text)
            identity = cls(
                mesh_id=MeshId(str(value["mesh_id"])),
                mesh_name=str(value["mesh_name"]),
                incarnation=int(value["incarnation"]),
                peer_id=PeerId(str(value["peer_id"])),
                draining=value.get("draining", False) is True,
            )
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise StateError(
                f"{source} is damaged ({error}); restore it from a backup, or move it away to start in a new mesh"
            ) from error
        return identity


def next_life(stored: MeshIdentity, *, configured: bool, random_bytes: bytes) -> MeshIdentity:
    """The identity of this start: incarnation + 1, and a new unnamed mesh if a configured node has none.

    ``random_bytes``: 16 bytes, used only for a new mesh id.
    """
    identity = replace(stored, incarnation=stored.incarnation + 1)
    if configured and not identity.mesh_id:
        identity = replace(identity, mesh_id=MeshId(str(uuid.UUID(bytes=random_bytes, version=4))))
    return identity
