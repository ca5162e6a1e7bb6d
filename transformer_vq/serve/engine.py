"""The engine: a fixed pool of slots, filled and emptied between decoding steps.

Every iteration processes one segment of one prompt, taking turns among prompts, and then decodes
one token in every occupied slot. So a prompt of a million tokens delays the others by one segment
at a time. The memory of all slots is allocated at the start; the state of a slot never grows.
All slots take part in every step, occupied or not: the arithmetic of a request does not depend on
how many others there are.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from torch import Tensor

from transformer_vq.data.tokenizers import Tokenizer
from transformer_vq.device import HostCopy, to_device
from transformer_vq.errors import UserError, is_out_of_memory
from transformer_vq.generation.decode import runs_ahead
from transformer_vq.generation.decoder import Decoder
from transformer_vq.generation.sampling import NOT_FINITE, Sampling, choose, mark_not_finite
from transformer_vq.nn.model import TransformerVQ
from transformer_vq.nn.quantizer import NotFiniteError
from transformer_vq.ops.cache import accumulation_dtype
from transformer_vq.serve.prefixes import PrefixStore
from transformer_vq.serve.requests import Event, Finished, Generation, Notify, Request

logger = logging.getLogger(__name__)

GREEDY = Sampling(temperature=0.0)  # the rule of slots that are not occupied


class QueueFullError(RuntimeError):
    """Too many requests are waiting; try again later."""


class EngineStoppedError(RuntimeError):
    """The engine accepts no more requests."""


class Metrics:
    """What the engine has done since it was started, for Prometheus; times are in seconds."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of processed prompts.")
        self.cached_tokens = self._counter("cached_tokens", "Reused tokens: prompts and contexts.")
        self.new_tokens = self._counter("generated_tokens", "Tokens that were generated.")
        self.steps = self._counter("decoding_steps", "Decoding steps of all slots.")
        self.finished = self._counter("requests", "Finished texts.", ["reason"])
        self.queue_wait = self._histogram("queue_wait", "Until a text has a slot.")
        self.first_token = self._histogram("time_to_first_token", "From arrival to first token.")
        self.next_token = self._histogram("time_per_output_token", "Between two tokens of a text.")
        self.duration = self._histogram("request_duration", "From arrival to the end of a text.")

    def _counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(f"tvq_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        bounds = [x * 10.0**e for e in range(-3, 3) for x in (1, 2, 5)]
        return Histogram(f"tvq_{name}_seconds", text, registry=self.registry, buckets=bounds)

    def gauge(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Add a value that is computed when it is asked for."""
        Gauge(f"tvq_{name}", text, registry=self.registry).set_function(value)

    def total(self, name: str, **labels: str) -> float:
        """Return the value of a counter."""
        return self.registry.get_sample_value(f"tvq_{name}_total", labels) or 0.0


def check_servable(model: TransformerVQ) -> None:
    """Raise UserError if the state of a model grows with the context."""
    if model.config.attention != "vq":
        raise UserError("the state of full attention grows; serve a model with attention='vq'")


class Engine:
    """Generates texts for many requests at once; see `submit`.

    precision: returns a context for all computations, such as that of `matmul_precision`.
    """

    def __init__(
        self,
        model: TransformerVQ,
        tokenizer: Tokenizer,
        prefixes: PrefixStore,
        n_slots: int = 8,
        max_waiting: int = 64,
        precision: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        check_servable(model)
        self.model, self.tokenizer, self.prefixes = model.eval(), tokenizer, prefixes
        self.max_waiting = max_waiting
        self.metrics = Metrics()
        self._precision = precision
        self._decoder = Decoder(model, model.init_state(n_slots))
        weight = next(model.parameters())
        dtype = accumulation_dtype(weight.dtype)
        self._logits = weight.new_zeros(n_slots, model.config.vocab_size, dtype=dtype)
        self._generations: list[Generation] = []
        """All that are not finished; those without a slot wait, in the order of arrival."""
        self._lock = threading.Lock()  # held while the list or a slot changes
        self._wake = threading.Event()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self.state_bytes = model.init_state(1).n_bytes  # size of the state of one slot

    @property
    def n_slots(self) -> int:
        return len(self._logits)

    @property
    def n_active(self) -> int:
        """Requests that are being processed."""
        return sum(x.slot is not None for x in self._all())

    @property
    def n_waiting(self) -> int:
        return sum(x.slot is None for x in self._all())

    @property
    def prefill_progress(self) -> tuple[int, int]:
        """Tokens of unfinished prompts and documents: those processed, and all."""
        unfinished = [x for x in self._all() if not x.is_decoding]
        total = sum(len(x.request.prompt) for x in unfinished)
        return total - sum(x.n_to_prefill for x in unfinished), total

    def _all(self) -> list[Generation]:
        with self._lock:
            return list(self._generations)

    def submit(self, request: Request, notify: Notify) -> Generation:
        """Queue a request; `notify` receives its events, the last of which is Finished.

        Raises QueueFullError or EngineStoppedError.
        """
        (generation,) = self.submit_all([(request, notify)])
        return generation

    def submit_all(self, requests: Sequence[tuple[Request, Notify]]) -> list[Generation]:
        """Queue several requests, all or none."""
        if any(not request.prompt and request.start is None for request, _ in requests):
            raise UserError("the prompt has no tokens; start it with the tokenizer's bos")
        found = [Generation(request, self.tokenizer, notify) for request, notify in requests]
        with self._lock:
            if self._stopping:
                raise EngineStoppedError("the server is shutting down")
            n_waiting = sum(x.slot is None for x in self._generations)
            if n_waiting + len(found) > self.max_waiting:
                raise QueueFullError(f"{n_waiting} requests are waiting")
            self._generations.extend(found)
        self._wake.set()
        return found

    def generate(self, request: Request) -> Finished:
        """Return the text of one request, and how it ended; the engine must be running."""
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.submit(request, events.put)
        while (end := events.get().end) is None:
            pass
        return end

    # The thread

    def start(self) -> None:
        """Process requests on a thread of its own."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def stop(self, seconds: float = 0.0) -> None:
        """Accept no more requests, finish those in progress, and cancel the rest after a time."""
        with self._lock:
            self._stopping = True
        self._wake.set()
        if self._thread is not None:
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline and self._all():
                time.sleep(0.02)
            for generation in self._all():
                generation.cancel()
            self._wake.set()
            self._thread.join()

    def _run(self) -> None:
        while True:
            self._wake.clear()
            if self.run_once():
                continue
            if not self._stopping:
                self._wake.wait()
            elif not self._all():  # one may have been submitted since
                return

    def run_once(self) -> bool:
        """Process one segment of a prompt and one token of every text; return whether any was."""
        with torch.no_grad(), self._precision():
            self._drop_ended()
            self._admit()
            prefilling = [x for x in self._all() if x.slot is not None and not x.is_decoding][:1]
            for generation in prefilling:
                self._guarded(partial(self._prefill, generation), [generation])
            decoding = [x for x in self._all() if x.is_decoding]
            if decoding:
                self._guarded(partial(self._decode, decoding), decoding)
        return bool(prefilling or decoding)

    def _guarded(self, step: Callable[[], None], affected: Sequence[Generation]) -> None:
        """Run a step; if it fails, end the requests that it affects. The server keeps running."""
        try:
            step()
        except Exception as error:
            logger.exception("a step of the engine failed")
            message = "out of memory" if is_out_of_memory(error) else "internal error"
            if isinstance(error, NotFiniteError):
                message = str(error)
            for generation in affected:
                generation.finish("error", error=message)

    def _drop_ended(self) -> None:
        """Finish what was cancelled or took too long, and free the slots of what is finished."""
        now = time.monotonic()
        for generation in self._all():
            deadline = generation.request.deadline
            if generation.is_cancelled:
                generation.finish("cancelled")
            elif deadline is not None and now >= deadline:
                generation.finish("timeout")
        with self._lock:
            for generation in filter(lambda x: x.finished, self._generations):
                start = generation.request.start
                n_cached = generation.n_cached + (0 if start is None else start.n_tokens)
                self.metrics.cached_tokens.inc(n_cached)
                self.metrics.finished.labels(generation.reason).inc()
                self.metrics.duration.observe(now - generation.submitted)
            self._generations = [x for x in self._generations if not x.finished]

    def _admit(self) -> None:
        """Give the free slots to waiting requests."""
        now = time.monotonic()
        with self._lock:
            free = set(range(self.n_slots)) - {x.slot for x in self._generations}
            for generation in self._generations:
                if generation.slot is None and free:
                    generation.slot = free.pop()
                    self.metrics.queue_wait.observe(now - generation.submitted)

    def _prefill(self, generation: Generation) -> None:
        """Process one segment of a prompt; then it is the turn of the others."""
        generation.reuse(self.prefixes)
        if generation.n_to_prefill:
            before = generation.n_to_prefill
            generation.prefill(self.model, self.prefixes)
            self.metrics.prompt_tokens.inc(before - generation.n_to_prefill)
        if generation.n_to_prefill:
            with self._lock:
                self._generations.remove(generation)
                self._generations.append(generation)
            return
        generation.send_prefilled()
        if generation.request.max_new_tokens == 0:
            generation.finish("length")
            return
        assert generation.context is not None
        assert generation.slot is not None
        self._decoder.write_row_(generation.slot, generation.context.state)
        self._logits[generation.slot] = generation.context.logits[0]
        generation.is_decoding = True

    def _decode(self, decoding: Sequence[Generation]) -> None:
        """Choose the next token of every text, and compute the logits of the one after it.

        What fails for one text ends that text only. A failing step of the decoder ends all: it
        changes the states in place, so it cannot be repeated.
        """
        by_slot = {x.slot: x for x in decoding}
        slots = [by_slot.get(i) for i in range(self.n_slots)]
        drawn = [0.0 if x is None else x.uniform() for x in slots]
        logits = self._logits
        uniform = torch.tensor(drawn, dtype=torch.float64).to(logits.dtype)
        tokens = self._choose(slots, to_device(uniform, logits.device))
        fetched, is_ahead = HostCopy(mark_not_finite(tokens, logits)), runs_ahead(logits)
        if is_ahead:
            self._logits = self._decoder.step(tokens)
        found, now = fetched.tolist(), time.monotonic()
        self.metrics.steps.inc()  # before the events, which may be the end of a response
        for i, generation in enumerate(slots):
            if generation is not None:
                add = partial(self._add, generation, found[i], logits[i], now)
                self._guarded(add, [generation])
        if not is_ahead and any(x is not None and not x.finished for x in slots):
            self._logits = self._decoder.step(tokens)

    def _choose(self, slots: Sequence[Generation | None], uniform: Tensor) -> Tensor:
        """Choose the next token of every slot; if that fails, end the requests at fault."""
        rules = [GREEDY if x is None else x.request.sampling for x in slots]
        try:
            return choose(rules, self._logits, uniform)
        except Exception:
            tokens = torch.zeros_like(uniform, dtype=torch.int64)

        def choose_one(i: int) -> None:
            row = slice(i, i + 1)
            tokens[row] = choose(rules[row], self._logits[row], uniform[row])

        for i, generation in enumerate(slots):
            if generation is not None:
                self._guarded(partial(choose_one, i), [generation])
        return tokens

    def _add(self, generation: Generation, token: int, logits: Tensor, now: float) -> None:
        """Report a token to its request."""
        if generation.finished:
            return
        if token == NOT_FINITE:
            raise NotFiniteError("the logits are NaN or infinite")
        self.metrics.new_tokens.inc()
        if generation.last_token is None:
            self.metrics.first_token.observe(now - generation.submitted)
        else:
            self.metrics.next_token.observe(now - generation.last_token)
        generation.last_token = now
        generation.add(token, logits)
