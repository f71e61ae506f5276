"""gossipd's shell: mirrors tunneld, launcherd and electiond, runs the membership machine, performs its effects."""

from __future__ import annotations

import asyncio
import os
import platform
from collections.abc import Iterable
from dataclasses import replace

from services.gossipd.announcement import NodeFacts
from services.gossipd.gossip import Gossip
from services.gossipd.io.peers import Peers, explain_member
from services.gossipd.io.state_files import StateFiles
from services.gossipd.io.trust_desk import TrustDesk
from services.gossipd.io.trust_keeping import Surroundings
from services.gossipd.membership import (
    ConfigApplied,
    DrainAsked,
    Membership,
    MeshAdopted,
    PersistDemand,
    PersistIdentity,
    PublishDemand,
    PublishMember,
    PublishMesh,
    SlotsReplaced,
)
from services.gossipd.mesh_identity import next_life
from services.gossipd.stimuli import Effect, LinksReplaced, Stimulus
from services.gossipd.trust import wanted_identity
from shared import codec
from shared.config import NodeConfig, changed_keys, load_config
from shared.errors import RequestRefused, StillStarting
from shared.ids import ModelName
from shared.io import log
from shared.io.bus import BusClient, BusServer, Mirror
from shared.io.drive import Drive, Tasks, Tick
from shared.io.lifecycle import StopSignal, environment
from shared.messages.daemon import ConfigReloaded, Done, ExplainSubject, Explanation, ReloadConfig, StoryEntry
from shared.messages.mesh import (
    Announcement,
    CountUnserved,
    MemberChanged,
    TunnelChanged,
)
from shared.messages.models import AssignmentsChanged, DeviceChanged, InventoryChanged, SlotChanged
from shared.messages.tunnel import FromPeer, LinkChanged
from shared.paths import NodePaths


def node_name(config: NodeConfig) -> str:
    return config.node.name or platform.node() or "node"


def config_stimulus(config: NodeConfig) -> ConfigApplied:
    return ConfigApplied(
        configured=config.configured,
        node_name=node_name(config),
        requested_models=tuple(ModelName(name) for name in config.models.serve),
        random_bytes=os.urandom(16),
        client=config.node.client,
    )


def role_words(own: Announcement, client: bool) -> str:
    """Why this node has its role, for ``why``: the end of a sentence."""
    if own.role == "client":
        return "only consumes: " + ("node.client is true in mesh.toml." if client else "its grant is client.")
    return f"serves {', '.join(item.model for item in own.hosted)}." if own.hosted else "serves no model now."


