"""The machine that keeps catalog, assignments and routes current.

Theory of operation. Each report of launcherd or gossipd changes the view; from the view the stateless rules of this
package derive everything anew, and what differs from what was last said is published. The only memory is a node's
assignments: once assigned, a model stays assigned until launcherd unloads it, and is then *declined* until somebody
asks for it again, so that a rule and a person never undo each other in turn.

After a start nothing is said, and nothing placed, until launcherd and gossipd have reported (or ``HOLD_SECONDS``): what
an earlier life had said stands meanwhile, so that a restart of electiond alone changes nothing.

=====================  ==========================================  =============================================
stimulus               condition                                   what it does to the assignments
=====================  ==========================================  =============================================
ConfigApplied          models are named                            those replace earlier named ones
any view change        configured, no named one, none assigned,    rule of ``allocation.assign_model``
                       inventory known, not held by its owner,
                       nothing on its way for a request
SlotChanged ready      nobody assigned it yet                      becomes an assignment of its slot's origin
SlotChanged coming     placed by the mesh, before a restart        stays an assignment
SlotChanged unloaded   assigned; by its owner, or unused too long  withdrawn and declined; the node is its owner's
SlotChanged unloaded   assigned; made room for another model       withdrawn and declined
SlotChanged unloaded   assigned for a request that is gone         withdrawn
SlotChanged failed     the mesh had placed it                      withdrawn and declined; the rule runs again
PlaceModel             this node can serve it                      assigned with origin ``request``
=====================  ==========================================  =============================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from services.electiond.allocation import assign_model, assign_named, why_unassigned
from services.electiond.catalog import (
    NAME_CHARACTERS,
    WAITING_STATES,
    build_catalog,
    nearest_names,
    resolve,
    too_large_words,
)
from services.electiond.election import place
from services.electiond.routes import build_routes
from services.electiond.view import Node, node_of, own_node
from shared.ids import ModelName, PeerId, SlotId
from shared.io.drive import Tick
from shared.messages.daemon import Refused
from shared.messages.mesh import MemberChanged
from shared.messages.models import (
    Assignment,
    AssignmentsChanged,
    CatalogChanged,
    DeviceChanged,
    InventoryChanged,
    ModelPlaced,
    ModelType,
    RoutesChanged,
    SlotChanged,
)

IDLE_WORDS = "this node is idle: it has no mesh.toml. Run 'meshctl up' (or bin/quickstart) to set it up"
DECLINED_LIMIT = 1_000
HOLD_SECONDS = 3.0
"""After a start electiond waits so long for launcherd and gossipd; gossipd itself waits up to 2 s for tunneld."""


@dataclass(frozen=True, slots=True)
class ConfigApplied:
    configured: bool
    named: tuple[ModelName, ...]
    slot_limits: Mapping[ModelType, int]
    """Models of each type this node may load at once; -1 without limit, 1 for a type that is not in it."""


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


Stimulus = (
    ConfigApplied
    | LauncherReplaced
    | MembersReplaced
    | InventoryChanged
    | DeviceChanged
    | SlotChanged
    | MemberChanged
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


@dataclass(slots=True)
class View:
    """First-hand reports and announcements, as they came."""

    members: dict[PeerId, MemberChanged] = field(default_factory=dict)
    inventory: InventoryChanged | None = None
    device: DeviceChanged | None = None
    slots: dict[SlotId, SlotChanged] = field(default_factory=dict)

    def nodes(self, named: tuple[ModelName, ...]) -> list[Node]:
        """All living nodes by peer id, this one built at first hand."""
        own = next((member for member in self.members.values() if member.is_self), None)
        models = self.inventory.models if self.inventory else ()
        mine = own_node(own, models, self.device, self.slots.values(), named)
        others = [node_of(member) for member in self.members.values() if not member.is_self and member.state == "alive"]
        return sorted([mine, *others], key=lambda node: node.peer_id)


class Elections:
    """electiond's core. ``story_of`` keeps the last decision about each model, for ``why``."""

    def __init__(self, memory: Memory = NO_MEMORY) -> None:
        self.catalog = CatalogChanged(models=())
        self.routes = RoutesChanged(routes=())
        self.assigned = AssignmentsChanged(assignments=(), idle_reason=IDLE_WORDS)
        self.story_of: dict[ModelName, str] = {}
        self.settled = False
        """Whether enough was heard since the start to say anything."""
        self._hold_until: float | None = None
        self._asked: list[PlaceRequested] = []
        self._config = ConfigApplied(configured=False, named=memory.named, slot_limits={})
        self._view = View()
        self._assignments: dict[ModelName, Assignment] = {}
        self._memory = memory
        self._declined: dict[ModelName, str] = dict(memory.declined)
        self._held_by_owner = memory.held_by_owner

    def next_deadline(self) -> float | None:
        return None if self.settled else self._hold_until

    def handle(self, stimulus: Stimulus | Tick, *, now: float) -> list[Effect]:
        if self._hold_until is None:
            self._hold_until = now + HOLD_SECONDS
        match stimulus:
            case ConfigApplied():
                self._apply_config(stimulus)
            case LauncherReplaced(inventory=inventory, device=device, slots=slots):
                self._take_inventory(inventory)
                self._view.device = device or self._view.device
                gone = set(self._view.slots) - {slot.slot_id for slot in slots}
                for slot_id in gone:
                    del self._view.slots[slot_id]
                for slot in slots:
                    self._take_slot(slot)
            case MembersReplaced(members=members):
                if any(member.is_self for member in members):
                    self._view.members = {member.announcement.peer_id: member for member in members}
            case InventoryChanged():
                self._take_inventory(stimulus)
            case DeviceChanged():
                self._view.device = stimulus
            case SlotChanged():
                self._take_slot(stimulus)
            case MemberChanged():
                self._view.members[stimulus.announcement.peer_id] = stimulus
            case PlaceRequested(token=token) if not self._config.configured:
                return [Reply(token, Refused(code="idle", detail=IDLE_WORDS))]
            case PlaceRequested():
                self._asked.append(stimulus)
            case Tick():
                pass
        if not self.settled and not self._heard_all() and now < self._hold_until:
            return []
        self.settled = True
        effects = self._derive()
        if self._asked:
            replies = [Reply(asked.token, self._place(asked.model)) for asked in self._asked]
            self._asked.clear()
            effects += [*self._derive(), *replies]
        return effects

    def _heard_all(self) -> bool:
        view = self._view
        me = any(member.is_self for member in view.members.values())
        return me and view.inventory is not None and view.device is not None

    def check_invariants(self) -> None:
        """Raises AssertionError when the machine contradicts itself."""
        assert not set(self._assignments) & set(self._declined)
        if not self.settled:
            assert (self.catalog.models, self.routes.routes, self.assigned.assignments) == ((), (), ())
            return
        assert not self._asked
        assert {item.model for item in self.assigned.assignments} == set(self._assignments)
        names = {model.name for model in self.catalog.models}
        assert {route.model for route in self.routes.routes} <= names
        assert all(model.reason for model in self.catalog.models)

    def explain(self, text: str) -> tuple[str, ...]:
        """What electiond knows about a model, in words; empty when it is not in the catalog."""
        name = resolve(text, self.catalog.models)
        model = next((model for model in self.catalog.models if model.name == name), None)
        if name is None or model is None:
            return ()
        sentences = [f"{name} is {model.status}: {model.reason}."]
        if name in self._assignments:
            sentences.append(f"It belongs on this node: {self._assignments[name].reason}.")
        elif name in self._declined:
            sentences.append(f"It is not placed here by itself any more: {self._declined[name]}.")
        if name in self.story_of:
            sentences.append(f"Last decision: {self.story_of[name]}.")
        return tuple(sentences)

    # -- assignments ----------------------------------------------------------------------------------------

    def _apply_config(self, config: ConfigApplied) -> None:
        newly_named = [name for name in config.named if name not in self._config.named]
        self._config = config
        for name in newly_named:
            self._declined.pop(name, None)
            self._declined.pop(_stem(name), None)
        if newly_named:
            self._held_by_owner = False
        still_named = {*config.named, *map(_stem, config.named)}
        flagged = [name for name, item in self._assignments.items() if item.origin == "flag"]
        self._drop([name for name in flagged if name not in still_named])

    def _take_inventory(self, inventory: InventoryChanged | None) -> None:
        """A launcherd that has only begun to look through its folders has nothing to say about models yet."""
        if inventory is not None and (inventory.models or not inventory.scanning):
            self._view.inventory = inventory

    def _take_slot(self, slot: SlotChanged) -> None:
        if slot.state == "unloaded":
            self._view.slots.pop(slot.slot_id, None)
            others = [other for other in self._view.slots.values() if other.model == slot.model]
            if not others and slot.model in self._assignments:
                self._withdraw(slot)
            return
        self._view.slots[slot.slot_id] = slot
        if slot.state == "failed":
            placed = self._assignments.get(slot.model)
            if placed is not None and placed.origin == "allocation":
                self._decline(slot.model, slot.reason)
        elif slot.state == "ready" and slot.model not in self._assignments and slot.origin != "flag":
            # Also after a restart of electiond: what runs stays where it is.
            words = "asked for on this node" if slot.origin == "request" else "placed here by the mesh before"
            self._assign(Assignment(model=slot.model, origin=slot.origin, reason=words))
        elif (
            slot.state in WAITING_STATES
            and slot.origin in ("allocation", "promotion")
            and slot.model not in self._assignments
            and slot.model not in self._declined
        ):
            words = "placed here by the mesh before"
            self._assign(Assignment(model=slot.model, origin=slot.origin, reason=words))

    def _withdraw(self, slot: SlotChanged) -> None:
        """An assigned model's last slot is gone: what that says about where the model belongs."""
        match slot.ended_by:
            case "owner" | "idle":
                # Both are the owner's word: nothing is placed here by itself any more.
                self._decline(slot.model, slot.reason)
                self._held_by_owner = True
            case "eviction" | "":
                self._decline(slot.model, slot.reason)
            case "dropped":
                if self._assignments[slot.model].origin == "request":
                    self._drop([slot.model])
            case "replaced":
                pass

    def _assign(self, assignment: Assignment) -> None:
        self._declined.pop(assignment.model, None)
        if assignment.origin in ("request", "flag"):
            self._held_by_owner = False
        self._assignments[assignment.model] = assignment
        self.story_of[assignment.model] = f"assigned to this node, {assignment.reason}"

    def _decline(self, model: ModelName, reason: str) -> None:
        self._drop([model])
        self._declined[model] = reason
        self.story_of[model] = f"withdrawn from this node, {reason}"
        while len(self._declined) > DECLINED_LIMIT:
            del self._declined[next(iter(self._declined))]

    def _drop(self, models: list[ModelName]) -> None:
        for model in models:
            self._assignments.pop(model, None)

    def _allocate(self, nodes: list[Node]) -> str:
        """Bring the assignments in line with the rules; why there is none, if there is none."""
        if not self._config.configured:
            self._assignments.clear()
            return IDLE_WORDS
        own = next(node for node in nodes if node.is_self)
        if self._view.inventory is None or self._view.device is None:
            return "" if self._assignments else "waits for launcherd to report models and memory"
        named = [name for name in self._resolved_names() if name not in self._declined]
        wanted = {
            item.model: item
            for item in assign_named(own, named, self._config.slot_limits, assigned=self._assignments.keys())
        }
        for name, item in wanted.items():
            if name not in self._assignments:
                self._assign(item)
        if self._assignments or self._config.named or self._held_by_owner:
            return "" if self._assignments else self._unassigned_words(own)
        coming = [slot.model for slot in self._view.slots.values() if slot.state in WAITING_STATES]
        if coming:
            return f"waits for {', '.join(sorted(set(coming)))}, which is being loaded already"
        failed = {slot.model for slot in self._view.slots.values() if slot.state == "failed"}
        avoided = self._declined.keys() | failed
        found = assign_model(own, nodes, avoided)
        if found is None:
            return why_unassigned(own, avoided)
        self._assign(found)
        return ""

    def _resolved_names(self) -> list[ModelName]:
        models = self._view.inventory.models if self._view.inventory else ()
        known = {model.name for model in models}
        return [name if name in known else _stem(name) for name in self._config.named]

    def _unassigned_words(self, own: Node) -> str:
        if self._config.named and not self._held_by_owner:
            return f"none of the named models ({', '.join(self._config.named)}) is on disk and fits"
        return "the last model was unloaded; a model loads when it is asked for"

    # -- derived ---------------------------------------------------------------------------------------------

    def _derive(self) -> list[Effect]:
        named = tuple(self._resolved_names())
        nodes = self._view.nodes(named if self._config.configured else ())
        idle_reason = self._allocate(nodes)
        catalog = CatalogChanged(models=build_catalog(nodes, self._view.slots.values(), self._assignments))
        routes = RoutesChanged(routes=build_routes(nodes))
        assigned = AssignmentsChanged(
            assignments=tuple(self._assignments[name] for name in sorted(self._assignments)), idle_reason=idle_reason
        )
        effects: list[Effect] = []
        if assigned != self.assigned:
            self.assigned = assigned
            effects.append(Publish(assigned))
        if catalog != self.catalog:
            self.catalog = catalog
            effects.append(Publish(catalog))
        if routes != self.routes:
            self.routes = routes
            effects.append(Publish(routes))
        memory = Memory(
            declined=tuple(self._declined.items()), held_by_owner=self._held_by_owner, named=self._config.named
        )
        if memory != self._memory:
            self._memory = memory
            effects.append(memory)
        return effects

    def _place(self, text: ModelName) -> ModelPlaced | Refused:
        name = resolve(text, self.catalog.models)
        if name is None:
            near = nearest_names(text, self.catalog.models)
            hint = f"; did you mean {', '.join(near)}?" if near else "."
            return Refused(
                code="model_not_found",
                detail=f"no node of the mesh has a model {text[:NAME_CHARACTERS]!r}{hint} See GET /v1/models",
            )
        nodes = self._view.nodes(())
        chosen = place(name, nodes)
        if chosen is None:
            holders = [node for node in nodes if node.has(name)]
            reason = (
                f"{name} {too_large_words(holders[0].models[name], holders)}"
                if holders
                else f"no node has the file of {name}; put {name}.gguf into a models folder"
            )
            return Refused(code="needs_capacity", detail=reason, retry_after_seconds=30.0)
        if chosen.is_self and name not in self._assignments:
            self._assign(Assignment(model=name, origin="request", reason="a request asked for it"))
        return ModelPlaced(model=name, peer_id=chosen.peer_id, reason=f"{chosen.name} has the file and the room")


def _stem(name: str) -> ModelName:
    """The catalog name that a file name or path stands for."""
    return ModelName(name.rsplit("/", 1)[-1].removesuffix(".gguf"))
