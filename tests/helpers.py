"""What several tests share: comparison by relative RMS, random inputs, the slow reference."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from transformer_vq import ModelConfig, TransformerVQ
from transformer_vq.config import DataConfig, OptimConfig, RunConfig, TrainConfig
from transformer_vq.data.batches import Batch
from transformer_vq.files import read_tensors
from transformer_vq.ops.blockwise import vq_attention
from transformer_vq.ops.decode import DecodeState, Step, Token, attend_one_
from transformer_vq.ops.packing import read_packing
from transformer_vq.ops.quadratic import Phi, quadratic_vq_attention
from transformer_vq.ops.state import VQState
from transformer_vq.training.checkpoint import TrainingResult, newest_checkpoint
from transformer_vq.training.metrics import read_metrics
from transformer_vq.training.step import StepResult, Trainer

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def relative_rms(got: Tensor, want: Tensor) -> float:
    """RMS of the difference over RMS of `want`, in float64."""
    got, want = got.detach().double(), want.detach().double()
    scale = want.square().mean().sqrt()
    return float((got - want).square().mean().sqrt() / scale.clamp(min=1e-300))


def assert_close(name: str, got: Tensor, want: Tensor, tolerance: float | None = None) -> None:
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, want {tuple(want.shape)}"
    tolerance = TOLERANCE[got.dtype] if tolerance is None else tolerance
    if not want.any():
        assert not got.any(), f"{name}: should be zero, largest is {got.abs().max():.3e}"
        return
    error = relative_rms(got, want)
    largest = float((got.detach().double() - want.detach().double()).abs().max())
    assert error <= tolerance, (
        f"{name}: relative RMS {error:.3e} > {tolerance:.0e}, max {largest:.3e}"
    )


def assert_same_gradients(leaves: dict[str, Tensor], got: Tensor, want: Tensor) -> None:
    """Both outputs pull on the leaves alike, in a random direction."""
    probe = torch.randn_like(want)
    got_grads = torch.autograd.grad((got * probe).sum(), list(leaves.values()))
    want_grads = torch.autograd.grad((want * probe).sum(), list(leaves.values()))
    for name, got_grad, want_grad in zip(leaves, got_grads, want_grads, strict=True):
        assert_close(f"gradient of {name}", got_grad, want_grad)


@dataclass
class Inputs:
    """Random arguments of `vq_attention`; the keys are codewords that carry a gradient."""

    q: Tensor
    k_hat: Tensor
    z: Tensor
    v: Tensor
    codebook: Tensor
    by_distance: Tensor
    block_len: int

    def leaves(self) -> dict[str, Tensor]:
        return {"q": self.q, "k": self.k_hat, "v": self.v, "by_distance": self.by_distance}

    def part(self, start: int, stop: int) -> tuple[Tensor, ...]:
        """The positional arguments of `vq_attention` for tokens start to stop."""
        at = slice(start, stop)
        return (
            self.q[..., at, :],
            self.k_hat[..., at, :],
            self.z[..., at],
            self.v[..., at, :],
            self.codebook,
            self.by_distance[..., at, :],
        )

    def empty_state(self, compressive_cache: bool = True) -> VQState:
        b, h, _, d_k = self.k_hat.shape
        return VQState.empty(
            b,
            h,
            self.block_len,
            d_k,
            self.v.shape[-1],
            self.codebook.shape[1],
            compressive_cache=compressive_cache,
            dtype=self.v.dtype,
        )


def attention_inputs(
    seq_len: int,
    *,
    block_len: int = 4,
    b: int = 2,
    h: int = 1,
    g: int = 1,
    d_k: int = 5,
    d_v: int = 6,
    n_code: int = 7,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    requires_grad: bool = False,
) -> Inputs:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    codebook = normal(h, n_code, d_k)
    z = torch.randint(n_code, (b, h, seq_len), generator=generator)
    k_hat = torch.stack([codebook[head, z[:, head]] for head in range(h)], dim=1)
    inputs = Inputs(
        q=normal(b, h, g, seq_len, d_k),
        k_hat=k_hat,
        z=z,
        v=normal(b, h, seq_len, d_v),
        codebook=codebook,
        by_distance=normal(b, h, g, seq_len, block_len + 1),
        block_len=block_len,
    )
    for leaf in inputs.leaves().values():
        leaf.requires_grad_(requires_grad)
    return inputs


def run_split(inputs: Inputs, cuts=(), *, document_ids=None, valid=None, cache=True, **options):
    """Output and last state of `vq_attention` in segments; the state carries gradients."""
    state, outputs = inputs.empty_state(cache), []
    for start, stop in pairwise([0, *cuts, inputs.q.shape[-2]]):
        at = slice(start, stop)
        packing = read_packing(
            state,
            stop - start,
            None if valid is None else valid[:, at],
            None if document_ids is None else document_ids[:, at],
        )
        q, k_hat, z, v, codebook, by_distance = inputs.part(start, stop)
        if packing is not None:

            def gather(x: Tensor, dim: int = -2, packing=packing) -> Tensor:
                return packing.gather(x.movedim(dim, 1)).movedim(1, dim)

            q, k_hat, v, by_distance = map(gather, (q, k_hat, v, by_distance))
            z = gather(z, -1)
        output, state = vq_attention(
            q, k_hat, z, v, codebook, by_distance, state, packing=packing, **options
        )
        if packing is not None:
            output = packing.scatter(output.movedim(-2, 1)).movedim(1, -2)
            state = replace(state, document=packing.document)
        outputs.append(output)
    return torch.cat(outputs, dim=-2), state


def assert_equal_to_serial(inputs: Inputs, cuts=(), *, backend="auto", **options) -> None:
    """Outputs, states and all gradients are those of the serial reduction."""
    got, after = run_split(inputs, cuts, backend=backend, **options)
    want, plain = run_split(inputs, cuts, reduction="serial", **options)
    assert_close("output", got, want)
    assert torch.equal(after.position, plain.position)
    both = [(got, want), (after.v, plain.v)]
    if after.cache is not None:
        assert torch.equal(after.cache.count, plain.cache.count)
        filled = (plain.cache.count > 0).unsqueeze(-1)
        both.append((after.cache.mean * filled, plain.cache.mean * filled))
        assert_close("cache", *both[-1])
    got, want = (torch.cat([x.flatten() for x in xs]) for xs in zip(*both, strict=True))
    assert_same_gradients(inputs.leaves(), got, want)


def assert_bfloat16_close(low: Inputs, **options) -> None:
    """Outputs and gradients of bfloat16 inputs are close to the serial reduction in float64."""
    leaves = [low.q, low.k_hat, low.v, low.by_distance]
    q, k_hat, v, by_distance = (x.detach().double().requires_grad_() for x in leaves)
    high = Inputs(q, k_hat, low.z, v, low.codebook.double(), by_distance, low.block_len)
    got, want = run_split(low, **options)[0], run_split(high, reduction="serial")[0]
    assert_close("output", got, want.to(got.dtype))
    probe = torch.randn_like(want)
    grads = [
        torch.autograd.grad((output * probe.to(output.dtype)).sum(), list(inputs.leaves().values()))
        for output, inputs in ((got, low), (want, high))
    ]
    for name, a, b in zip(low.leaves(), *grads, strict=True):
        assert_close(f"gradient of {name}", a, b.to(a.dtype))


def decode_all(inputs: Inputs, start: int, stop: int, state: VQState):
    """Outputs and last state of decoding the tokens from start to stop one by one."""
    codebooks = [inputs.codebook]
    decoding, outputs = DecodeState.of([state], codebooks), []
    for t in range(start, stop):
        q, k_hat, z, v, codebook, by_distance = inputs.part(t, t + 1)
        q, k_hat, v, by_distance = (x[..., 0, :] for x in (q, k_hat, v, by_distance))
        token = Token(q @ codebook.mT, by_distance, z[..., 0], v, q, k_hat)
        outputs.append(attend_one_(token, 0, Step.start_(decoding)))
    (after,) = decoding.states(codebooks, state.v.dtype)
    return torch.stack(outputs, dim=-2), after


def block_starts(seq_len: int, block_len: int, cuts: tuple[int, ...] = ()) -> Tensor:
    """The first token of the block that each token is in, for segments that begin at the cuts."""
    edges = [0, *cuts, seq_len]
    return torch.cat(
        [
            start + torch.arange(stop - start) // block_len * block_len
            for start, stop in pairwise(edges)
        ]
    )


def reference(
    inputs: Inputs,
    *,
    phi: Phi | None = None,
    window_only: bool = False,
    cuts: tuple[int, ...] = (),
) -> Tensor:
    """Definition 3.1, the segments beginning at the cuts."""
    starts = block_starts(inputs.q.shape[-2], inputs.block_len, cuts)
    return quadratic_vq_attention(
        inputs.q,
        inputs.k_hat,
        inputs.v,
        inputs.by_distance,
        phi=phi,
        window_only=window_only,
        block_starts=starts,
    )


def tiny_config(**overrides) -> ModelConfig:
    """A model small enough for anything: blocks of 4, 7 codes, 17 tokens.

    Codebooks start at random and are not revived; gqa has four query heads and two key heads.
    """
    sizes = {"vocab_size": 17, "d_model": 16, "n_layer": 2, "d_k": 8, "n_code": 7, "block_len": 4}
    sizes |= {"codebook_init": "random", "revive_below": 0.0}
    if overrides.get("head_type") == "gqa":
        sizes |= {"d_k": 4, "n_kv_head": 2}
    return ModelConfig(**(sizes | overrides))


def tiny_model(
    reduction="auto", backend="auto", checkpoint_activations=False, **overrides
) -> TransformerVQ:
    """A model of that config, computed in that way."""
    return TransformerVQ(
        tiny_config(**overrides),
        reduction=reduction,
        backend=backend,
        checkpoint_activations=checkpoint_activations,
    )


def training_results(seq_len=23, dtype=torch.float64, **options) -> dict[str, Tensor]:
    """Outputs and gradients of two segments of a model with padding and documents."""
    torch.manual_seed(0)
    model = tiny_model(n_layer=1, p_dropsin=0.0, **options).to(dtype)
    tokens, ids = torch.randint(17, (2, 2, seq_len)), torch.zeros(2, seq_len).long()
    ids[:, seq_len // 2 :] = 1
    valid = torch.ones(2, seq_len, dtype=torch.bool)
    valid[1, 2] = False
    first = model(tokens[0], document_ids=ids, valid=valid)
    second = model(tokens[1], first.state, document_ids=ids + 1)
    loss = sum(x.logits.square().mean() + x.commit_loss for x in (first, second))
    loss.backward()
    found = {"logits": second.logits, "commit loss": second.commit_loss}
    for output in (first, second):
        for usage in output.code_usage:
            found |= {f"usage {len(found)}": usage.sum, f"count {len(found)}": usage.count}
    found |= {f"cache {n}": x.cache.count.double() for n, x in enumerate(second.state.layers)}
    return found | {name: p.grad for name, p in model.named_parameters()}


def tiny_run(folder: Path, **changes: dict[str, object]) -> RunConfig:
    """A run of seconds on some text that is written into `folder`; changes by part of the config.

    Everything random is on, so that a resumed run shows whatever it has forgotten.
    """
    text = folder / "text"
    if not text.exists():
        text.mkdir(parents=True)
        words = ["the", "a", "cat", "mat", "sat", "on", "and", "then", "it", "ran", "off", "up"]
        generator = random.Random(0)
        for number in range(3):
            chosen = generator.choices(words, k=400)
            (text / f"{number}.txt").write_text(" ".join(chosen))
    dropout = {"p_dropsin": 0.1, "p_dropres": 0.1, "p_droplyr": 0.1}
    model = tiny_config(vocab_size=257, n_layer=1, block_len=8, revive_below=0.01, **dropout)
    train = TrainConfig(
        steps=10,
        batch_size=4,
        seq_len=48,
        backprop_len=16,
        eval_every=4,
        save_every=3,
        eval_tokens=40,
        device="cpu",
    )
    return RunConfig(
        model=replace(model, **changes.get("model", {})),
        data=replace(DataConfig(path=str(text), cache=str(folder / "cache"))),
        optim=replace(
            OptimConfig(lr=1e-3, warmup=3, weight_decay=1e-3), **changes.get("optim", {})
        ),
        train=replace(train, **changes.get("train", {})),
    )


def losses(run: Path) -> list[tuple[str, int, float]]:
    """(kind, step, loss) of every row: what must not depend on interruptions."""
    return [(row["kind"], row["step"], row["nats_per_token"]) for row in read_metrics(run)]


def interrupt_after(monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    """Send SIGINT to this process during step n."""
    train_step = Trainer.step

    def and_signal(self: Trainer, batch: Batch, step: int, **options: Any) -> StepResult:
        if step == n:
            os.kill(os.getpid(), signal.SIGINT)
        return train_step(self, batch, step, **options)

    monkeypatch.setattr(Trainer, "step", and_signal)


def interrupted(n: int, function: Callable[..., TrainingResult], *args, **kwargs) -> TrainingResult:
    """Call `train` or `resume`, and send SIGINT to this process during step n."""
    with pytest.MonkeyPatch.context() as patch:
        interrupt_after(patch, n)
        return function(*args, **kwargs)


def assert_same_runs(run: Path, other: Path) -> None:
    """Check that metrics, the final checkpoint and the best model are the same to the bit."""
    assert losses(run) == losses(other)
    rates = [[row.get("lr") for row in read_metrics(x)] for x in (run, other)]
    assert rates[0] == rates[1]
    assert [path for path in run.rglob("*") if ".partial" in path.name] == []
    got, want = (newest_checkpoint(x) for x in (run, other))
    best = [read_tensors(x / "best" / "model.safetensors")[0] for x in (run, other)]
    states = [x.model.state_dict() for x in (got, want)]
    for a, b in (best, states, (got.tensors, want.tensors)):
        assert a.keys() == b.keys()
        assert [name for name in b if a[name].numpy().tobytes() != b[name].numpy().tobytes()] == []
