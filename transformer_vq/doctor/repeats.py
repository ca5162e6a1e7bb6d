"""Determinism: the same step twice must give the same bits, or the report names what differs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from transformer_vq.doctor.attention import FP32, matmul_rounding, reductions
from transformer_vq.doctor.findings import Repeat, explain
from transformer_vq.doctor.models import make_model, random_tokens
from transformer_vq.doctor.samples import Sizes
from transformer_vq.generation.decoder import Decoder
from transformer_vq.nn.model import TransformerVQ

N_REPEATS = 3
Step = Callable[[TransformerVQ, Tensor], dict[str, Tensor]]


def repeats(sizes: Sizes, device: torch.device) -> Iterator[Callable[[], Repeat]]:
    """Yield a function per path that repeats it."""
    for reduction in reductions():
        yield partial(repeat, f"training step, {reduction}", sizes, device, reduction)
    yield partial(repeat, "training step, full attention", sizes, device, "full")
    yield partial(repeat, "decoder", sizes, device, "decoder")


def repeat(name: str, sizes: Sizes, device: torch.device, kind: str) -> Repeat:
    """Repeat one path; kind: a reduction, "full" or "decoder"."""
    try:
        differing = _differences(sizes, device, kind)
    except Exception as error:
        status, note = explain(error)
        return Repeat(name, "skipped" if status == "skipped" else "FAILED", note)
    if not differing:
        return Repeat(name, "equal")
    more = f" and {len(differing) - 2} more" if len(differing) > 2 else ""
    return Repeat(name, "differs", f"{', '.join(differing[:2])}{more}")


def _differences(sizes: Sizes, device: torch.device, kind: str) -> list[str]:
    """Return the tensors that are not the same in every repetition."""
    step: Step = decoded if kind == "decoder" else trained
    attention = "full" if kind == "full" else "vq"
    found: list[str] = []
    with matmul_rounding(FP32):
        for head_type in sizes.head_types:
            config = sizes.model(head_type, attention=attention)
            model = make_model(config).to(device)
            if kind not in ("full", "decoder"):
                model.set_execution(reduction=kind)  # type: ignore[arg-type]
            tokens = random_tokens(config, sizes).to(device)
            first = step(model, tokens)
            others = [step(model, tokens) for _ in range(N_REPEATS - 1)]
            found += [
                f"{head_type} {name}"
                for name, x in first.items()
                if any(not torch.equal(x, other[name]) for other in others)
            ]
    return found


def trained(model: TransformerVQ, tokens: Tensor) -> dict[str, Tensor]:
    """Return the results of a forward and a backward pass by name."""
    model.train().zero_grad(set_to_none=True)
    output = model(tokens)
    (output.logits.square().mean() + output.commit_loss).backward()
    usages = {f"usage {i} {n}": x for i, u in enumerate(output.code_usage) for n, x in _named(u)}
    gradients = {
        f"gradient of {name}": p.grad.clone()
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    return {"logits": output.logits.detach(), **usages, **gradients}


def decoded(model: TransformerVQ, tokens: Tensor) -> dict[str, Tensor]:
    """Return the logits of tokens decoded one by one."""
    model.eval()
    step = Decoder(model, model.init_state(len(tokens))).step
    n = 2 * model.config.block_len + 3  # enough to evict tokens
    return {"logits": torch.stack([step(tokens[:, t]) for t in range(min(n, tokens.shape[1]))])}


def _named(usage: object) -> list[tuple[str, Tensor]]:
    return [(name, x.detach()) for name, x in vars(usage).items() if isinstance(x, Tensor)]
