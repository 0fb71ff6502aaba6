"""What operators of many adapters watch, for Prometheus."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prometheus_client.core import Metric

    from polylens.engine.adapter_lease import StoreStats
    from polylens.engine.handle import RequestTimes
    from polylens.engine.stats import EngineStats

MAX_ADAPTER_LABELS = 100
"""Adapters with series of their own; those seen later share the label "other". Thousands may be registered, and
every label value is a series for ever."""

OTHER = "other"
BASE = "base"
"""Label of requests without an adapter."""

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Buckets from a token of a tiny model to a long answer on a busy machine."""


class AdapterLabels:
    """Adapter name -> label value, of bounded number."""

    def __init__(self, limit: int = MAX_ADAPTER_LABELS) -> None:
        self._limit = limit
        self._own: set[str] = set()

    def of(self, adapter: str | None) -> str:
        if not adapter:
            return BASE
        if adapter not in self._own and len(self._own) < self._limit:
            self._own.add(adapter)
        return adapter if adapter in self._own else OTHER


class Metrics:
    """The server's own registry; one a server, so that tests and several engines in a process do not meet."""

    def __init__(self, stats: Callable[[], EngineStats], adapters: Callable[[], StoreStats]) -> None:
        self.registry = CollectorRegistry()
        self.labels = AdapterLabels()
        self.registry.register(_EngineCollector(stats, adapters, self.labels))
        self._time_to_first_token = self._histogram(
            "time_to_first_token", "From a request's arrival to its first token"
        )
        self._inter_token = self._histogram("inter_token_latency", "Between two tokens of an answer")
        self._queue_time = self._histogram("queue_time", "From being prepared to the first step")
        self._prepare_time = self._histogram("prepare_time", "Rendering, tokenising, decoding and processing media")
        self._request_time = self._histogram("request_duration", "From a request's arrival to its end")
        self._ended = Counter(
            "polylens_requests", "Requests by how they ended", ["adapter", "status"], registry=self.registry
        )
        self._errors = Counter(
            "polylens_http_errors", "Calls answered with an error", ["status"], registry=self.registry
        )
        self._adapter_loads = Counter(
            "polylens_adapter_loads", "Loads asked for over HTTP", ["result"], registry=self.registry
        )
        self._adapter_load_time = Histogram(
            "polylens_adapter_load_seconds", "Time of a load", buckets=SECONDS, registry=self.registry
        )

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"polylens_{name}_seconds", text, ["adapter"], buckets=SECONDS, registry=self.registry)

    def observe_gap(self, adapter: str | None, seconds: float) -> None:
        """A token came `seconds` after the one before it."""
        self._inter_token.labels(self.labels.of(adapter)).observe(seconds)

    def observe_end(self, adapter: str | None, times: RequestTimes, status: int) -> None:
        """A request ended; what of its stages it reached is counted."""
        label = self.labels.of(adapter)
        ended = times.ended or time.monotonic()
        self._ended.labels(label, str(status)).inc()
        self._request_time.labels(label).observe(ended - times.submitted)
        if times.queued is not None:
            self._prepare_time.labels(label).observe(times.queued - times.submitted)
        if times.queued is not None and times.admitted is not None:
            self._queue_time.labels(label).observe(times.admitted - times.queued)
        if times.first_token is not None:
            self._time_to_first_token.labels(label).observe(times.first_token - times.submitted)

    def observe_error(self, status: int) -> None:
        """A call was answered with an error object."""
        self._errors.labels(str(status)).inc()

    def observe_load(self, result: str, seconds: float) -> None:
        """An adapter was loaded ("ok"), or not ("refused")."""
        self._adapter_loads.labels(result).inc()
        self._adapter_load_time.observe(seconds)


_COUNTERS = {
    "preemptions": ("num_preemptions_total", "Sequences whose pages were taken back"),
    "prompt_tokens": ("prompt_tokens_total", "Prompt tokens of admitted requests"),
    "prefix_cache_hit_tokens": ("cached_tokens_total", "Prompt tokens that the prefix cache had"),
    "generated_tokens": ("generated_tokens_total", "Tokens generated"),
    "engine_steps": ("num_steps_total", "Steps of the engine"),
    "vision_cache_hits": ("vision_hits_total", "Pictures and videos whose features were cached"),
    "vision_cache_misses": ("vision_misses_total", "Pictures and videos that were encoded"),
    "encoder_rows": ("encoder_rows_total", "Rows (patches) through the vision tower; its rate is rows a second"),
    "encoder_items": ("encoder_items_total", "Pictures and videos through the vision tower"),
}
_GAUGES = {
    "kv_pages": ("kv_pages", "KV pages there are"),
    "kv_pages_used": ("kv_pages_used", "KV pages that running requests hold"),
    "kv_pages_cached": ("kv_pages_cached", "KV pages that only the prefix cache keeps"),
    "carried_state_bytes": ("carried_state_bytes", "Bytes that layers with a state keep of running requests"),
    "vision_cache_bytes": ("vision_cache_bytes", "Bytes of cached features"),
}
_ADAPTER_COUNTERS = {
    "adapter_file_reads": ("num_reads", "Adapters read from their files"),
    "adapter_moves_in": ("num_moves_in", "Adapters brought onto the device"),
    "adapter_evictions": ("num_moves_out", "Adapters put off the device for others"),
    "adapter_move_in_seconds": ("moves_in_s", "Time it took to bring adapters onto the device"),
}
_ADAPTER_GAUGES = {
    "adapters_registered": ("num_registered", "Adapter names that requests may use"),
    "adapters_on_device": ("num_on_device", "Adapters on the device"),
    "adapter_device_bytes": ("device_bytes", "Bytes of adapters on the device"),
    "adapter_host_bytes": ("host_bytes", "Bytes of adapters kept in CPU memory beside them"),
}


class _EngineCollector:
    """Reads the engine's snapshot when Prometheus asks."""

    def __init__(
        self, stats: Callable[[], EngineStats], adapters: Callable[[], StoreStats], labels: AdapterLabels
    ) -> None:
        self._stats = stats
        self._adapters = adapters
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for name, (attribute, text) in _COUNTERS.items():
            yield CounterMetricFamily(f"polylens_{name}", text, value=getattr(stats, attribute))
        for name, (attribute, text) in _GAUGES.items():
            yield GaugeMetricFamily(f"polylens_{name}", text, value=getattr(stats, attribute))
        adapters = self._adapters()
        for name, (attribute, text) in _ADAPTER_COUNTERS.items():
            yield CounterMetricFamily(f"polylens_{name}", text, value=getattr(adapters, attribute))
        for name, (attribute, text) in _ADAPTER_GAUGES.items():
            yield GaugeMetricFamily(f"polylens_{name}", text, value=getattr(adapters, attribute))
        for state, counts in (("running", stats.running), ("waiting", stats.waiting)):
            yield self._by_adapter(state, counts)

    def _by_adapter(self, state: str, counts: object) -> Metric:
        family = GaugeMetricFamily(f"polylens_requests_{state}", f"Requests {state} now", labels=["adapter"])
        totals: dict[str, int] = {}
        for adapter, count in dict(counts).items():  # type: ignore[call-overload]
            label = self._labels.of(adapter)
            totals[label] = totals.get(label, 0) + count
        for label, count in totals.items():
            family.add_metric([label], count)
        return family
