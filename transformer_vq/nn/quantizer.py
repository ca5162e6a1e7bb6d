"""Vector quantization of keys (Definitions 2.1 and 2.6) with a codebook learned by running means.

`forward` changes nothing: it hands out what the keys of this call say about the codebook
(`CodeUsage`), and `update` applies it. So recomputation, gradient accumulation, several processes
and torch.compile need no special care: usages are added up and applied once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transformer_vq.errors import UserError
from transformer_vq.ops.cache import accumulation_dtype, code_sums
from transformer_vq.ops.precision import full_precision

NO_CANDIDATE = 2**62  # priority of an empty slot, above all others


class NotFiniteError(UserError):
    """NaN or inf where a number is needed."""


@dataclass(frozen=True)
class CodebookHealth:
    """How well a codebook serves the keys it was given; plain numbers for logs."""

    share_in_use: float
    """Part of the codes that got at least one key."""
    perplexity: float
    """exp(entropy) of the use of codes: n_code when even, 1 when one code takes all."""
    relative_error: float
    """Squared quantization error over squared size of the keys."""


@dataclass(frozen=True)
class CodeUsage:
    """What a batch of keys says about a codebook. Usages of several batches add up.

    sum: [h, s, k] of the keys per code, count: [h, s], error: [h] and energy: [h] sums of squared
    quantization errors and of squared keys. candidates: [h, s, k] keys that could become codes,
    those with the lowest `priority`: [s], in that order. So a sum has the candidates that the keys
    of all batches together would have, however they were divided.
    """

    sum: Tensor
    count: Tensor
    error: Tensor
    energy: Tensor
    candidates: Tensor | None = None
    priority: Tensor | None = None

    def __add__(self, other: CodeUsage) -> CodeUsage:
        candidates, priority = self.candidates, self.priority
        if candidates is not None and other.candidates is not None:
            assert priority is not None
            assert other.priority is not None
            candidates = torch.cat([candidates, other.candidates], dim=1)
            priority, order = lowest(torch.cat([priority, other.priority]), len(priority))
            candidates = candidates[:, order]
        return CodeUsage(
            self.sum + other.sum,
            self.count + other.count,
            self.error + other.error,
            self.energy + other.energy,
            candidates,
            priority,
        )

    def health(self) -> CodebookHealth:
        """Averages over heads."""
        share = (self.count > 0).double().mean()
        p = self.count.double() / self.count.double().sum(-1, keepdim=True).clamp(min=1)
        perplexity = torch.special.entr(p).sum(-1).exp().mean()
        error = self.error.double().sum() / self.energy.double().sum().clamp(min=1e-30)
        return CodebookHealth(float(share), float(perplexity), float(error))


def add_usages(
    total: tuple[CodeUsage, ...] | None, usages: tuple[CodeUsage, ...]
) -> tuple[CodeUsage, ...]:
    """Add the code usage of one more forward pass, layer by layer; None is an empty total."""
    if total is None:
        return usages
    return tuple(a + b for a, b in zip(total, usages, strict=True))


@dataclass(frozen=True)
class Quantized:
    """k_hat: [b, h, t, k], z: [b, h, t], commit_loss: scalar, usage: of this call's keys."""

    k_hat: Tensor
    z: Tensor
    commit_loss: Tensor
    usage: CodeUsage


