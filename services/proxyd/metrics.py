"""Numbers for Prometheus. Counting is plain dict arithmetic, about 3 µs a request; the text is made at the scrape.

Labels stay few: a model's name counts only if the mesh knows the model, so that no client can fill memory by asking
for names it makes up.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, get_args

from services.proxyd.requests_log import RequestRecord
from shared.messages.models import SlotChanged, SlotState

if TYPE_CHECKING:
    from prometheus_client.core import Metric

FAST_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0)
"""Seconds: what proxyd itself adds."""
SLOW_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""Seconds: waiting for models and engines."""
SPEED_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 60.0, 80.0, 100.0, 150.0, 200.0, 400.0)
"""Tokens per second."""
SERIES_LIMIT = 4000
NODES_LIMIT = 1000
UNKNOWN = "unknown"
OTHER = "other"


@dataclass(slots=True)
class Histogram:
    """Observations in buckets; ``counts`` has one more entry than ``bounds``, for what is above the last."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative, as Prometheus wants them."""
        result, running = [], 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            running += count
            result.append((bound, float(running)))
        return result


@dataclass(slots=True)
class _Series:
    """Everything counted for one (route, model)."""

    statuses: dict[str, int] = field(default_factory=dict)
    outcomes: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    retries: int = 0
    total: Histogram = field(default_factory=lambda: Histogram(SLOW_BUCKETS))
    first_byte: Histogram = field(default_factory=lambda: Histogram(SLOW_BUCKETS))
    queue: Histogram = field(default_factory=lambda: Histogram(SLOW_BUCKETS))
    overhead: Histogram = field(default_factory=lambda: Histogram(FAST_BUCKETS))
    speed: Histogram = field(default_factory=lambda: Histogram(SPEED_BUCKETS))


