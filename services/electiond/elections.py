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
any view change        configured, no named one, none assigned,    this node's part of
                       inventory known, not held by its owner,     ``placements.plan_placements``, at once when it
                       nothing on its way for a request            is alone, else when the mesh has settled
SlotChanged ready      nobody assigned it yet                      becomes an assignment of its slot's origin
SlotChanged coming     placed by the mesh, before a restart        stays an assignment
SlotChanged unloaded   assigned; by its owner, or unused too long  withdrawn and declined; the node is its owner's
SlotChanged unloaded   assigned; made room for another model       withdrawn and declined
SlotChanged unloaded   assigned for a request that is gone         withdrawn
SlotChanged failed     the mesh had placed it                      withdrawn and declined; the rule runs again
PlaceModel             ``election.place`` chose this node          assigned with origin ``request``
PlaceModel             it chose another one                        none; the lease taken there loads the model
MemberChanged          this node entered another mesh, which       what the mesh of one had placed gives way, once
                       serves its model and lacks another
=====================  ==========================================  =============================================
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from services.electiond.allocation import assign_named, why_unassigned
from services.electiond.catalog import (
    NAME_CHARACTERS,
    WAITING_STATES,
    build_catalog,
    nearest_names,
    resolve,
    too_large_words,
)
from services.electiond.election import place
from services.electiond.identity import with_mesh_names
from services.electiond.near import NearSets
from services.electiond.newcomer import Newcomer
from services.electiond.pace import Pace
from services.electiond.placements import Placement, plan_placements
from services.electiond.promises import Promises
from services.electiond.routes import build_routes
from services.electiond.stimuli import (
    NO_MEMORY,
    ConfigApplied,
    Effect,
    LauncherReplaced,
    MembersReplaced,
    Memory,
    PlaceRequested,
    Publish,
    Reply,
    Stimulus,
)
from services.electiond.view import Node, View, stem
from shared.ids import ModelName, PeerId
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
    RoutesChanged,
    SlotChanged,
)
from shared.messages.trust import PeersWanted