class VectorQuantizer(nn.Module):
    """Replaces each key by the nearest of `n_code` codewords; one codebook per head.

    The codebook is a pair of float32 buffers, running sum and running count of the keys per code,
    and no parameter: it follows the keys through `update`, never through a gradient.
    """

    c_sum: Tensor
    c_count: Tensor
    started: Tensor

    def __init__(
        self,
        n_code: int,
        d_k: int,
        n_head: int = 1,
        *,
        ema_decay: float = 0.99,
        codebook_init: str = "random",
        revive_below: float = 0.0,
    ) -> None:
        super().__init__()
        if codebook_init not in ("random", "keys"):
            raise ValueError(f"codebook_init={codebook_init!r}: choose 'random' or 'keys'")
        self.ema_decay = ema_decay
        self.codebook_init = codebook_init
        self.revive_below = revive_below
        self.register_buffer("c_sum", torch.empty(n_head, n_code, d_k))
        self.register_buffer("c_count", torch.empty(n_head, n_code))
        self.register_buffer("started", torch.empty((), dtype=torch.bool))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.c_sum, std=self.c_sum.shape[1] ** -0.5)
        nn.init.ones_(self.c_count)
        self.started.fill_(self.codebook_init == "random")

    @property
    def codebook(self) -> Tensor:
        """The codewords: [h, s, k]."""
        return self.c_sum / self.c_count.clamp(min=0.01).unsqueeze(-1)

    @property
    def uses_candidates(self) -> bool:
        """Whether training replaces codes by keys, at the start or later."""
        return self.codebook_init == "keys" or self.revive_below > 0

    def forward(
        self, k: Tensor, valid: Tensor | None = None, priority: Tensor | None = None
    ) -> Quantized:
        """k: [b, h, t, k]; positions where valid: [b, t] is False count neither for the loss nor
        for the codebook. priority: [b, t] from 0 to 2^62 - 1, for training: the keys with the
        lowest numbers may become codes; `token_priority` by default. Raises NotFiniteError for keys
        that are not finite."""
        if k.ndim != 4 or (k.shape[1], k.shape[3]) != (self.c_sum.shape[0], self.c_sum.shape[2]):
            n_head, _, d_k = self.c_sum.shape
            raise ValueError(f"keys have shape {tuple(k.shape)}, want [b, {n_head}, t, {d_k}]")
        # Not when compiling, where it would break the graph: there NaN stays NaN through k_hat.
        if not (torch.compiler.is_compiling() or k.is_meta or torch.isfinite(k).all()):
            raise NotFiniteError(
                "keys are not finite (NaN or inf), so no code is nearest; look for a diverged "
                "loss, a too large learning rate or bad input features"
            )
        with full_precision(k.device):
            exact = k.to(accumulation_dtype(k.dtype))
            codebook = self.codebook.to(exact.dtype)
            z = nearest_code(exact.detach(), codebook)
            codeword = _lookup(codebook, z)
            error = (exact - codeword).square().sum(-1)  # [b, h, t]
            if valid is not None:
                error = error * valid[:, None]
            n_tokens = error[:, 0].numel() if valid is None else valid.sum().clamp(min=1)
            # The zero carries the gradient, so k_hat is the codeword to the last bit.
            k_hat = codeword.to(k.dtype) + (k - k.detach())
            usage = self._usage(exact.detach(), z, error.detach(), valid, priority)
            return Quantized(k_hat, z, error.sum() / n_tokens, usage)

    def _usage(
        self, k: Tensor, z: Tensor, error: Tensor, valid: Tensor | None, priority: Tensor | None
    ) -> CodeUsage:
        n_code = self.c_sum.shape[1]
        by_head = k.transpose(0, 1).flatten(1, 2)  # [h, b * t, k]
        counted = None if valid is None else valid.flatten()
        total, count = code_sums(z.transpose(0, 1).flatten(1), by_head, n_code, counted)
        energy = k.square().sum(-1)
        if valid is not None:
            energy = energy * valid[:, None]
        usage = CodeUsage(total, count, error.sum((0, 2)), energy.sum((0, 2)))
        if not (self.training and self.uses_candidates):
            return usage
        if priority is None:
            priority = token_priority(k.shape[0], k.shape[2], valid, k.device)
        priority = priority.flatten()
        if counted is not None:
            priority = priority.masked_fill(~counted, NO_CANDIDATE)
        # Fewer keys than codes leave empty slots at the end.
        priority = F.pad(priority, (0, max(n_code - len(priority), 0)), value=NO_CANDIDATE)
        priority, order = lowest(priority, n_code)
        candidates = by_head[:, order.clamp(max=by_head.shape[1] - 1)]
        return replace(usage, candidates=candidates, priority=priority)

    @torch.no_grad()
    def update(self, usage: CodeUsage) -> None:
        """new = ema_decay * old + (1 - ema_decay) * batch, for sums and counts."""
        if usage.sum.shape != self.c_sum.shape:
            raise ValueError(
                f"usage of a codebook of shape {tuple(usage.sum.shape)} cannot update one of shape "
                f"{tuple(self.c_sum.shape)}"
            )
        self.c_sum.mul_(self.ema_decay).add_(usage.sum, alpha=1 - self.ema_decay)
        self.c_count.mul_(self.ema_decay).add_(usage.count, alpha=1 - self.ema_decay)
        if usage.candidates is not None and usage.priority is not None:
            n_code = len(usage.priority)
            n_keys = (usage.priority < NO_CANDIDATE).sum().clamp(min=1)
            slots = torch.arange(n_code, device=n_keys.device) % n_keys  # each key once if possible
            # Sum and count together: a new sum over an old count would not be a codeword.
            replaced = (self.c_count < self.revive_below) | ~self.started
            replaced &= usage.count.sum() > 0
            keys = usage.candidates[:, slots].to(self.c_sum.dtype)
            self.c_sum.copy_(torch.where(replaced.unsqueeze(-1), keys, self.c_sum))
            self.c_count.masked_fill_(replaced, 1.0)
            self.started |= usage.count.sum() > 0

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> VectorQuantizer:
        """Moves and casts like any module, but the running sums never drop below float32."""
        before = self.c_sum, self.c_count
        super()._apply(fn, recurse)
        if self.c_sum.dtype.itemsize < 4:
            self.c_sum, self.c_count = (x.to(self.c_sum.device) for x in before)
        return self


