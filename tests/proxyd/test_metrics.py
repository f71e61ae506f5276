"""The numbers for Prometheus: right, readable by its parser, and few."""

from __future__ import annotations

import time

from prometheus_client.parser import text_string_to_metric_families

from services.proxyd.metrics import NODES_LIMIT, SERIES_LIMIT, Histogram, Metrics
from services.proxyd.requests_log import RequestRecord
from shared.ids import ModelName, RequestId, SlotId
from shared.messages.models import SlotChanged

CHAT = "/v1/chat/completions"


def record(model: str | None = "qwen", status: int = 200, route: str = CHAT, **fields: object) -> RequestRecord:
    values: dict[str, object] = {"outcome": "ok", "total_seconds": 0.3, "first_byte_seconds": 0.02}
    made = RequestRecord(request_id=RequestId("r"), route=route, started=0.0, model=ModelName(model) if model else None)
    for name, value in {**values, **fields}.items():
        setattr(made, name, value)
    made.status = status
    return made


def slot(number: int = 1, state: str = "ready") -> SlotChanged:
    return SlotChanged(
        slot_id=SlotId(f"s{number}"), model=ModelName("qwen"), type="llm", state=state, reason="", origin="flag",  # type: ignore[arg-type]
        parallel=4, in_use=2, waiting=3, restarts=1, requests_total=7, need_bytes=1000,
    )  # fmt: skip


def samples(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    content_type, body = metrics.render()
    assert content_type.startswith(b"text/plain")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


def made(slots: tuple[SlotChanged, ...] = ()) -> Metrics:
    return Metrics(lambda name: name == "qwen", lambda: slots, lambda: "desk")


def test_requests_tokens_and_times_are_counted_by_route_and_model() -> None:
    metrics = made()
    metrics.active(1)
    metrics.active(1)
    metrics.active(-1)
    for _ in range(3):
        metrics.observe(record(prompt_tokens=10, completion_tokens=5, overhead_seconds=0.0002, attempts=2))
    metrics.observe(record(status=503, outcome="refused", first_byte_seconds=None))
    seen = samples(metrics)
    where = (("model", "qwen"), ("route", CHAT))
    assert seen["meshd_requests_total", (*where, ("status", "200"))] == 3
    assert seen["meshd_requests_total", (*where, ("status", "503"))] == 1
    assert seen["meshd_request_outcomes_total", (("model", "qwen"), ("outcome", "refused"), ("route", CHAT))] == 1
    assert seen["meshd_tokens_total", (("kind", "completion"), *where)] == 15
    assert seen["meshd_request_retries_total", where] == 3
    assert seen["meshd_requests_active", ()] == 1
    assert seen["meshd_request_seconds_count", where] == 4
    assert seen["meshd_request_first_byte_seconds_count", where] == 3
    assert seen["meshd_request_overhead_seconds_bucket", (("le", "0.00025"), *where)] == 3
    assert seen["meshd_request_overhead_seconds_bucket", (("le", "0.0001"), *where)] == 0
    assert abs(seen["meshd_request_seconds_sum", where] - 1.2) < 1e-9


def test_requests_are_counted_by_the_node_that_had_them() -> None:
    metrics = made()
    metrics.observe(record(node="desk", attempts=1))
    metrics.observe(record(node="barn", attempts=2))
    metrics.observe(record(node="desk", attempts=0, status=503))
    seen = samples(metrics)
    assert seen["meshd_requests_by_node_total", (("node", "desk"),)] == 1
    assert seen["meshd_requests_by_node_total", (("node", "barn"),)] == 1
    for number in range(NODES_LIMIT + 10):
        metrics.observe(record(node=f"n{number}", attempts=1))
    assert len(metrics._nodes) <= NODES_LIMIT + 1


def test_made_up_model_names_share_one_series() -> None:
    """TRAPS 37: a client must not fill memory, nor Prometheus, with names of its own."""
    metrics = made()
    for number in range(1000):
        metrics.observe(record(model=f'evil{number}"}} 1\n'))
    seen = samples(metrics)
    assert {dict(labels).get("model") for name, labels in seen if name == "meshd_requests_total"} == {"unknown"}
    assert seen["meshd_requests_total", (("model", "unknown"), ("route", CHAT), ("status", "200"))] == 1000


def test_series_are_bounded_whatever_the_catalog() -> None:
    metrics = Metrics(lambda name: True, lambda: (), lambda: "desk")
    for number in range(SERIES_LIMIT + 50):
        metrics.observe(record(model=f"m{number}"))
    assert len(metrics._series) <= SERIES_LIMIT + 1


def test_slots_and_engines_carry_model_and_node() -> None:
    seen = samples(made((slot(1), slot(2, "loading"))))
    labels = (("model", "qwen"), ("node", "desk"), ("type", "llm"))
    assert seen["meshd_engine_in_use", labels] == 2
    assert seen["meshd_engine_waiting", labels] == 3
    assert seen["meshd_engine_restarts_total", labels] == 1
    assert seen["meshd_slots", (("node", "desk"), ("state", "ready"))] == 1
    assert seen["meshd_slots", (("node", "desk"), ("state", "loading"))] == 1
    assert seen["meshd_slots", (("node", "desk"), ("state", "failed"))] == 0


def test_buckets_are_cumulative_and_bounds_belong_to_them() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    assert histogram.buckets() == [("1.0", 2.0), ("2.0", 3.0), ("+Inf", 4.0)]
    assert histogram.total == 12.0


def test_counting_a_request_is_cheap() -> None:
    metrics, one = made(), record(prompt_tokens=10, completion_tokens=5)
    started = time.perf_counter()
    for _ in range(2000):
        metrics.observe(one)
    assert (time.perf_counter() - started) / 2000 < 100e-6
