"""gossipd's two files: ``state/mesh.json`` (identity) and ``state/demand.json`` (own counters)."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from services.gossipd.mesh_identity import MeshIdentity
from shared.errors import StateError
from shared.ids import ModelName, SlotId
from shared.io import log


class StateFiles:
    """Reads and atomically replaces the files. ``folder`` exists."""

    def __init__(self, folder: Path) -> None:
        self._identity = folder / "mesh.json"
        self._demand = folder / "demand.json"

    def load_identity(self) -> MeshIdentity:
        """The stored identity, or an empty one on the first start. Raises: StateError."""
        try:
            text = self._identity.read_text(encoding="utf-8")
        except FileNotFoundError:
            return MeshIdentity()
        except (OSError, UnicodeDecodeError) as error:
            raise StateError(f"cannot read {self._identity}: {error}; fix its permissions") from error
        return MeshIdentity.from_json(text, str(self._identity))

    def save_identity(self, identity: MeshIdentity) -> None:
        """Raises: StateError: a node that can't remember its incarnation must not announce itself."""
        try:
            replace_file(self._identity, identity.to_json())
        except OSError as error:
            raise StateError(f"cannot write {self._identity}: {error.strerror or error}; free some space") from error

    def load_demand(self) -> tuple[dict[ModelName, int], dict[SlotId, int]]:
        """Counters of before; a missing or damaged file costs only statistics."""
        try:
            value = json.loads(self._demand.read_text(encoding="utf-8"))
            totals = {ModelName(str(name)): int(count) for name, count in value["totals"].items()}
            slots = {SlotId(str(name)): int(count) for name, count in value["slots"].items()}
        except FileNotFoundError:
            return {}, {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            log.warning("demand_lost", path=self._demand, reason=error)
            return {}, {}
        return totals, slots

    def save_demand(self, totals: dict[ModelName, int], slots: dict[SlotId, int]) -> None:
        """A full disk costs only statistics: it is logged."""
        try:
            replace_file(self._demand, json.dumps({"totals": totals, "slots": slots}))
        except OSError as error:
            log.warning("demand_not_saved", path=self._demand, reason=error.strerror or error)


def replace_file(path: Path, text: str) -> None:
    """Write whole or not at all, synced. Raises: OSError."""
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
