"""Check an installation on a device: `tvq doctor`.

Every implementation is compared with the same weights in float64 on the CPU, and that reference
with Definition 3.1. Repeated steps must be bitwise equal, host syncs are counted on CUDA, and a
short measurement shows the speed of training and decoding. Groups of checks run in subprocesses
with a time limit: a broken kernel can crash the process or make the GPU unusable for it, and its
end is a finding.

Weights and tokens are chosen such that no key is almost equally far from two codewords. Otherwise
rounding could select another code, and results would differ by more than rounding.
"""

from __future__ import annotations

import getpass
import math
import os
import platform
import re
import subprocess
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_vq import demo
from transformer_vq.config import (
    HeadType,
    ModelConfig,
    Precision,
    Reduction,
    RunConfig,
    TrainConfig,
)
from transformer_vq.data.batches import Batch
from transformer_vq.device import cpu_name, has_fast_bf16, matmul_precision, total_memory
from transformer_vq.errors import is_out_of_memory
from transformer_vq.generation.decoder import Decoder
from transformer_vq.generation.prefill import prefill
from transformer_vq.measure import (
    bandwidth_probe,
    best_seconds,
    in_subprocess,
    machine,
    matmul_rates,
    synchronize,
)
from transformer_vq.memory_use import peak_bytes
from transformer_vq.nn.model import TransformerVQ
from transformer_vq.progress import progress_bar
from transformer_vq.sizes import flops_per_token
from transformer_vq.training.step import Trainer

Section = Literal["Results", "Determinism", "Host syncs", "Speed"]
SECTIONS: dict[Section, str] = {
    "Results": "largest relative RMS error",
    "Determinism": "repetitions",
    "Host syncs": "syncs",
    "Speed": "tokens/s",
}
"""The tables of the report, and what their column of numbers shows."""
TOLERANCES = {"float64": 1e-12, "fp32": 1e-5, "tf32": 5e-3, "bf16": 2e-2}
OTHER_KINDS = ("full", "states", "decoder")  # rather than a reduction
NEEDS_CUDA = "needs CUDA"
TIME_LIMIT = 240.0  # seconds per subprocess
SEED = 0
N_REPEATS = 3
N_TOKENS = 8  # decoded while syncs are counted
MAX_NOTE = 160  # characters of an error message
SYNC_SIGN = "synchronizing CUDA operation"  # in the warnings of PyTorch
PACKAGE = Path(__file__).parent
# Errors that mean that torch.compile lacks a tool on this machine, with what it lacks.
MISSING_TOOLS = {
    "InvalidCxxCompiler": "torch.compile needs a C++ compiler",
    "TritonMissing": "torch.compile needs triton",
    "working triton installation": "torch.compile needs triton",
    "GPUTooOldForTriton": "the GPU is too old for triton",
}
ILLEGAL = "SIGILL"
ILLEGAL_HINT = (
    ", an illegal instruction: PyTorch uses one that this machine does not allow, often AMX in a "
    "virtual machine; try ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16"
)
VARIABLES = (
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "KMP_AFFINITY", "CUDA_VISIBLE_DEVICES"),
    *("HIP_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG"),
    *("NVIDIA_TF32_OVERRIDE", "ONEDNN_MAX_CPU_ISA", "PYTORCH_ALLOC_CONF", "TRITON_INTERPRET"),
    *("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE", "LD_PRELOAD"),
)
"""Environment variables that change speed or results; those that are set are reported."""


@dataclass(frozen=True)
class Finding:
    """A row of the report."""

    section: Section
    name: str
    dtype: str
    status: Literal["ok", "equal", "differs", "FAILED", "skipped"]
    value: float | None = None
    """The number that SECTIONS describes; None if nothing was computed."""
    note: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """Everything that was found on a device."""

    environment: dict[str, str]
    findings: tuple[Finding, ...]
    quick: bool
    seconds: float

    @property
    def failed(self) -> list[str]:
        """The checks that failed. A speed that could not be measured is not a failure."""
        bad = (x for x in self.findings if x.status == "FAILED" and x.section != "Speed")
        return [f"{x.name} ({x.dtype})" for x in bad]


