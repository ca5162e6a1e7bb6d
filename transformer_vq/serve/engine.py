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
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from prometheus_client import Histogram
from torch import Tensor

from transformer_vq.data.tokenizers import Tokenizer
from transformer_vq.device import HostCopy, to_device
from transformer_vq.errors import UserError, is_out_of_memory
from transformer_vq.generation.decode import runs_ahead
from transformer_vq.generation.decoder import Decoder
from transformer_vq.generation.sampling import NOT_FINITE, Sampling, choose, mark_not_finite
from transformer_vq.nn.model import TransformerVQ
from transformer_vq.nn.quantizer import NotFiniteError
from transformer_vq.serve.prefixes import PrefixStore
from transformer_vq.serve.requests import Event, Finished, Generation, Notify, Request

logger = logging.getLogger(__name__)

GREEDY = Sampling(temperature=0.0)  # the rule of slots that are not occupied


class QueueFullError(RuntimeError):
    """Too many requests are waiting; try again later."""


class EngineStoppedError(RuntimeError):
    """The engine accepts no more requests."""


def _histogram(name: str, text: str, longest: int) -> Histogram:
    """Return a histogram of seconds, with bounds up to the longest time."""
    bounds = [x * 10.0**e for e in range(-3, 3) for x in (1, 2, 5)]
    buckets = [bound for bound in bounds if bound <= longest]
    return Histogram(f"tvq_{name}_seconds", text, registry=None, buckets=buckets)


class Counters:
    """What the engine has done since it was started; the histograms are per text or token."""

    def __init__(self) -> None:
        self.prompt_tokens = self.new_tokens = self.steps = 0
        self.cached_tokens = 0
        """Tokens of prompts and stored contexts that were not processed again."""
        self.finished: dict[str, int] = {}
        """Number of requests by reason."""
        self.queue_wait = _histogram("queue_wait", "Time that a text waits for a slot.", 5)
        self.first_token = _histogram(
            "time_to_first_token", "Time from arrival to the first token.", 500
        )
        self.next_token = _histogram(
            "time_per_output_token", "Time between two tokens of a text.", 5
        )
        self.duration = _histogram(
            "request_duration", "Time from arrival to the end of a text.", 500
        )


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
        self.counters = Counters()
        self._precision = precision
        self._decoder = Decoder(model, model.init_state(n_slots))
        weight = next(model.parameters())
        self._logits = torch.zeros(
            n_slots,
            model.config.vocab_size,
            dtype=torch.promote_types(weight.dtype, torch.float32),
            device=weight.device,
        )
        self._slots: list[Generation | None] = [None] * n_slots
        self._prefilling: deque[Generation] = deque()
        """Requests whose prompts are being processed; each will have a slot."""
        self._waiting: deque[Generation] = deque()
        self._lock = threading.Lock()
        """Held while requests move: each is in one of the three places above at any time."""
        self._wake = threading.Event()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self.state_bytes = model.init_state(1).n_bytes
        """Size of the state of one slot."""

    @property
    def n_slots(self) -> int:
        return len(self._slots)

    @property
    def n_active(self) -> int:
        """Requests that are being processed."""
        with self._lock:
            return self._n_active()

    def _n_active(self) -> int:
        return len(self._prefilling) + sum(slot is not None for slot in self._slots)

    @property
    def n_waiting(self) -> int:
        return len(self._waiting)

    @property
    def prefill_progress(self) -> tuple[int, int]:
        """Tokens of unfinished prompts and documents: those processed, and all."""
        with self._lock:
            unfinished = [*self._waiting, *self._prefilling]
        total = sum(len(x.request.prompt) for x in unfinished)
        return total - sum(x.n_to_prefill for x in unfinished), total

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
            if len(self._waiting) + len(found) > self.max_waiting:
                raise QueueFullError(f"{len(self._waiting)} requests are waiting")
            self._waiting.extend(found)
        self._wake.set()
        return found

    def generate(self, request: Request) -> tuple[str, Finished]:
        """Return the text of one request and its last event; the engine must be running."""
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.submit(request, events.put)
        while not isinstance(event := events.get(), Finished):
            pass
        return event.text, event

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

    def _all(self) -> list[Generation]:
        with self._lock:
            occupied = [slot for slot in self._slots if slot is not None]
            return [*self._waiting, *self._prefilling, *occupied]

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
            first = self._prefilling[0] if self._prefilling else None
            has_prefilled = first is not None and self._guarded(self._prefill, [first])
            occupied = [x for x in self._slots if x is not None and not x.finished]
            has_decoded = bool(occupied) and self._guarded(self._decode, occupied)
        return has_prefilled or has_decoded

    def _guarded(self, step: Callable[[], None], affected: Sequence[Generation]) -> bool:
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
        return True

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
            for x in (*self._waiting, *self._prefilling, *self._slots):
                if x is not None and x.finished:
                    self._count(x, now)
            self._waiting = deque(x for x in self._waiting if not x.finished)
            self._prefilling = deque(x for x in self._prefilling if not x.finished)
            self._slots = [None if x is None or x.finished else x for x in self._slots]

    def _count(self, generation: Generation, now: float) -> None:
        counters, reason, start = self.counters, str(generation.reason), generation.request.start
        counters.cached_tokens += generation.n_cached + (0 if start is None else start.n_tokens)
        counters.finished[reason] = counters.finished.get(reason, 0) + 1
        counters.duration.observe(now - generation.submitted)

    def _admit(self) -> None:
        """Start the prefill of waiting requests, as many as there are free slots."""
        now = time.monotonic()
        with self._lock:
            while self._waiting and self._n_active() < self.n_slots:
                generation = self._waiting.popleft()
                self._prefilling.append(generation)
                self.counters.queue_wait.observe(now - generation.submitted)

    def _prefill(self) -> None:
        """Process one segment of the next prompt in turn."""
        generation = self._prefilling[0]
        generation.reuse(self.prefixes)
        if generation.n_to_prefill:
            before = generation.n_to_prefill
            generation.prefill(self.model, self.prefixes)
            self.counters.prompt_tokens += before - generation.n_to_prefill
        if generation.n_to_prefill:
            with self._lock:
                self._prefilling.rotate(-1)
            return
        slot = self._slots.index(None)
        generation.start_decoding()
        if generation.request.max_new_tokens == 0:
            generation.finish("length")
            return
        self._decoder.write_row_(slot, generation.context.state)
        self._logits[slot] = generation.context.logits[0]
        with self._lock:
            self._slots[slot] = self._prefilling.popleft()

    def _decode(self) -> None:
        """Choose the next token of every text, and compute the logits of the one after it.

        What fails for one text ends that text only. A failing step of the decoder ends all: it
        changes the states in place, so it cannot be repeated.
        """
        slots = [x if x is not None and not x.finished else None for x in self._slots]
        drawn = [0.0 if x is None else x.uniform() for x in slots]
        logits = self._logits
        uniform = torch.tensor(drawn, dtype=torch.float64).to(logits.dtype)
        tokens = self._choose(slots, to_device(uniform, logits.device))
        fetched, is_ahead = HostCopy(mark_not_finite(tokens, logits)), runs_ahead(logits)
        if is_ahead:
            self._logits = self._decoder.step(tokens)
        found, now = fetched.tolist(), time.monotonic()
        self.counters.steps += 1  # before the events, which may be the end of a response
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
        self.counters.new_tokens += 1
        if generation.last_token is None:
            self.counters.first_token.observe(now - generation.submitted)
        else:
            self.counters.next_token.observe(now - generation.last_token)
        generation.last_token = now
        generation.add(token, logits)
