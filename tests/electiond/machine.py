"""Building blocks for tests of electiond's machine."""

from __future__ import annotations

from typing import TypeVar

from services.electiond.elections import Elections
from services.electiond.stimuli import (
    NO_MEMORY,
    ConfigApplied,
    Effect,
    LauncherReplaced,
    MembersReplaced,
    Memory,
    Publish,
    Stimulus,
)
from shared.io.drive import Tick
from shared.messages.models import (
    MODEL_TYPES,
    SlotChanged,
)
from tests.electiond.nodes import GB, device, inventory, local, member, name

T = TypeVar("T")


def config(*named: str, configured: bool = True, **limits: int) -> ConfigApplied:
    return ConfigApplied(
        configured=configured,
        named=tuple(map(name, named)),
        slot_limits={**dict.fromkeys(MODEL_TYPES, 1), **limits},  # type: ignore[dict-item]
    )


def launcher(
    *models: str, slots: tuple[SlotChanged, ...] = (), vram_bytes: int = 8 * GB, **sizes: int
) -> LauncherReplaced:
    return LauncherReplaced(
        inventory=inventory(*(local(text) for text in models), *(local(text, size) for text, size in sizes.items())),
        device=device(vram_bytes),
        slots=slots,
    )


class Machine:
    """Elections with a clock that stands still, invariants checked after each step."""

    def __init__(self, *stimuli: Stimulus | Tick, memory: Memory = NO_MEMORY) -> None:
        self.elections = Elections(memory)
        self.now = 1000.0
        self.memory = memory
        self.said: list[Effect] = []
        for stimulus in stimuli:
            self.tell(stimulus)

    def tell(self, stimulus: Stimulus | Tick) -> list[Effect]:
        effects = self.elections.handle(stimulus, now=self.now)
        self.elections.check_invariants()
        self.said += effects
        for effect in effects:
            if isinstance(effect, Memory):
                self.memory = effect
        return effects

    def restarted(self, *stimuli: Stimulus | Tick) -> Machine:
        return Machine(*stimuli, memory=self.memory)

    @property
    def assigned(self) -> dict[str, str]:
        return {item.model: item.origin for item in self.elections.assigned.assignments}

    @property
    def why(self) -> str:
        return self.elections.assigned.idle_reason

    def status(self, text: str) -> str:
        return next(item.status for item in self.elections.catalog.models if item.name == text)


def settled(*stimuli: Stimulus, vram_bytes: int = 8 * GB, **sizes: int) -> Machine:
    """Configured, with launcherd's report of models by size, and known to gossipd."""
    return Machine(config(), launcher(vram_bytes=vram_bytes, **sizes), MembersReplaced((member(),)), *stimuli)


def published(effects: list[Effect], kind: type[T]) -> list[T]:
    return [item.message for item in effects if isinstance(item, Publish) and isinstance(item.message, kind)]