def nearest_code(k: Tensor, codebook: Tensor) -> Tensor:
    """Index of the nearest codeword, the first one of several. k: [b, h, t, k] -> [b, h, t]."""
    # |k - c|^2 = |k|^2 - 2 (k . c - |c|^2 / 2), and |k|^2 is the same for all codes.
    half_norms = codebook.square().sum(-1) / 2
    return (torch.einsum("bhtk,hsk->bhts", k, codebook) - half_norms.unsqueeze(-2)).argmax(-1)


def _lookup(codebook: Tensor, z: Tensor) -> Tensor:
    """The codewords of the codes. codebook: [h, s, k], z: [b, h, t] -> [b, h, t, k]."""
    n_head, n_code, _ = codebook.shape
    rows = z + torch.arange(n_head, device=z.device).view(-1, 1) * n_code
    return codebook.flatten(0, 1)[rows]


def lowest(priority: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The n lowest numbers in ascending order, and where they are. priority: [m] -> [n], [n]."""
    values, order = priority.topk(n, largest=False, sorted=True)
    return values, order


def token_priority(
    batch_size: int,
    seq_len: int,
    valid: Tensor | None = None,
    device: torch.device | None = None,
    first_row: int = 0,
) -> Tensor:
    """Pseudo-random numbers that follow from row and place alone: [batch_size, seq_len] of int64.

    Padding has no place of its own, so it changes no number. first_row: the number of the first
    row, for a batch that is one part of a larger one. No random state is used or changed.
    """
    row = first_row + torch.arange(batch_size, device=device).unsqueeze(-1)
    place = torch.arange(seq_len, device=device) if valid is None else valid.cumsum(1) - 1
    # The finalizer of MurmurHash3; products wrap around.
    x = (row << 32) + place + 1
    for factor in (-0x00AE502812AA7333, -0x3B314601E57A13AD):
        x = (x ^ ((x >> 33) & 0x7FFFFFFF)) * factor
    x = x ^ ((x >> 33) & 0x7FFFFFFF)
    return x & 0x3FFFFFFFFFFFFFFF
