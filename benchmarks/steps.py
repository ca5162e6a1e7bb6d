"""Time one training step of a given shape: forward, backward, optimizer, codebooks.

It is the step of `tvq train`, on random tokens, with gradients through the entire sequence.
"""

from __future__ import annotations

import math
import re
import time
from dataclasses import KW_ONLY, dataclass, fields, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from common import Record
from measure import synchronize
from transformer_vq.config import (
    HeadType,
    ModelConfig,
    Precision,
    Reduction,
    RunConfig,
    TrainConfig,
)
from transformer_vq.data.batches import Batch
from transformer_vq.device import find_device, total_memory
from transformer_vq.errors import UserError
from transformer_vq.memory_use import peak_bytes
from transformer_vq.nn.layers import FeedForward, linear, rms_norm
from transformer_vq.nn.model import ModelOutput, ModelState, TransformerVQ, last_columns
from transformer_vq.sizes import flops_per_token
from transformer_vq.training.step import Trainer

StepAttention = Literal["vq", "full", "sdpa"]

StepKind = Literal["full", "sdpa", "serial", "matmul", "associative", "input_scan", "auto"]
"""Full attention, the SDPA baseline, or the reduction of VQ attention."""


def step_kind(attention: StepAttention, reduction: Reduction) -> StepKind:
    """Return the kind of attention of a training step."""
    return reduction if attention == "vq" else attention


HEAD_TYPES: tuple[HeadType, ...] = ("shga", "mqa", "mha")  # the head types of the paper


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The model and the batch of a training step; by default one layer of the paper's 190M model.

    Field docstrings are the help texts of `train.py` and `documents.py`.
    """

    d_model: int = 768
    """Width of the residual stream."""
    n_layer: int | None = None
    """Transformer layers; by default 1 on a CPU and 24, as in the paper, on a GPU."""
    d_k: int = 128
    """Width of queries and keys, per head."""
    n_kv_head: int | None = None
    """Key/value heads of gqa."""
    n_code: int = 512
    """Codewords per codebook."""
    block_len: int = 512
    """Tokens per block."""
    vocab_size: int = 256
    """Vocabulary size."""
    batch_size: int = 1
    """Sequences per step."""
    precision: Precision = "fp32"
    """Precision of matrix products: fp32 or bf16."""
    device: str = "auto"
    """cpu, cuda, ...; auto uses a GPU if one is available."""


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
    values = {field.name: getattr(shape, field.name) for field in fields(Shape)}
    if shape.n_layer is not None:
        return values
    return values | {"n_layer": 1 if find_device(shape.device).type == "cpu" else PAPER_LAYERS}


def timed_steps(cell: Cell, time_limit: float = math.inf, memory_gb: float | None = None) -> Record:
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


def _random_batch(cell: Cell) -> Batch:
    shape = (cell.batch_size, cell.seq_len)
    positions = torch.arange(cell.seq_len).expand(shape)
    tokens, targets = (torch.randint(cell.vocab_size, shape) for _ in range(2))
    ids = None if cell.document_len is None else positions // cell.document_len
    return Batch(tokens, targets, document_ids=ids)


class SdpaAttention(nn.Module):
    """RMSNorm, causal multi-head attention with heads of width d_k, output projection."""

    def __init__(self, d_model: int, d_k: int) -> None:
        super().__init__()
        self.d_k = d_k
        self.checkpoint_activations = False
        self.qkv_proj = linear(d_model, 3 * d_model)
        self.o_proj = linear(d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        """Return the residual branch of x: [b, t, d_model] -> [b, t, d_model]."""
        if self.checkpoint_activations and torch.is_grad_enabled():
            branch: Tensor = checkpoint(self._forward, x, use_reentrant=False)
            return branch
        return self._forward(x)

    def _forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv_proj(rms_norm(x)).unflatten(-1, (3, -1, self.d_k))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # [b, h, t, k] each
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        branch: Tensor = self.o_proj(y.transpose(1, 2).flatten(2))
        return branch


class SdpaTransformer(TransformerVQ):
    """A plain transformer without state; trainable like `TransformerVQ`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(replace(config, head_type="mha", attention="full"))
        self.branches = nn.ModuleList(
            branch
            for _ in range(config.n_layer)
            for branch in (
                SdpaAttention(config.d_model, config.d_k),
                FeedForward(config.d_model, 4 * config.d_model),
            )
        )

    def forward(
        self,
        tokens: Tensor,
        state: ModelState | None = None,
        valid: Tensor | None = None,
        document_ids: Tensor | None = None,
        key_priority: Tensor | None = None,
        *,
        n_logits: int | None = None,
    ) -> ModelOutput:
        """Return the logits of tokens: [b, t]; the returned state is empty.

        `state` and `key_priority` are ignored: this model has no window, cache or codebooks.
        """
        if valid is not None or document_ids is not None:
            raise UserError("the sdpa baseline does not support padding or documents")
        x = self.embed(tokens)
        for branch in self.branches:
            x = x + branch(x)
        features = x if n_logits is None else last_columns(x, n_logits)
        return ModelOutput(
            self.logits(features), self.init_state(len(tokens)), torch.zeros_like(x[0, 0, 0]), ()
        )


def sdpa_flops_per_token(config: ModelConfig, seq_len: int) -> int:
    """Return the FLOPs of a forward pass: those of full MHA without the positional bias."""
    full = flops_per_token(replace(config, head_type="mha", attention="full"), seq_len)
    return full - config.n_layer * config.d_model * 2 * (seq_len // 2)
