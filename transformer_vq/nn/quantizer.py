"""Vector quantization of keys (Definitions 2.1 and 2.6) with codebooks learned by moving averages.

`forward` is pure: it returns the codebook statistics of this batch (`CodeUsage`), and
`update_codebook` applies them. So activation checkpointing, gradient accumulation, data parallelism
and torch.compile need no special care: usages are added up and applied once per step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transformer_vq.errors import UserError
from transformer_vq.ops.cache import accumulation_dtype, code_sums, lookup
from transformer_vq.ops.runtime import full_precision, is_readable, tensor_tree

NO_CANDIDATE = 2**62  # priority of an empty slot, above all others
MAX_UNUSED = 1024  # training passes without an update of the codebook before a warning
FindCode = Callable[[Tensor, Tensor], Tensor]  # codes of keys from a codebook; see `nearest_code`


class NotFiniteError(UserError):
    """NaN or inf where a number is needed."""


@dataclass(frozen=True)
class CodebookHealth:
    """Metrics of a codebook on one batch of keys."""

    share_in_use: float
    """Fraction of the codes with at least one key."""
    perplexity: float
    """exp(entropy) of the code frequencies: n_code if uniform, 1 if a single code is used."""
    relative_error: float
    """Squared quantization error divided by the squared norm of the keys."""


@tensor_tree
@dataclass(frozen=True)
class CodeUsage:
    """Codebook statistics of a batch of keys. Usages of several batches can be added.

    sum: [h, s, k] of the keys per code, count: [h, s], error: [h] and energy: [h] sums of squared
    quantization errors and squared norms. candidates: [h, s, k] keys that may become codes: those
    with the lowest `priority`, [s], in that order. So the candidates of a sum do not depend on how
    the keys were split into batches.
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
            assert priority is not None and other.priority is not None  # noqa: PT018
            priority, order = lowest(torch.cat([priority, other.priority]), len(priority))
            candidates = torch.cat([candidates, other.candidates], dim=1)[:, order]
        total, count = self.sum + other.sum, self.count + other.count
        error, energy = self.error + other.error, self.energy + other.energy
        return CodeUsage(total, count, error, energy, candidates, priority)

    def health(self) -> CodebookHealth:
        """Return metrics averaged over heads; waits for a GPU."""
        return CodebookHealth(*self.health_values().tolist())

    def health_values(self) -> Tensor:
        """Return the fields of `CodebookHealth` as a tensor, to read many at once: [3]."""
        share = (self.count > 0).double().mean()
        p = self.count.double() / self.count.double().sum(-1, keepdim=True).clamp(min=1)
        perplexity = torch.special.entr(p).sum(-1).exp().mean()
        error = self.error.double().sum() / self.energy.double().sum().clamp(min=1e-30)
        return torch.stack([share, perplexity, error])


def add_usages(
    total: tuple[CodeUsage, ...] | None, usages: tuple[CodeUsage, ...]
) -> tuple[CodeUsage, ...]:
    """Add the code usage of one more forward pass, layer by layer; None is an empty total."""
    if total is None:
        return usages
    return tuple(a + b for a, b in zip(total, usages, strict=True))


@dataclass(frozen=True)
class Quantized:
    """k_hat: [b, h, t, k], z: [b, h, t], commit_loss: scalar, usage: of this call's keys, None
    in evaluation mode without gradients, codebook: [h, s, k] the codewords, error: [b, h, t] the
    squared quantization errors.
    """

    k_hat: Tensor
    z: Tensor
    commit_loss: Tensor
    usage: CodeUsage | None
    codebook: Tensor
    error: Tensor


