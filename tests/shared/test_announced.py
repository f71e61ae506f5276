"""What is told of a model and of a slot."""

from __future__ import annotations

from dataclasses import fields

from shared.announced import available_model, hosted_models
from shared.ids import ModelName, SlotId
from shared.messages.mesh import AvailableModel
from shared.messages.models import LocalModel, SlotChanged, SlotState


def test_everything_that_can_be_told_is_told_and_the_path_is_not() -> None:
    values = {
        "name": "m", "type": "embedding", "file_size_bytes": 1, "file_hash": "aa", "architecture": "bert",
        "quantization": "Q8_0", "parameters": 2, "context_tokens": 3, "parallel": 4, "kv_bytes_per_token": 5,
        "compute_bytes": 6, "builtin": True,
    }  # fmt: skip
    said = available_model(LocalModel(path="/secret/m.gguf", **values))  # type: ignore[arg-type]
    assert {field.name: getattr(said, field.name) for field in fields(AvailableModel)} == values
    assert "secret" not in repr(said)


def slot(name: str, state: SlotState) -> SlotChanged:
    return SlotChanged(
        slot_id=SlotId(name), model=ModelName(name), type="llm", state=state, reason="r", origin="flag", parallel=4
    )


def test_only_ready_slots_are_hosted_in_order_of_names() -> None:
    slots = [slot("c", "ready"), slot("b", "loading"), slot("a", "ready"), slot("d", "draining")]
    assert [(item.model, item.parallel) for item in hosted_models(slots)] == [("a", 4), ("c", 4)]