class Gossipd:
    """Owns the machine's surroundings for the life of the process."""

    def __init__(self, paths: NodePaths, config: NodeConfig) -> None:
        self.paths = paths
        self.config = config
        self.files = StateFiles(paths.state)
        self.tasks = Tasks()
        self.bus = BusServer("gossipd", paths, self, self.answer, self.tasks)
        self.tunneld = BusClient("tunneld", paths)
        around = Surroundings(self.bus, lambda: self.membership.identity, self.members, self.post_trust)
        self.peers = Peers(paths.state, self.tunneld, self.tasks, self.bus)
        around = replace(around, goodbye=self.peers.goodbye, trusting=lambda _trust: self.peers.trust(self.desk))
        self.desk = TrustDesk(paths, self.tunneld, self.tasks, around)
        stored = wanted_identity(self.files.load_identity(), self.desk.trust.credentials)
        identity = next_life(stored, configured=config.configured, random_bytes=os.urandom(16))
        self.files.save_identity(identity)
        counted, counted_slots = self.files.load_demand()
        facts = NodeFacts(
            node_name=node_name(config),
            configured=config.configured,
            requested_models=tuple(ModelName(name) for name in config.models.serve),
            draining=identity.draining,
            client=config.node.client,
        )
        self.membership = Membership(identity, facts, counted=counted, counted_slots=counted_slots)
        self.gossip = Gossip(self.membership, seed=int.from_bytes(os.urandom(8), "big"), known=self.peers.load())
        self.drive: Drive[Stimulus, Effect] = Drive(self.gossip, self.perform, quiet=(Tick, FromPeer))
        self.peers.post = self.drive.post

    def start(self) -> None:
        self.drive.post(config_stimulus(self.config))
        self.bus.start()
        self.desk.start()
        for daemon in ("tunneld", "launcherd", "electiond"):
            Mirror(daemon, self.paths, self.on_snapshot, self.on_message).start(self.tasks)
        self.tasks.start(self.drive.run(), "membership")
        self.peers.start(self.desk)

    # -- stimuli ------------------------------------------------------------------------------------------

    def on_message(self, message: codec.Message) -> None:
        self.desk.on_message(message)
        match message:
            case TunnelChanged() | InventoryChanged() | DeviceChanged() | SlotChanged() | AssignmentsChanged():
                self.drive.post(message)
            case LinkChanged():
                self.drive.post(message)
            case FromPeer(channel=channel) if channel != "enroll":
                self.drive.post(message)

    def on_snapshot(self, messages: list[codec.Message]) -> None:
        self.desk.on_snapshot(messages)
        slots = tuple(message for message in messages if isinstance(message, SlotChanged))
        if slots or any(isinstance(message, InventoryChanged) for message in messages):
            self.drive.post(SlotsReplaced(slots))
        if any(isinstance(message, TunnelChanged) for message in messages):
            self.drive.post(LinksReplaced(tuple(item for item in messages if isinstance(item, LinkChanged))))
        for message in messages:
            if not isinstance(message, SlotChanged):
                self.on_message(message)

    # -- effects ------------------------------------------------------------------------------------------

    def perform(self, effect: Effect) -> None:
        match effect:
            case PublishMember(member=member) if not member.is_self:
                self.bus.publish(member)
                self.peers.tell(member)
            case PublishMember(member=member):
                self.bus.publish(member)
                said = member.announcement
                log.info(
                    "announced",
                    incarnation=said.incarnation,
                    seq=said.seq,
                    role=said.role,
                    state=said.state,
                    models=len(said.available_models),
                    hosted=" ".join(item.model for item in said.hosted) or "none",
                )
            case PublishMesh(mesh=mesh):
                self.bus.publish(mesh)
                self.desk.on_mesh()
                log.info("mesh", mesh=mesh.mesh_id, name=mesh.mesh_name or "unnamed")
            case PublishDemand(demand=demand):
                self.bus.publish(demand)
            case PersistIdentity(identity=identity):
                self.files.save_identity(identity)
            case PersistDemand(totals=totals, slots=slots):
                self.files.save_demand(totals, slots)
            case _:
                self.peers.perform(effect)

    # -- what the bus server tells and asks -----------------------------------------------------------------

    def state_line(self) -> str:
        mesh = self.membership.identity.mesh_name or self.membership.identity.mesh_id or "no mesh"
        if self.membership.own:
            others = len(self.gossip.roster.others())
            return f"{mesh}: {others + 1} nodes" if others else f"{mesh}: 1 node"
        who = "tunneld to say who this node is" if self.membership.settled else "tunneld and launcherd"
        return f"waits for {who}"

    def snapshot(self) -> Iterable[codec.Message]:
        if not self.membership.settled:
            raise StillStarting("gossipd has just started and waits for tunneld and launcherd; ask again in a moment")
        if not self.gossip.caught_up(now=asyncio.get_running_loop().time()):
            raise StillStarting("gossipd has just started and hears from its peers; ask again in a moment")
        return [*self.gossip.snapshot(now=asyncio.get_running_loop().time()), *self.desk.snapshot()]

    def story(self, limit: int) -> tuple[StoryEntry, ...]:
        return self.drive.story(limit, asyncio.get_running_loop().time())

    async def answer(self, request: codec.Message, _deadline_seconds: float) -> codec.Message:
        reply = await self.desk.answer(request)
        if reply is not None:
            return reply
        match request:
            case CountUnserved():
                self.drive.post(request)
                return Done()
            case ExplainSubject(subject=subject):
                return Explanation(sentences=self.explain(subject))
            case ReloadConfig():
                return self.reload()
        raise RequestRefused("not_for_me", f"gossipd does not serve {type(request).__name__}")

    def members(self) -> list[MemberChanged]:
        said = self.gossip.snapshot(now=asyncio.get_running_loop().time())
        return [item for item in said if isinstance(item, MemberChanged)]

    def post_trust(self, stimulus: MeshAdopted | DrainAsked) -> None:
        self.drive.post(stimulus)

    def explain(self, subject: str) -> tuple[str, ...]:
        own = self.membership.own
        identity = self.membership.identity
        if subject in self.desk.keeping.message().banned:
            return (f"{subject} is banned from the mesh. An issuer can lift that: meshctl peers ban --lift {subject}",)
        demand = {item.model: item for item in self.membership.demand.summary(now=asyncio.get_running_loop().time())}
        if subject in demand:
            item = demand[ModelName(subject)]
            return (
                f"The mesh has been asked for {subject} {item.requests_total} times, "
                f"{item.per_minute_10m:g} a minute over the last ten minutes.",
            )
        for member in self.members():
            if not member.is_self and subject in (member.announcement.peer_id, member.announcement.name):
                return explain_member(member)
        if own is None or subject not in (own.peer_id, own.name, "node", "this node"):
            return ()
        mesh = f"mesh {identity.mesh_name or identity.mesh_id}" if identity.mesh_id else "no mesh (it is idle)"
        return (
            f"{own.name} ({own.peer_id}) is alive: it is this node, in {mesh}, start number {own.incarnation}.",
            f"Its role is {own.role} because it " + role_words(own, self.config.node.client),
        )

    def reload(self) -> ConfigReloaded:
        new = load_config(self.paths.config_file, environment())
        mine = ("node.name", "node.client", "models.serve")
        changed = tuple(key for key in changed_keys(self.config, new) if key in mine)
        self.config = new
        self.drive.post(config_stimulus(new))
        return ConfigReloaded(changed=changed, needs_restart=())


async def main(paths: NodePaths, config: NodeConfig) -> None:
    """Run until SIGTERM. Raises: StateError when the node's identity can't be kept."""
    daemon = Gossipd(paths, config)
    stop = StopSignal()
    daemon.start()
    log.ready("gossipd", incarnation=daemon.membership.identity.incarnation)
    kind = await stop.wait_or(daemon.tasks)
    log.info("stopping", daemon="gossipd", kind=kind)
    daemon.perform(daemon.membership.persist_demand())
    if kind == "node":
        await daemon.peers.goodbye()
    await daemon.tasks.cancel()
    daemon.bus.close()