@dataclass(frozen=True)
class Sizes:
    """Sizes of the inputs; the sequence ends with an incomplete block."""

    seq_len: int = 75
    block_len: int = 16
    n_code: int = 24
    d_model: int = 64
    d_k: int = 16
    batch_size: int = 2
    head_types: tuple[HeadType, ...] = get_args(HeadType)

    @property
    def cut(self) -> int:
        """Where a sequence is cut into two segments, within a block."""
        return 2 * self.block_len + self.block_len // 3

    def model(self, head_type: HeadType, attention: Literal["vq", "full"] = "vq") -> ModelConfig:
        """Return a model of one layer with these sizes."""
        return ModelConfig(
            vocab_size=64,
            d_model=self.d_model,
            n_layer=1,
            head_type=head_type,
            attention=attention,
            d_k=self.d_k,
            n_kv_head=2 if head_type == "gqa" else None,
            n_code=self.n_code,
            block_len=self.block_len,
            codebook_init="random",
            revive_below=0.0,
        )


CPU_SIZES = Sizes()
GPU_SIZES = Sizes(seq_len=1100, block_len=128, n_code=256, d_model=256, d_k=64)
"""Closer to real models: a kernel may fail only for several tiles."""

Group = Callable[[Sizes, torch.device], list[Finding]]


def examine(device: torch.device, *, quick: bool = False, sizes: Sizes | None = None) -> Diagnosis:
    """Check and measure everything on a device; quick: without compiling and measuring."""
    start = time.perf_counter()
    if sizes is None:
        sizes = CPU_SIZES if device.type == "cpu" else GPU_SIZES
    found: list[Finding] = []
    work = groups(device, quick)
    with progress_bar("doctor", len(work), "groups") as advance:
        for (section, name, dtype), group in work.items():
            advance(0, note=name)
            found += isolated(section, name, dtype, group, sizes, device)
            advance(1)
    return Diagnosis(environment(device), tuple(found), quick, time.perf_counter() - start)


def groups(device: torch.device, quick: bool) -> dict[tuple[Section, str, str], Group | str]:
    """Return the checks of each subprocess by section, name and dtype, or why they are skipped."""
    on_cuda = device.type == "cuda"
    lengths = (1024, 4096) if device.type == "cpu" else (2048, 8192, 32_768)
    precision: Precision = "fp32" if device.type == "cpu" else "bf16"
    work: dict[tuple[Section, str, str], Group | str] = {
        ("Results", "Definition 3.1", "float64"): check_definition,
        ("Results", "models", "fp32"): check_models,
        ("Results", "loss", "tf32"): partial(check_loss, dtype="tf32") if on_cuda else NEEDS_CUDA,
        ("Results", "loss", "bf16"): partial(check_loss, dtype="bf16"),
        ("Results", "compiled training step", "fp32"): (
            "--quick" if quick else partial(check_compiled, kind="auto")
        ),
        ("Results", "compiled decoder", "fp32"): (
            "--quick" if quick else partial(check_compiled, kind="decoder")
        ),
        ("Results", "triton", "fp32"): check_triton if on_cuda else "needs a GPU",
        ("Determinism", "repeated steps", "fp32"): check_repeats,
        ("Host syncs", "training and decoding", "fp32"): count_syncs if on_cuda else NEEDS_CUDA,
    }
    for n in lengths:
        group = partial(time_training, seq_len=n, tokens=lengths[-1], precision=precision)
        work["Speed", f"training, {n:,} tokens", precision] = "--quick" if quick else group
    for n in (1, 8):
        decoding = partial(time_decoding, batch_size=n)
        work["Speed", f"decoding, batch {n}", "fp32"] = "--quick" if quick else decoding
    return work


def isolated(
    section: Section,
    name: str,
    dtype: str,
    group: Group | str,
    sizes: Sizes,
    device: torch.device,
) -> list[Finding]:
    """Run a group in a subprocess; return a row even if the process dies."""
    row = Finding(section, name, dtype, "skipped")
    if isinstance(group, str):
        return [replace(row, note=group)]
    try:
        found = in_subprocess(group, sizes, device, seconds=TIME_LIMIT)
    except Exception as error:
        return [_failure(row, error)]
    if isinstance(found, list):
        return found
    reason = found["failed"] + (ILLEGAL_HINT if ILLEGAL in found["failed"] else "")
    is_slow = "time limit" in reason
    return [replace(row, status="skipped" if is_slow else "FAILED", note=reason)]


