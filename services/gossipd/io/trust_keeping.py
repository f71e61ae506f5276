"""What the desk and the exchange of trust share: credentials and decisions, kept before they count, and published.

Keys and certificates are written before anything is answered or published: nothing counts that a crash would undo.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from services.gossipd.credentials import Credentials
from services.gossipd.io.authority_files import AuthorityFiles
from services.gossipd.membership import DrainAsked, MeshAdopted
from services.gossipd.mesh_identity import MeshIdentity
from services.gossipd.trust import wanted_identity
from shared.certificates import csr_public_key
from shared.errors import RequestRefused, StateError
from shared.ids import PeerId
from shared.io.bus import BusClient, BusServer
from shared.io.drive import Tasks
from shared.io.log import LogOnce
from shared.messages.mesh import MemberChanged
from shared.messages.trust import CsrMade, MakeCsr, TrustChanged
from shared.paths import NodePaths
from shared.peer_ids import peer_id_of

CSR_SECONDS = 5.0


@dataclass(frozen=True)
class Surroundings:
    """What is seen of the daemon around."""

    bus: BusServer
    identity: Callable[[], MeshIdentity]
    members: Callable[[], Iterable[MemberChanged]]
    post: Callable[[MeshAdopted | DrainAsked], None]
    """To the membership machine."""
    goodbye: Callable[[], Awaitable[None]] | None = None
    """Tell the peers of the present mesh that this node leaves it."""
    trusting: Callable[[TrustChanged], None] | None = None
    """Told of everything that is published about trust."""
    clock: Callable[[], float] = time.time
    """Unix seconds."""


class TrustKeeping:
    """This node's trust, on disk and in effect. Raises: StateError for damaged files."""

    def __init__(self, paths: NodePaths, tunneld: BusClient, tasks: Tasks, around: Surroundings) -> None:
        self._files = AuthorityFiles(paths.state)
        self.trust = self._files.load()
        self.tunneld = tunneld
        self.tasks = tasks
        self.around = around
        self.lock = asyncio.Lock()
        """Held while the mesh or a certificate changes."""
        self.once = LogOnce()
        self._told: TrustChanged | None = None
        self._kept = self.trust.to_json()

    def unix_seconds(self) -> float:
        return self.around.clock()

    def now(self) -> datetime:
        return datetime.fromtimestamp(self.around.clock(), UTC)

    def identity(self) -> MeshIdentity:
        """With the mesh that counts already, even if the membership machine has not heard of it yet."""
        return wanted_identity(self.around.identity(), self.trust.credentials)

    def adopt(self, credentials: Credentials) -> None:
        """Keep it, then act by it. Raises: StateError, and everything is as before."""
        self._files.save_credentials(credentials)
        self.trust.adopt(credentials)
        self._kept = self.trust.to_json()
        self._files.save_decisions(self.trust)
        self.around.post(MeshAdopted(credentials.mesh_id, credentials.mesh_name))
        self.publish()

    def keep_decisions(self) -> None:
        """To disk, then into effect. Raises: StateError, and everything is as it was kept last."""
        try:
            self._files.save_decisions(self.trust)
        except StateError:
            self.trust.revert(self._kept)
            raise
        self._kept = self.trust.to_json()
        self.publish()

    def message(self) -> TrustChanged:
        return self.trust.message(self.around.identity())

    def publish(self) -> None:
        """What tunneld works with, when it changed."""
        message = self.message()
        if message != self._told:
            self._told = message
            self.around.bus.publish(message)
            if self.around.trusting is not None:
                self.around.trusting(message)

    async def signing_request(self) -> tuple[bytes, PeerId]:
        """Of this node's key, from tunneld, and whose key it is. Raises: MeshError."""
        made = await self.tunneld.request(MakeCsr(), deadline_seconds=CSR_SECONDS)
        if not isinstance(made, CsrMade):
            raise RequestRefused("not_for_me", "tunneld answered something else; see 'meshctl version'")
        return made.csr_der, peer_id_of(csr_public_key(made.csr_der).public_bytes_raw())

    def members(self) -> list[MemberChanged]:
        """Those that take part now, this node among them."""
        return [member for member in self.around.members() if member.state in ("alive", "suspect")]

    def others(self) -> bool:
        return any(not member.is_self for member in self.members())