class VectorQuantizer(nn.Module):
    """Replace each key by the nearest of `n_code` codewords; one codebook per head.

    The codebook is not a parameter but a pair of float32 buffers, the running sum and count of the
    keys per code. It follows the keys through `update_codebook`, never through a gradient.

    with_metric: measure errors as |(k - c) M|, and add a constant to the scores of each code; M is
    the buffer `metric`: [h, k, k], the constants are `code_bias`: [h, s]. Calibration sets them.
    """

    c_sum: Tensor
    c_count: Tensor
    started: Tensor
    metric: Tensor | None
    code_bias: Tensor | None

    def __init__(
        self,
        n_code: int,
        d_k: int,
        n_head: int = 1,
        *,
        ema_decay: float = 0.99,
        codebook_init: str = "keys",
        revive_below: float = 0.1,
        with_metric: bool = False,
    ) -> None:
        super().__init__()
        sizes = {"n_code": n_code, "d_k": d_k, "n_head": n_head}.items()
        for name, value, is_valid, wanted in (
            *((n, x, isinstance(x, int) and x >= 1, "a positive integer") for n, x in sizes),
            ("codebook_init", codebook_init, codebook_init in ("random", "keys"), "random or keys"),
            ("ema_decay", ema_decay, 0 <= ema_decay < 1, "a number from 0 to below 1"),
            ("revive_below", revive_below, revive_below >= 0, "a number of at least 0"),
        ):
            if not is_valid:
                raise UserError(f"{name}={value!r}: must be {wanted}")
        self.ema_decay, self.revive_below = ema_decay, revive_below
        self.codebook_init, self._n_unused = codebook_init, 0
        self.register_buffer("c_sum", torch.empty(n_head, n_code, d_k))
        self.register_buffer("c_count", torch.empty(n_head, n_code))
        self.register_buffer("started", torch.empty((), dtype=torch.bool))
        metric = torch.empty(n_head, d_k, d_k) if with_metric else None
        self.register_buffer("metric", metric)
        self.register_buffer("code_bias", torch.empty(n_head, n_code) if with_metric else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.c_sum, std=self.c_sum.shape[1] ** -0.5)
        nn.init.ones_(self.c_count)
        nn.init.constant_(self.started, self.codebook_init == "random")
        if self.metric is not None and self.code_bias is not None:
            self.metric.copy_(torch.eye(self.metric.shape[-1]).expand_as(self.metric))
            nn.init.zeros_(self.code_bias)

    @property
    def codebook(self) -> Tensor:
        """The codewords: [h, s, k]."""
        return self.c_sum / self.c_count.clamp(min=0.01).unsqueeze(-1)

    @property
    def uses_candidates(self) -> bool:
        """Whether training replaces codes with keys, at the start or later."""
        return self.codebook_init == "keys" or self.revive_below > 0

    def forward(
        self,
        k: Tensor,
        valid: Tensor | None = None,
        priority: Tensor | None = None,
        find_code: FindCode | None = None,
    ) -> Quantized:
        """Quantize keys. k: [b, h, t, k], valid: [b, t], False for padding, which is ignored.

        priority: [b, t] from 0 to 2^62 - 1, for training: the keys with the lowest numbers may
        become codes; `token_priority` by default. find_code: `nearest_code` by default, or a
        kernel that equals it. Raise NotFiniteError for NaN or inf on a CPU; on other devices and in
        compiled graphs they propagate to k_hat and the commitment loss.
        """
        if k.ndim != 4 or (k.shape[1], k.shape[3]) != (self.c_sum.shape[0], self.c_sum.shape[2]):
            n_head, _, d_k = self.c_sum.shape
            raise ValueError(f"keys have shape {tuple(k.shape)}, want [b, {n_head}, t, {d_k}]")
        if is_readable(k) and not torch.isfinite(k).all():
            problem = "keys are not finite (NaN or inf), so they have no nearest code"
            fix = "look for a diverged loss, a too large learning rate or bad input features"
            raise NotFiniteError(f"{problem}; {fix}")
        self._warn_if_unused()
        with full_precision(k.device):
            exact = k.to(accumulation_dtype(k.dtype))
            codebook = self.codebook.to(exact.dtype)
            measured, codes = self._measured(exact), self._measured(codebook)
            z = (find_code or nearest_code)(measured.detach(), codes)
            codeword = lookup(codebook, z)
            error = (measured - lookup(codes, z)).square().sum(-1)  # [b, h, t]
            if valid is not None:
                error = error * valid[:, None]
            n_tokens = error[:, 0].numel() if valid is None else valid.sum().clamp(min=1)
            # Adding a zero that carries the gradient keeps k_hat bitwise equal to the codeword.
            k_hat = codeword.to(k.dtype) + (k - k.detach())
            usage = None
            if self.training or torch.is_grad_enabled():  # not needed for prefill and evaluation
                energy = measured.detach().square().sum(-1)
                usage = self._usage(exact.detach(), z, error.detach(), energy, valid, priority)
            return Quantized(k_hat, z, error.sum() / n_tokens, usage, codebook, error)

    def _measured(self, x: Tensor) -> Tensor:
        """Return keys or codewords in the space in which errors are measured: [..., h, t, k]."""
        return x if self.metric is None else x @ self.metric.to(x.dtype)

    def _usage(
        self,
        k: Tensor,
        z: Tensor,
        error: Tensor,
        energy: Tensor,
        valid: Tensor | None,
        priority: Tensor | None,
    ) -> CodeUsage:
        n_code = self.c_sum.shape[1]
        by_head = k.transpose(0, 1).flatten(1, 2)  # [h, b * t, k]
        counted = None if valid is None else valid.flatten()
        total, count = code_sums(z.transpose(0, 1).flatten(1), by_head, n_code, counted)
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

    def _warn_if_unused(self) -> None:
        """Warn once if training never updates the codebook, which the loss hardly shows."""
        if not (self.training and torch.is_grad_enabled()) or torch.compiler.is_compiling():
            return
        self._n_unused += 1
        if self._n_unused == MAX_UNUSED:
            problem = f"{MAX_UNUSED} training passes without an update of the codebook"
            fix = "update_codebook(code_usage) of the layer, or update_codebooks of the model"
            why = "keys drift away from their codes"
            warnings.warn(f"{problem}: {why}; once per step, call {fix}", stacklevel=2)

    @torch.no_grad()
    def update_codebook(self, code_usage: CodeUsage) -> None:
        """Set sums and counts to ema_decay * old + (1 - ema_decay) * batch; once per step."""
        usage, self._n_unused = code_usage, 0
        if usage.sum.shape != self.c_sum.shape:
            found, wanted = tuple(usage.sum.shape), tuple(self.c_sum.shape)
            raise ValueError(f"usage of a codebook of shape {found} cannot update one of {wanted}")
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
        """Move and cast like any module, but keep the running sums in float32 or better."""
        before = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.c_sum.dtype.itemsize < 4:
            for name, x in before.items():
                self._buffers[name] = None if x is None else x.to(self.c_sum.device)
        return self