def _failure(row: Finding, error: Exception) -> Finding:
    """Return the row of a check that raised an exception: broken, or not possible here."""
    if is_out_of_memory(error):
        return replace(row, status="FAILED", note="out of memory")
    text = f"{type(error).__name__}: {error}"
    for sign, reason in MISSING_TOOLS.items():
        if sign in text:
            return replace(row, status="skipped", note=reason)
    return replace(row, status="FAILED", note=without_places(text))


def check(name: str, dtype: str, measure: Callable[[], dict[str, float]]) -> Finding:
    """Compare the errors that `measure` returns by case with the tolerance of a dtype."""
    row = Finding("Results", name, dtype, "ok")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    try:
        errors = measure()
    except Exception as error:
        return _failure(row, error)
    finally:
        torch.set_float32_matmul_precision(before)
    case, worst = max(errors.items(), key=lambda x: x[1] if math.isfinite(x[1]) else math.inf)
    if worst <= TOLERANCES[dtype]:
        return replace(row, value=worst, note=f"{len(errors)} cases, worst: {case}")
    n_wrong = sum(not x <= TOLERANCES[dtype] for x in errors.values())
    value = worst if math.isfinite(worst) else None
    note = f"{n_wrong} of {len(errors)} cases, worst: {case}"
    return replace(row, status="FAILED", value=value, note=note)


def relative_error(got: Tensor, want: Tensor) -> float:
    """Return the RMS of the difference over the RMS of `want`, in float64 on the CPU."""
    got = got.detach().cpu().double()
    scale = want.square().mean().sqrt().clamp(min=1e-30)
    return float((got - want).square().mean().sqrt() / scale)


def check_definition(sizes: Sizes, device: torch.device) -> list[Finding]:
    """Check that all reductions equal Definition 3.1 in float64 on the CPU: the reference."""

    def measure() -> dict[str, float]:
        return {f"{heads}, {name}": max(errors) for heads, name, *errors in demo.differences()}

    return [check("Definition 3.1", "float64", measure)]


