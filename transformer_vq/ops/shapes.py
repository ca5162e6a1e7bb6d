"""Sizes: checks for public ops in the letters of the einsums, and sizes unknown until run time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def is_symbolic(size: int) -> bool:
    """Return whether torch.export leaves this size open, so that no branch may depend on it."""
    return torch.compiler.is_exporting() and not isinstance(size, int)


def symbolic_blocks(seq_len: int, block_len: int) -> int | None:
    """Return the number of blocks of a symbolic length, counting a partial one; otherwise None.

    The result is a new symbol. An expression in seq_len would let torch.export specialize on it,
    for example on more than one block.
    """
    if not is_symbolic(seq_len):
        return None
    expression = (seq_len + block_len - 1) // block_len
    n_blocks: Any = torch.scalar_tensor(expression, dtype=torch.int64).item()
    torch._check(n_blocks >= 1)
    torch._check(n_blocks * block_len >= seq_len)
    torch._check(n_blocks * block_len < seq_len + block_len)
    result: int = n_blocks
    return result


def check_shapes(**tensors: tuple[Tensor, str]) -> None:
    """Check that tensors have one axis per letter, and each letter the same size everywhere.

    check_shapes(q=(q, "bhgtk"), z=(z, "bht")) raises ValueError with both shapes.
    """
    sizes: dict[str, int] = {}
    for name, (tensor, letters) in tensors.items():
        shape = tuple(tensor.shape)
        want = [sizes.get(letter, letter) for letter in letters]
        fits = len(shape) == len(letters) and all(
            size == sizes.setdefault(letter, size)
            for letter, size in zip(letters, shape, strict=True)
        )
        if not fits:
            axes = ", ".join(letters)
            wanted = ", ".join(map(str, want))
            raise ValueError(f"{name} has shape {shape}, want [{axes}] = [{wanted}]")
