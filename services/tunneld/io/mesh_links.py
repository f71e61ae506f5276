"""This node's links as they are: connections, dials on their way, and the machine of ``links.py`` that decides.

Everything between nodes goes through here: :meth:`open_stream` for what this node begins, ``on_stream`` for what others
do. Without credentials of a mesh the ports are held but do not listen.
"""

from __future__ import annotations

import asyncio
import datetime
import os
from collections.abc import Callable
from functools import partial

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from services.tunneld.io.connection import Connection
from services.tunneld.io.credentials import Credentials
from services.tunneld.io.mesh_port import MeshPort
from services.tunneld.io.quic import QuicEndpoint
from services.tunneld.io.stream import TunnelStream
from services.tunneld.io.tls import TlsEndpoint
from services.tunneld.link import (
    CancelDial,
    CloseConnection,
    Connected,
    ConnectionId,
    ConnectionLost,
    Dial,
    DialDone,
    DialFailed,
    DialId,
    Effect,
    Measured,
    MeshSet,
    Preference,
    PublishLink,
    Stimulus,
)
from services.tunneld.links import Links
from shared.certificates import load_der
from shared.errors import CertificateRefused, MeshError, PeerUnreachable
from shared.ids import PeerId
from shared.io import log
from shared.io.drive import Drive, Tasks, Tick
from shared.messages.daemon import StoryEntry
from shared.messages.trust import PeersWanted, TrustChanged
from shared.messages.tunnel import LinkChanged
from shared.multiaddrs import Address, parse_addresses

DIAL_SECONDS = 5.0
MEASURE_SECONDS = 1.0
OnStream = Callable[[Connection, TunnelStream], None]
OnEnroll = Callable[[TunnelStream, str], None]


