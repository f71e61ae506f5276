"""Nodes, models and slots for electiond's tests."""

from __future__ import annotations

from typing import Any

from services.electiond.view import Node
from shared.ids import MeshId, ModelName, PeerId, SlotId
from shared.messages.mesh import Announcement, AvailableModel, MemberChanged, ServedModel
from shared.messages.models import DeviceChanged, InventoryChanged, LocalModel, SlotChanged

GB = 10**9


def name(text: str) -> ModelName:
    return ModelName(text)


def model(text: str, size_bytes: int = GB, **fields: Any) -> AvailableModel:
    return AvailableModel(name=name(text), **{"type": "llm", "file_size_bytes": size_bytes, **fields})


def served(text: str, **fields: Any) -> ServedModel:
    return ServedModel(model=name(text), **{"type": "llm", **fields})


def node(
    peer: str, vram_bytes: int = 8 * GB, *models: AvailableModel, hosts: tuple[str, ...] = (), **fields: Any
) -> Node:
    return Node(
        peer_id=PeerId(peer),
        name=fields.pop("label", f"node-{peer}"),
        vram_bytes=vram_bytes,
        device="cpu",
        models={item.name: item for item in models},
        hosted=tuple(served(text) for text in hosts),
        **fields,
    )


def local(text: str, size_bytes: int = GB, **fields: Any) -> LocalModel:
    return LocalModel(
        name=name(text), path=f"/models/{text}.gguf", **{"type": "llm", "file_size_bytes": size_bytes, **fields}
    )


def inventory(*models: LocalModel, **fields: Any) -> InventoryChanged:
    return InventoryChanged(models=models, **fields)


def device(vram_bytes: int = 8 * GB) -> DeviceChanged:
    return DeviceChanged(device="cpu", vram_bytes=vram_bytes, total_bytes=vram_bytes, reserve_bytes=0, engine="test 1")


def slot(text: str, state: str, **fields: Any) -> SlotChanged:
    defaults = {"type": "llm", "origin": "allocation", "reason": f"{state} for a test", "parallel": 4}
    return SlotChanged(
        slot_id=SlotId(fields.pop("slot_id", f"slot-{text}")), model=name(text), state=state, **{**defaults, **fields}
    )


def member(
    peer: str = "me", *models: AvailableModel, is_self: bool = True, state: str = "alive", **fields: Any
) -> MemberChanged:
    said = Announcement(
        peer_id=PeerId(peer),
        incarnation=1,
        seq=1,
        mesh_id=MeshId("m"),
        version="0",
        name=f"node-{peer}",
        role="standby",
        state="active",
        available_models=models,
        **fields,
    )
    return MemberChanged(announcement=said, state=state, reason="test", is_self=is_self)  # type: ignore[arg-type]
