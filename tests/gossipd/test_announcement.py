"""What a node says of itself, from what its daemons report."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from services.gossipd.announcement import NodeFacts, announce, same_content
from services.gossipd.mesh_identity import MeshIdentity
from shared.ids import MeshId, ModelName, PeerId, SlotId
from shared.messages.mesh import Announcement, AvailableModel, ServedModel, TunnelChanged
from shared.messages.models import (
    Assignment,
    AssignmentsChanged,
    DeviceChanged,
    InventoryChanged,
    LocalModel,
    SlotChanged,
)

IDENTITY = MeshIdentity(mesh_id=MeshId("mesh"), incarnation=4, peer_id=PeerId("me"))


def local(name: str, **more: Any) -> LocalModel:
    return LocalModel(name=ModelName(name), type="llm", path=f"/secret/{name}.gguf", **{"file_size_bytes": 9, **more})


def slot(name: str, state: str) -> SlotChanged:
    return SlotChanged(
        slot_id=SlotId(f"{name}-{state}"),
        model=ModelName(name),
        type="llm",
        state=state,  # type: ignore[arg-type]
        reason="",
        origin="flag",
        parallel=4,
    )


def slots(*items: SlotChanged) -> dict[SlotId, SlotChanged]:
    return {item.slot_id: item for item in items}


FULL = NodeFacts(
    node_name="desk",
    configured=True,
    requested_models=(ModelName("wish"),),
    tunnel=TunnelChanged(peer_id=PeerId("me"), port=9340, addresses=("/ip4/10.0.0.2",)),
    inventory=InventoryChanged(
        models=(
            local(
                "a",
                file_hash="ab",
                kv_bytes_per_token=1,
                compute_bytes=2,
                context_tokens=3,
                parallel=4,
                architecture="llama",
                quantization="Q4",
                parameters=5,
                builtin=True,
            ),
            local("b"),
        )
    ),
    device=DeviceChanged(device="RTX", vram_bytes=8, total_bytes=9, reserve_bytes=1, engine="llama-server"),
    assignments=AssignmentsChanged(
        assignments=(
            Assignment(model=ModelName("b"), origin="flag", reason=""),
            Assignment(model=ModelName("a"), origin="flag", reason=""),
            Assignment(model=ModelName("not-on-disk"), origin="flag", reason=""),
        )
    ),
)


def said(facts: NodeFacts, *running: SlotChanged) -> Announcement:
    return announce(facts, slots(*running), IDENTITY, PeerId("me"), 12)


def test_everything_that_daemons_report_is_in_it() -> None:
    words = said(FULL, slot("a", "ready"))
    assert (words.peer_id, words.incarnation, words.seq, words.mesh_id) == ("me", 4, 12, "mesh")
    assert (words.name, words.state, words.addresses) == ("desk", "active", ("/ip4/10.0.0.2",))
    assert (words.device, words.vram_bytes, words.requested_models) == ("RTX", 8, ("wish",))
    assert words.available_models[0] == AvailableModel(
        name=ModelName("a"),
        type="llm",
        file_size_bytes=9,
        file_hash="ab",
        kv_bytes_per_token=1,
        compute_bytes=2,
        context_tokens=3,
        parallel=4,
        architecture="llama",
        quantization="Q4",
        parameters=5,
        builtin=True,
    )
    assert [item.model for item in words.serving] == ["a", "b"]
    assert words.hosted == (ServedModel(model=ModelName("a"), type="llm", parallel=4),)
    assert words.role == "host"


def test_nothing_is_left_out_of_what_others_need() -> None:
    """Whatever part of LocalModel is announced at all is copied; a field added to both must be too."""
    shared_fields = {field.name for field in fields(AvailableModel)} & {field.name for field in fields(LocalModel)}
    model = FULL.inventory.models[0] if FULL.inventory else None
    announced = said(FULL).available_models[0]
    assert {name: getattr(announced, name) for name in shared_fields} == {
        name: getattr(model, name) for name in shared_fields
    }


def test_no_path_leaves_the_node() -> None:
    assert "/secret" not in repr(said(FULL, slot("a", "ready")))


def test_only_ready_slots_are_hosted_and_make_a_host() -> None:
    states = ("queued", "loading", "draining", "stopping", "restarting", "failed", "unloaded")
    words = said(FULL, *(slot("a", state) for state in states))
    assert (words.role, words.hosted) == ("standby", ())
    both = said(FULL, slot("b", "ready"), slot("a", "ready"))
    assert [item.model for item in both.hosted] == ["a", "b"]


def test_a_node_of_which_nothing_is_known_yet_can_speak() -> None:
    words = said(NodeFacts(node_name="desk", configured=False))
    assert (words.state, words.role, words.vram_bytes, words.available_models) == ("idle", "standby", 0, ())


def test_a_client_says_so_by_configuration_or_by_grant() -> None:
    assert said(replace(FULL, client=True), slot("a", "ready")).role == "client"
    assert said(replace(FULL, grant="client"), slot("a", "ready")).role == "client"


def test_the_same_inputs_give_the_same_announcement_whatever_the_order() -> None:
    assert said(FULL, slot("a", "ready"), slot("b", "ready")) == said(FULL, slot("b", "ready"), slot("a", "ready"))


def test_only_the_number_may_differ_for_the_same_content() -> None:
    words = said(FULL)
    assert same_content(words, replace(words, seq=99, incarnation=3))
    for change in ({"role": "host"}, {"vram_bytes": 1}, {"addresses": ()}, {"mesh_id": MeshId("x")}):
        assert not same_content(words, replace(words, **change))
