"""The grid of `tvq bench train`: head types, kinds of attention and sequence lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from transformer_vq.bench.defaults import Shape
from transformer_vq.bench.records import StepKind
from transformer_vq.bench.steps import Cell, shape_fields
from transformer_vq.config import HeadType
from transformer_vq.errors import UserError


def grid(
    head_types: Sequence[HeadType],
    kinds: Sequence[StepKind],
    lengths: Sequence[int],
    shape: Shape,
    compile: bool = False,
) -> list[Cell]:
    """Return all cells, short sequences first. The sdpa baseline has only one head type, MHA.

    Raises UserError for an invalid model.
    """
    if not lengths or not _series(head_types, kinds):
        raise UserError("the grid is empty; give at least one of --head-types, --kinds, --lengths")
    if min(lengths) < 1:
        raise UserError(f"--lengths {min(lengths)}: must be at least 1")
    fields = shape_fields(shape)
    cells = []
    for seq_len in sorted(set(lengths)):
        for head_type, kind in _series(head_types, kinds):
            if kind == "full" or kind == "sdpa":
                cell = Cell(head_type, kind, "auto", seq_len, compile=compile, **fields)
            else:
                cell = Cell(head_type, "vq", kind, seq_len, compile=compile, **fields)
            cells.append(_with_steps(cell, max(lengths)))
    return cells


def _series(
    head_types: Sequence[HeadType], kinds: Sequence[StepKind]
) -> list[tuple[HeadType, StepKind]]:
    by_head: list[tuple[HeadType, StepKind]] = [
        (head_type, kind) for head_type in head_types for kind in kinds if kind != "sdpa"
    ]
    return by_head + ([("mha", "sdpa")] if "sdpa" in kinds else [])


def _with_steps(cell: Cell, longest: int) -> Cell:
    """Give a cell as many steps as take about the time of one VQ step at the longest length."""
    linear = replace(cell, attention="vq", reduction="auto", seq_len=longest)
    return replace(cell, steps=max(1, round(linear.flops / cell.flops)))