def make_model(config: ModelConfig, reduction: str = "auto") -> TransformerVQ:
    """Return a model with the same random weights on every machine."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = TransformerVQ(config)
    method = {"backend" if reduction == "triton" else "reduction": reduction}
    model.set_execution(**method)  # type: ignore[arg-type]
    return model


def random_tokens(config: ModelConfig, sizes: Sizes) -> Tensor:
    """Return the same random tokens on every machine: [b, t]."""
    generator = torch.Generator().manual_seed(SEED)
    shape = (sizes.batch_size, sizes.seq_len)
    return torch.randint(config.vocab_size, shape, generator=generator)


def reductions(has_kernels: bool = False) -> list[str]:
    """Return all reductions, and the Triton kernels if they can run."""
    return [*get_args(Reduction), *["triton"] * has_kernels]


def check_models(sizes: Sizes, device: torch.device) -> list[Finding]:
    """Compare models with the same weights in float64 on the CPU, outputs and gradients."""
    found = []
    for kind in [*reductions(), *OTHER_KINDS]:
        name = kind if kind in ("states", "decoder") else f"training step, {kind}"
        reduction = "auto" if kind in OTHER_KINDS else kind
        found.append(check(name, "fp32", partial(model_errors, kind, reduction, sizes, device)))
    return found


def check_triton(sizes: Sizes, device: torch.device) -> list[Finding]:
    """Check the Triton kernels."""
    names = {"triton": "training step, triton", "decoder": "decoder, triton"}
    return [
        check(name, "fp32", partial(model_errors, kind, "triton", sizes, device))
        for kind, name in names.items()
    ]


def check_compiled(sizes: Sizes, device: torch.device, kind: str) -> list[Finding]:
    """Check a compiled model; compiling takes long, so on a CPU only one head type."""
    if device.type == "cpu":
        sizes = replace(sizes, head_types=("gqa",))
    name = "compiled decoder" if kind == "decoder" else "compiled training step"
    measure = partial(model_errors, kind, "auto", sizes, device, compiled=True)
    return [check(name, "fp32", measure)]


def model_errors(
    kind: str, reduction: str, sizes: Sizes, device: torch.device, compiled: bool = False
) -> dict[str, float]:
    """Return the errors of models with all head types, by case."""
    compare = {"states": state_errors, "decoder": decoder_errors}.get(kind, training_errors)
    found: dict[str, float] = {}
    for head_type in sizes.head_types:
        torch.compiler.reset()
        config = sizes.model(head_type, "full" if kind == "full" else "vq")
        exact = make_model(config, "serial").double()
        model = make_model(config, reduction).to(device)
        errors = compare(model, exact, random_tokens(config, sizes), sizes.cut, compiled)
        found |= {f"{head_type}, {name}": error for name, error in errors.items()}
    return found


def training_errors(
    model: TransformerVQ, exact: TransformerVQ, tokens: Tensor, cut: int, compiled: bool
) -> dict[str, float]:
    """Return the errors of the logits of two segments, and of all gradients together.

    A compiled model gets one segment, because each shape is compiled anew.
    """
    results = []
    for one in (model, exact):
        call = torch.compile(one) if compiled and one is model else one
        x = tokens.to(next(one.parameters()).device)
        logits, state = [], None
        for segment in [x[:, :cut]] if compiled else [x[:, :cut], x[:, cut:]]:
            output = call(segment, state)
            (_loss(output.logits, segment) + output.commit_loss).backward(retain_graph=True)
            logits.append(output.logits.detach())
            state = output.state
        gradients = [
            p.grad.cpu().double().flatten() for p in one.parameters() if p.grad is not None
        ]
        results.append((torch.cat(logits, dim=1), torch.cat(gradients)))
    (got, got_gradient), (want, want_gradient) = results
    return {
        "logits": relative_error(got, want),
        "gradients": relative_error(got_gradient, want_gradient),
    }


@torch.no_grad()
def state_errors(
    model: TransformerVQ, exact: TransformerVQ, tokens: Tensor, cut: int, compiled: bool
) -> dict[str, float]:
    """Return the errors of padding and of packed documents, compared with plain sequences."""
    x = tokens.to(next(model.parameters()).device)
    n_padding = [(7 * row + 5) % cut for row in range(len(tokens))]
    valid = torch.arange(x.shape[1]) >= torch.tensor(n_padding).unsqueeze(-1)
    got = model(x, valid=valid.to(x.device)).logits.cpu()
    found = {
        f"padding, row {i}": relative_error(got[i, n:], exact(tokens[i : i + 1, n:]).logits[0])
        for i, n in enumerate(n_padding)
    }
    ids = (torch.arange(x.shape[1]) >= cut).long().expand_as(tokens)
    got = model(x, document_ids=ids.to(x.device)).logits.cpu()
    for i, part in enumerate((slice(0, cut), slice(cut, None))):
        want = exact(tokens[:, part]).logits
        found[f"document {i}"] = relative_error(got[:, part], want)
    return found


@torch.no_grad()
def decoder_errors(
    model: TransformerVQ, exact: TransformerVQ, tokens: Tensor, cut: int, compiled: bool
) -> dict[str, float]:
    """Return the error of logits that are decoded token by token after a prefill."""
    x = tokens.to(next(model.parameters()).device)
    step = Decoder(model.eval(), model(x[:, :cut]).state).step
    step = torch.compile(step, fullgraph=True) if compiled else step
    got = torch.stack([step(x[:, t]) for t in range(cut, x.shape[1])], dim=1)
    return {"logits": relative_error(got, exact(tokens).logits[:, cut:])}


def check_loss(sizes: Sizes, device: torch.device, dtype: str) -> list[Finding]:
    """Check the loss in lower precision, whose other results depend on the chosen codes."""

    @torch.no_grad()
    def measure(reduction: str) -> dict[str, float]:
        found: dict[str, float] = {}
        for head_type in sizes.head_types:
            config = sizes.model(head_type)
            tokens = random_tokens(config, sizes)
            model, x = make_model(config, reduction).to(device), tokens.to(device)
            with matmul_precision(device, "bf16" if dtype == "bf16" else "fp32"):
                got = _loss(model(x).logits, x)
            want = _loss(make_model(config, "serial").double()(tokens).logits, tokens)
            found[head_type] = relative_error(got, want)
        return found

    names = reductions(device.type == "cuda")
    return [check(f"loss, {name}", dtype, partial(measure, name)) for name in names]


def _loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


# Determinism, host syncs and speed


def check_repeats(sizes: Sizes, device: torch.device) -> list[Finding]:
    """Repeat training steps and decoding, which must give the same bits."""
    found = []
    for kind in [*reductions(device.type == "cuda"), "full", "decoder"]:
        name = kind if kind == "decoder" else f"training step, {kind}"
        row = Finding("Determinism", name, "fp32", "equal", N_REPEATS)
        try:
            differing = _differing(sizes, device, kind)
        except Exception as error:
            found.append(_failure(row, error))
            continue
        if differing:
            row = replace(row, status="differs", note=", ".join(differing[:3]))
        found.append(row)
    return found


def _differing(sizes: Sizes, device: torch.device, kind: str) -> list[str]:
    """Return the tensors that are not the same in every repetition."""
    found: list[str] = []
    for head_type in sizes.head_types:
        config = sizes.model(head_type, "full" if kind == "full" else "vq")
        model = make_model(config, "auto" if kind in OTHER_KINDS else kind).to(device)
        tokens = random_tokens(config, sizes).to(device)
        step = _decoded if kind == "decoder" else _trained
        first, *others = [step(model, tokens) for _ in range(N_REPEATS)]
        found += [
            f"{head_type} {name}"
            for name, x in first.items()
            if any(not torch.equal(x, other[name]) for other in others)
        ]
    return found


def _trained(model: TransformerVQ, tokens: Tensor) -> dict[str, Tensor]:
    """Return the results of a forward and a backward pass by name."""
    model.train().zero_grad(set_to_none=True)
    output = model(tokens)
    (output.logits.square().mean() + output.commit_loss).backward()
    found = {"logits": output.logits.detach()}
    for i, usage in enumerate(output.code_usage):
        found |= {f"usage {i} {n}": x for n, x in vars(usage).items() if isinstance(x, Tensor)}
    for name, p in model.named_parameters():
        if p.grad is not None:
            found[f"gradient of {name}"] = p.grad.clone()
    return found


@torch.no_grad()
def _decoded(model: TransformerVQ, tokens: Tensor) -> dict[str, Tensor]:
    """Return the logits of tokens decoded one by one; enough to evict some."""
    step = Decoder(model.eval(), model.init_state(len(tokens))).step
    n = min(2 * model.config.block_len + 3, tokens.shape[1])
    return {"logits": torch.stack([step(tokens[:, t]) for t in range(n)])}


def _trainer(
    config: ModelConfig, shape: tuple[int, int], device: torch.device, precision: Precision
) -> Callable[[], object]:
    """Return a function that takes a training step of `tvq train` on random tokens."""
    b, t = shape
    train = TrainConfig(batch_size=b, seq_len=t, backprop_len=t, precision=precision)
    trainer = Trainer(make_model(config), RunConfig(config, train=train), device)
    tokens = torch.randint(config.vocab_size, shape)
    batch = Batch(tokens, tokens.roll(-1, dims=1), torch.arange(t).expand(shape))
    return lambda: trainer.step(batch, 0, begins=True)


def count_syncs(sizes: Sizes, device: torch.device) -> list[Finding]:
    """Count how often the host waits for the GPU, by line of this package."""
    config = sizes.model("shga")
    model = make_model(config).to(device).eval()
    decoder = Decoder(model, model.init_state(sizes.batch_size))

    def decode() -> None:
        tokens = torch.zeros(sizes.batch_size, dtype=torch.int64, device=device)
        for _ in range(N_TOKENS):
            tokens = decoder.step(tokens).argmax(-1)

    train = _trainer(config, (sizes.batch_size, 4 * sizes.block_len), device, "fp32")
    found = []
    for name, work in (("one training step", train), (f"decoding {N_TOKENS} tokens", decode)):
        row = Finding("Host syncs", name, "fp32", "ok")
        try:
            work()  # a warm-up: the first call initializes libraries
            torch.cuda.synchronize(device)
            with counting() as places:
                work()
        except Exception as error:
            found.append(_failure(row, error))
            continue
        note = ", ".join(f"{n} x {place}" for place, n in places.most_common(5))
        found.append(replace(row, value=sum(places.values()), note=note))
    return found


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Count the syncs in the context by the line that caused them."""
    found: Counter[str] = Counter()

    def note(message: Warning | str, category: Any, *_: Any, **__: Any) -> None:
        if SYNC_SIGN in str(message):
            found[_place()] += 1

    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(before)