def nearest_code(k: Tensor, codebook: Tensor) -> Tensor:
    """Return the index of the nearest codeword; ties go to the first. k: [b, h, t, k]."""
    # |k - c|^2 = |k|^2 - 2 (k . c - |c|^2 / 2), and |k|^2 is the same for all codes.
    half_norms = codebook.square().sum(-1) / 2
    return (torch.einsum("bhtk,hsk->bhts", k, codebook) - half_norms.unsqueeze(-2)).argmax(-1)


def lowest(priority: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Return the n lowest numbers in ascending order and their indices. priority: [m]."""
    values, order = priority.topk(n, largest=False, sorted=True)
    return values, order


def token_priority(
    batch_size: int,
    seq_len: int,
    valid: Tensor | None = None,
    device: torch.device | None = None,
    first_row: int = 0,
) -> Tensor:
    """Return a hash of the row and place of each token: [batch_size, seq_len] of int64.

    Padding is skipped in the count of places. first_row: index of the first row, for a micro-batch
    of a larger batch. No random state is used or changed.
    """
    row = first_row + torch.arange(batch_size, device=device).unsqueeze(-1)
    place = torch.arange(seq_len, device=device) if valid is None else valid.cumsum(1) - 1
    # The finalizer of MurmurHash3; products wrap around.
    x = (row << 32) + place + 1
    for factor in (-0x00AE502812AA7333, -0x3B314601E57A13AD):
        x = (x ^ ((x >> 33) & 0x7FFFFFFF)) * factor
    x = x ^ ((x >> 33) & 0x7FFFFFFF)
    return x & 0x3FFFFFFFFFFFFFFF
