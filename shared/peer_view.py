"""The nodes of the mesh as a person sees them: gossipd's word on each, tunneld's word on the link with it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shared.messages.mesh import MemberChanged
from shared.messages.trust import JoinChanged
from shared.messages.tunnel import LinkChanged
from shared.node_status import JoinStepStatus, LinkStatus, PeerStatus

NO_WORD = "only dialled so far: it has not said who it is"


def peers_of(members: Sequence[MemberChanged], links: Iterable[LinkChanged]) -> tuple[PeerStatus, ...]:
    """All members in gossipd's order, then the peers that tunneld dials and nobody has heard of yet."""
    link_of = {link.peer_id: link for link in links}
    known = {member.announcement.peer_id for member in members}
    strangers = [link for link in link_of.values() if link.peer_id not in known and link.state != "closed"]
    return (
        *(_peer(member, link_of.get(member.announcement.peer_id)) for member in members),
        *(_stranger(link) for link in strangers),
    )


def link_words(link: LinkStatus | None) -> str:
    """For a table: ``quic+tcp 0.4 ms``, or the state and why it is not connected."""
    if link is None:
        return ""
    if link.state != "connected":
        return f"{link.state}: {link.reason}"
    return link.transport + (f" {link.rtt_ms:.1f} ms" if link.rtt_ms is not None else "")


def join_steps(join: JoinChanged | None) -> tuple[JoinStepStatus, ...]:
    steps = join.steps if join else ()
    return tuple(JoinStepStatus(name=step.name, state=step.state, detail=step.detail) for step in steps)


def _peer(member: MemberChanged, link: LinkChanged | None) -> PeerStatus:
    said = member.announcement
    return PeerStatus(
        peer_id=said.peer_id,
        name=said.name,
        state=member.state,
        reason=member.reason,
        role=said.role,
        node_state=said.state,
        version=said.version,
        device=said.device,
        vram_bytes=said.vram_bytes,
        addresses=said.addresses,
        hosted=tuple(served.model for served in said.hosted),
        models_on_disk=len(said.available_models),
        age_seconds=member.age_seconds,
        is_self=member.is_self,
        grant=member.grant,
        trusted=member.trusted,
        link=_link(link) if link is not None and not member.is_self else None,
    )


def _stranger(link: LinkChanged) -> PeerStatus:
    return PeerStatus(
        peer_id=link.peer_id,
        name="",
        state="unknown",
        reason=NO_WORD,
        role="",
        node_state="",
        version="",
        device="",
        vram_bytes=0,
        addresses=(),
        hosted=(),
        models_on_disk=0,
        age_seconds=0.0,
        is_self=False,
        grant=link.grant or "",
        link=_link(link),
    )


def _link(link: LinkChanged) -> LinkStatus:
    used = dict.fromkeys(transport for transport in (link.control, link.bulk) if transport)
    return LinkStatus(
        state=link.state,
        reason=link.reason,
        transport="+".join(used),
        rtt_ms=None if link.rtt_seconds is None else round(link.rtt_seconds * 1000, 3),
        address=link.remote_address,
        retry_in_seconds=link.retry_in_seconds,
        bytes_sent=link.counters.bytes_sent,
        bytes_received=link.counters.bytes_received,
    )