class MeshLinks:
    """Links over both transports. Call :meth:`start` once the loop runs, :meth:`close` at the end."""

    def __init__(
        self,
        key: Ed25519PrivateKey,
        own: PeerId,
        port: MeshPort,
        preference: Preference,
        *,
        publish: Callable[[LinkChanged], None],
        on_stream: OnStream,
        on_enroll: OnEnroll,
        tasks: Tasks,
    ) -> None:
        self._key = key
        self._own = own
        self._credentials: Credentials | None = None
        self._trust: TrustChanged | None = None
        self._publish = publish
        self._on_enroll = on_enroll
        self._tasks = tasks
        self._listening = False
        self._connections: dict[ConnectionId, Connection] = {}
        self._to_close: dict[ConnectionId, str] = {}
        self._dials: dict[DialId, asyncio.Task[None]] = {}
        self._count = 0
        self.quic = QuicEndpoint(port.udp, lambda: self._credentials, self._on_connection, on_stream)
        self.tls = TlsEndpoint(port.tcp, lambda: self._credentials, self._on_connection, on_stream)
        self.links = Links(own, transport=preference, seed=os.urandom(8))
        self.drive: Drive[Stimulus, Effect] = Drive(self.links, self._perform, quiet=(Tick, Measured))

    def start(self) -> None:
        self._tasks.start(self.drive.run(), "links")
        self._tasks.start(self._measure(), "link measurements")

    # -- what gossipd says ----------------------------------------------------------------------------------------

    async def set_trust(self, trust: TrustChanged) -> None:
        """Take over credentials and bans. Raises: CertificateRefused for certificates that cannot be used."""
        before = self._credentials
        self._trust = trust
        self._credentials = self._make_credentials(trust)
        in_mesh = self._credentials is not None
        self.quic.on_enroll = self._on_enroll if in_mesh and trust.issuer else None
        if in_mesh and not self._listening:
            await self.quic.listen()
            await self.tls.listen()
            self._listening = True
            log.info("listening", mesh=trust.mesh_id, name=trust.mesh_name or "unnamed")
        now = self._credentials
        other_mesh = before is not None and (now is None or (before.mesh_id, before.root) != (now.mesh_id, now.root))
        self.drive.post(MeshSet(in_mesh=in_mesh, banned=frozenset(trust.banned), renewed=other_mesh))

    def _make_credentials(self, trust: TrustChanged) -> Credentials | None:
        if not trust.chain_der or not trust.root_der:
            return None
        credentials = Credentials(
            mesh_id=trust.mesh_id,
            root=load_der(trust.root_der),
            chain=tuple(load_der(part) for part in trust.chain_der),
            key=self._key,
            banned=frozenset(trust.banned),
        )
        own = credentials.judge(credentials.chain, datetime.datetime.now(datetime.UTC))
        if own.peer_id != self._own:
            raise CertificateRefused(f"gossipd's certificate is for {own.peer_id}, this node is {self._own}")
        return credentials

    @property
    def trust(self) -> TrustChanged | None:
        return self._trust

    def want(self, wanted: PeersWanted) -> None:
        self.drive.post(wanted)

    # -- streams --------------------------------------------------------------------------------------------------

    async def open_stream(self, peer_id: PeerId, *, bulk: bool) -> TunnelStream:
        """A new stream to the peer over the connection that fits. Raises: PeerUnreachable with the link's reason."""
        connection_id = self.links.connection_for(peer_id, bulk=bulk)
        connection = self._connections.get(connection_id) if connection_id is not None else None
        if connection is None:
            raise PeerUnreachable(f"no link with {peer_id}: {self.links.why_not(peer_id)}")
        return await connection.open_stream()

    def silent_seconds(self, peer_id: PeerId) -> float:
        """Since the peer was last heard over the connection that bulk streams take; 0 without one."""
        connection_id = self.links.connection_for(peer_id, bulk=True)
        connection = self._connections.get(connection_id) if connection_id is not None else None
        return connection.silent_seconds() if connection is not None else 0.0

    def observed_address(self, peer_id: PeerId) -> str:
        """Where the peer sees this node over QUIC, whose port does not change with each connection; "" if unknown."""
        for connection in self._connections.values():
            if connection.peer.peer_id == peer_id and connection.transport == "quic" and connection.dialled_here:
                return connection.observed_address
        return ""

    def addresses_of(self, peer_id: PeerId) -> tuple[Address, ...]:
        """Where the peer says it is, and where this node sees it over QUIC, whose port others can dial."""
        seen = [
            connection.remote
            for connection in self._connections.values()
            if connection.peer.peer_id == peer_id and connection.transport == "quic"
        ]
        return tuple(dict.fromkeys([*self.links.addresses_of(peer_id), *parse_addresses(tuple(seen))]))

    async def dial_enroll(self, address: Address, root_fingerprint: str) -> TunnelStream:
        return await self.quic.dial_enroll(address, root_fingerprint)

    def story(self, limit: int) -> tuple[StoryEntry, ...]:
        return self.drive.story(limit, asyncio.get_running_loop().time())

    # -- effects --------------------------------------------------------------------------------------------------

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Dial(dial_id=dial_id):
                self._dials[dial_id] = self._tasks.start(self._dial(effect), f"dial {effect.address}")
            case CancelDial(dial_id=dial_id):
                task = self._dials.pop(dial_id, None)
                if task is not None:
                    task.cancel()
            case CloseConnection(connection_id=connection_id, reason=reason, when_idle=when_idle):
                self._close_connection(connection_id, reason, when_idle)
            case PublishLink(link=link):
                self._publish(link)

    def _close_connection(self, connection_id: ConnectionId, reason: str, when_idle: bool) -> None:
        connection = self._connections.get(connection_id)
        if connection is None:
            return
        if when_idle and connection.open_streams:
            self._to_close[connection_id] = reason
            return
        connection.close(reason)

    async def _dial(self, dial: Dial) -> None:
        endpoint = self.quic if dial.address.transport == "quic" else self.tls
        try:
            async with asyncio.timeout(DIAL_SECONDS):
                await endpoint.dial(dial.address, dial.peer_id)
        except MeshError as error:
            self.drive.post(DialFailed(dial.dial_id, error.detail))
        except TimeoutError:
            self.drive.post(DialFailed(dial.dial_id, f"no answer within {DIAL_SECONDS:g} s"))
        else:
            self.drive.post(DialDone(dial.dial_id))
        finally:
            self._dials.pop(dial.dial_id, None)

    # -- connections ----------------------------------------------------------------------------------------------

    def _on_connection(self, connection: Connection) -> None:
        self._count += 1
        connection_id = ConnectionId(self._count)
        self._connections[connection_id] = connection
        self.drive.post(
            Connected(
                connection_id,
                connection.peer.peer_id,
                connection.transport,
                connection.remote,
                connection.dialled_here,
                connection.peer.grant,
            )
        )
        connection.closed.add_done_callback(partial(self._on_closed, connection_id))

    def _on_closed(self, connection_id: ConnectionId, closed: asyncio.Future[str]) -> None:
        connection = self._connections.pop(connection_id)
        self._to_close.pop(connection_id, None)
        reason = "" if closed.cancelled() else closed.result()
        self.drive.post(Measured(connection_id, None, connection.counters))
        self.drive.post(ConnectionLost(connection_id, reason or "the connection ended"))
        for other in self._connections.values():
            if other.peer.peer_id == connection.peer.peer_id:
                # A machine that died says nothing over UDP; its TCP connections often do.
                other.suspect()

    async def _measure(self) -> None:
        while True:
            await asyncio.sleep(MEASURE_SECONDS)
            for connection_id, connection in self._connections.items():
                self.drive.post(Measured(connection_id, connection.rtt_seconds(), connection.counters))
            for connection_id, reason in list(self._to_close.items()):
                self._close_connection(connection_id, reason, True)

    def close(self) -> None:
        """Tell the peers and end all connections."""
        for connection in list(self._connections.values()):
            connection.close("that node stops")
        self.quic.close()
        self.tls.close()