class Metrics:
    """The counters of one worker. ``slots`` and ``node_name`` are asked at each scrape."""

    def __init__(
        self,
        known_model: Callable[[str], bool],
        slots: Callable[[], Iterable[SlotChanged]],
        node_name: Callable[[], str],
    ) -> None:
        self._known_model = known_model
        self._slots = slots
        self._node_name = node_name
        self._series: dict[tuple[str, str], _Series] = {}
        self._nodes: dict[str, int] = {}
        """Requests by the node whose engine had them."""
        self._active = 0

    def observe(self, record: RequestRecord) -> None:
        """Count one finished request."""
        model = str(record.model or "")
        if model and not self._known_model(model):
            model = UNKNOWN
        key = (record.route, model)
        series = self._series.get(key)
        if series is None:
            if len(self._series) >= SERIES_LIMIT:
                key = (OTHER, OTHER)
            series = self._series.setdefault(key, _Series())
        if record.attempts:
            node = record.node if record.node in self._nodes or len(self._nodes) < NODES_LIMIT else OTHER
            self._nodes[node] = self._nodes.get(node, 0) + 1
        status = str(record.status)
        series.statuses[status] = series.statuses.get(status, 0) + 1
        series.outcomes[record.outcome] = series.outcomes.get(record.outcome, 0) + 1
        series.total.observe(record.total_seconds)
        series.queue.observe(record.queue_seconds)
        if record.first_byte_seconds is not None:
            series.first_byte.observe(record.first_byte_seconds)
            series.overhead.observe(record.overhead_seconds)
        if record.attempts > 1:
            series.retries += record.attempts - 1
        if record.prompt_tokens is not None:
            series.prompt_tokens += record.prompt_tokens
        if record.completion_tokens is not None:
            series.completion_tokens += record.completion_tokens
        if record.tokens_per_second:
            series.speed.observe(record.tokens_per_second)

    def active(self, delta: int) -> None:
        """Requests in flight went up or down by ``delta``."""
        self._active += delta

    def render(self) -> tuple[bytes, bytes]:
        """(content type, body) in the Prometheus text format."""
        # 9 MB and 80 ms: only a node that is scraped pays for it.
        from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

        registry = CollectorRegistry()
        registry.register(self)
        return CONTENT_TYPE_LATEST.encode(), generate_latest(registry)

    def collect(self) -> Iterator[Metric]:
        """For prometheus-client's registry."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        where = ["route", "model"]
        requests = CounterMetricFamily("meshd_requests", "Finished requests.", labels=[*where, "status"])
        outcomes = CounterMetricFamily("meshd_request_outcomes", "How requests ended.", labels=[*where, "outcome"])
        tokens = CounterMetricFamily("meshd_tokens", "Tokens, as engines report them.", labels=[*where, "kind"])
        retries = CounterMetricFamily("meshd_request_retries", "Attempts after a request's first.", labels=where)
        histograms: list[tuple[Any, Callable[[_Series], Histogram]]] = [
            (HistogramMetricFamily(f"meshd_request_{name}", help_text, labels=where), pick)
            for name, help_text, pick in (
                ("seconds", "From a request's arrival to its end.", lambda series: series.total),
                ("first_byte_seconds", "From a request's last byte to its answer's first.", lambda s: s.first_byte),
                ("queue_seconds", "Waiting for the model and a free place on its engine.", lambda s: s.queue),
                ("overhead_seconds", "Spent in proxyd before the answer's first byte.", lambda s: s.overhead),
                ("tokens_per_second", "Generation speed, as engines measure it.", lambda s: s.speed),
            )
        ]
        for key, series in self._series.items():
            labels = list(key)
            for status, count in series.statuses.items():
                requests.add_metric([*labels, status], count)
            for outcome, count in series.outcomes.items():
                outcomes.add_metric([*labels, outcome], count)
            tokens.add_metric([*labels, "prompt"], series.prompt_tokens)
            tokens.add_metric([*labels, "completion"], series.completion_tokens)
            retries.add_metric(labels, series.retries)
            for family, pick in histograms:
                histogram = pick(series)
                family.add_metric(labels, buckets=histogram.buckets(), sum_value=histogram.total)
        nodes = CounterMetricFamily("meshd_requests_by_node", "Requests by whose engine had them.", labels=["node"])
        for name, count in self._nodes.items():
            nodes.add_metric([name], count)
        yield requests
        yield nodes
        yield outcomes
        yield tokens
        yield retries
        for family, _ in histograms:
            yield family
        yield GaugeMetricFamily("meshd_requests_active", "Requests in flight.", value=self._active)
        yield from self._collect_slots(CounterMetricFamily, GaugeMetricFamily)

    def _collect_slots(self, counter: Any, gauge: Any) -> Iterator[Metric]:
        slots = list(self._slots())
        node = self._node_name()
        by_state = gauge("meshd_slots", "Slots of this node by state.", labels=["state", "node"])
        for state in get_args(SlotState):
            if state != "unloaded":
                by_state.add_metric([state, node], sum(slot.state == state for slot in slots))
        yield by_state
        for name, help_text, pick in (
            ("parallel", "Requests the engine works on at once.", lambda slot: slot.parallel),
            ("in_use", "Requests the engine works on now.", lambda slot: slot.in_use),
            ("waiting", "Requests waiting for the model.", lambda slot: slot.waiting),
            ("need_bytes", "Memory the model needs.", lambda slot: slot.need_bytes),
            ("context_tokens", "Context over all parallel requests.", lambda slot: slot.context_tokens),
            ("load_seconds", "How long the model took to load.", lambda slot: slot.load_seconds),
        ):
            family = gauge(f"meshd_engine_{name}", help_text, labels=["model", "type", "node"])
            _add(family, slots, node, pick)
            yield family
        for name, help_text, pick in (
            ("requests", "Requests the slot has had.", lambda slot: slot.requests_total),
            ("restarts", "Times the engine was restarted.", lambda slot: slot.restarts),
        ):
            family = counter(f"meshd_engine_{name}", help_text, labels=["model", "type", "node"])
            _add(family, slots, node, pick)
            yield family


def _add(family: Any, slots: list[SlotChanged], node: str, pick: Callable[[SlotChanged], float]) -> None:
    seen: set[str] = set()
    for slot in slots:
        # Two slots of one model exist only while one replaces the other; a series must not appear twice.
        if slot.model not in seen:
            seen.add(slot.model)
            family.add_metric([slot.model, slot.type, node], pick(slot))
