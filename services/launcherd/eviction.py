"""Which models have to go so that another can be loaded: one stateless rule.

Limits count models of one type; memory counts bytes over all types; the NPU takes one model, whatever its type.
Victims are taken least recently used first, a model that is in use counting as used now. Builtin models (the guide,
under 1 MB) take no part: they need no place and give none.

Source: DESIGN §7 (LRU per type; limits; memory; the NPU; pins); FIELD, complaint 5; docs/spec/slots.md.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from shared.ids import ModelName, SlotId
from shared.messages.models import ModelType


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupant:
    """A slot that has, or is about to get back, an engine."""

    slot_id: SlotId
    model: ModelName
    type: ModelType
    need_bytes: int
    last_use_at: float
    busy: bool = False
    """Requests run on it or wait for it."""
    leaving: bool = False
    """It goes whatever happens: stopping, or unloaded by somebody."""
    chosen: bool = False
    """It was chosen before and is being drained: choose it again unless something better turned up."""
    protected: str = ""
    """Why the wanted model may not displace it, in words; empty when it may."""
    pinned: bool = False
    """It makes room for no other model, unless everything goes."""
    npu: bool = False
    builtin: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The model to be loaded. `everything`: its first load failed, so all others go."""

    model: ModelName
    type: ModelType
    need_bytes: int
    npu: bool = False
    builtin: bool = False
    everything: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """`start_now`: nothing stands in the way. Else `victims` must go, or `blocked` says why they may not.

    `pinned`: what blocks are pins alone, so that waiting changes nothing.
    """

    start_now: bool
    victims: tuple[SlotId, ...] = ()
    blocked: str = ""
    pinned: bool = False


Step = Literal["npu", "limit", "memory"]
"""The rules, in the order in which victims are chosen by them."""


def make_room(wanted: Wanted, occupants: Sequence[Occupant], *, limit: int, capacity_bytes: int) -> Room:
    """What has to go before `wanted` may start. `limit` is for its type, -1 without limit.

    The caller has refused what exceeds `capacity_bytes` even alone.
    """
    own = [occupant for occupant in occupants if occupant.model == wanted.model]
    others = [occupant for occupant in occupants if occupant.model != wanted.model]
    if wanted.everything:
        return Room(start_now=not occupants, victims=tuple(occupant.slot_id for occupant in occupants))
    victims = {occupant.slot_id for occupant in own}
    if wanted.builtin:
        return Room(start_now=not own, victims=tuple(victims))
    counted = [occupant for occupant in others if not occupant.builtin]
    if not own and _fits(wanted, counted, limit, capacity_bytes):
        return Room(start_now=True)
    remaining = [occupant for occupant in counted if not occupant.leaving]
    chosen: list[Occupant] = []
    steps: tuple[Step, ...] = ("npu", "limit", "memory")
    for step in steps:
        while not _fits(wanted, remaining, limit, capacity_bytes, (step,)):
            competing = [occupant for occupant in remaining if _competes(occupant, wanted, step)]
            eligible = [occupant for occupant in competing if not occupant.protected and not occupant.pinned]
            if not eligible:
                only_pins = all(occupant.pinned and not occupant.protected for occupant in competing)
                return Room(start_now=False, blocked=_blocked(competing, step), pinned=only_pins)
            victim = min(eligible, key=lambda occupant: (occupant.type != wanted.type, *_least_recent(occupant)))
            chosen.append(victim)
            remaining.remove(victim)
    # Least recently used first may have taken small models before the large one that was enough by itself.
    for occupant in list(chosen):
        if _fits(wanted, [*remaining, occupant], limit, capacity_bytes):
            remaining.append(occupant)
            chosen.remove(occupant)
    victims |= {occupant.slot_id for occupant in chosen}
    return Room(start_now=False, victims=tuple(victims))


def _fits(
    wanted: Wanted,
    others: Collection[Occupant],
    limit: int,
    capacity_bytes: int,
    steps: Collection[Step] = ("npu", "limit", "memory"),
) -> bool:
    if "npu" in steps and wanted.npu and any(other.npu for other in others):
        return False
    if "limit" in steps and limit != -1 and sum(other.type == wanted.type for other in others) >= limit:
        return False
    return "memory" not in steps or sum(other.need_bytes for other in others) + wanted.need_bytes <= capacity_bytes


def _competes(occupant: Occupant, wanted: Wanted, step: Step) -> bool:
    """Whether it would help `wanted` by that rule if this one went."""
    match step:
        case "npu":
            return occupant.npu
        case "limit":
            return occupant.type == wanted.type
        case "memory":
            return True


def _least_recent(occupant: Occupant) -> tuple[bool, bool, float, SlotId]:
    return (occupant.busy, not occupant.chosen, occupant.last_use_at, occupant.slot_id)


def _blocked(competing: Sequence[Occupant], step: Step) -> str:
    reasons = [
        f"{occupant.model} {occupant.protected or 'is pinned'}"
        for occupant in competing
        if occupant.protected or occupant.pinned
    ]
    told = "; ".join(reasons) or "the memory is taken"
    return f"one model at a time may use the NPU, and {told}" if step == "npu" else told
