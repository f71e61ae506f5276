"""What launcherd says of this node alone: slots, files, registry, downloads, limits, device. Mirrored, not asked for.

:class:`MeshView` answers what a model name means in the whole mesh; this answers what is on this machine, with
launcherd's own names. Ages in messages become Unix times when they arrive, so that a later answer is still right.

Source: docs/spec/lemonade.md.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from shared.codec import Message
from shared.ids import ModelName, SlotId
from shared.messages.downloads import DownloadChanged, RegisteredModel, RegistryChanged
from shared.messages.models import (
    MODEL_TYPES,
    DeviceChanged,
    InventoryChanged,
    LimitsChanged,
    LocalModel,
    ModelType,
    SlotChanged,
    SlotState,
)

LOADED: tuple[SlotState, ...] = ("ready", "draining")
"""An engine runs and answers, if only what it has begun."""
DOWNLOADS_KEPT = 64
"""Finished downloads are forgotten, oldest first, beyond so many."""
_ENDED = ("done", "failed", "cancelled")


@dataclass(frozen=True, slots=True)
class SeenSlot:
    """A slot with its ages as Unix times, in seconds."""

    slot: SlotChanged
    since: float
    """When it came into its state."""
    last_use: float


def _same(name: ModelName) -> ModelName:
    return name


class LocalView:
    """``replace`` on launcherd's snapshot, ``apply`` on each publication. ``now`` is Unix time.

    Everything is kept by launcherd's names. ``mesh_name`` and ``local_name`` translate where two nodes have different
    files of one name: clients see and send the mesh's, by which inference goes.
    """

    def __init__(
        self,
        mesh_name: Callable[[ModelName], ModelName] = _same,
        local_name: Callable[[ModelName], ModelName] = _same,
    ) -> None:
        self.mesh_name = mesh_name
        self.local_name = local_name
        self.slots: dict[SlotId, SeenSlot] = {}
        self.inventory: dict[ModelName, LocalModel] = {}
        self.registry: dict[ModelName, RegisteredModel] = {}
        self.downloads: dict[ModelName, DownloadChanged] = {}
        self.device: DeviceChanged | None = None
        self.limits: dict[ModelType, int] = {}
        """Empty before launcherd has said them."""
        self.settled = False
        """Whether the files on this node's disk are known."""

    def replace(self, messages: Iterable[Message], *, now: float) -> None:
        """A snapshot: all that launcherd says. The newest words on ended downloads stay: no snapshot repeats them."""
        self.slots.clear()
        self.inventory = {}
        self.registry = {}
        self.settled = False
        self.downloads = {name: item for name, item in self.downloads.items() if item.state in _ENDED}
        for message in messages:
            self.apply(message, now=now)

    def apply(self, message: Message, *, now: float) -> None:
        """One publication. Messages of other kinds are ignored."""
        match message:
            case SlotChanged(slot_id=slot_id, state="unloaded"):
                self.slots.pop(slot_id, None)
            case SlotChanged(slot_id=slot_id):
                since, last_use = now - message.state_age_seconds, now - message.last_use_age_seconds
                self.slots[slot_id] = SeenSlot(message, since, last_use)
            case InventoryChanged(models=models, scanning=scanning):
                self.inventory = {model.name: model for model in models}
                self.settled = not scanning
            case RegistryChanged(models=registered):
                self.registry = {model.name: model for model in registered}
            case DownloadChanged(model=model):
                self.downloads.pop(model, None)
                self.downloads[model] = message
                self._forget_downloads()
            case DeviceChanged():
                self.device = message
            case LimitsChanged(max_loaded_models=limits):
                self.limits = dict(zip(MODEL_TYPES, limits, strict=False))
            case _:
                return

    def _forget_downloads(self) -> None:
        ended = [name for name, item in self.downloads.items() if item.state in _ENDED]
        for name in ended[: max(0, len(self.downloads) - DOWNLOADS_KEPT)]:
            del self.downloads[name]

    # -- queries ------------------------------------------------------------------------------------------

    def loaded(self) -> list[SeenSlot]:
        """Slots whose engine answers, the newest load first."""
        found = [seen for seen in self.slots.values() if seen.slot.state in LOADED]
        return sorted(found, key=lambda seen: (-seen.since, seen.slot.model))

    def starting(self) -> list[SeenSlot]:
        """Slots that wait or load, by name."""
        found = [seen for seen in self.slots.values() if seen.slot.state in ("queued", "loading", "restarting")]
        return sorted(found, key=lambda seen: seen.slot.model)

    def on_disk(self, name: str) -> LocalModel | None:
        """The model of that name on this node's disk: the mesh's name, launcherd's, or that of its file."""
        for tried in (self.local_name(ModelName(name)), ModelName(name), ModelName(name.removesuffix(".gguf"))):
            found = self.inventory.get(tried)
            if found is not None:
                return found
        return None

    def nearest(self, name: str) -> tuple[str, ...]:
        """Names like it, of the files and the registry."""
        known = sorted({*map(self.mesh_name, self.inventory), *self.registry})
        return tuple(difflib.get_close_matches(name[:64], known, n=3, cutoff=0.4))

    def download_of(self, *names: str) -> DownloadChanged | None:
        """The newest word on a download that goes by one of these names, the first first: the model's, or where it
        comes from, as a repository also without the quantisation that was chosen there."""
        for name in filter(None, names):
            for download in reversed(self.downloads.values()):
                repository = download.checkpoint.rpartition(":")[0]
                if name in (download.model, download.checkpoint, repository):
                    return download
        return None


def is_ended(download: DownloadChanged) -> bool:
    """Whether nothing more will come of it."""
    return download.state in _ENDED
