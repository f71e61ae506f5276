"""What the declarations compute, and that keys don't show."""

from __future__ import annotations

from services.launcherd.slot_events import DeviceMeasured, EngineEndpoint
from shared.io.drive import brief
from tests.launcherd.table import model


def test_capacity_is_the_total_less_the_reserve_and_never_negative() -> None:
    device = DeviceMeasured(device="cpu", total_bytes=10, reserve_bytes=3, engine="e")
    assert device.capacity_bytes == 7
    assert DeviceMeasured(device="cpu", total_bytes=1, reserve_bytes=3, engine="e").capacity_bytes == 0


def test_a_model_is_named_like_its_file() -> None:
    assert model("m").name == "m"


def test_api_keys_never_show() -> None:
    """API keys never appear in the story or the log."""
    endpoint = EngineEndpoint(pid=1, port=2, base_url="http://x", api_key="secret", log_path="/l")
    assert "secret" not in repr(endpoint) + brief(endpoint)
