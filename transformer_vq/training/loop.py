"""A run from its first update to its last, in as many sittings as it takes."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from transformer_vq.checkpoint import (
    MODEL,
    Checkpoint,
    CheckpointError,
    checkpoint_steps,
    load_model,
    locked,
    newest_checkpoint,
    read_config,
    save_checkpoint,
    write_json,
)
from transformer_vq.config import RunConfig
from transformer_vq.data.batches import TrainingBatches
from transformer_vq.data.corpora import Corpus, prepare
from transformer_vq.evaluate import evaluate
from transformer_vq.nn.device import find_device
from transformer_vq.nn.model import TransformerVQ
from transformer_vq.nn.quantizer import NotFiniteError
from transformer_vq.progress import progress_bar, warn
from transformer_vq.training.metrics import MetricsLog, check_loggers, metrics_log, rewind
from transformer_vq.training.signals import StopRequest
from transformer_vq.training.step import Trainer, Update

# What may change between two sittings of a run, because no update depends on it.
FREE_FIELDS = {
    *("data.path", "data.cache", "train.device", "train.recompute", "train.compile"),
    *("train.log_every", "train.eval_every", "train.eval_tokens", "train.save_every"),
    *("train.keep", "train.tensorboard", "train.wandb"),
}


class TrainingError(RuntimeError):
    """A run that cannot go on; the message says what is left and what to do."""


@dataclass(frozen=True)
class Result:
    """How a sitting ended."""

    run: Path
    step: int
    finished: bool
    stopped_by: int | None
    """The signal that ended it, if one did."""
    best_loss: float
    """Lowest validation loss of the whole run, in nats per token."""


def train(config: RunConfig, run: Path) -> Result:
    """Begin a run in the folder `run`, which must not hold one yet."""
    if (run / "config.json").exists():
        raise CheckpointError(f"{run} already holds a run; go on with `tvq resume {run}`")
    if run.exists() and not run.is_dir():
        raise CheckpointError(f"{run} is a file; give the name of a new folder")
    config = _with_absolute_paths(config)
    check_loggers(config)
    device = find_device(config.train.device)
    corpus = prepare(config.data, config.model.vocab_size)
    batches = _batches(config, corpus)
    trainer = _first_trainer(config, device)
    run.mkdir(parents=True, exist_ok=True)
    with locked(run):
        write_json(run / "config.json", config.to_dict())
        corpus.tokenizer().save(run)
        return _Sitting(run, config, corpus, batches, trainer).go()


def resume(run: Path, config: RunConfig | None = None) -> Result:
    """Go on from the newest checkpoint that can be read, bit for bit as if never interrupted.

    config: the run's own with changes; raises CheckpointError naming those that would make it
    another run.
    """
    stored = read_config(run)
    config = stored if config is None else config
    _check_same(stored, config, run)
    check_loggers(config)
    device = find_device(config.train.device)
    corpus = prepare(config.data, config.model.vocab_size)
    batches = _batches(config, corpus)
    with locked(run):
        checkpoint = newest_checkpoint(run)
        if checkpoint is None:
            warn(f"{run} has no checkpoint yet: starting from the beginning")
            trainer = _first_trainer(config, device)
            sitting = _Sitting(run, config, corpus, batches, trainer)
        else:
            _check_same(RunConfig.from_dict(checkpoint.facts["config"]), config, run)
            if checkpoint.facts["corpus"] != corpus.sha256:
                raise CheckpointError(
                    f"the data of {run} have changed since it began; bring back the old ones"
                )
            trainer = Trainer(checkpoint.model, config, device)
            trainer.load_tensors(checkpoint.tensors)
            sitting = _Sitting(run, config, corpus, batches, trainer)
            sitting.step = sitting.saved_at = checkpoint.step
            sitting.validated_at = checkpoint.facts["validated_at"]
            best_loss = checkpoint.facts["best_loss"]
            sitting.best_loss = math.inf if best_loss is None else best_loss
        rewind(run, sitting.step, sitting.validated_at)
        write_json(run / "config.json", config.to_dict())
        return sitting.go()


class _Sitting:
    """One process's share of a run."""

    def __init__(
        self,
        run: Path,
        config: RunConfig,
        corpus: Corpus,
        batches: TrainingBatches,
        trainer: Trainer,
    ) -> None:
        self.run = run
        self.config = config
        self.corpus = corpus
        self.batches = batches
        self.trainer = trainer
        self.step = self.saved_at = self.validated_at = 0
        self.best_loss = math.inf

    def go(self) -> Result:
        train = self.config.train
        with (
            StopRequest() as stop,
            metrics_log(self.run, self.config, self.step) as log,
            progress_bar(self.run.name, train.steps, "updates", self.step) as advance,
        ):
            # One lap more than there are updates, so that the last one is validated and saved too.
            while True:
                at_end = self.step == train.steps
                due = self.step % train.eval_every == 0 or at_end
                if due and self.validated_at != self.step and not stop:
                    self._validate(log, stop)
                due = self.step % train.save_every == 0 or at_end or bool(stop)
                if due and self.saved_at != self.step:
                    self._save(must=at_end or bool(stop))
                if at_end or stop:
                    break
                advance(1, note=self._update(log))
        finished = self.step == train.steps
        return Result(self.run, self.step, finished, stop.signal, self.best_loss)

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
        health = _health(update)
        if self.step % self.config.train.log_every == 0:
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
        note = f"{bits:.3f} bits/byte, {update.tokens / seconds:,.0f} tokens/s"
        if health:
            note += f", {health['share_in_use']:.0%} of codes in use"
        return note

    def _validate(self, log: MetricsLog, stop: StopRequest) -> None:
        """Score the validation split; keep the model if it is the best so far."""
        train = self.config.train
        start = time.perf_counter()
        result = evaluate(
            self.trainer.model,
            self.corpus.split("validation"),
            seq_len=train.seq_len,
            window=train.backprop_len,
            batch_size=train.batch_size // train.accumulate,
            precision=train.precision,
            max_tokens=train.eval_tokens,
            stopped=lambda: bool(stop),
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
        warn(f"step {self.step}: validation {result.bits_per_byte:.4f} bits/byte")
        if result.nats_per_token < self.best_loss:
            self.best_loss = result.nats_per_token
            folder = self.run / "best"
            try:
                folder.mkdir(exist_ok=True)
                self.trainer.model.save(folder / MODEL)
            except OSError as error:
                warn(f"cannot save the best model: {error}")

    def _save(self, must: bool) -> None:
        """Write a checkpoint. If that fails, training goes on unless this was the last chance."""
        facts = {
            "config": self.config.to_dict(),
            "corpus": self.corpus.sha256,
            "validated_at": self.validated_at,
            "best_loss": self.best_loss if math.isfinite(self.best_loss) else None,
        }
        checkpoint = Checkpoint(self.step, self.trainer.model, self.trainer.tensors(), facts)
        try:
            save_checkpoint(self.run, checkpoint, self.config.train.keep)
        except OSError as error:
            left = checkpoint_steps(self.run)
            message = (
                f"cannot save step {self.step}: {error}; "
                + (f"step {left[-1]} is still there" if left else "there is no checkpoint yet")
                + f"; make room, then `tvq resume {self.run}`"
            )
            if must:
                raise TrainingError(message) from error
            warn(message)
            return
        self.saved_at = self.step

    def _why_not_finite(self, error: Exception) -> str:
        left = checkpoint_steps(self.run)
        kept = f"the checkpoint of step {left[-1]} is good" if left else "no checkpoint was made"
        return (
            f"update {self.step + 1} is not finite ({error}); {kept}; start again with a smaller "
            "optim.lr, a longer optim.warmup or a smaller optim.grad_clip"
        )

    def _bits_per_byte(self, split: str) -> float:
        """Bits per byte for one nat per token, on average over a split."""
        size = self.corpus.sizes[split]
        return size.tokens / size.bytes / math.log(2)


def _first_trainer(config: RunConfig, device: torch.device) -> Trainer:
    """The beginning of a run: everything random follows from its seed."""
    torch.manual_seed(config.train.seed)
    return Trainer(_first_model(config), config, device)


def _first_model(config: RunConfig) -> TransformerVQ:
    """Fresh weights, or those of the run or file that `train.init_from` names."""
    if config.train.init_from is None:
        return TransformerVQ(config.model)
    model, _ = load_model(Path(config.train.init_from))
    if model.config != config.model:
        other = RunConfig(model.config, config.data, config.optim, config.train)
        fields = ", ".join(config.differences(other))
        raise CheckpointError(f"{config.train.init_from} is another model: {fields} differ")
    return model


def _with_absolute_paths(config: RunConfig) -> RunConfig:
    """So that a run can be resumed from anywhere."""

    def absolute(path: str | None) -> str | None:
        return None if path is None else str(Path(path).expanduser().absolute())

    data = replace(
        config.data, path=absolute(config.data.path), tokenizer=absolute(config.data.tokenizer)
    )
    init_from = absolute(config.train.init_from)
    return replace(config, data=data, train=replace(config.train, init_from=init_from))


def _batches(config: RunConfig, corpus: Corpus) -> TrainingBatches:
    train = config.train
    return TrainingBatches(
        corpus.split("train"), train.batch_size, train.seq_len, train.backprop_len, train.seed
    )


def _check_same(stored: RunConfig, config: RunConfig, run: Path) -> None:
    changed = stored.differences(config)
    named = [f"{k} ({a} -> {b})" for k, (a, b) in changed.items() if k not in FREE_FIELDS]
    if named:
        raise CheckpointError(
            f"{run} was begun with another config: {', '.join(named)}; resume without these "
            "changes, or begin a new run (train.init_from takes over the weights)"
        )


def _health(update: Update) -> dict[str, float]:
    """Codebook health averaged over the layers; nothing for full attention."""
    health = [usage.health() for usage in update.code_usage]
    return {
        name: sum(getattr(h, name) for h in health) / len(health)
        for name in ("share_in_use", "perplexity", "relative_error")
        if health
    }
