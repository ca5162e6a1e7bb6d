"""Check whole models against the same weights in float64 on the CPU.

Weights and tokens are chosen such that no key is almost equally far from two codewords. Otherwise
rounding could select another code, and the results would differ by more than rounding. The results
of bf16 depend on such choices, so only the loss of a bf16 model is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_vq.config import ModelConfig
from transformer_vq.device import matmul_precision
from transformer_vq.doctor.attention import BF16, FP32, matmul_rounding, relative_error
from transformer_vq.doctor.findings import Check, Errors, check
from transformer_vq.doctor.samples import Sizes
from transformer_vq.generation.decoder import Decoder
from transformer_vq.nn.model import ModelOutput, TransformerVQ

Compare = Callable[["Pair", Tensor], dict[str, float]]

SEED = 0
"""Gives keys with a clear nearest code for all sizes; a test checks it."""


@dataclass(frozen=True)
class Pair:
    """A model on the device, and its copy in float64 on the CPU."""

    actual: TransformerVQ
    exact: TransformerVQ
    cut: int

    @property
    def device(self) -> torch.device:
        return next(self.actual.parameters()).device


def make_model(config: ModelConfig) -> TransformerVQ:
    """Return a model with the same random weights on every machine."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return TransformerVQ(config)


def random_tokens(config: ModelConfig, sizes: Sizes) -> Tensor:
    """Return the same random tokens on every machine: [b, t]."""
    generator = torch.Generator().manual_seed(SEED)
    shape = (sizes.batch_size, sizes.seq_len)
    return torch.randint(config.vocab_size, shape, generator=generator)


def make_pair(config: ModelConfig, sizes: Sizes, device: torch.device) -> Pair:
    """Return a model and its exact copy, which uses the simplest reduction."""
    model = make_model(config)
    exact = deepcopy(model).double()
    exact.set_execution(reduction="serial")
    return Pair(model.to(device), exact, sizes.cut)


def checks(sizes: Sizes, device: torch.device) -> Iterator[Callable[[], Check]]:
    """Yield a function per path that checks it for all head types."""

    def one(name: str, compare: Compare, attention: str = "vq") -> Callable[[], Check]:
        measure = partial(over_heads, compare, sizes, device, attention)
        return lambda: check(name, FP32.name, FP32.tolerance, measure)

    yield one("model: training step", training_step)
    yield one("model: full attention", training_step, "full")
    yield one("model: carried state", carried_state)
    yield one("model: padding", padding)
    yield one("model: documents", documents)
    yield one("model: decoder", decoder)
    yield lambda: check(
        "model: loss under autocast",
        BF16.name,
        BF16.tolerance,
        partial(over_heads, autocast_loss, sizes, device, "vq"),
    )


def over_heads(
    compare: Compare,
    sizes: Sizes,
    device: torch.device,
    attention: str = "vq",
) -> Errors:
    """Return the errors of models with all head types."""
    found: dict[str, float] = {}
    with matmul_rounding(FP32):
        for head_type in sizes.head_types:
            config = sizes.model(head_type, attention=attention)
            pair = make_pair(config, sizes, device)
            errors = compare(pair, random_tokens(config, sizes))
            found |= {f"{head_type}, {name}": error for name, error in errors.items()}
    return Errors(found)


def training_step(pair: Pair, tokens: Tensor) -> dict[str, float]:
    """Return the errors of the logits and of all gradients together."""
    outputs = []
    for model, x in ((pair.actual, tokens.to(pair.device)), (pair.exact, tokens)):
        output = model(x)
        (_loss(output, x) + output.commit_loss).backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        flat = torch.cat([gradient.detach().cpu().double().flatten() for gradient in gradients])
        outputs.append((output.logits.detach(), flat))
    (got, got_gradient), (want, want_gradient) = outputs
    return {
        "logits": relative_error(got, want),
        "gradients": relative_error(got_gradient, want_gradient),
    }


@torch.no_grad()
def carried_state(pair: Pair, tokens: Tensor) -> dict[str, float]:
    """Return the error of the second of two segments."""
    x = tokens.to(pair.device)
    state = pair.actual(x[:, : pair.cut]).state
    got = pair.actual(x[:, pair.cut :], state).logits
    return {"second segment": relative_error(got, pair.exact(tokens).logits[:, pair.cut :])}


@torch.no_grad()
def padding(pair: Pair, tokens: Tensor) -> dict[str, float]:
    """Return the error of rows with padding at the start, compared with rows without it."""
    n_padding = [(7 * row + 5) % pair.cut for row in range(len(tokens))]
    valid = torch.arange(tokens.shape[1]) >= torch.tensor(n_padding).unsqueeze(-1)
    got = pair.actual(tokens.to(pair.device), valid=valid.to(pair.device)).logits.cpu()
    return {
        f"row {row}": relative_error(got[row, n:], pair.exact(tokens[row : row + 1, n:]).logits[0])
        for row, n in enumerate(n_padding)
    }


@torch.no_grad()
def documents(pair: Pair, tokens: Tensor) -> dict[str, float]:
    """Return the error of two documents per row, compared with separate sequences."""
    ids = (torch.arange(tokens.shape[1]) >= pair.cut).long().expand_as(tokens)
    got = pair.actual(tokens.to(pair.device), document_ids=ids.to(pair.device)).logits.cpu()
    parts = (slice(0, pair.cut), slice(pair.cut, None))
    return {
        f"document {number}": relative_error(got[:, part], pair.exact(tokens[:, part]).logits)
        for number, part in enumerate(parts)
    }


def decoder(pair: Pair, tokens: Tensor, compiled: bool = False) -> dict[str, float]:
    """Return the error of logits that are decoded token by token after a prefill."""
    with torch.no_grad():
        x = tokens.to(pair.device)
        step = Decoder(pair.actual.eval(), pair.actual(x[:, : pair.cut]).state).step
        if compiled:
            torch.compiler.reset()
            step = torch.compile(step, fullgraph=True)
        got = torch.stack([step(x[:, t]) for t in range(pair.cut, x.shape[1])], dim=1)
        return {"logits": relative_error(got, pair.exact(tokens).logits[:, pair.cut :])}


@torch.no_grad()
def autocast_loss(pair: Pair, tokens: Tensor) -> dict[str, float]:
    """Return the relative error of the loss with matrix products in bf16."""
    x = tokens.to(pair.device)
    with matmul_precision(pair.device, "bf16"):
        got = _loss(pair.actual(x), x)
    want = _loss(pair.exact(tokens), tokens)
    return {"loss": relative_error(got, want)}


def _loss(output: ModelOutput, tokens: Tensor) -> Tensor:
    return F.cross_entropy(output.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
