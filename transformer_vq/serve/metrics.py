"""GET /metrics: counters and gauges of the engine in the format of Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from transformer_vq.serve.service import Service


class EngineCollector(Collector):
    """Reads the counters of the engine when they are asked for."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        engine = self._service.engine
        counters = engine.counters
        for name, text, value in (
            ("tvq_prompt_tokens", "Tokens of prompts that were processed.", counters.prompt_tokens),
            ("tvq_cached_tokens", "Tokens of prompts that were reused.", counters.cached_tokens),
            ("tvq_generated_tokens", "Tokens that were generated.", counters.new_tokens),
            ("tvq_decoding_steps", "Decoding steps of all slots.", counters.steps),
        ):
            yield CounterMetricFamily(name, text, value)
        finished = CounterMetricFamily("tvq_requests", "Finished texts.", labels=["reason"])
        for reason, n in sorted(counters.finished.items()):
            finished.add_metric([reason], n)
        yield finished
        contexts = self._service.contexts.list()
        for name, text, value in (
            ("tvq_slots", "Maximum number of concurrent requests.", engine.n_slots),
            ("tvq_active_requests", "Requests that are being processed.", engine.n_active),
            ("tvq_waiting_requests", "Requests that wait for a slot.", engine.n_waiting),
            ("tvq_state_bytes", "Size of the state of one slot.", engine.state_bytes),
            ("tvq_prefix_bytes", "Stored prefixes in memory.", engine.prefixes.n_bytes),
            ("tvq_contexts", "Stored contexts.", len(contexts)),
            ("tvq_context_bytes", "Size of all stored contexts.", sum(x.bytes for x in contexts)),
        ):
            yield GaugeMetricFamily(name, text, value)


def registry_of(service: Service) -> CollectorRegistry:
    """Return a registry of its own, so that several servers fit in one process."""
    registry = CollectorRegistry()
    registry.register(EngineCollector(service))
    return registry