IDLE_WORDS = "this node is idle: it has no mesh.toml. Run 'meshctl up' (or bin/quickstart) to set it up"
DECLINED_LIMIT = 1_000
HOLD_SECONDS = 3.0
"""After a start electiond waits so long for launcherd and gossipd; gossipd itself waits up to 2 s for tunneld."""
STALE_SECONDS = 0.5
"""Load and round trips of other nodes move all the time; they are taken up together."""


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
        self._near = NearSets()
        self._pace = Pace()
        self._promises = Promises()
        self._newcomer = Newcomer()
        self._moved: set[ModelName] = set()
        """Gave way to another model when this node entered a mesh; their engines may still run."""
        self._peers_expected = False
        self._nodes: list[Node] = []
        """As of the last derivation, by the mesh's names."""
        self._due: float | None = None
        """When a placement that waits may be made."""
        self._stale_at: float | None = None
        """When what moves all the time, load and round trips, is told again."""
        self._assignments: dict[ModelName, Assignment] = {}
        self._memory = memory
        self._declined: dict[ModelName, str] = dict(memory.declined)
        self._held_by_owner = memory.held_by_owner
        self._made_room: set[ModelName] = set()
        """Evicted for a load that is not through yet."""

    def next_deadline(self) -> float | None:
        """When something is due without a further report: in seconds of the same clock as ``now``."""
        if not self.settled:
            return self._hold_until
        return min((at for at in (self._due, self._stale_at) if at is not None), default=None)

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
                    self._replace_members(members, now)
            case InventoryChanged():
                self._take_inventory(stimulus)
            case DeviceChanged():
                self._view.device = stimulus
            case SlotChanged():
                self._take_slot(stimulus)
            case MemberChanged():
                if not self._take_member(stimulus, now) and self.settled:
                    self._stale_at = self._stale_at if self._stale_at is not None else now + STALE_SECONDS
                    return []
            case PeersWanted(peers=peers):
                self._peers_expected = bool(peers)
                self._pace.expect_peers(self._peers_expected, now=now)
            case PlaceRequested(token=token) if not self._config.configured:
                return [Reply(token, Refused(code="idle", detail=IDLE_WORDS))]
            case PlaceRequested():
                self._asked.append(stimulus)
            case Tick():
                pass
        if not self.settled and not self._heard_all() and now < self._hold_until:
            return []
        effects = self._derive(now)
        self.settled = True
        if self._asked:
            replies = [Reply(asked.token, self._place(asked.model, asked.avoid, now)) for asked in self._asked]
            self._asked.clear()
            effects += [*self._derive(now), *replies]
        return effects

    def _replace_members(self, members: tuple[MemberChanged, ...], now: float) -> None:
        gone = self._view.members.keys() - {member.announcement.peer_id for member in members}
        for peer_id in gone:
            del self._view.members[peer_id]
            self._near.forget(peer_id)
        for member in sorted(members, key=lambda member: not member.is_self):
            self._take_member(member, now)

    def _take_member(self, member: MemberChanged, now: float) -> bool:
        """Whether more changed than what moves all the time: load and round trips."""
        peer_id = member.announcement.peer_id
        own = self._view.own
        self._near.observe(member, own.announcement.peer_id if own else PeerId(""))
        known = self._view.members.get(peer_id)
        if known is not None and member.is_self and known.announcement.mesh_id != member.announcement.mesh_id:
            self._newcomer.entered(now=now)
        if member.state in ("dead", "left") and not member.is_self:
            self._view.members.pop(peer_id, None)
            return known is not None
        self._view.members[peer_id] = member
        return known is None or _lasting(known) != _lasting(member)

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
        here = model.name_here or name
        own = next((node for node in self._nodes if node.is_self), None)
        if here in self._assignments:
            sentences.append(f"It belongs on this node: {self._assignments[here].reason}.")
        elif here in self._declined:
            sentences.append(f"It is not placed here by itself any more: {self._declined[here]}.")
        elif own is not None and len(self._nodes) > 1 and not self._assignments and self.assigned.idle_reason:
            sentences.append(f"This node serves nothing: {self.assigned.idle_reason}.")
        if here in self.story_of:
            sentences.append(f"Last decision: {self.story_of[here]}.")
        return tuple(sentences)

    # -- assignments ----------------------------------------------------------------------------------------

    def _apply_config(self, config: ConfigApplied) -> None:
        newly_named = [name for name in config.named if name not in self._config.named]
        self._config = config
        for name in newly_named:
            self._declined.pop(name, None)
            self._declined.pop(stem(name), None)
        if newly_named:
            self._held_by_owner = False
        still_named = {*config.named, *map(stem, config.named)}
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
            if not others:
                self._moved.discard(slot.model)
            if not others and slot.model in self._assignments:
                self._withdraw(slot)
            return
        self._view.slots[slot.slot_id] = slot
        if slot.model in self._moved:
            return
        if slot.state == "failed":
            placed = self._assignments.get(slot.model)
            if placed is not None and placed.origin != "flag":
                self._decline(slot.model, slot.reason)
            # What made room for it in vain may come back.
            for model in self._made_room:
                self._declined.pop(model, None)
        if slot.state in ("failed", "ready"):
            self._made_room.clear()
        if slot.state == "ready" and slot.model not in self._assignments and slot.origin != "flag":
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
                self._made_room.add(slot.model)
            case "dropped":
                if self._assignments[slot.model].origin == "request":
                    self._drop([slot.model])

    def _assign(self, assignment: Assignment) -> None:
        self._declined.pop(assignment.model, None)
        self._made_room.discard(assignment.model)
        self._moved.discard(assignment.model)
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

    def _allocate(self, nodes: list[Node], now: float) -> str:
        """Bring the assignments in line with the rules; why there is none, if there is none.

        ``nodes`` go by the mesh's names; assignments by this node's own, as launcherd knows no others.
        """
        self._due = None
        if not self._config.configured:
            self._assignments.clear()
            return IDLE_WORDS
        own = next(node for node in nodes if node.is_self)
        if own.standing == "client":
            self._assignments.clear()
            return why_unassigned(own, ())
        if self._view.inventory is None or self._view.device is None:
            return "" if self._assignments else "waits for launcherd to report models and memory"
        named = [name for name in self._resolved_names() if name not in self._declined]
        wanted = {
            item.model: item
            for item in assign_named(self._own(), named, self._config.slot_limits, assigned=self._assignments.keys())
        }
        for name, item in wanted.items():
            if name not in self._assignments:
                self._assign(item)
        self._reconsider(own, nodes, now)
        if self._assignments or self._config.named or self._held_by_owner:
            return "" if self._assignments else self._unassigned_words(own)
        coming = [slot.model for slot in self._view.slots.values() if slot.state in WAITING_STATES]
        if coming:
            return f"waits for {', '.join(sorted(set(coming)))}, which is being loaded already"
        failed = {slot.model for slot in self._view.slots.values() if slot.state == "failed"}
        found = self._placement(own, nodes, self._declined.keys() | failed, now)
        if isinstance(found, str):
            return found
        self._assign(replace(found.assignment(), model=own.local_name(found.model)))
        return ""

    def _reconsider(self, own: Node, nodes: list[Node], now: float) -> None:
        """Once, after this node entered a mesh: make room for a model that the mesh lacks."""
        if len(self._assignments) != 1:
            return
        (current,) = self._assignments.values()
        others = [node for node in nodes if not node.is_self]
        at = self._newcomer.moves_at(
            own, others, own.mesh_name(current.model), settled_at=self._pace.ready_at(), now=now
        )
        if current.origin != "allocation" or at is None:
            return
        if now < at:
            self._due = at
            return
        self._newcomer.ended()
        refused = {(own.mesh_name(name), own.peer_id) for name in self._declined}
        mine = replace(own, hosted=(), serving=(), requested=())
        found = plan_placements([mine, *others], near=self._near, refused=refused).get(own.peer_id)
        if found is None or found.rule != 2:
            return
        self._drop([current.model])
        self._assign(replace(found.assignment(), model=own.local_name(found.model)))
        self._moved.add(current.model)
        self.story_of[current.model] = f"gave way to {found.model} when this node entered the mesh, others serve it"

    def _placement(self, own: Node, nodes: list[Node], avoided: Collection[ModelName], now: float) -> Placement | str:
        """What the mesh places on this free node now, or in words why nothing."""
        if (len(nodes) > 1 or self._peers_expected or self._pace.moved) and now < self._pace.ready_at():
            self._due = self._pace.ready_at()
            return self._pace.reason()
        refused = {(own.mesh_name(name), own.peer_id) for name in avoided}
        mine = replace(own, hosted=(), serving=(), requested=())
        everyone = [mine, *(node for node in nodes if not node.is_self)]
        while True:
            plan = plan_placements(everyone, near=self._near, refused=refused | self._promises.passed)
            mine_is = plan.pop(own.peer_id, None)
            wished = [item for item in plan.values() if item.rule != 3 and self._could(own, item.model, refused)]
            if not self._promises.expect(wished, now=now):
                break
        self._due = self._promises.next_deadline()
        if mine_is is not None and (mine_is.rule in (1, 2) or not wished):
            return mine_is
        if wished:
            taker = next(node.name for node in nodes if node.peer_id == wished[0].peer_id)
            return f"stands by for {wished[0].model}, which nobody serves and {taker} was given"
        return why_unassigned(own, {own.mesh_name(name) for name in avoided}, nodes)

    def _could(self, own: Node, model: ModelName, refused: Collection[tuple[ModelName, PeerId]]) -> bool:
        return own.has(model) and own.fits(own.models[model]) and (model, own.peer_id) not in refused

    def _resolved_names(self) -> list[ModelName]:
        models = self._view.inventory.models if self._view.inventory else ()
        known = {model.name for model in models}
        return [name if name in known else stem(name) for name in self._config.named]

    def _unassigned_words(self, own: Node) -> str:
        if self._config.named and not self._held_by_owner:
            return f"none of the named models ({', '.join(self._config.named)}) is on disk and fits"
        return "the last model was unloaded; a model loads when it is asked for"

    # -- derived ---------------------------------------------------------------------------------------------

    def _own(self) -> Node:
        """This node by its own names."""
        return next(node for node in self._all_nodes() if node.is_self)

    def _all_nodes(self) -> list[Node]:
        named = tuple(self._resolved_names()) if self._config.configured else ()
        return self._view.nodes(named, self._assignments.values(), self._config.client)

    def _derive(self, now: float) -> list[Effect]:
        self._stale_at = None
        raw = self._all_nodes()
        self._pace.observe([node for node in raw if not node.is_self], now=now)
        nodes = with_mesh_names(raw)
        self._promises.observe(nodes, now=now, first=not self.settled)
        nodes = self._promises.without_empty_words(nodes, now=now)
        before = dict(self._assignments)
        idle_reason = self._allocate(nodes, now)
        if before != self._assignments:
            nodes = self._promises.without_empty_words(with_mesh_names(self._all_nodes()), now=now)
        self._nodes = nodes
        models = build_catalog(nodes, self._view.slots.values(), self._assignments, self._near)
        catalog = CatalogChanged(models=models)
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

    def _place(self, text: ModelName, avoid: tuple[PeerId, ...], now: float) -> ModelPlaced | Refused:
        name = resolve(text, self.catalog.models)
        if name is None:
            near = nearest_names(text, self.catalog.models)
            hint = f"; did you mean {', '.join(near)}?" if near else "."
            return Refused(
                code="model_not_found",
                detail=f"no node of the mesh has a model {text[:NAME_CHARACTERS]!r}{hint} See GET /v1/models",
            )
        nodes = self._nodes
        chosen = place(name, nodes, promises=self._promises, now=now, avoid=avoid)
        if chosen is None:
            return Refused(code="needs_capacity", detail=self._why_unplaceable(name), retry_after_seconds=30.0)
        local = chosen.local_name(name)
        reason = f"{chosen.name} has the file and the room"
        if not chosen.is_self:
            self._promises.sent(name, chosen.peer_id, now=now)
            self.story_of[name] = f"a request was sent to {chosen.name} to load it: {reason}"
        elif local not in self._assignments:
            self._assign(Assignment(model=local, origin="request", reason="a request asked for it"))
        return ModelPlaced(
            model=name, peer_id=chosen.peer_id, reason=reason, name_there=local if local != name else ModelName("")
        )

    def _why_unplaceable(self, name: ModelName) -> str:
        holders = [node for node in self._nodes if node.has(name)]
        if not holders:
            return f"no node has the file of {name}; put {name}.gguf into a models folder, or use 'meshctl pull'"
        if any(node.fits(node.models[name]) for node in holders):
            return next(model for model in self.catalog.models if model.name == name).reason
        return f"{name} {too_large_words(holders[0].models[name], holders, self._nodes, self._near)}"


def _lasting(member: MemberChanged) -> tuple[object, ...]:
    """What of a member decides about anything but the choice among its equals."""
    said = replace(member.announcement, seq=0)
    return (said, member.state, member.grant, member.trusted, member.is_self)
