"""Who is in the mesh, and what each node last said of itself.

Theory of operation. Every node speaks for itself in a signed record numbered ``(incarnation, seq)``; the highest
number wins. The incarnation is persisted and rises at each start. This node's record is rebuilt whenever one of its
daemons reports something new, and sent on when its content differs; tunneld signs it. This machine knows this node
alone; ``gossip.py`` runs it together with what is known of the others.

=======================  ============================================  ==========================================
stimulus                 condition                                     effects
=======================  ============================================  ==========================================
TunnelChanged            own id differs from the stored one            PersistIdentity
any report of a daemon   own announcement's content differs            SignAnnouncement, PublishMember
SlotChanged              ``requests_total`` of a known slot rose        counts demand
CountUnserved            this node entered a request nobody serves     counts demand
ConfigApplied            first configuration of an idle node           PersistIdentity, PublishMesh, as above
MeshAdopted              another mesh than before                      PersistIdentity, PublishMesh, as above
DrainAsked               other than before                             PersistIdentity, as above
Tick                     demand changed, or rates fade                 PublishDemand, PersistDemand
RecordSigned             for the current number                        keeps the record for peers
=======================  ============================================  ==========================================
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from services.gossipd.announcement import NodeFacts, announce, same_content
from services.gossipd.demand import DemandCounters
from services.gossipd.mesh_identity import MeshIdentity, next_life
from shared import codec
from shared.ids import MeshId, ModelName, PeerId, SlotId
from shared.io.drive import Tick
from shared.messages.mesh import (
    Announcement,
    CountUnserved,
    DemandChanged,
    MemberChanged,
    MeshIdentityChanged,
    RecordSigned,
    SignedRecord,
    TunnelChanged,
)
from shared.messages.models import AssignmentsChanged, DeviceChanged, InventoryChanged, SlotChanged
from shared.messages.trust import Grant

HOLD_SECONDS = 2.0
"""After a start the first announcement waits so long for tunneld and launcherd, so that a restart of gossipd alone
never tells the mesh that a busy node serves nothing, has no memory or cannot be reached."""
DEMAND_SECONDS = 1.0
"""Demand is published at most so often."""
PERSIST_SECONDS = 10.0
"""Counts of at most so many seconds are lost when gossipd is killed."""


@dataclass(frozen=True, slots=True)
class SlotsReplaced:
    """The whole list of slots, from a snapshot of launcherd."""

    slots: tuple[SlotChanged, ...]


@dataclass(frozen=True, slots=True)
class ConfigApplied:
    """``mesh.toml`` was read. ``random_bytes``: 16 bytes for a new mesh id."""

    configured: bool
    node_name: str
    requested_models: tuple[ModelName, ...]
    random_bytes: bytes
    client: bool = False
    """It only consumes: others shall expect nothing of it."""


@dataclass(frozen=True, slots=True)
class MeshAdopted:
    """This node is in another mesh from now on, admitted there or its first."""

    mesh_id: MeshId
    mesh_name: str


@dataclass(frozen=True, slots=True)
class DrainAsked:
    """Take no new requests from the mesh, or take them again; kept over a restart."""

    draining: bool


Stimulus = (
    TunnelChanged
    | InventoryChanged
    | DeviceChanged
    | SlotChanged
    | SlotsReplaced
    | AssignmentsChanged
    | CountUnserved
    | RecordSigned
    | ConfigApplied
    | MeshAdopted
    | DrainAsked
)


@dataclass(frozen=True, slots=True)
class SignAnnouncement:
    """Have tunneld sign this and hand the result back as ``RecordSigned``."""

    announcement: Announcement


@dataclass(frozen=True, slots=True)
class PublishMember:
    member: MemberChanged


@dataclass(frozen=True, slots=True)
class PublishMesh:
    mesh: MeshIdentityChanged


@dataclass(frozen=True, slots=True)
class PublishDemand:
    demand: DemandChanged


@dataclass(frozen=True, slots=True)
class PersistIdentity:
    identity: MeshIdentity


@dataclass(frozen=True, slots=True)
class PersistDemand:
    totals: dict[ModelName, int]
    slots: dict[SlotId, int]


Effect = SignAnnouncement | PublishMember | PublishMesh | PublishDemand | PersistIdentity | PersistDemand


class Membership:
    """The membership machine of one node. ``identity`` is already that of this life (see ``next_life``)."""

    def __init__(
        self,
        identity: MeshIdentity,
        facts: NodeFacts,
        *,
        counted: dict[ModelName, int] | None = None,
        counted_slots: dict[SlotId, int] | None = None,
    ) -> None:
        self.identity = identity
        self.facts = facts
        self.demand = DemandCounters()
        self.record: SignedRecord | None = None
        self.own: Announcement | None = None
        self._slots: dict[SlotId, SlotChanged] = {}
        self._seq = 0
        self._counted_slots = dict(counted_slots or {})
        self.demand.restore(identity.peer_id, counted or {})
        self._publish_at: float | None = None
        self._persist_at: float | None = None
        self.settled = False
        """Whether enough is known to speak for this node: until then its earlier life's words stand."""
        self._started = False
        self._hold_until: float | None = None

    def next_deadline(self) -> float | None:
        deadlines = [at for at in (self._publish_at, self._persist_at, self._hold_until) if at is not None]
        return min(deadlines, default=None)

    def handle(self, stimulus: Stimulus | Tick, *, now: float) -> list[Effect]:
        effects: list[Effect] = []
        if not self._started:
            self._started = True
            self._hold_until = now + HOLD_SECONDS
        match stimulus:
            case TunnelChanged():
                self.facts = replace(self.facts, tunnel=stimulus)
                if stimulus.peer_id != self.identity.peer_id:
                    self._take_peer_id(stimulus.peer_id)
                    effects.append(PersistIdentity(self.identity))
            case InventoryChanged(models=models, scanning=scanning):
                if models or not scanning:
                    self.facts = replace(self.facts, inventory=stimulus)
            case DeviceChanged():
                self.facts = replace(self.facts, device=stimulus)
            case AssignmentsChanged():
                self.facts = replace(self.facts, assignments=stimulus)
            case SlotChanged():
                self._count_slot(stimulus, now)
                if stimulus.state == "unloaded":
                    self._slots.pop(stimulus.slot_id, None)
                else:
                    self._slots[stimulus.slot_id] = stimulus
            case SlotsReplaced(slots=slots):
                for slot in slots:
                    self._count_slot(slot, now)
                self._slots = {slot.slot_id: slot for slot in slots if slot.state != "unloaded"}
            case CountUnserved(model=model, count=count):
                self._count(model, max(0, count), now)
            case ConfigApplied():
                effects += self._apply_config(stimulus)
            case MeshAdopted(mesh_id=mesh_id, mesh_name=mesh_name):
                if (mesh_id, mesh_name) != (self.identity.mesh_id, self.identity.mesh_name):
                    self.identity = replace(self.identity, mesh_id=mesh_id, mesh_name=mesh_name)
                    effects += [PersistIdentity(self.identity), PublishMesh(self._mesh())]
            case DrainAsked(draining=draining):
                self.facts = replace(self.facts, draining=draining)
                if draining != self.identity.draining:
                    self.identity = replace(self.identity, draining=draining)
                    effects.append(PersistIdentity(self.identity))
            case RecordSigned(record=record):
                if self.own is not None and record.payload == codec.encode(self.own):
                    self.record = record
            case Tick():
                effects += self._tick(now)
        if not isinstance(stimulus, RecordSigned | CountUnserved):
            effects += self._announce(now)
        return effects

    def refute(self, incarnation: int, *, now: float) -> list[Effect]:
        """Somebody holds of this node what it did not say as of ``incarnation``: speak again, with a higher one."""
        if incarnation < self.identity.incarnation:
            return []
        self.identity = replace(self.identity, incarnation=incarnation + 1)
        return [PersistIdentity(self.identity), *self._announce(now, again=True)]

    def set_grant(self, grant: Grant | None, *, now: float) -> list[Effect]:
        """What this node's certificate lets it do."""
        self.facts = replace(self.facts, grant=grant)
        return self._announce(now)

    def set_leaving(self, leaving: bool, *, now: float) -> list[Effect]:
        """Say goodbye, or take it back when the node stays after all."""
        self.facts = replace(self.facts, leaving=leaving)
        return self._announce(now)

    @property
    def slots(self) -> dict[SlotId, SlotChanged]:
        return self._slots

    def snapshot(self, *, now: float) -> list[MeshIdentityChanged | MemberChanged | DemandChanged]:
        """Everything published, as one consistent copy."""
        items: list[MeshIdentityChanged | MemberChanged | DemandChanged] = [self._mesh()]
        if self.own is not None:
            items.append(self._member(self.own))
        items.append(DemandChanged(demand=self.demand.summary(now=now)))
        return items

    def check_invariants(self) -> None:
        """Raises AssertionError when the machine contradicts itself."""
        if self.own is not None:
            assert self.own.incarnation == self.identity.incarnation
            assert self.own.seq == self._seq
            assert self.own.peer_id == self.identity.peer_id != ""
        assert all(slot.state != "unloaded" for slot in self._slots.values())

    def _apply_config(self, config: ConfigApplied) -> list[Effect]:
        self.facts = replace(
            self.facts,
            configured=config.configured,
            node_name=config.node_name,
            requested_models=config.requested_models,
            client=config.client,
        )
        if not config.configured or self.identity.mesh_id:
            return []
        made = next_life(self.identity, configured=True, random_bytes=config.random_bytes)
        self.identity = replace(made, incarnation=self.identity.incarnation)
        return [PersistIdentity(self.identity), PublishMesh(self._mesh())]

    def _take_peer_id(self, peer_id: PeerId) -> None:
        if not self.identity.peer_id:
            # Counted before tunneld spoke. Under another key the old counter stays the old node's.
            self.demand.rename(self.identity.peer_id, peer_id)
        self.identity = replace(self.identity, peer_id=peer_id)
        self.own = None
        self.record = None

    def _announce(self, now: float, *, again: bool = False) -> list[Effect]:
        spoken = None not in (self.facts.tunnel, self.facts.inventory, self.facts.device)
        if self._hold_until is not None and now < self._hold_until and not spoken:
            return []
        self._hold_until = None
        self.settled = True
        if not self.identity.peer_id:
            return []
        announcement = announce(self.facts, self._slots, self.identity, self.identity.peer_id, self._seq + 1)
        if self.own is not None and same_content(announcement, self.own) and not again:
            return []
        self._seq += 1
        self.own = announcement
        return [SignAnnouncement(announcement), PublishMember(self._member(announcement))]

    def _member(self, announcement: Announcement) -> MemberChanged:
        return MemberChanged(announcement=announcement, state="alive", reason="this node", is_self=True)

    def _mesh(self) -> MeshIdentityChanged:
        return MeshIdentityChanged(mesh_id=MeshId(self.identity.mesh_id), mesh_name=self.identity.mesh_name)

    def _count_slot(self, slot: SlotChanged, now: float) -> None:
        """launcherd counts per slot from 0 and keeps the count over its restarts, if perhaps a little behind: only
        what is above the highest number heard is new."""
        known = self._counted_slots.get(slot.slot_id, 0)
        if slot.requests_total > known:
            self._count(slot.model, slot.requests_total - known, now)
            self._counted_slots[slot.slot_id] = slot.requests_total
        if slot.state == "unloaded":
            self._counted_slots.pop(slot.slot_id, None)

    def _count(self, model: ModelName, count: int, now: float) -> None:
        if count == 0:
            return
        self.demand.add(self.identity.peer_id, model, count, now=now)
        self.demand_changed(now)
        if self._persist_at is None:
            self._persist_at = now + PERSIST_SECONDS

    def demand_changed(self, now: float) -> None:
        """Counts rose, here or elsewhere: to be published soon."""
        if self._publish_at is None or self._publish_at > now + DEMAND_SECONDS:
            self._publish_at = now + DEMAND_SECONDS

    def _tick(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        if self._publish_at is not None and now >= self._publish_at:
            effects.append(PublishDemand(DemandChanged(demand=self.demand.summary(now=now))))
            # Rates fade without new requests: say so now and then until they are 0.
            self._publish_at = now + PERSIST_SECONDS if self.demand.active(now=now) else None
        if self._persist_at is not None and now >= self._persist_at:
            self._persist_at = None
            effects.append(self.persist_demand())
        return effects

    def persist_demand(self) -> PersistDemand:
        """What to keep over a restart."""
        return PersistDemand(self.demand.totals_of(self.identity.peer_id), dict(self._counted_slots))
