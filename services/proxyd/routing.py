"""Which host answers a request: rendezvous hashing on (model, session) with a load guard and a cool-down.

A conversation keeps its host, and with it its KV cache, as long as that host is not overloaded; hosts that come and
go move only their own share.

Source: DESIGN §8; docs/spec/routing.md; "Consistent hashing with bounded loads" (Mirrokni, Thorup, Zadimoghaddam 2016).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from shared.ids import ModelName, PeerId
from shared.messages.models import RouteHost

LOAD_BOUND = 1.25
"""A host is skipped above this multiple of the mean load: the paper's c, 1.25 keeps moves rare and queues short."""
COOL_DOWN_FIRST_SECONDS = 1.0
COOL_DOWN_MOST_SECONDS = 60.0
SILENT_SECONDS = 0.5
"""Said again each 0.1 s while it lasts."""


def rendezvous_weight(model: ModelName, session: str, peer_id: PeerId) -> int:
    """The same on every node and in every process."""
    data = b"\x00".join(part.encode("utf-8", "surrogatepass") for part in (model, session, peer_id))
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "big")


def choose_host(
    model: ModelName,
    session: str | None,
    hosts: Sequence[RouteHost],
    *,
    self_id: PeerId,
    excluded: Collection[PeerId] = (),
    doubtful: Collection[PeerId] = (),
) -> RouteHost | None:
    """The host for a request, None when every one is excluded.

    ``excluded`` are hosts already tried for this request; ``doubtful`` ones, cooling down or suspected dead, are taken
    only when there is no other. Without a session the node's own id stands for one, and an own engine that is not
    overloaded comes first. When all are over the bound, the least loaded one is taken: overload is answered by its
    queue, not by a wrong choice here.
    """
    candidates = [host for host in hosts if host.peer_id not in excluded]
    if doubtful:
        candidates = [host for host in candidates if host.peer_id not in doubtful] or candidates
    if len(candidates) <= 1:
        return candidates[0] if candidates else None
    mean = sum(host.load for host in candidates) / len(candidates)
    # A host with a free place is never too full, however idle the others are.
    open_hosts = [host for host in candidates if host.load < 1.0 or host.load <= LOAD_BOUND * mean]
    if not open_hosts:
        return min(candidates, key=lambda host: (host.load, host.peer_id != self_id, host.peer_id))
    if session is None:
        for host in open_hosts:
            if host.peer_id == self_id:
                return host
    key = session if session is not None else str(self_id)
    return max(open_hosts, key=lambda host: (rendezvous_weight(model, key, host.peer_id), host.peer_id))


@dataclass(slots=True)
class _CoolDown:
    until: float
    seconds: float


class CoolDowns:
    """Hosts that just failed, or are silent where bytes were due. A further failure doubles the time, a success ends
    it.

    Kept per node and model: an engine that dies says nothing about its neighbour. A node that cannot be reached is
    kept with no model and cools down for all of them.
    """

    def __init__(self) -> None:
        self._hosts: dict[tuple[PeerId, ModelName | None], _CoolDown] = {}
        self._silent: dict[tuple[PeerId, ModelName], float] = {}

    def failed(self, peer_id: PeerId, model: ModelName | None, *, now: float) -> None:
        """Failures during a cool-down are of requests that began before it, and one failure to us."""
        known = self._hosts.get((peer_id, model))
        if known is not None and known.until > now:
            return
        seconds = COOL_DOWN_FIRST_SECONDS if known is None else min(known.seconds * 2, COOL_DOWN_MOST_SECONDS)
        self._hosts[peer_id, model] = _CoolDown(now + seconds, seconds)

    def succeeded(self, peer_id: PeerId, model: ModelName) -> None:
        if self._hosts:
            self._hosts.pop((peer_id, model), None)
            self._hosts.pop((peer_id, None), None)

    def silent(self, peer_id: PeerId, model: ModelName, *, now: float) -> None:
        """A request on that engine gets no bytes now; to be said again while it lasts."""
        self._silent[peer_id, model] = now + SILENT_SECONDS

    def cooling(self, model: ModelName, *, now: float) -> set[PeerId]:
        """Hosts that requests for ``model`` should rather not go to."""
        if not self._hosts and not self._silent:
            return set()
        found = {peer_id for (peer_id, of), state in self._hosts.items() if of in (model, None) and state.until > now}
        self._silent = {key: until for key, until in self._silent.items() if until > now}
        return found | {peer_id for peer_id, of in self._silent if of == model}
