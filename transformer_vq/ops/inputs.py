"""The inputs of the attention as one value, and the one place where a sequence is cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_vq.ops.ragged import Packing
from transformer_vq.ops.shapes import check_shapes, is_symbolic
from transformer_vq.ops.state import AttentionState


def segment_lens(seq_len: int, block_len: int, max_len: int) -> list[int]:
    """Cut a sequence: into segments of at most max_len tokens, in whole blocks, then the rest.

    Only the last segment may be shorter than a block. max_len is rounded down to whole blocks. A
    sequence of symbolic length is not cut.
    """
    if is_symbolic(seq_len):
        return [seq_len]
    segment_len = max(max_len // block_len, 1) * block_len
    n_whole = seq_len // block_len * block_len
    lens = [min(segment_len, n_whole - start) for start in range(0, n_whole, segment_len)]
    return lens + [seq_len - n_whole] * (seq_len > n_whole)


def split(x: Tensor, lens: Sequence[int], dim: int) -> tuple[Tensor, ...]:
    """Split a tensor; unlike that of slices, the gradient is put together only once."""
    return (x,) if len(lens) == 1 else x.split(list(lens), dim)


def shift_in(window: Tensor, segment: Tensor, n_blocks: int, dim: int) -> Tensor:
    """Return the window, then all blocks of the segment but the last."""
    window = window.to(segment.dtype)
    if not is_symbolic(n_blocks) and n_blocks == 1:
        return window
    kept = segment.narrow(dim, 0, segment.shape[dim] - window.shape[dim])
    return torch.cat([window, kept], dim=dim)


@dataclass(frozen=True)
class AttentionInputs:
    """One segment of a sequence, projected and quantized.

    q: [b, h, g, t, k], k_hat: [b, h, t, k], z: [b, h, t], v: [b, h, t, v], codebook: [h, s, k],
    by_distance: [b, h, g, t, L + 1] positional scores for distances L, ..., 0, or None for none;
    packing: padding and documents. After `blocked`, t is replaced by two axes: r, i.
    """

    q: Tensor
    k_hat: Tensor
    z: Tensor
    v: Tensor
    codebook: Tensor
    by_distance: Tensor | None = None
    packing: Packing | None = None

    @property
    def seq_len(self) -> int:
        return self.q.shape[-2]

    def split(self, lens: Sequence[int]) -> list[AttentionInputs]:
        """Return consecutive segments with these lengths."""
        if len(lens) == 1:
            return [self]
        n = len(lens)
        by_distance = [None] * n if self.by_distance is None else split(self.by_distance, lens, -2)
        packing = [None] * n if self.packing is None else self.packing.split(lens)
        parts = zip(
            split(self.q, lens, -2),
            split(self.k_hat, lens, -2),
            split(self.z, lens, -1),
            split(self.v, lens, -2),
            [self.codebook] * n,
            by_distance,
            packing,
            strict=True,
        )
        return [AttentionInputs(*part) for part in parts]

    def padded(self, seq_len: int) -> AttentionInputs:
        """Return the same segment with zeros at the end, up to seq_len tokens."""
        n, bias, packing = seq_len - self.seq_len, self.by_distance, self.packing
        return replace(
            self,
            q=F.pad(self.q, (0, 0, 0, n)),
            k_hat=F.pad(self.k_hat, (0, 0, 0, n)),
            z=F.pad(self.z, (0, n)),
            v=F.pad(self.v, (0, 0, 0, n)),
            by_distance=None if bias is None else F.pad(bias, (0, 0, 0, n)),
            packing=None if packing is None else packing.padded(n),
        )

    def blocked(self, n_blocks: int) -> AttentionInputs:
        """Return a view in which the axis of tokens is divided into n_blocks blocks."""
        size, bias = (n_blocks, -1), self.by_distance
        return replace(
            self,
            q=self.q.unflatten(-2, size),
            k_hat=self.k_hat.unflatten(-2, size),
            z=self.z.unflatten(-1, size),
            v=self.v.unflatten(-2, size),
            by_distance=None if bias is None else bias.unflatten(-2, size),
        )

    def check(self, state: AttentionState) -> None:
        """Raise ValueError if the shapes do not fit each other or the state."""
        shapes = {
            "q": (self.q, "bhgtk"),
            "k_hat": (self.k_hat, "bhtk"),
            "z": (self.z, "bht"),
            "v": (self.v, "bhtv"),
            "codebook": (self.codebook, "hsk"),
            "state_keys": (state.k, "bhLk"),
            "state_values": (state.v, "bhLv"),
        }
        if self.by_distance is not None:
            shapes["by_distance"] = (self.by_distance, "bhgtd")
        check_shapes(**shapes)
        window_len = state.k.shape[-2]
        if self.by_distance is not None and self.by_distance.shape[-1] != window_len + 1:
            raise ValueError(
                f"by_distance has {self.by_distance.shape[-1]} distances, want {window_len + 1}: "
                f"{window_len}, ..., 0 for the window of the state"
            )
