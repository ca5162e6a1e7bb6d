"""One training step of a given shape, timed: forward, backward, optimizer, codebooks.

It is the step of `tvq train`, on random tokens, with gradients through the whole sequence.
"""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass
from typing import Any, Literal

import torch

from transformer_vq.bench.cells import peak_bytes, synchronize
from transformer_vq.bench.sdpa import SdpaTransformer, sdpa_flops_per_token
from transformer_vq.config import (
    HeadType,
    ModelConfig,
    Precision,
    Reduction,
    RunConfig,
    TrainConfig,
)
from transformer_vq.data.batches import Batch, TrainingBatches
from transformer_vq.data.corpus import prepare
from transformer_vq.device import find_device, total_memory
from transformer_vq.errors import UserError
from transformer_vq.nn.model import TransformerVQ
from transformer_vq.training.run import training_batches, with_parts_that_fit
from transformer_vq.training.sizes import flops_per_token
from transformer_vq.training.step import Trainer


def _as_option(field: re.Match[str]) -> str:
    return f"--{field[2].replace('_', '-')} "


@dataclass(frozen=True)
class Cell:
    """One measurement: which model, how long a sequence, how many steps in a timing."""

    head_type: HeadType
    attention: Literal["vq", "full", "sdpa"]
    reduction: Reduction
    seq_len: int
    d_model: int = 768
    n_layer: int = 1
    d_k: int = 128
    n_kv_head: int | None = None
    n_code: int = 512
    block_len: int = 512
    vocab_size: int = 256
    batch_size: int = 1
    precision: Precision = "fp32"
    checkpoint_activations: bool = False
    compile: bool = False
    device: str = "auto"
    steps: int = 1
    """Training steps in one timing: many of a short sequence, so that every timing lasts as long
    and a lucky moment of the machine does not favour the short ones."""
    document_len: int | None = None
    """Tokens per document packed into the sequence; None for the path without documents."""

    @property
    def config(self) -> RunConfig:
        """The run of which this is a step; raises UserError for one that cannot be."""
        try:
            return self._config()
        except UserError as error:
            # The options of benchmarks have the same names, but no sections.
            raise UserError(re.sub(r"\b(model|train)\.(\w+)=", _as_option, str(error))) from None

    def _config(self) -> RunConfig:
        model = ModelConfig(
            vocab_size=self.vocab_size,
            d_model=self.d_model,
            n_layer=self.n_layer,
            head_type=self.head_type,
            attention="vq" if self.attention == "vq" else "full",
            d_k=self.d_k,
            n_kv_head=self.n_kv_head if self.head_type == "gqa" else None,
            n_code=self.n_code,
            block_len=self.block_len,
            codebook_init="random",  # as in the paper
            revive_below=0.0,
        )
        train = TrainConfig(
            batch_size=self.batch_size,
            seq_len=self.seq_len,
            backprop_len=self.seq_len,
            precision=self.precision,
            reduction=self.reduction,
            checkpoint_activations=self.checkpoint_activations,
            compile=self.compile,
            device=self.device,
        )
        return RunConfig(model, train=train)

    @property
    def flops_per_token(self) -> int:
        """Of a training step: three forward passes; recomputation counts as nothing."""
        count = sdpa_flops_per_token if self.attention == "sdpa" else flops_per_token
        return 3 * count(self.config.model, self.seq_len)

    @property
    def flops(self) -> int:
        """Of a training step, all tokens together."""
        return self.flops_per_token * self.batch_size * self.seq_len


def kind(row: dict[str, Any]) -> str:
    """full, sdpa, or the reduction of VQ attention; `row` holds the fields of a cell."""
    return row["reduction"] if row["attention"] == "vq" else row["attention"]


def timed_steps(
    cell: Cell, time_limit: float = math.inf, memory_gb: float | None = None
) -> dict[str, Any]:
    """Seconds of the first step and of one after it, and peak memory; for a process of its own.

    time_limit: seconds after which no further step is begun. memory_gb: of a GPU.
    """
    device = find_device(cell.device)
    if memory_gb is not None and device.type == "cuda":
        share = min(1e9 * memory_gb / total_memory(device), 1.0)
        torch.cuda.set_per_process_memory_fraction(share, device)
    torch.manual_seed(0)
    model = (SdpaTransformer if cell.attention == "sdpa" else TransformerVQ)(cell.config.model)
    trainer = Trainer(model, cell.config, device)
    batch = _batch(cell)
    start = time.perf_counter()
    trainer.update(batch, 0, begins=True)  # compiles, if asked to, and touches all memory
    synchronize(device)
    first, start = time.perf_counter() - start, time.perf_counter()
    for done in range(1, cell.steps + 1):
        trainer.update(batch, done, begins=True)
        if time.perf_counter() - start > time_limit:
            break
    synchronize(device)
    seconds = (time.perf_counter() - start) / done
    return {"first": first, "seconds": seconds, "peak_gb": peak_bytes(device) / 1e9}


def trainer_and_batches(config: RunConfig) -> tuple[Trainer, TrainingBatches]:
    """All that updates of a run need, without the run."""
    device = find_device(config.train.device)
    config = with_parts_that_fit(config, total_memory(device))
    torch.manual_seed(config.train.seed)
    batches = training_batches(config, prepare(config.data, config.model.vocab_size))
    return Trainer(TransformerVQ(config.model), config, device), batches


def _batch(cell: Cell) -> Batch:
    """Random tokens."""
    shape = (cell.batch_size, cell.seq_len)
    positions = torch.arange(cell.seq_len).expand(shape)
    tokens, targets = (torch.randint(cell.vocab_size, shape) for _ in range(2))
    ids = None if cell.document_len is None else positions // cell.document_len
    return Batch(tokens, targets, positions, document_ids=ids)