def _place() -> str:
    """Return the innermost line of this package on the stack, outside the doctor."""
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if path.is_relative_to(PACKAGE) and path != Path(__file__):
            return f"{path.relative_to(PACKAGE.parent).as_posix()}:{frame.lineno}"
    return "outside of transformer_vq"  # gradients of PyTorch's own operations


def _speed_model(device: torch.device) -> ModelConfig:
    return ModelConfig(256, 256, 1) if device.type == "cpu" else ModelConfig(256, 768, 4)


def time_training(
    sizes: Sizes, device: torch.device, seq_len: int, tokens: int, precision: Precision
) -> list[Finding]:
    """Measure training steps, and the fastest matrix product of the same precision."""
    config, batch_size = _speed_model(device), tokens // seq_len
    step = _trainer(config, (batch_size, seq_len), device, precision)
    seconds = best_seconds(step, rounds=2, max_steps=10, device=device)
    rate = matmul_rates(device, [precision], 1)[precision]
    share = 3 * flops_per_token(config, seq_len) * tokens / seconds / rate
    note = f"{share:.2f} of the matrix-product rate ({rate / 1e9:,.0f} GFLOP/s)"
    name = f"training, {seq_len:,} tokens, batch {batch_size}"
    return [_speed(name, precision, tokens / seconds, note, device)]


