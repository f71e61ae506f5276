"""tunneld's shell: holds the node key and the mesh port, and carries every byte between this node and others.

It decides nothing: gossipd says whom to trust (``TrustChanged``) and whom to keep connected (``PeersWanted``).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable

from services.tunneld.addresses import own_addresses
from services.tunneld.io.admin import AdminDesk, ask_peer
from services.tunneld.io.control_streams import ControlStreams
from services.tunneld.io.data_socket import DataSocket
from services.tunneld.io.engine_relay import EngineRelay
from services.tunneld.io.enrolment import EnrolmentDesk, enroll
from services.tunneld.io.incoming import IncomingStreams
from services.tunneld.io.mesh_links import MeshLinks
from services.tunneld.io.mesh_port import MeshPort, bind_mesh_port, interface_addresses
from services.tunneld.io.node_key import NodeKey
from services.tunneld.io.probe import Prober
from services.tunneld.io.stream import TunnelStream
from shared import codec
from shared.certificates import make_csr
from shared.config import NodeConfig, changed_keys, is_loopback, load_config
from shared.errors import CertificateRefused, RequestRefused
from shared.ids import HolderId, PeerId
from shared.io import log
from shared.io.bus import BusClient, BusServer, Mirror
from shared.io.drive import Tasks
from shared.io.lease_client import LeaseClient
from shared.io.lifecycle import StopSignal, environment
from shared.messages.daemon import ConfigReloaded, Done, ExplainSubject, Explanation, ReloadConfig, StoryEntry
from shared.messages.mesh import RecordSigned, SignedRecord, SignRecord, TunnelChanged
from shared.messages.trust import CsrMade, EnrollAt, MakeCsr, PeersWanted, RedeemInvite, TrustChanged
from shared.messages.tunnel import AdminRequest, LinkChanged, PeerProbed, ProbePeer, SendToPeers
from shared.paths import NodePaths

ADDRESS_SECONDS = 15.0
"""How often interfaces are looked at for a new address."""
SIGN_LIMIT_BYTES = 1024 * 1024
LIVE_KEYS = ("mesh.advertise", "mesh.accept_admin")


class Tunneld:
    """State of the running daemon; also what its bus server tells about it."""

    def __init__(self, paths: NodePaths, config: NodeConfig, key: NodeKey, port: MeshPort) -> None:
        self.paths = paths
        self.config = config
        self.key = key
        self.port = port
        self.status = TunnelChanged(peer_id=key.peer_id, port=port.port, addresses=())
        self.tasks = Tasks()
        self.bus = BusServer("tunneld", paths, self, self.answer, self.tasks)
        self._clients = {name: BusClient(name, paths) for name in ("gossipd", "launcherd")}
        self._changes: deque[tuple[float, str]] = deque(maxlen=200)
        self._trust = asyncio.Queue[TrustChanged]()
        self._observed: dict[PeerId, str] = {}
        self.enrolments = EnrolmentDesk(self._redeem, self.bus.count)
        self.control = ControlStreams(self._open_control, self.bus.publish, self.bus.count, self.tasks)
        self.admin = AdminDesk(
            key.peer_id, paths.logs, self._ask, lambda: self.config.mesh.accept_admin, self._dial_back
        )
        self.leases = LeaseClient(
            self._clients["launcherd"],
            self.tasks,
            HolderId(f"tunneld-{self.bus.boot_id}"),
            queue_limit=config.engine.queue_limit,
            wait_seconds=config.api.request_wait_seconds,
            daemon="tunneld",
        )
        self.engines = EngineRelay(self.leases, self.bus.count)
        self.data = DataSocket(
            paths.data_socket,
            self._open_bulk,
            self.bus.count,
            self.tasks,
            silent_seconds=lambda peer_id: self.links.silent_seconds(peer_id),
        )
        self.incoming = IncomingStreams(self.control, self.admin, self.engines.serve, self.bus.count, self.tasks)
        self.links = MeshLinks(
            key.private,
            key.peer_id,
            port,
            config.mesh.transport,
            publish=self._publish_link,
            on_stream=self.incoming.accept,
            on_enroll=self._on_enroll,
            tasks=self.tasks,
        )
        self.prober = Prober(key.peer_id, self.links)

    async def start(self) -> None:
        self.look()
        await self.data.start()
        self.bus.start()
        self.links.start()
        self.tasks.start(self._watch_addresses(), "interface addresses")
        self.tasks.start(self._follow_trust(), "trust")
        Mirror("gossipd", self.paths, self._on_snapshot, self._on_message).start(self.tasks)
        Mirror(
            "launcherd",
            self.paths,
            self.leases.on_snapshot,
            self.leases.on_message,
            lambda _boot: self.leases.on_new_boot(),
        ).start(self.tasks)
        self.bus.publish(self.status)

    async def stop(self) -> None:
        self.data.close()
        self.links.close()
        await self.leases.close()
        await self.tasks.cancel()
        self.bus.close()
        self.port.close()

    # -- what gossipd says ----------------------------------------------------------------------------------------

    def _on_snapshot(self, messages: list[codec.Message]) -> None:
        for message in messages:
            self._on_message(message)

    def _on_message(self, message: codec.Message) -> None:
        match message:
            case TrustChanged():
                self._trust.put_nowait(message)
            case PeersWanted():
                self.links.want(message)

    async def _follow_trust(self) -> None:
        while True:
            trust = await self._trust.get()
            if trust == self.links.trust:
                continue
            try:
                await self.links.set_trust(trust)
            except CertificateRefused as error:
                # Renewal is gossipd's business; until then nobody would accept this node either.
                log.error("certificate_unusable", mesh=trust.mesh_id, reason=error.detail)
                self._note(f"certificate unusable: {error.detail}")

    # -- what is published ----------------------------------------------------------------------------------------

    def _publish_link(self, link: LinkChanged) -> None:
        self.bus.publish(link)
        if link.state != "connected":
            self._observed.pop(link.peer_id, None)
            self.control.forget(link.peer_id)
        else:
            observed = self.links.observed_address(link.peer_id)
            if observed and self._observed.get(link.peer_id) != observed:
                self._observed[link.peer_id] = observed
                self.look()
        log.info("link", peer=link.peer_id, state=link.state, reason=link.reason)

    def look(self) -> bool:
        """Read the interfaces; whether the announced addresses changed, which is then published."""
        host = self.config.mesh.host
        addresses = own_addresses(
            interface_addresses(host),
            self.port.port,
            self.key.peer_id,
            advertise=self.config.mesh.advertise,
            observed=self._observed,
        )
        reason = ""
        if is_loopback(host):
            reason = f"mesh.host is {host}: only this machine can reach the node"
        elif all("/ip4/127." in address or "/ip6/::1/" in address for address in addresses):
            reason = "this machine has no network interface with an address besides loopback"
        status = TunnelChanged(
            peer_id=self.key.peer_id, port=self.port.port, addresses=addresses, reason=reason
        )
        changed = status != self.status
        self.status = status
        if changed:
            self._note(f"addresses {', '.join(addresses) or 'none'}")
            log.info("addresses_changed", addresses=" ".join(addresses))
            self.bus.publish(status)
        return changed

    async def _watch_addresses(self) -> None:
        while True:
            await asyncio.sleep(ADDRESS_SECONDS)
            self.look()

    def _note(self, text: str) -> None:
        self._changes.append((asyncio.get_running_loop().time(), text))

    # -- the bus --------------------------------------------------------------------------------------------------

    def state_line(self) -> str:
        links = self.links.links.links()
        connected = sum(link.state == "connected" for link in links)
        mesh = f"{connected} of {len(links)} links up" if links else "mesh of one"
        return f"mesh port {self.port.port}, {mesh}, {len(self.status.addresses)} addresses"

    def snapshot(self) -> Iterable[codec.Message]:
        return (self.status, *self.links.links.links())

    def story(self, limit: int) -> tuple[StoryEntry, ...]:
        now = asyncio.get_running_loop().time()
        changes = (
            StoryEntry(age_seconds=round(now - at, 3), stimulus=text, effects=()) for at, text in self._changes
        )
        entries = [*changes, *self.links.story(limit), *self.leases.story(limit)]
        return tuple(sorted(entries, key=lambda entry: -entry.age_seconds)[-limit:])

    async def answer(self, request: codec.Message, deadline_seconds: float) -> codec.Message:
        match request:
            case SignRecord(payload=payload):
                if len(payload) > SIGN_LIMIT_BYTES:
                    raise RequestRefused("too_large", f"a record has at most {SIGN_LIMIT_BYTES} bytes")
                signature = self.key.sign(payload)
                return RecordSigned(
                    record=SignedRecord(payload=payload, signature=signature, peer_id=self.key.peer_id)
                )
            case SendToPeers():
                self.control.send(request)
                return Done()
            case MakeCsr():
                return CsrMade(csr_der=make_csr(self.key.private))
            case EnrollAt():
                return await enroll(request, self.key.private, self.links.dial_enroll)
            case AdminRequest():
                return await ask_peer(await self.links.open_stream(request.peer, bulk=False), request)
            case ProbePeer():
                return await self.prober.probe(request)
            case ExplainSubject(subject=subject):
                return Explanation(sentences=self._explain(subject))
            case ReloadConfig():
                return self._reload()
        raise RequestRefused("not_for_me", f"tunneld does not serve {type(request).__name__}")

    def _explain(self, subject: str) -> tuple[str, ...]:
        if subject in (self.key.peer_id, "node", "this node"):
            where = ", ".join(self.status.addresses) or "nowhere"
            sentences = [f"This node is {self.key.peer_id}, reachable at {where}."]
            if self.status.reason:
                sentences.append(f"Not reachable from outside: {self.status.reason}.")
            return tuple(sentences)
        link = next((link for link in self.links.links.links() if link.peer_id == subject), None)
        if link is None:
            return ()
        rtt = f", round trip {link.rtt_seconds * 1000:.1f} ms" if link.rtt_seconds is not None else ""
        return (f"The link with {link.peer_id} is {link.state}{rtt}: {link.reason}.",)

    def _reload(self) -> ConfigReloaded:
        new = load_config(self.paths.config_file, environment())
        changed = changed_keys(self.config, new)
        later = tuple(key for key in changed if key.startswith("mesh.") and key not in LIVE_KEYS)
        self.config = new
        self.look()
        return ConfigReloaded(changed=tuple(key for key in changed if key in LIVE_KEYS), needs_restart=later)

    # -- between nodes --------------------------------------------------------------------------------------------

    async def _open_control(self, peer_id: PeerId) -> TunnelStream:
        return await self.links.open_stream(peer_id, bulk=False)

    def _on_enroll(self, stream: TunnelStream, observed_address: str) -> None:
        self.tasks.start(self.enrolments.serve(stream, observed_address), "enrolment")

    async def _dial_back(self, peer_id: PeerId) -> PeerProbed:
        return await self.prober.dial_back(peer_id)

    async def _open_bulk(self, peer_id: PeerId) -> TunnelStream:
        return await self.links.open_stream(peer_id, bulk=True)

    async def _redeem(self, request: RedeemInvite) -> codec.Message:
        return await self._ask("gossipd", request)

    async def _ask(self, daemon: str, request: codec.Message) -> codec.Message:
        return await self._clients[daemon].request(request, deadline_seconds=8.0)


async def main(paths: NodePaths, config: NodeConfig) -> None:
    """Run until SIGTERM. Raises: StateError for a taken port or an unusable key."""
    key = NodeKey(paths.state)
    port = bind_mesh_port(config.mesh.host, config.mesh.port, paths.state / "mesh_port")
    daemon = Tunneld(paths, config, key, port)
    stop = StopSignal()
    await daemon.start()
    log.ready("tunneld", peer=key.peer_id, port=port.port)
    kind = await stop.wait_or(daemon.tasks)
    log.info("stopping", daemon="tunneld", kind=kind)
    await daemon.stop()
