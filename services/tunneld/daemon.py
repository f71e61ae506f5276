"""tunneld's shell: holds the node key and the mesh port, signs for gossipd, publishes where this node is."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

from services.tunneld.io.mesh_port import MeshPort, bind_mesh_port, interface_addresses
from services.tunneld.io.node_key import NodeKey
from shared import codec
from shared.certificates import make_csr
from shared.config import NodeConfig, changed_keys, is_loopback, load_config
from shared.errors import RequestRefused
from shared.io import log
from shared.io.bus import BusServer
from shared.io.drive import Tasks
from shared.io.lifecycle import StopSignal, environment
from shared.messages.daemon import ConfigReloaded, ExplainSubject, Explanation, ReloadConfig, StoryEntry
from shared.messages.mesh import RecordSigned, SignedRecord, SignRecord, TunnelChanged
from shared.messages.trust import CsrMade, MakeCsr
from shared.paths import NodePaths
from shared.peer_ids import multiaddrs

ADDRESS_SECONDS = 15.0
"""How often interfaces are looked at for a new address."""
SIGN_LIMIT_BYTES = 1024 * 1024


@dataclass
class Tunneld:
    """State of the running daemon; also what its bus server tells about it."""

    paths: NodePaths
    config: NodeConfig
    key: NodeKey
    port: MeshPort
    status: TunnelChanged
    changes: list[tuple[float, str]] = field(default_factory=list)

    def state_line(self) -> str:
        return f"mesh port {self.port.port}, mesh of one, {len(self.status.addresses)} addresses"

    def snapshot(self) -> Iterable[codec.Message]:
        return (self.status,)

    def story(self, limit: int) -> tuple[StoryEntry, ...]:
        now = asyncio.get_running_loop().time()
        return tuple(
            StoryEntry(age_seconds=round(now - at, 3), stimulus=text, effects=())
            for at, text in self.changes[-limit:]
        )

    def look(self) -> bool:
        """Read the interfaces; whether the announced addresses changed."""
        host = self.config.mesh.host
        addresses = multiaddrs(interface_addresses(host), self.port.port, self.key.peer_id)
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
            self.changes.append((asyncio.get_running_loop().time(), f"addresses {', '.join(addresses) or 'none'}"))
            del self.changes[:-200]
        return changed

    async def answer(self, request: codec.Message, _deadline_seconds: float) -> codec.Message:
        match request:
            case SignRecord(payload=payload):
                if len(payload) > SIGN_LIMIT_BYTES:
                    raise RequestRefused("too_large", f"a record has at most {SIGN_LIMIT_BYTES} bytes")
                return RecordSigned(
                    record=SignedRecord(
                        payload=payload, signature=self.key.sign(payload), peer_id=self.key.peer_id
                    )
                )
            case MakeCsr():
                return CsrMade(csr_der=make_csr(self.key.private))
            case ExplainSubject(subject=subject):
                if subject not in (self.key.peer_id, "node", "this node"):
                    return Explanation(sentences=())
                where = ", ".join(self.status.addresses) or "nowhere"
                sentences = [f"This node is {self.key.peer_id}, reachable at {where}."]
                if self.status.reason:
                    sentences.append(f"Not reachable from outside: {self.status.reason}.")
                return Explanation(sentences=tuple(sentences))
            case ReloadConfig():
                new = load_config(self.paths.config_file, environment())
                later = tuple(key for key in changed_keys(self.config, new) if key.startswith("mesh."))
                return ConfigReloaded(changed=(), needs_restart=later)
        raise RequestRefused("not_for_me", f"tunneld does not serve {type(request).__name__}")


async def main(paths: NodePaths, config: NodeConfig) -> None:
    """Run until SIGTERM. Raises: StateError for a taken port or an unusable key."""
    key = NodeKey(paths.state)
    port = bind_mesh_port(config.mesh.host, config.mesh.port, paths.state / "mesh_port")
    daemon = Tunneld(paths, config, key, port, TunnelChanged(peer_id=key.peer_id, port=port.port, addresses=()))
    daemon.look()
    tasks = Tasks()
    bus = BusServer("tunneld", paths, daemon, daemon.answer, tasks)
    bus.start()
    stop = StopSignal()

    async def watch_addresses() -> None:
        while True:
            await asyncio.sleep(ADDRESS_SECONDS)
            if daemon.look():
                log.info("addresses_changed", addresses=" ".join(daemon.status.addresses))
                bus.publish(daemon.status)

    tasks.start(watch_addresses(), "interface addresses")
    bus.publish(daemon.status)
    log.ready("tunneld", peer=key.peer_id, port=port.port)
    kind = await stop.wait_or(tasks)
    log.info("stopping", daemon="tunneld", kind=kind)
    await tasks.cancel()
    bus.close()
    port.close()
