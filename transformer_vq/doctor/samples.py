"""Random inputs of the attention, and Definition 3.1 for them.

Rows with padding and documents are given to the definition as they are meant: without padding, and
with a mask that hides other documents.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, get_args

import torch
from torch import Tensor

from transformer_vq.config import AttentionConfig, HeadType, ModelConfig
from transformer_vq.ops.blockwise import vq_attention
from transformer_vq.ops.quadratic import quadratic_vq_attention
from transformer_vq.ops.ragged import Packing, read_packing
from transformer_vq.ops.state import AttentionState

Scenario = Literal["one segment", "carried state", "padding", "documents"]
ALL_HEADS: tuple[HeadType, ...] = get_args(HeadType)


@dataclass(frozen=True)
class Sizes:
    """Head types and sizes of the inputs; the sequence ends with an incomplete block."""

    seq_len: int = 75
    block_len: int = 16
    n_code: int = 24
    d_model: int = 64
    d_k: int = 16
    batch_size: int = 2
    head_types: tuple[HeadType, ...] = ALL_HEADS

    @property
    def cut(self) -> int:
        """Where a sequence is cut into two segments, within a block."""
        return 2 * self.block_len + self.block_len // 3

    def model(self, head_type: HeadType, **options: object) -> ModelConfig:
        """Return a model of one layer with these sizes."""
        return ModelConfig(
            vocab_size=64,
            d_model=self.d_model,
            n_layer=1,
            head_type=head_type,
            d_k=self.d_k,
            n_kv_head=2 if head_type == "gqa" else None,
            n_code=self.n_code,
            block_len=self.block_len,
            codebook_init="random",
            revive_below=0.0,
            **options,  # type: ignore[arg-type]
        )


CPU_SIZES = Sizes()
GPU_SIZES = Sizes(seq_len=1100, block_len=128, n_code=256, d_model=256, d_k=64)
"""Closer to real models: a kernel may fail only for several tiles."""


@dataclass(frozen=True)
class Tensors:
    """Arguments of `vq_attention`; shapes as there."""

    q: Tensor
    k_hat: Tensor
    z: Tensor
    v: Tensor
    codebook: Tensor
    by_distance: Tensor

    @property
    def leaves(self) -> dict[str, Tensor]:
        """The tensors that get a gradient, by name."""
        return {"q": self.q, "k": self.k_hat, "v": self.v, "bias": self.by_distance}

    def to(self, device: torch.device, dtype: torch.dtype) -> Tensors:
        """Return copies whose gradients can be computed."""
        names = ("q", "k_hat", "v", "codebook", "by_distance")
        # Round first: some devices do not have float64.
        moved = {name: getattr(self, name).detach().to(dtype, copy=True) for name in names}
        moved = {name: x.to(device) for name, x in moved.items()}
        tensors = Tensors(**moved, z=self.z.to(device))
        for leaf in tensors.leaves.values():
            leaf.requires_grad_()
        return tensors

    def tokens(self, row: int | slice, index: Tensor | slice) -> Tensors:
        """Return some rows and columns."""
        at = slice(row, row + 1) if isinstance(row, int) else row
        return Tensors(
            self.q[at][..., index, :],
            self.k_hat[at][..., index, :],
            self.z[at][..., index],
            self.v[at][..., index, :],
            self.codebook,
            self.by_distance[at][..., index, :],
        )

    def gather(self, packing: Packing) -> Tensors:
        """Return the tensors with padding at the end of each row."""

        def moved(x: Tensor) -> Tensor:
            return packing.gather(x.movedim(-2, 1)).movedim(1, -2)

        z = moved(self.z.unsqueeze(-1)).squeeze(-1)
        q, k_hat, v, bias = map(moved, (self.q, self.k_hat, self.v, self.by_distance))
        return Tensors(q, k_hat, z, v, self.codebook, bias)


@dataclass(frozen=True)
class Problem:
    """One call of the attention: heads, scenario and random inputs in float64 on the CPU."""

    head_type: HeadType
    scenario: Scenario
    block_len: int
    cuts: tuple[int, ...]
    tensors: Tensors
    probe: Tensor
    """Gradient of the output, which determines those of the inputs."""
    valid: Tensor | None = None
    document_ids: Tensor | None = None

    @property
    def name(self) -> str:
        return f"{self.head_type}, {self.scenario}"


def problems(sizes: Sizes, dtype: torch.dtype, seed: int = 0) -> Iterator[Problem]:
    """Yield a problem per head type and scenario; `dtype` represents its inputs exactly."""
    generator = torch.Generator().manual_seed(seed)
    b, t = sizes.batch_size, sizes.seq_len

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).double()

    for head_type in sizes.head_types:
        heads = AttentionConfig(
            sizes.d_model,
            d_k=sizes.d_k,
            head_type=head_type,
            n_kv_head=2 if head_type == "gqa" else None,
        ).heads
        h, g = heads.n_kv_head, heads.n_group
        codebook = normal(h, sizes.n_code, heads.d_k)
        z = torch.randint(sizes.n_code, (b, h, t), generator=generator)
        k_hat = torch.stack([codebook[head, z[:, head]] for head in range(h)], dim=1)
        # Scores of order one: those of a model are divided by the square root of the width.
        q = (normal(b, h, g, t, heads.d_k) * heads.d_k**-0.5).to(dtype).double()
        v = normal(b, h, t, heads.d_v)
        bias = normal(b, h, g, t, sizes.block_len + 1)
        plain = Problem(
            head_type,
            "one segment",
            sizes.block_len,
            (),
            Tensors(q, k_hat, z, v, codebook, bias),
            normal(b, h, g, t, heads.d_v),
        )
        yield plain
        carried = replace(plain, scenario="carried state", cuts=(sizes.cut,))
        yield carried
        valid = torch.rand(b, t, generator=generator) < 0.8
        yield replace(carried, scenario="padding", valid=valid)
        starts = torch.rand(b, t, generator=generator) < 2 / sizes.block_len
        yield replace(carried, scenario="documents", document_ids=starts.cumsum(1))


def definition(problem: Problem, x: Tensors) -> Tensor:
    """Return Definition 3.1, in the precision and on the device of the tensors."""
    output = torch.zeros_like(problem.probe, dtype=x.v.dtype, device=x.v.device)
    rows = []
    edges = [0, *problem.cuts, x.z.shape[-1]]
    for row in range(x.z.shape[0]):
        valid = torch.ones(edges[-1], dtype=torch.bool)
        if problem.valid is not None:
            valid = problem.valid[row]
        # Blocks start at the first valid token of each segment.
        block_starts, n = [], 0
        for start, stop in pairwise(edges):
            length = int(valid[start:stop].sum())
            block_starts.append(n + torch.arange(length) // problem.block_len * problem.block_len)
            n += length
        visible = None
        if problem.document_ids is not None:
            ids = problem.document_ids[row][valid]
            visible = (ids[:, None] == ids[None, :]).unsqueeze(0).to(x.v.device)
        index = valid.nonzero().squeeze(-1).to(x.v.device)
        part = x.tokens(row, index)
        found = quadratic_vq_attention(
            part.q,
            part.k_hat,
            part.v,
            part.by_distance,
            block_starts=torch.cat(block_starts).to(x.v.device),
            visible=visible,
        )
        rows.append(output[row : row + 1].index_copy(-2, index, found))
    return torch.cat(rows)


def linear_time(problem: Problem, x: Tensors, reduction: str) -> Tensor:
    """Return the same from `vq_attention`, segment by segment."""
    state = empty_state(problem, x)
    outputs = []
    for start, stop in pairwise([0, *problem.cuts, x.z.shape[-1]]):
        part = x.tokens(slice(None), slice(start, stop))
        packing = _packing(problem, state, start, stop)
        if packing is not None and packing.order is not None:
            part = part.gather(packing)
        output, state = vq_attention(
            part.q,
            part.k_hat,
            part.z,
            part.v,
            part.codebook,
            part.by_distance,
            state,
            packing=packing,
            reduction=reduction,
        )
        if packing is not None:
            state = replace(state, document=packing.document)
            if packing.order is not None:
                output = packing.scatter(output.movedim(-2, 1)).movedim(1, -2)
        outputs.append(output)
    return torch.cat(outputs, dim=-2)


def empty_state(problem: Problem, x: Tensors) -> AttentionState:
    """Return the state before the first token."""
    b, h, _, d_k = x.k_hat.shape
    return AttentionState.empty(
        b,
        h,
        problem.block_len,
        d_k,
        x.v.shape[-1],
        x.codebook.shape[-2],
        dtype=x.v.dtype,
        device=x.v.device,
    )


def _packing(problem: Problem, state: AttentionState, start: int, stop: int) -> Packing | None:
    device = state.k.device
    valid, ids = (
        None if given is None else given[:, start:stop].to(device)
        for given in (problem.valid, problem.document_ids)
    )
    return read_packing(state, stop - start, valid, ids)
