"""The training loop: step, log, validate and save until the last step or a stop request."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, fields
from pathlib import Path

import torch

from transformer_vq.config import RunConfig
from transformer_vq.data.batches import Batch, TrainingBatches
from transformer_vq.data.corpus import Corpus
from transformer_vq.device import HostCopy
from transformer_vq.errors import TrainingError
from transformer_vq.evaluation import score
from transformer_vq.memory_use import peak_bytes
from transformer_vq.nn.quantizer import CodebookHealth, NotFiniteError
from transformer_vq.progress import info, progress_bar, short, warn
from transformer_vq.sizes import mfu_per_token
from transformer_vq.training.checkpoint import (
    Progress,
    TrainingResult,
    checkpoint_steps,
    save_best,
    save_checkpoint,
)
from transformer_vq.training.metrics import MetricsLog
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
        progress: Progress,
    ) -> None:
        self.folder = run
        self.config = config
        self.corpus = corpus
        self.batches = batches
        self.trainer = trainer
        self.progress = progress
        self.pinned: int | None = None
        """Step of the checkpoint from which the run can be extended."""
        if config.optim.schedule == "wsd":
            self.pinned = config.optim.decay_start(config.train.steps)
        self._mfu_per_token = mfu_per_token(config, trainer.world)
        self._note = ""
        self._checked_at = progress.step
        self._saved = asdict(progress)  # as in the newest checkpoint
        self._reader = ThreadPoolExecutor(1, "batches")
        self._read_ahead: Future[tuple[Batch, int]] | None = None  # the next batch
        self._pending: Callable[[], None] | None = None  # waits for a checkpoint
        self._unlogged: list[float] = []  # seconds of each step since the last logged one

    def run(self) -> TrainingResult:
        """Train until the last step or a signal."""
        train, world, progress = self.config.train, self.trainer.world, self.progress
        with (
            self._reader,
            StopRequest() as stop,
            closing(MetricsLog(self.folder, self.config, progress.step, world.is_rank_zero)) as log,
            progress_bar(self.folder.name, train.steps, "steps", progress.step) as advance,
        ):

            def stopping() -> bool:  # all ranks stop together, whichever received the signal
                return world.any(bool(stop))

            # One iteration more than there are steps: it validates and saves after the last step.
            while True:
                step, at_end = progress.step, progress.step == train.steps
                due = step % train.eval_every == 0 or at_end
                if due and progress.validated_at != step and not stopping():
                    self._check_finite()
                    self._validate(log, stopping)
                is_last = stopping() or at_end
                due = step % train.save_every == 0 or is_last or step == self.pinned
                if due and self._saved != asdict(progress):  # also after the last validation
                    self._check_finite()
                    self._save(required=is_last)
                if is_last:
                    break
                advance(1, note=self._train_step(log))
            self._finish_saving()
        # A signal in the last step skips or stops its validation.
        finished = progress.is_finished(self.config)
        # The same on all ranks: each must exit with the status of the signal.
        stopped_by = None if finished else -world.smallest(-(stop.signal or 0)) or None
        both = (progress.best_loss, progress.best_bits_per_byte)
        best = [math.inf if x is None else x for x in both]
        return TrainingResult(self.folder, progress.step, finished, stopped_by, *best)

    def _train_step(self, log: MetricsLog) -> str:
        """Train one step and log it; return the note for the progress bar.

        On a GPU, losses are read only when they are logged: reading them waits for the GPU.
        """
        start, step = time.perf_counter(), self.progress.step
        batch, n_targets = self._next_batch()
        is_logged = (step + 1) % self.config.train.log_every == 0
        try:
            begins, ends = map(self.batches.starts_sequences, (step, step + 1))
            result = self.trainer.step(batch, step, begins=begins, ends=ends, n_targets=n_targets)
            if is_logged:
                health = _health(result)  # before the check, so that the host waits once
                self.trainer.check_finite()
        except NotFiniteError as error:
            raise TrainingError(self._not_finite_message(error)) from error
        self.progress.step += 1
        self._unlogged.append(time.perf_counter() - start)
        if is_logged:
            self._log(log, result, _mean_health(health))
        return self._note

    def _next_batch(self) -> tuple[Batch, int]:
        """Return this rank's rows of the next batch; those after it are read on another thread."""
        step, rows = self.progress.step, self.trainer.strategy.rows
        ahead, self._read_ahead = self._read_ahead, None
        found = self.batches.read(step, rows) if ahead is None else ahead.result()
        if step + 1 < self.config.train.steps:
            self._read_ahead = self._reader.submit(self.batches.read, step + 1, rows)
        return found

    def _log(self, log: MetricsLog, result: StepResult, codes: dict[str, float]) -> None:
        """Write a row of metrics.jsonl and the note of the progress bar; does not wait for a GPU.

        codes: the codebook health.
        """
        self.progress.logged_at = self.progress.step
        seconds = sum(self._unlogged) / len(self._unlogged)
        self._unlogged.clear()
        size = self.corpus.sizes["train"]
        bits = result.nats_per_token * size.tokens / size.bytes / math.log(2)
        speed, memory = result.tokens / seconds, peak_bytes(self.trainer.world.device)
        mfu = None if self._mfu_per_token is None else speed * self._mfu_per_token
        log.write(
            "train",
            self.progress.step,
            nats_per_token=result.nats_per_token,
            bits_per_byte=bits,
            commit_loss=result.commit_loss,
            grad_norm=result.grad_norm,
            lr=result.lr,
            peak_memory_bytes=memory,
            mfu=mfu,
            tokens=result.tokens,
            seconds=seconds,
            tokens_per_second=speed,
            **codes,
        )
        notes = [f"{bits:.3f} bits/byte", f"{short(speed)} tok/s", f"{memory / 1e9:.1f} GB"]
        if codes:
            notes.append(f"{codes['share_in_use']:.0%} codes")
        if mfu is not None:
            notes.append(f"{mfu:.0%} MFU")
        self._note = ", ".join(notes)

    def _check_finite(self) -> None:
        """Raise TrainingError if a step was not finite; nothing is saved after such a step."""
        step = self.progress.step
        if self._checked_at == step:
            return
        start = time.perf_counter()
        try:
            self.trainer.check_finite()
            self.trainer.check_weights(step)
        except NotFiniteError as error:
            raise TrainingError(self._not_finite_message(error)) from error
        self._checked_at = step
        if self._unlogged:  # the wait belongs to the steps
            self._unlogged[-1] += time.perf_counter() - start

    def _validate(self, log: MetricsLog, stopping: Callable[[], bool]) -> None:
        """Evaluate on the validation split; save the model if it is the best so far.

        Both use the averaged weights, if there is an average.
        """
        train, world, progress = self.config.train, self.trainer.world, self.progress
        start = time.perf_counter()
        with self.trainer.averaged_model() as averaged:
            result = score(
                averaged,
                self.corpus.split("validation"),
                seq_len=train.seq_len,
                span=train.backprop_len,
                batch_size=train.batch_size // train.accumulate,
                precision=train.precision,
                max_tokens=train.eval_tokens,
                stopped=stopping,
                share=(world.rank("data"), world.size("data")),
                total=lambda x: world.sum(x, "data"),
            )
            if result is None:
                return
            progress.validated_at = progress.step
            log.write(
                "validation",
                progress.step,
                nats_per_token=result.nats_per_token,
                bits_per_byte=result.bits_per_byte,
                tokens=result.tokens,
                seconds=time.perf_counter() - start,
            )
            info(f"step {progress.step}: validation {result.bits_per_byte:.4f} bits/byte")
            if progress.best_loss is not None and result.nats_per_token >= progress.best_loss:
                return
            progress.best_loss = result.nats_per_token
            progress.best_bits_per_byte = result.bits_per_byte
            model = self.trainer.strategy.model_tensors()  # with the averaged weights
            metadata = averaged.file_metadata(step=str(progress.step))
            try:
                save_best(self.folder, model, metadata, world.checkpoint_group)
            except OSError as error:
                warn(f"cannot save the best model: {error}")

    def _save(self, required: bool) -> None:
        """Write a checkpoint. If that fails, raise TrainingError if required, otherwise warn.

        With `train.async_save`, training goes on while it is written; a failure is then reported at
        the next checkpoint.
        """
        train, step = self.config.train, self.progress.step
        metadata = {"config": self.config.to_dict(), "corpus": self.corpus.sha256}
        self._finish_saving()

        def save() -> None:
            self._pending = save_checkpoint(
                self.folder,
                step,
                self.trainer.tensors(),
                metadata | asdict(self.progress),
                train.keep,
                self.pinned,
                self.trainer.world.checkpoint_group,
                in_background=train.async_save and not required,
            )

        if self._reported(save, step, required):
            self._saved = asdict(self.progress)

    def _finish_saving(self) -> None:
        """Wait for a checkpoint that is written in the background."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self._reported(pending, self._saved["step"], required=False)

    def _reported(self, save: Callable[[], None], step: int, required: bool) -> bool:
        """Return whether a checkpoint was written; if not, raise TrainingError or warn."""
        try:
            save()
        except OSError as error:
            fix = f"free some space, then run `tvq resume {self.folder}`"
            message = f"cannot save step {step}: {error}; {self._last_checkpoint()}; {fix}"
            if required:
                raise TrainingError(message) from error
            warn(message)
            return False
        return True

    def _not_finite_message(self, error: NotFiniteError) -> str:
        step = error.step if isinstance(error, NotFiniteStepError) else self.progress.step + 1
        fix = f"use `tvq resume {self.folder}` with a smaller --optim.lr or --optim.grad-clip"
        problem = f"step {step} is not finite ({error}); {self._last_checkpoint()}"
        return f"{problem}; {fix}, or start again with a longer --optim.warmup"

    def _last_checkpoint(self) -> str:
        steps = checkpoint_steps(self.folder)
        return f"the last checkpoint is step {steps[-1]}" if steps else "no checkpoint exists yet"


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
