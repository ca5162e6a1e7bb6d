"""The training loop: step, log, validate and save until the last step or a stop request."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path

import torch

from transformer_vq.config import RunConfig
from transformer_vq.data.batches import TrainingBatches
from transformer_vq.data.corpus import Corpus
from transformer_vq.device import HostCopy
from transformer_vq.errors import TrainingError
from transformer_vq.evaluation import score
from transformer_vq.memory_use import peak_bytes
from transformer_vq.nn.model import TransformerVQ
from transformer_vq.nn.quantizer import CodebookHealth, NotFiniteError
from transformer_vq.progress import info, progress_bar, short, warn
from transformer_vq.training.checkpoint import (
    BEST,
    MODEL,
    Checkpoint,
    Progress,
    TrainingResult,
    checkpoint_steps,
    save_checkpoint,
)
from transformer_vq.training.metrics import MetricsLog, metrics_log
from transformer_vq.training.mfu import Utilization
from transformer_vq.training.optim import decay_start
from transformer_vq.training.signals import StopRequest
from transformer_vq.training.step import NotFiniteStepError, StepResult, Trainer


class TrainingLoop:
    """The training loop of a run; all ranks execute it together.

    progress: where to start; `trainer` must be in the same state.
    """

    def __init__(
        self,
        run: Path,
        config: RunConfig,
        corpus: Corpus,
        batches: TrainingBatches,
        trainer: Trainer,
        progress: Progress | None = None,
    ) -> None:
        progress = Progress() if progress is None else progress
        self.folder = run
        self.config = config
        self.corpus = corpus
        self.batches = batches
        self.trainer = trainer
        self.pinned = decay_start(config) if config.optim.schedule == "wsd" else None
        """Step of the checkpoint from which the run can be extended."""
        self.utilization = Utilization(config, trainer.world)
        self._mfu_note = ""
        self.step = self.saved_at = progress.step
        self.validated_at, self.logged_at = progress.validated_at, progress.logged_at
        self.best_loss = progress.best_loss
        self.best_bits_per_byte = progress.best_bits_per_byte
        self._note = self._codes_note = ""
        self._checked_at = progress.step
        self._unlogged: list[float] = []  # seconds of each step since the last logged one

    @property
    def is_finished(self) -> bool:
        """Whether all steps and the last validation are done."""
        return self.validated_at == self.step == self.config.train.steps

    def run(self) -> TrainingResult:
        """Train until the last step or a signal."""
        train = self.config.train
        world = self.trainer.world
        with (
            StopRequest() as stop,
            metrics_log(self.folder, self.config, self.step, world.is_rank_zero) as log,
            progress_bar(self.folder.name, train.steps, "steps", self.step) as advance,
        ):
            # All ranks stop together, whichever of them received the signal.
            stopping = partial(self._stops, stop)
            # One iteration more than there are steps: it validates and saves after the last step.
            while True:
                at_end = self.step == train.steps
                due = self.step % train.eval_every == 0 or at_end
                if due and self.validated_at != self.step and not stopping():
                    self._check_finite()
                    self._validate(log, stopping)
                is_last = stopping() or at_end
                due = self.step % train.save_every == 0 or is_last or self.step == self.pinned
                if due and self.saved_at != self.step:
                    self._check_finite()
                    self._save(required=is_last)
                if is_last:
                    break
                advance(1, note=self._train_step(log) + self._mfu_note)
        finished = self.is_finished  # a signal in the last step skips or stops its validation
        # The same on all ranks: each must exit with the status of the signal.
        stopped_by = None if finished else world.largest(stop.signal or 0) or None
        best = self.best_loss, self.best_bits_per_byte
        return TrainingResult(self.folder, self.step, finished, stopped_by, *best)

    def _stops(self, stop: StopRequest) -> bool:
        """Return whether any rank has received a signal."""
        return self.trainer.world.any(bool(stop))

    def _train_step(self, log: MetricsLog) -> str:
        """Train one step and log it; return the note for the progress bar.

        On a GPU, losses are read only when they are logged: reading them waits for the GPU.
        """
        start = time.perf_counter()
        batch = self.batches[self.step]
        try:
            result = self.trainer.step(
                batch,
                self.step,
                begins=self.batches.starts_sequences(self.step),
                ends=self.batches.starts_sequences(self.step + 1),
            )
            is_logged = (self.step + 1) % self.config.train.log_every == 0
            if is_logged:
                health = _health(result)  # before the check, so that the host waits once
                self.trainer.check_finite()
        except NotFiniteError as error:
            raise TrainingError(self._not_finite_message(error)) from error
        self.step += 1
        self._unlogged.append(time.perf_counter() - start)
        if not (is_logged or self.trainer.checks_each_step):
            return self._note
        bits = result.nats_per_token * self._bits_per_byte("train")
        seconds = sum(self._unlogged) / len(self._unlogged)
        if is_logged:
            self.logged_at = self.step
            self._unlogged.clear()
            codes = _mean_health(health)
            if codes:
                self._codes_note = f", {codes['share_in_use']:.0%} codes"
            log.write(
                "train",
                self.step,
                nats_per_token=result.nats_per_token,
                bits_per_byte=bits,
                commit_loss=result.commit_loss,
                grad_norm=result.grad_norm,
                lr=result.lr,
                **self._device_metrics(result.tokens / seconds),
                tokens=result.tokens,
                seconds=seconds,
                tokens_per_second=result.tokens / seconds,
                **codes,
            )
        speed, memory = result.tokens / seconds, peak_bytes(self.trainer.world.device)
        self._note = (
            f"{bits:.3f} bits/byte, {short(speed)} tok/s, {memory / 1e9:.1f} GB{self._codes_note}"
        )
        return self._note

    def _check_finite(self) -> None:
        """Raise TrainingError if a step was not finite; nothing is saved after such a step."""
        if self._checked_at == self.step:
            return
        start = time.perf_counter()
        try:
            self.trainer.check_finite()
            self.trainer.check_weights(self.step)
        except NotFiniteError as error:
            raise TrainingError(self._not_finite_message(error)) from error
        self._checked_at = self.step
        if self._unlogged:  # the wait belongs to the steps
            self._unlogged[-1] += time.perf_counter() - start

    def _validate(self, log: MetricsLog, stopping: Callable[[], bool]) -> None:
        """Evaluate on the validation split; save the model if it is the best so far."""
        with self.trainer.averaged_model() as model:
            self._validate_model(model, log, stopping)

    def _validate_model(
        self, model: TransformerVQ, log: MetricsLog, stopping: Callable[[], bool]
    ) -> None:
        train, world = self.config.train, self.trainer.world
        start = time.perf_counter()
        result = score(
            model,
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
            self.best_bits_per_byte = result.bits_per_byte
            model = self.trainer.strategy.gather_model()
            if not world.is_rank_zero:
                return
            folder = self.folder / BEST
            try:
                folder.mkdir(exist_ok=True)
                model.save(folder / MODEL, step=str(self.step))
            except OSError as error:
                warn(f"cannot save the best model: {error}")

    def _save(self, required: bool) -> None:
        """Write a checkpoint. If that fails, raise TrainingError if required, otherwise warn."""
        metadata = {
            "config": self.config.to_dict(),
            "corpus": self.corpus.sha256,
            "validated_at": self.validated_at,
            "logged_at": self.logged_at,
            "best_loss": _finite(self.best_loss),
            "best_bits_per_byte": _finite(self.best_bits_per_byte),
        }
        model, tensors = self.trainer.strategy.gather_model(), self.trainer.tensors()
        if not self.trainer.world.is_rank_zero:
            return
        checkpoint = Checkpoint(self.step, model, tensors, metadata)
        try:
            save_checkpoint(self.folder, checkpoint, self.config.train.keep, self.pinned)
        except OSError as error:
            message = (
                f"cannot save step {self.step}: {error}; {self._last_checkpoint()}; free some "
                f"space, then run `tvq resume {self.folder}`"
            )
            if required:
                raise TrainingError(message) from error
            warn(message)
            return
        self.saved_at = self.step

    def _not_finite_message(self, error: NotFiniteError) -> str:
        step = error.step if isinstance(error, NotFiniteStepError) else self.step + 1
        return (
            f"step {step} is not finite ({error}); {self._last_checkpoint()}; use `tvq "
            f"resume {self.folder}` with a smaller --optim.lr or --optim.grad-clip, or start again "
            "with a longer --optim.warmup"
        )

    def _last_checkpoint(self) -> str:
        steps = checkpoint_steps(self.folder)
        return f"the last checkpoint is step {steps[-1]}" if steps else "no checkpoint exists yet"

    def _bits_per_byte(self, split: str) -> float:
        """Return the factor from nats per token to bits per byte, averaged over a split."""
        size = self.corpus.sizes[split]
        return size.tokens / size.bytes / math.log(2)

    def _device_metrics(self, tokens_per_second: float) -> dict[str, float | None]:
        """Return peak memory and MFU for a row of metrics.jsonl; neither waits for the GPU."""
        mfu = self.utilization.mfu(tokens_per_second)
        if mfu is not None:
            self._mfu_note = f", {mfu:.0%} MFU"
        return {"peak_memory_bytes": peak_bytes(self.trainer.world.device), "mfu": mfu}


def _finite(x: float) -> float | None:
    """Return a number, or None if JSON cannot represent it."""
    return x if math.isfinite(x) else None


def _health(result: StepResult) -> HostCopy | None:
    """Queue the computation of the codebook health of each layer; None for full attention."""
    usages = result.code_usage
    return HostCopy(torch.stack([usage.health_values() for usage in usages])) if usages else None


def _mean_health(health: HostCopy | None) -> dict[str, float]:
    """Return the codebook health averaged over the layers; empty for full attention."""
    if health is None:
        return {}
    columns = zip(*health.tolist(), strict=True)
    names = (field.name for field in fields(CodebookHealth))
    return {name: sum(x) / len(x) for name, x in zip(names, columns, strict=True)}
