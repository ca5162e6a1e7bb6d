"""The loop: update, log, validate, save, until the last update or a request to stop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from transformer_vq.config import RunConfig
from transformer_vq.data.batches import TrainingBatches
from transformer_vq.data.corpus import Corpus
from transformer_vq.evaluation import score
from transformer_vq.nn.quantizer import NotFiniteError
from transformer_vq.progress import info, progress_bar, warn
from transformer_vq.training.checkpoint import (
    BEST,
    MODEL,
    Checkpoint,
    checkpoint_steps,
    save_checkpoint,
)
from transformer_vq.training.metrics import MetricsLog, metrics_log
from transformer_vq.training.signals import StopRequest
from transformer_vq.training.step import Trainer, Update


class TrainingError(RuntimeError):
    """A run that cannot continue; the message says what is saved and what to do."""


@dataclass(frozen=True)
class TrainingResult:
    """How a sitting ended."""

    run: Path
    step: int
    finished: bool
    stopped_by: int | None
    """The signal that stopped it, on whichever rank; None if it finished."""
    best_loss: float
    """Lowest validation loss of the whole run, in nats per token."""


class TrainingLoop:
    """A run from one start of the program to its end, in all its processes alike."""

    def __init__(
        self,
        run: Path,
        config: RunConfig,
        corpus: Corpus,
        batches: TrainingBatches,
        trainer: Trainer,
    ) -> None:
        self.folder = run
        self.config = config
        self.corpus = corpus
        self.batches = batches
        self.trainer = trainer
        self.step = self.saved_at = self.validated_at = 0
        self.best_loss = math.inf
        self._codes_note = ""

    def run(self) -> TrainingResult:
        train = self.config.train
        world = self.trainer.world
        with (
            StopRequest() as stop,
            metrics_log(self.folder, self.config, self.step, world.is_rank_zero) as log,
            progress_bar(self.folder.name, train.steps, "updates", self.step) as advance,
        ):
            # All processes stop together, whichever of them was asked to.
            stopping = partial(self._stops, stop)
            # One lap more than there are updates, so that the last one is validated and saved too.
            while True:
                at_end = self.step == train.steps
                due = self.step % train.eval_every == 0 or at_end
                if due and self.validated_at != self.step and not stopping():
                    self._validate(log, stopping)
                is_last = stopping() or at_end
                due = self.step % train.save_every == 0 or is_last
                if due and self.saved_at != self.step:
                    self._save(must=is_last)
                if is_last:
                    break
                advance(1, note=self._update(log))
        # A signal that arrives in the last step skips or stops the last validation.
        finished = self.validated_at == self.step == train.steps
        # The same on all ranks: each must end with the status of the signal that one of them got.
        stopped_by = None if finished else world.largest(stop.signal or 0) or None
        return TrainingResult(self.folder, self.step, finished, stopped_by, self.best_loss)

    def _stops(self, stop: StopRequest) -> bool:
        return self.trainer.world.any(bool(stop))

    def _update(self, log: MetricsLog) -> str:
        """One update; what is to stand beside the progress bar."""
        start = time.perf_counter()
        batch = self.batches[self.step]
        try:
            update = self.trainer.update(batch, self.step, self.batches.begins(self.step))
        except NotFiniteError as error:
            raise TrainingError(self._why_not_finite(error)) from error
        self.step += 1
        if self.batches.begins(self.step):
            self.trainer.carried = []  # nothing is carried into new sequences
        bits = update.nats_per_token * self._bits_per_byte("train")
        seconds = time.perf_counter() - start
        if self.step % self.config.train.log_every == 0:
            health = _health(update)  # on a GPU it waits for the device: not at every update
            if health:
                self._codes_note = f", {health['share_in_use']:.0%} of codes in use"
            log.write(
                "train",
                self.step,
                nats_per_token=update.nats_per_token,
                bits_per_byte=bits,
                commit_loss=update.commit_loss,
                grad_norm=update.grad_norm,
                lr=update.lr,
                tokens=update.tokens,
                seconds=seconds,
                tokens_per_second=update.tokens / seconds,
                **health,
            )
        return f"{bits:.3f} bits/byte, {update.tokens / seconds:,.0f} tokens/s{self._codes_note}"

    def _validate(self, log: MetricsLog, stopping: Callable[[], bool]) -> None:
        """Score the validation split; keep the model if it is the best so far."""
        train, world = self.config.train, self.trainer.world
        start = time.perf_counter()
        result = score(
            self.trainer.model,
            self.corpus.split("validation"),
            seq_len=train.seq_len,
            window=train.backprop_len,
            batch_size=train.batch_size // train.accumulate,
            precision=train.precision,
            max_tokens=train.eval_tokens,
            stopped=stopping,
            share=(world.rank("data"), world.size("data")),
            total=lambda x: world.sum(x, "data"),
        )
        if result is None:
            return
        self.validated_at = self.step
        log.write(
            "validation",
            self.step,
            nats_per_token=result.nats_per_token,
            bits_per_byte=result.bits_per_byte,
            tokens=result.tokens,
            seconds=time.perf_counter() - start,
        )
        info(f"step {self.step}: validation {result.bits_per_byte:.4f} bits/byte")
        if result.nats_per_token < self.best_loss:
            self.best_loss = result.nats_per_token
            model = self.trainer.strategy.whole_model()
            if not world.is_rank_zero:
                return
            folder = self.folder / BEST
            try:
                folder.mkdir(exist_ok=True)
                model.save(folder / MODEL)
            except OSError as error:
                warn(f"cannot save the best model: {error}")

    def _save(self, must: bool) -> None:
        """Write a checkpoint. If that fails, training goes on unless this was the last chance."""
        metadata = {
            "config": self.config.to_dict(),
            "corpus": self.corpus.sha256,
            "validated_at": self.validated_at,
            "best_loss": self.best_loss if math.isfinite(self.best_loss) else None,
        }
        model, tensors = self.trainer.strategy.whole_model(), self.trainer.tensors()
        if not self.trainer.world.is_rank_zero:
            return
        checkpoint = Checkpoint(self.step, model, tensors, metadata)
        try:
            save_checkpoint(self.folder, checkpoint, self.config.train.keep)
        except OSError as error:
            left = checkpoint_steps(self.folder)
            last = f"the last checkpoint is step {left[-1]}" if left else "no checkpoint exists yet"
            message = (
                f"cannot save step {self.step}: {error}; {last}; free some space, then run "
                f"`tvq resume {self.folder}`"
            )
            if must:
                raise TrainingError(message) from error
            warn(message)
            return
        self.saved_at = self.step

    def _why_not_finite(self, error: Exception) -> str:
        left = checkpoint_steps(self.folder)
        kept = f"the last checkpoint is step {left[-1]}" if left else "no checkpoint was written"
        return (
            f"step {self.step + 1} is not finite ({error}); {kept}; start again with a smaller "
            "--optim.lr, a longer --optim.warmup or a smaller --optim.grad-clip"
        )

    def _bits_per_byte(self, split: str) -> float:
        """Bits per byte for one nat per token, on average over a split."""
        size = self.corpus.sizes[split]
        return size.tokens / size.bytes / math.log(2)


def _health(update: Update) -> dict[str, float]:
    """Codebook health averaged over the layers; nothing for full attention."""
    health = [usage.health() for usage in update.code_usage]
    return {
        name: sum(getattr(h, name) for h in health) / len(health)
        for name in ("share_in_use", "perplexity", "relative_error")
        if health
    }
