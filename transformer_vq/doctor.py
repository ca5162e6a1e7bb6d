"""Check an installation on a device: `tvq doctor`.

Every implementation is compared with the same weights in float64 on the CPU. Repeated steps must be
bitwise equal, host syncs are counted on CUDA, and a short measurement shows the speed of training
and decoding. Groups of checks run in subprocesses with a time limit: a broken kernel can crash the
process or make the GPU unusable for it, and its end is a finding.

Weights and tokens are chosen such that no key is almost equally far from two codewords. Otherwise
rounding could select another code, and results would differ by more than rounding.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.benchmark import Timer

from transformer_vq.config import HeadType, ModelConfig, Precision, RunConfig, TrainConfig
from transformer_vq.data.batches import Batch
from transformer_vq.device import cpu_name, has_fast_bf16, matmul_precision, total_memory
from transformer_vq.generation.decoder import Decoder
from transformer_vq.memory_use import peak_bytes
from transformer_vq.nn.model import TransformerVQ
from transformer_vq.ops.reductions import REDUCTIONS
from transformer_vq.progress import progress_bar
from transformer_vq.sizes import flops_per_token
from transformer_vq.training.step import Trainer

Status = Literal["ok", "FAILED", "skipped"]
SECTIONS = {"Results": "largest relative RMS error", "Host syncs": "syncs", "Speed": "tokens/s"}
"""The tables of the report, and what their column of numbers shows."""
TOLERANCES = {"fp32": 1e-5, "bf16": 2e-2}
HEAD_TYPES: tuple[HeadType, ...] = get_args(HeadType)
TIME_LIMIT = 240.0  # seconds per subprocess
N_REPEATS = 3
N_TOKENS = 8  # decoded while syncs are counted
MAX_NOTE = 160  # characters of an error message
MISSING_TOOLS = r"InvalidCxxCompiler|TritonMissing|working triton installation|GPUTooOldForTriton"
"""Errors that mean that torch.compile lacks a tool on this machine."""
VARIABLES = r"(OMP|MKL|KMP|CUDA|CUBLAS|HIP|NVIDIA_TF32|ONEDNN|PYTORCH|TORCH|TRITON).*|LD_PRELOAD"
"""Environment variables that may change speed or results; those that are set are reported."""


@dataclass(frozen=True)
class Finding:
    """A row of the report."""

    section: str
    name: str
    dtype: str
    status: Status
    value: float | None = None  # the number that SECTIONS describes; None if nothing was computed
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


Group = Callable[[torch.device], list[Finding]]
Run = Callable[[TransformerVQ, Tensor], dict[str, Tensor]]


def examine(device: torch.device, *, quick: bool = False) -> Diagnosis:
    """Check and measure everything on a device; quick: without compiling and measuring."""
    start = time.perf_counter()
    found: list[Finding] = []
    work = groups(device, quick)
    with progress_bar("doctor", len(work), "groups") as advance:
        for (section, name, dtype), group in work.items():
            advance(0, note=name)
            found += isolated(Finding(section, name, dtype, "skipped"), group, device)
            advance(1)
    return Diagnosis(environment(device), tuple(found), quick, time.perf_counter() - start)


def groups(device: torch.device, quick: bool) -> dict[tuple[str, str, str], Group | str]:
    """Return the checks of each subprocess by section, name and dtype, or why they are skipped."""
    no_cuda = None if device.type == "cuda" else "needs CUDA"
    is_quick = "--quick" if quick else None
    return {
        ("Results", "models", "fp32"): check_models,
        ("Results", "triton", "fp32"): no_cuda or check_triton,
        ("Results", "loss", "bf16"): check_bf16,
        ("Results", "compiled decoder", "fp32"): is_quick or check_compiled_decoder,
        ("Host syncs", "training and decoding", "fp32"): no_cuda or count_syncs,
        ("Speed", "training and decoding", _precision(device)): is_quick or measure_speed,
    }


def isolated(row: Finding, group: Group | str, device: torch.device) -> list[Finding]:
    """Run a group, a function of this module, in a subprocess.

    Returns `row` with the reason if the group is skipped or its process dies.
    """
    if isinstance(group, str):
        return [replace(row, note=group)]
    command = [sys.executable, "-m", "transformer_vq.doctor", group.__name__, str(device)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIME_LIMIT)
    except subprocess.TimeoutExpired:
        return [replace(row, note=f"exceeded the time limit of {TIME_LIMIT:g} s")]
    if done.returncode < 0:
        return [_failure(row, f"killed by signal {-done.returncode}")]
    if done.returncode:
        return [_failure(row, (done.stderr.splitlines() or ["no message"])[-1])]
    return [Finding(**x) for x in json.loads(done.stdout.splitlines()[-1])]


def _failure(row: Finding, reason: str) -> Finding:
    """Return the row of a check that raised an exception: broken, or not possible here."""
    status: Status = "skipped" if re.search(MISSING_TOOLS, reason) else "FAILED"
    return replace(row, status=status, note=without_folders(reason))


# Results


def check_models(device: torch.device) -> list[Finding]:
    """Check all reductions, full attention and the decoder."""
    kinds = (*REDUCTIONS, "full")
    steps = [check_path(f"training step, {x}", _train, x, device) for x in kinds]
    return [*steps, check_path("decoder", _decode, "auto", device)]


def check_triton(device: torch.device) -> list[Finding]:
    """Check the Triton kernels."""
    step = check_path("training step, triton", _train, "triton", device)
    return [step, check_path("decoder, triton", _decode, "triton", device)]


def check_compiled_decoder(device: torch.device) -> list[Finding]:
    """Check the compiled decoder once, because compiling takes long."""
    run = partial(_decode, compiled=True)
    return [check_path("compiled decoder", run, "auto", device, once=True)]


def check_bf16(device: torch.device) -> list[Finding]:
    """Check the loss in bf16: other results depend on the chosen codes."""
    kinds = [*REDUCTIONS, *["triton"] * (device.type == "cuda")]
    return [check_path(f"loss, {x}", _score, x, device, "bf16") for x in kinds]


def check_path(
    name: str, run: Run, kind: str, device: torch.device, dtype: str = "fp32", once: bool = False
) -> Finding:
    """Run a path through models several times; compare it with float64, and the repetitions.

    Repetitions that differ are not a failure: GPUs often add numbers in varying order.
    """
    row = Finding("Results", name, dtype, "ok")
    errors: dict[str, float] = {}
    differing = []
    try:
        for heads in HEAD_TYPES[-1:] if once else HEAD_TYPES:
            model, exact, tokens = make_models(heads, kind, device)
            n_runs = 1 if once else N_REPEATS
            first, *others = [run(model, tokens.to(device)) for _ in range(n_runs)]
            want = _train(exact, tokens)
            for result, x in first.items():
                errors[f"{heads}, {result}"] = relative_error(x, want[result][-len(x) :])
                if not all(torch.equal(x, other[result]) for other in others):
                    differing.append(f"{heads} {result}")
    except Exception as error:
        return _failure(row, f"{type(error).__name__}: {error}")
    case, worst = max(errors.items(), key=lambda x: x[1] if math.isfinite(x[1]) else math.inf)
    n_wrong = sum(not x <= TOLERANCES[dtype] for x in errors.values())
    note = f"{f'{n_wrong} of ' * (n_wrong > 0)}{len(errors)} cases, worst: {case}"
    if differing:
        note += f"; repetitions differ: {', '.join(differing[:3])}"
    value = worst if math.isfinite(worst) else None
    return replace(row, status="FAILED" if n_wrong else "ok", value=value, note=note)


def relative_error(got: Tensor, want: Tensor) -> float:
    """Return the RMS of the difference over the RMS of `want`, in float64 on the CPU."""
    got, want = got.detach().cpu().double(), want.detach()
    return float((got - want).square().mean().sqrt() / want.square().mean().sqrt())


def make_models(
    heads: HeadType, kind: str, device: torch.device
) -> tuple[TransformerVQ, TransformerVQ, Tensor]:
    """Return a model on a device, the same in float64 on the CPU, and tokens: [b, t].

    kind: a reduction, "triton", or "full" for full attention. Sizes on GPUs are closer to those of
    real models: a kernel may fail only for several tiles. The last block is incomplete.
    """
    is_cpu = device.type == "cpu"
    d_model, d_k, n_code, block_len = (64, 16, 24, 16) if is_cpu else (256, 64, 256, 128)
    n_kv_head = 2 if heads == "gqa" else None
    config = ModelConfig(64, d_model, 1, head_type=heads, n_kv_head=n_kv_head, d_k=d_k)
    config = replace(config, n_code=n_code, block_len=block_len, codebook_init="random")
    config = replace(config, attention="full" if kind == "full" else "vq", revive_below=0.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tokens = torch.randint(config.vocab_size, (2, 4 * block_len + block_len * 2 // 3))
        model = TransformerVQ(config)
    exact = deepcopy(model).double()
    exact.set_execution(reduction="serial")
    if kind == "triton":
        model.set_execution(backend="triton")
    elif kind != "full":
        model.set_execution(reduction=kind)  # type: ignore[arg-type]
    return model.to(device), exact, tokens


def _train(model: TransformerVQ, tokens: Tensor) -> dict[str, Tensor]:
    """Return logits, [t, b, vocab_size], loss and all gradients of two segments."""
    model.train().zero_grad(set_to_none=True)
    logits, state = [], None
    for segment in tokens.tensor_split([_cut(model)], dim=1):
        output = model(segment, state)
        (_loss(output.logits, segment) + output.commit_loss).backward(retain_graph=True)
        logits.append(output.logits.detach())
        state = output.state
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    y = torch.cat(logits, dim=1)
    loss = _loss(y, tokens).unsqueeze(0)
    return {"logits": y.transpose(0, 1), "loss": loss, "gradients": torch.cat(gradients)}


@torch.no_grad()
def _decode(model: TransformerVQ, tokens: Tensor, compiled: bool = False) -> dict[str, Tensor]:
    """Return the logits of tokens that are decoded one by one after a prefill."""
    prompt, rest = tokens.tensor_split([_cut(model)], dim=1)
    step = Decoder(model.eval(), model(prompt).state).step
    step = torch.compile(step, fullgraph=True) if compiled else step
    return {"logits": torch.stack([step(x).clone() for x in rest.unbind(1)])}


@torch.no_grad()
def _score(model: TransformerVQ, tokens: Tensor) -> dict[str, Tensor]:
    """Return the loss alone, in bf16."""
    with matmul_precision(tokens.device, "bf16"):
        return {"loss": _loss(model(tokens).logits, tokens).unsqueeze(0)}


def _cut(model: TransformerVQ) -> int:
    """Return where a sequence is cut, within a block."""
    return 2 * model.config.block_len + model.config.block_len // 3


def _loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


# Host syncs and speed


def _trainer(config: ModelConfig, b: int, t: int, device: torch.device) -> Callable[[], Any]:
    """Return a function that takes a training step of `tvq train` on random tokens, [b, t]."""
    train = TrainConfig(batch_size=b, seq_len=t, backprop_len=t, precision=_precision(device))
    trainer = Trainer(TransformerVQ(config), RunConfig(config, train=train), device)
    tokens = torch.randint(config.vocab_size, (b, t))
    batch = Batch(tokens, tokens.roll(-1, dims=1))
    return lambda: trainer.step(batch, 0, begins=True)


def _decoder(config: ModelConfig, n_rows: int, device: torch.device) -> Callable[[], Any]:
    """Return a function that decodes the next token of each row."""
    model = TransformerVQ(config).to(device).eval()
    decoder = Decoder(model, model.init_state(n_rows))
    tokens = torch.zeros(n_rows, dtype=torch.int64, device=device)
    return lambda: tokens.copy_(decoder.step(tokens).argmax(-1))


def _precision(device: torch.device) -> Precision:
    return "fp32" if device.type == "cpu" else "bf16"


def count_syncs(device: torch.device) -> list[Finding]:
    """Count how often the host waits for the GPU, by line of code."""
    config = ModelConfig(256, 256, 1)
    decode = _decoder(config, 2, device)
    works: dict[str, Callable[[], Any]] = {
        "one training step": _trainer(config, 2, 4 * config.block_len, device),
        f"decoding {N_TOKENS} tokens": lambda: [decode() for _ in range(N_TOKENS)],
    }
    found = []
    for name, work in works.items():
        work()  # a warm-up: the first call initializes libraries
        torch.cuda.synchronize(device)
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            work()
        torch.cuda.set_sync_debug_mode("default")
        syncs = [x for x in caught if "synchronizing CUDA operation" in str(x.message)]
        places = Counter(f"{Path(x.filename).name}:{x.lineno}" for x in syncs)
        note = ", ".join(f"{n} x {place}" for place, n in places.most_common(5))
        found.append(Finding("Host syncs", name, "fp32", "ok", len(syncs), note))
    return found


def measure_speed(device: torch.device) -> list[Finding]:
    """Measure training, next to a matrix product of the same precision, and decoding."""
    is_cpu, dtype = device.type == "cpu", _precision(device)
    config = ModelConfig(256, 256, 1) if is_cpu else ModelConfig(256, 768, 4)
    b, t, width = (1, 4096, 2048) if is_cpu else (4, 8192, 8192)
    step = _seconds(_trainer(config, b, t, device))
    x = torch.ones(width, width, device=device)
    square = x.bfloat16() if dtype == "bf16" else x
    rate = 2 * width**3 / _seconds(lambda: square @ square)
    share = 3 * flops_per_token(config, t) * b * t / step / rate
    note = f"{share:.2f} of the matrix-product rate ({rate / 1e9:,.0f} GFLOP/s), "
    note += f"{peak_bytes(device) / 1e9:.2f} GB peak"
    name = f"training, {b} x {t:,} tokens"
    found = [Finding("Speed", name, dtype, "ok", b * t / step, note)]
    for n in (1, 8):
        value = n / _seconds(_decoder(config, n, device))
        found.append(Finding("Speed", f"decoding, batch {n}", "fp32", "ok", value))
    return found


def _seconds(step: Callable[[], Any]) -> float:
    """Return the median time of a call, after the GPU has finished it."""
    timer = Timer("step()", globals={"step": step}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=1.0).median


# The environment and the report, without names of folders


def environment(device: torch.device) -> dict[str, str]:
    """Return what determines results and speed on this machine."""
    found = {
        "device": str(device),
        "transformer_vq": _package("transformer-vq"),
        "Python": f"{platform.python_implementation()} {platform.python_version()}",
        "OS": platform.platform(),
        "PyTorch": torch.__version__,
        "CUDA, ROCm": f"{torch.version.cuda or 'none'}, {torch.version.hip or 'none'}",
        "triton, NumPy": f"{_package('triton')}, {_package('numpy')}",
        "CPU": f"{cpu_name()}, {torch.backends.cpu.get_cpu_capability()}",
        "cores": f"{os.cpu_count()}, {torch.get_num_threads()} threads of PyTorch",
        "host memory": f"{total_memory(torch.device('cpu')) / 1e9:.1f} GB",
        "bf16 instructions": "yes" if has_fast_bf16(device) else "no, emulated",
    }
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        kind = f"{gpu.name}, {gpu.major}.{gpu.minor}, {gpu.total_memory / 1e9:.1f} GB"
        found["GPU"] = f"{torch.cuda.device_count()} x {kind}"
    names = sorted(name for name in os.environ if re.fullmatch(VARIABLES, name))
    return found | {name: without_folders(os.environ[name]) for name in names}


def _package(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def without_folders(text: str) -> str:
    """Return the first line of a text, shortened, without the folders of paths."""
    line = next((x.strip() for x in text.splitlines() if x.strip()), "")
    line = re.sub(r"(?<![\w.])~?(?:/[^\s/:;,'\"()|]+)*/(?=[^\s/])", ".../", line)
    line = line.replace("|", "/")  # a column of a Markdown table ends here
    return line if len(line) <= MAX_NOTE else f"{line[:MAX_NOTE]}..."


def summary(diagnosis: Diagnosis) -> str:
    """Return the result in one sentence."""
    failed, counts = diagnosis.failed, Counter(x.status for x in diagnosis.findings)
    end = f"on {diagnosis.environment['device']} in {diagnosis.seconds:,.0f} s"
    if failed:
        return f"{len(failed)} of the checks FAILED {end}: {', '.join(failed)}."
    return f"{counts['ok']} checks passed and {counts['skipped']} were skipped {end}."


def markdown(diagnosis: Diagnosis) -> str:
    """Return the report."""
    lines = [f"# tvq doctor{' --quick' * diagnosis.quick}", "", "## Environment", ""]
    lines += [f"- {name}: {value}" for name, value in diagnosis.environment.items()]
    for section, number in SECTIONS.items():
        lines += ["", f"## {section}", "", f"| check | dtype | result | {number} | details |"]
        lines.append("| --- | --- | --- | ---: | --- |")
        for x in diagnosis.findings:
            if x.section == section:
                is_count = x.value == 0 or (x.value or 0) >= 1
                value = "" if x.value is None else f"{x.value:{',.0f' if is_count else '.1e'}}"
                lines.append(f"| {x.name} | {x.dtype} | {x.status} | {value} | {x.note} |")
    return "\n".join([*lines, "", summary(diagnosis)])


def record(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return everything as plain values for JSON."""
    failed = diagnosis.failed
    return asdict(diagnosis) | {"ok": not failed, "failed": failed, "summary": summary(diagnosis)}


if __name__ == "__main__":  # a subprocess: the name of a group and the device
    rows = globals()[sys.argv[1]](torch.device(sys.argv[2]))
    print(json.dumps([asdict(row) for row in rows]))