def time_decoding(sizes: Sizes, device: torch.device, batch_size: int) -> list[Finding]:
    """Measure decoding in place after a short context; a step costs the same at every position."""
    model = make_model(_speed_model(device)).to(device).eval()
    context = prefill(model, [[1] * 512] * batch_size)
    decoder = Decoder(model, context.state, 256)
    token = torch.zeros(batch_size, dtype=torch.int64, device=device)
    seconds = best_seconds(lambda: decoder.step(token), rounds=3, max_steps=64, device=device)
    n_bytes = sum(x.nbytes for x in model.parameters()) + context.state.n_bytes
    share = n_bytes / seconds / bandwidth_probe(device)()
    note = f"{share:.2f} of the read bandwidth"
    return [_speed(f"decoding, batch {batch_size}", "fp32", batch_size / seconds, note, device)]


def _speed(name: str, dtype: str, value: float, note: str, device: torch.device) -> Finding:
    synchronize(device)
    peak = f"{peak_bytes(device) / 1e9:.2f} GB peak"
    return Finding("Speed", name, dtype, "ok", value, f"{note}, {peak}")


# The environment and the report, without names of hosts, users and folders


def environment(device: torch.device) -> dict[str, str]:
    """Return what determines results and speed on this machine."""
    known = machine()
    commit = f" (commit {known['commit']})" if known["commit"] else ""
    n_usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else known["cores"]
    precision = torch.get_float32_matmul_precision()
    found = {
        "device": str(device),
        "transformer_vq": f"{known['transformer_vq'] or 'not installed'}{commit}",
        "Python": f"{platform.python_implementation()} {platform.python_version()}",
        "OS": platform.platform(),
        "PyTorch": torch.__version__,
        "CUDA, ROCm": f"{torch.version.cuda or 'none'}, {torch.version.hip or 'none'}",
        "triton, NumPy": f"{_package('triton')}, {_package('numpy')}",
        "CPU": cpu_name(),
        "cores": f"{known['cores']}, {n_usable} usable, {known['threads']} threads of PyTorch",
        "instruction sets": _try(_instruction_sets),
        "host memory": f"{total_memory(torch.device('cpu')) / 1e9:.1f} GB",
        "bf16 instructions": "yes" if has_fast_bf16(device) else "no, emulated",
        "float32 matmul precision": precision,
        "deterministic algorithms": str(torch.are_deterministic_algorithms_enabled()),
    }
    if device.type == "cuda":
        found["GPU"] = _try(lambda: _gpu(device))
        found["driver"] = _try(_driver)
        found["cuDNN"] = str(torch.backends.cudnn.version())
    values = ((name, os.environ.get(name)) for name in VARIABLES)
    return found | {name: without_places(value) for name, value in values if value is not None}


