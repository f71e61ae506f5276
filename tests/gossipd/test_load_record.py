from __future__ import annotations

from dataclasses import replace

from services.gossipd.load_record import load_record, moved
from services.gossipd.mesh_identity import MeshIdentity
from shared.ids import MeshId, ModelName, PeerId, SlotId
from shared.messages.mesh import ModelCount, PeerRtt
from shared.messages.models import SlotChanged

IDENTITY = MeshIdentity(mesh_id=MeshId("mesh"), incarnation=4, peer_id=PeerId("me"))
READY = SlotChanged(
    slot_id=SlotId("s"), model=ModelName("m"), type="llm", state="ready", reason="", origin="flag", parallel=4, in_use=2
)


def test_it_says_how_busy_the_node_is() -> None:
    slots = (READY, replace(READY, slot_id=SlotId("t"), model=ModelName("l"), state="loading"))
    made = load_record(IDENTITY, 3, slots, {ModelName("m"): 7}, {PeerId("b"): None, PeerId("a"): 0.02})
    assert (made.incarnation, made.seq) == (4, 3)
    assert [(load.model, load.in_use, load.parallel) for load in made.loads] == [("m", 2, 4)]
    assert made.demand == (ModelCount(model=ModelName("m"), requests_total=7),)
    assert made.rtts == (
        PeerRtt(peer_id=PeerId("a"), rtt_seconds=0.02),
        PeerRtt(peer_id=PeerId("b"), rtt_seconds=0.0),
    )


def test_time_alone_moves_nothing() -> None:
    one = load_record(IDENTITY, 3, (READY,), {}, {})
    later = load_record(IDENTITY, 4, (replace(READY, last_use_age_seconds=9.0),), {}, {})
    assert not moved(one, later)
    assert moved(one, load_record(IDENTITY, 4, (replace(READY, in_use=3),), {}, {}))
