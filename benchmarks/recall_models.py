"""The models of `recall.py`: transformers of this library, and a Mamba of equal size.

Mamba is `MambaForCausalLM` of Hugging Face transformers with random weights. Its scan in pure
PyTorch takes quadratic time in the backward pass; on a CPU it is replaced by an equal one in linear
time.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recall_tasks import Candidate, RecallSettings
from transformer_vq.errors import missing_extra
from transformer_vq.nn.model import TransformerVQ

WIDTH_STEP = 4  # Mamba's width is a multiple of it


def build(candidate: Candidate, settings: RecallSettings, vocab_size: int) -> nn.Module:
    """Return a model with random weights; its output has `logits`."""
    if candidate.model != "mamba":
        return TransformerVQ(settings.model(candidate, vocab_size))
    check_transformers()
    with _quiet_transformers():
        return _mamba(mamba_width(settings, vocab_size), settings, vocab_size)


def n_parameters(model: nn.Module) -> int:
    """Return the number of parameters of a model; codebooks are not parameters."""
    return sum(p.numel() for p in model.parameters())


def quantized(
    model: TransformerVQ, candidate: Candidate, settings: RecallSettings
) -> TransformerVQ:
    """Return a model with the same weights whose keys are quantized, if the candidate's are."""
    config = settings.model(candidate, model.config.vocab_size)
    if config == model.config:
        return model
    found = TransformerVQ(config)
    _, unexpected = found.load_state_dict(model.state_dict(), strict=False)
    assert not unexpected
    return found


def state_bytes(model: nn.Module, output: Any, batch_size: int) -> int:
    """Return the bytes that one sequence carries after `output` was computed."""
    if isinstance(model, TransformerVQ):
        total: int = output.state.n_bytes
        return total // batch_size
    config: Any = model.config
    n_values = config.num_hidden_layers * config.intermediate_size
    return int(4 * n_values * (config.state_size + config.conv_kernel))


def check_transformers() -> None:
    """Raise UserError if transformers is not installed, without importing it."""
    if find_spec("transformers") is None:
        raise missing_extra("the mamba baseline", "transformers>=5")


@functools.cache
def mamba_width(settings: RecallSettings, vocab_size: int) -> int:
    """Return the width at which Mamba is closest to the number of parameters of full attention."""
    with torch.device("meta"):
        wanted = n_parameters(TransformerVQ(settings.model(Candidate("full"), vocab_size)))
        width, distance = WIDTH_STEP, wanted
        while True:
            n = n_parameters(_mamba(width, settings, vocab_size))
            if n > wanted:
                return width if n - wanted < distance else max(width - WIDTH_STEP, WIDTH_STEP)
            distance = wanted - n
            width += WIDTH_STEP


def _mamba(width: int, settings: RecallSettings, vocab_size: int) -> nn.Module:
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        num_hidden_layers=2 * settings.n_layer,
        tie_word_embeddings=False,
        use_cache=False,
    )
    model: nn.Module = MambaForCausalLM(config)
    return model


@contextmanager
def fast_mamba(device: torch.device) -> Iterator[None]:
    """Replace the scan of transformers' Mamba on a CPU, and hide its advice to install kernels."""
    from transformers.models.mamba import modeling_mamba

    name = "mamba_selective_scan"
    original = getattr(modeling_mamba, name, None)
    is_replaced = device.type == "cpu" and original is not None  # older versions do not have it
    if is_replaced:
        setattr(modeling_mamba, name, selective_scan)
    try:
        with _quiet_transformers():
            yield
    finally:
        if is_replaced:
            setattr(modeling_mamba, name, original)


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    logger = logging.getLogger("transformers")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def selective_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    D: Tensor,  # noqa: N803
    z: Tensor,
    delta_bias: Tensor,
    **_: object,
) -> Tensor:
    """Return the output of Mamba's selective scan, with the arguments of transformers.

    x, dt, z: [b, d, t], a: [d, n], b, c: [b, n, t], D, delta_bias: [d]. Returns [b, d, t].
    """
    dt = F.softplus(dt + delta_bias[:, None])
    steps, inputs = (y.permute(2, 0, 1).contiguous() for y in (dt, dt * x))  # [t, b, d]
    rows, columns = (y.permute(2, 0, 1).contiguous() for y in (b, c))  # [t, b, n]
    output: Tensor = SelectiveScan.apply(steps, inputs, a.T.contiguous(), rows, columns)
    return (output.permute(1, 2, 0) + x * D[:, None]) * F.silu(z)


class SelectiveScan(torch.autograd.Function):
    """y[t] = c[t] h[t], where h[t] = exp(a dt[t]) h[t - 1] + b[t] u[t] starts at zero.

    dt, u, y: [t, b, d], a: [n, d], b, c: [t, b, n], h: [t, b, n, d].
    """

    @staticmethod
    def forward(ctx: Any, dt: Tensor, u: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        decay = (dt.unsqueeze(-2) * a).exp_()
        h = b.unsqueeze(-1) * u.unsqueeze(-2)
        for now, before, factor in zip(h[1:], h[:-1], decay[1:], strict=True):
            now.addcmul_(factor, before)
        ctx.save_for_backward(dt, u, a, b, c, decay, h)
        return (c.unsqueeze(-2) @ h).squeeze(-2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        dt, u, a, b, c, decay, h = ctx.saved_tensors
        grad_y = grads[0].contiguous()
        grad_c = (h @ grad_y.unsqueeze(-1)).squeeze(-1)
        grad_h = c.unsqueeze(-1) * grad_y.unsqueeze(-2)
        for t in range(len(h) - 2, -1, -1):
            grad_h[t].addcmul_(decay[t + 1], grad_h[t + 1])
        grad_u = (b.unsqueeze(-2) @ grad_h).squeeze(-2)
        grad_b = (grad_h @ u.unsqueeze(-1)).squeeze(-1)
        grad_exponent = grad_h.mul_(decay)  # of a dt[t], which has no effect on h[0]
        grad_exponent[1:].mul_(h[:-1])
        grad_exponent[0].zero_()
        grad_dt = (grad_exponent * a).sum(-2)
        grad_a = grad_exponent.mul_(dt.unsqueeze(-2)).flatten(0, 1).sum(0)
        return grad_dt, grad_u, grad_a, grad_b, grad_c