def _gpu(device: torch.device) -> str:
    properties = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    capability = f"capability {properties.major}.{properties.minor}"
    memory = f"{total / 1e9:.1f} GB, {free / 1e9:.1f} GB free"
    return f"{torch.cuda.device_count()} x {properties.name}, {capability}, {memory}"


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.splitlines()[0].strip()


def _instruction_sets() -> str:
    # In the process that runs, not only what the CPU has: ATEN_CPU_CAPABILITY may limit it.
    used = torch.backends.cpu.get_cpu_capability()
    names = sorted(name for name, value in torch.cpu.get_capabilities().items() if value is True)
    return f"{used} used by PyTorch; CPU has {', '.join(names)}"


def _package(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _try(read: Callable[[], str]) -> str:
    """Return a fact, or that it is unknown: a broken driver must not end the report."""
    try:
        return read()
    except Exception as error:
        return f"unknown ({without_places(f'{type(error).__name__}: {error}')})"


def without_places(text: str) -> str:
    """Return the first line of a text, shortened, without folders, host name and user name."""
    line = next((x.strip() for x in text.splitlines() if x.strip()), "")
    line = re.sub(r"(?<![\w.])~?(?:/[^\s/:;,'\"()|]+)*/(?=[^\s/])", ".../", line)
    names = [platform.node()]
    with suppress(OSError, KeyError):
        names.append(getpass.getuser())
    for name in names:
        if len(name) > 2:  # shorter ones cannot be recognized
            line = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "...", line)
    line = line.replace("|", "/")  # a column of a Markdown table ends here
    return line if len(line) <= MAX_NOTE else f"{line[:MAX_NOTE]}..."


def summary(diagnosis: Diagnosis) -> str:
    """Return the result in one sentence."""
    failed, device = diagnosis.failed, diagnosis.environment["device"]
    took = f"in {diagnosis.seconds:,.0f} s"
    if failed:
        more = f" and {len(failed) - 3} more" if len(failed) > 3 else ""
        names = f"{', '.join(failed[:3])}{more}"
        return f"{len(failed)} of the checks on {device} FAILED {took}: {names}."
    counts = Counter(x.status for x in diagnosis.findings)
    same = "repeated steps are bitwise equal"
    if counts["differs"]:
        same = f"repeated steps differ in {counts['differs']} paths"
    passed = counts["ok"] + counts["equal"] + counts["differs"]
    return (
        f"No check failed on {device}: {passed} passed and {counts['skipped']} were skipped "
        f"{took}, and {same}."
    )


def markdown(diagnosis: Diagnosis) -> str:
    """Return the report."""
    lines = [f"# tvq doctor{' --quick' * diagnosis.quick}", "", "## Environment", ""]
    lines += [f"- {name}: {value}" for name, value in diagnosis.environment.items()]
    for section, number in SECTIONS.items():
        lines += ["", f"## {section}", "", f"| check | dtype | result | {number} | details |"]
        lines.append("| --- | --- | --- | ---: | --- |")
        for x in diagnosis.findings:
            if x.section == section:
                lines.append(
                    f"| {x.name} | {x.dtype} | {x.status} | {_number(x.value)} | {x.note} |"
                )
    return "\n".join([*lines, "", summary(diagnosis)])


def _number(x: float | None) -> str:
    if x is None:
        return ""
    return f"{x:,.0f}" if x >= 1 or x == 0 else f"{x:.1e}"


def record(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return everything as plain values for JSON."""
    failed: Sequence[str] = diagnosis.failed
    return {
        **asdict(diagnosis),
        "ok": not failed,
        "failed": failed,
        "summary": summary(diagnosis),
    }
