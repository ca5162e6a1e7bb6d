"""Time one training step of a given shape: forward, backward, optimizer, codebooks.

It is the step of `tvq train`, on random tokens, with gradients through the entire sequence.
"""

from __future__ import annotations

import math
import re
import time
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch

from transformer_vq.bench.cells import synchronize
from transformer_vq.bench.defaults import Shape
from transformer_vq.bench.records import StepAttention, StepKind, StepTiming, step_kind
from transformer_vq.bench.sdpa import SdpaTransformer, sdpa_flops_per_token
from transformer_vq.config import HeadType, ModelConfig, Reduction, RunConfig, TrainConfig
from transformer_vq.data.batches import Batch, TrainingBatches
from transformer_vq.data.corpus import prepare
from transformer_vq.device import find_device, total_memory
from transformer_vq.errors import UserError
from transformer_vq.memory_use import peak_bytes
from transformer_vq.nn.model import TransformerVQ
from transformer_vq.training.memory import choose_accumulation
from transformer_vq.training.run import training_batches
from transformer_vq.training.sizes import flops_per_token
from transformer_vq.training.step import Trainer

PAPER_LAYERS = 24


@dataclass(frozen=True)
class Cell(Shape):
    """One measurement: the model, the length of the sequence, and the steps per timing."""

    head_type: HeadType
    attention: StepAttention
    reduction: Reduction
    seq_len: int
    _: KW_ONLY
    n_layer: int = 1
    checkpoint_activations: bool = False
    compile: bool = False
    steps: int = 1
    """Training steps per timing. Short sequences get more steps, so that all timings take about
    equally long. Otherwise short timings would profit more from idle moments of the machine."""
    document_len: int | None = None
    """Tokens per packed document; None for the code path without documents."""

    @property
    def kind(self) -> StepKind:
        """full, sdpa, or the reduction of VQ attention."""
        return step_kind(self.attention, self.reduction)

    @property
    def config(self) -> RunConfig:
        """The config of a run with this step; raises UserError if it is invalid."""
        try:
            return self._config()
        except UserError as error:
            # The options of benchmarks have the same names as config fields, but no sections.
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
        """FLOPs of a training step per token: three forward passes, without recomputation."""
        count = sdpa_flops_per_token if self.attention == "sdpa" else flops_per_token
        return 3 * count(self.config.model, self.seq_len)

    @property
    def flops(self) -> int:
        """FLOPs of a training step."""
        return self.flops_per_token * self.batch_size * self.seq_len


def _as_option(field: re.Match[str]) -> str:
    return f"--{field[2].replace('_', '-')} "


def shape_fields(shape: Shape) -> dict[str, Any]:
    """Return the fields of a shape for `Cell`, with the default number of layers filled in."""
    values = vars(shape)
    if shape.n_layer is not None:
        return values
    return values | {"n_layer": 1 if find_device(shape.device).type == "cpu" else PAPER_LAYERS}


def timed_steps(
    cell: Cell, time_limit: float = math.inf, memory_gb: float | None = None
) -> StepTiming:
    """Time the training steps of a cell; run this in a subprocess to measure its peak memory.

    time_limit: seconds after which no further step is started. memory_gb: limit on GPU memory.
    """
    device = find_device(cell.device)
    if memory_gb is not None and device.type == "cuda":
        share = min(1e9 * memory_gb / total_memory(device), 1.0)
        torch.cuda.set_per_process_memory_fraction(share, device)
    torch.manual_seed(0)
    model = (SdpaTransformer if cell.attention == "sdpa" else TransformerVQ)(cell.config.model)
    trainer = Trainer(model, cell.config, device)
    batch = _random_batch(cell)
    start = time.perf_counter()
    trainer.step(batch, 0, begins=True)  # compiles if requested, and touches all memory
    synchronize(device)
    first, start = time.perf_counter() - start, time.perf_counter()
    for done in range(1, cell.steps + 1):
        trainer.step(batch, done, begins=True)
        if time.perf_counter() - start > time_limit:
            break
    synchronize(device)
    seconds = (time.perf_counter() - start) / done
    return {"first": first, "seconds": seconds, "peak_gb": peak_bytes(device) / 1e9}


def trainer_and_batches(config: RunConfig) -> tuple[Trainer, TrainingBatches]:
    """Return what the training steps of a run need, without creating a run folder."""
    device = find_device(config.train.device)
    config = choose_accumulation(config, total_memory(device))
    torch.manual_seed(config.train.seed)
    batches = training_batches(config, prepare(config.data, config.model.vocab_size))
    return Trainer(TransformerVQ(config.model), config, device), batches


def _random_batch(cell: Cell) -> Batch:
    shape = (cell.batch_size, cell.seq_len)
    positions = torch.arange(cell.seq_len).expand(shape)
    tokens, targets = (torch.randint(cell.vocab_size, shape) for _ in range(2))
    ids = None if cell.document_len is None else positions // cell.document_len
    return Batch(tokens, targets, positions, document_ids=ids)
