"""GET /metrics: counters, gauges and latencies of the engine in the format of Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from transformer_vq.serve.service import Service

STEP_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
REQUEST_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)


class Latencies:
    """Histograms in seconds; the engine observes them, one value per text or token."""

    def __init__(self) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"tvq_{name}_seconds", text, registry=None, buckets=buckets)

        self.waiting = histogram("queue_wait", "Time that a text waits for a slot.", STEP_BUCKETS)
        self.first_token = histogram(
            "time_to_first_token", "Time from arrival to the first token.", REQUEST_BUCKETS
        )
        self.next_token = histogram(
            "time_per_output_token", "Time between two tokens of a text.", STEP_BUCKETS
        )
        self.request = histogram(
            "request_duration", "Time from arrival to the end of a text.", REQUEST_BUCKETS
        )

    def observe_token(self, now: float, submitted: float, last_token: float | None) -> None:
        """Count the token of a text; `last_token` is the time of the one before it."""
        if last_token is None:
            self.first_token.observe(now - submitted)
        else:
            self.next_token.observe(now - last_token)

    def collect(self) -> Iterator[Metric]:
        """Yield all histograms."""
        for histogram in (self.waiting, self.first_token, self.next_token, self.request):
            yield from histogram.collect()


class EngineCollector(Collector):
    """Reads the counters of the engine when they are asked for."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        engine = self._service.engine
        counters = engine.counters
        for name, text, value in (
            ("tvq_prompt_tokens", "Tokens of prompts that were processed.", counters.prompt_tokens),
            (
                "tvq_cached_tokens",
                "Tokens of prompts and contexts that were reused.",
                counters.cached_tokens,
            ),
            ("tvq_generated_tokens", "Tokens that were generated.", counters.new_tokens),
            ("tvq_decoding_steps", "Decoding steps of all slots.", counters.steps),
        ):
            yield CounterMetricFamily(name, text, value)
        finished = CounterMetricFamily("tvq_requests", "Finished texts.", labels=["reason"])
        for reason, n in sorted(counters.finished.items()):
            finished.add_metric([reason], n)
        yield finished
        yield from counters.latencies.collect()
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
