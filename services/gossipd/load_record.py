"""The fast-moving half of what this node says: how busy it is, what it was asked for, who is near. Stateless.

Source: docs/spec/membership.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from services.gossipd.mesh_identity import MeshIdentity
from shared.ids import ModelName, PeerId
from shared.messages.mesh import LoadRecord, ModelCount, ModelLoad, PeerRtt
from shared.messages.models import SlotChanged

RTTS_LIMIT = 128


def load_record(
    identity: MeshIdentity,
    seq: int,
    slots: Iterable[SlotChanged],
    demand: Mapping[ModelName, int],
    rtts: Mapping[PeerId, float | None],
) -> LoadRecord:
    """``rtts``: of connected peers; 0 for one that was not measured yet, so that others know of the link."""
    return LoadRecord(
        peer_id=identity.peer_id,
        incarnation=identity.incarnation,
        seq=seq,
        mesh_id=identity.mesh_id,
        loads=tuple(
            ModelLoad(
                model=slot.model,
                in_use=slot.in_use,
                waiting=slot.waiting,
                parallel=slot.parallel,
                last_use_age_seconds=slot.last_use_age_seconds or 0.0,
            )
            for slot in sorted(slots, key=lambda slot: (slot.model, slot.slot_id))
            if slot.state == "ready"
        ),
        demand=tuple(ModelCount(model=model, requests_total=count) for model, count in sorted(demand.items())),
        rtts=tuple(
            PeerRtt(peer_id=peer_id, rtt_seconds=round(rtt or 0.0, 6))
            for peer_id, rtt in sorted(rtts.items())[:RTTS_LIMIT]
        ),
    )


def moved(one: LoadRecord, other: LoadRecord) -> bool:
    """Whether two records differ in more than their numbers and in how long ago something was."""
    return _still(one) != _still(other)


def _still(record: LoadRecord) -> LoadRecord:
    loads = tuple(replace(load, last_use_age_seconds=0.0) for load in record.loads)
    return replace(record, incarnation=0, seq=0, loads=loads)
