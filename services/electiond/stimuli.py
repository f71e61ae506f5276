"""What the machine of electiond is told, and what it has done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shared.ids import ModelName, PeerId
from shared.messages.daemon import Refused
from shared.messages.mesh import MemberChanged
from shared.messages.models import (
    AssignmentsChanged,
    CatalogChanged,
    DeviceChanged,
    InventoryChanged,
    ModelPlaced,
    ModelType,
    RoutesChanged,
    SlotChanged,
)
from shared.messages.trust import PeersWanted


@dataclass(frozen=True, slots=True)
class ConfigApplied:
    configured: bool
    named: tuple[ModelName, ...]
    slot_limits: Mapping[ModelType, int]
    """Models of each type this node may load at once; -1 without limit, 1 for a type that is not in it."""
    client: bool = False
    """It only consumes."""


@dataclass(frozen=True, slots=True)
class LauncherReplaced:
    """Everything launcherd publishes, from a snapshot."""

    inventory: InventoryChanged | None
    device: DeviceChanged | None
    slots: tuple[SlotChanged, ...]


@dataclass(frozen=True, slots=True)
class MembersReplaced:
    """The whole membership, from a snapshot of gossipd."""

    members: tuple[MemberChanged, ...]


@dataclass(frozen=True, slots=True)
class PlaceRequested:
    """``PlaceModel`` came in; answer it with :class:`Reply` under ``token``."""

    token: int
    model: ModelName
    avoid: tuple[PeerId, ...] = ()


Stimulus = (
    ConfigApplied
    | LauncherReplaced
    | MembersReplaced
    | InventoryChanged
    | DeviceChanged
    | SlotChanged
    | MemberChanged
    | PeersWanted
    | PlaceRequested
)


@dataclass(frozen=True, slots=True)
class Publish:
    message: CatalogChanged | AssignmentsChanged | RoutesChanged


@dataclass(frozen=True, slots=True)
class Reply:
    token: int
    message: ModelPlaced | Refused


@dataclass(frozen=True, slots=True)
class Memory:
    """What a restart of electiond alone must not forget. Also the effect that says: keep this."""

    declined: tuple[tuple[ModelName, str], ...] = ()
    held_by_owner: bool = False
    named: tuple[ModelName, ...] = ()
    """What the configuration named: only what it names anew is no longer declined."""


NO_MEMORY = Memory()
Effect = Publish | Reply | Memory
