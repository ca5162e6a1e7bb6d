"""Hardware, versions and settings of this machine, without names of hosts, users and folders."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from transformer_vq import __version__
from transformer_vq.bench.cells import machine
from transformer_vq.device import cpu_name, has_fast_bf16, total_memory
from transformer_vq.doctor.findings import without_places

VARIABLES = (
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "KMP_AFFINITY", "CUDA_VISIBLE_DEVICES"),
    *("HIP_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG"),
    *("NVIDIA_TF32_OVERRIDE", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
    *("PYTORCH_ENABLE_MPS_FALLBACK", "TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"),
    *("TRITON_INTERPRET", "LD_PRELOAD"),
)
"""Environment variables that change speed or results; those that are set are reported."""
INSTRUCTIONS = ("avx2", "avx512", "amx", "fma3", "neon", "sve", "bf16", "i8mm")
"""Prefixes of the instruction sets that matter for matrix products."""


@dataclass(frozen=True)
class Environment:
    """Facts by name, in three groups; all values are text."""

    device: dict[str, str]
    versions: dict[str, str]
    settings: dict[str, str]


def environment(device: torch.device) -> Environment:
    """Return what determines results and speed on this machine."""
    return Environment(_device(device), _versions(device), _settings(device))


def _device(device: torch.device) -> dict[str, str]:
    known = machine()
    found = {"device": str(device)}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        capability = f"{properties.major}.{properties.minor}"
        found["GPU"] = f"{properties.name}, capability {capability}"
        found["GPUs"] = str(torch.cuda.device_count())
        found["GPU memory"] = _try(lambda: _gpu_memory(device))
    elif device.type == "mps":
        found["GPU memory"] = _try(lambda: f"{_gb(torch.mps.recommended_max_memory())} usable")
    n_usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    cores = str(known["cores"])
    if n_usable is not None and n_usable != known["cores"]:
        cores += f", {n_usable} usable by this process"
    available = _available_memory()
    free = "" if available is None else f", {_gb(available)} available"
    found |= {
        "CPU": cpu_name(),
        "cores": cores,
        "threads": f"{known['threads']} of PyTorch",
        "instruction sets": _instruction_sets(),
        "host memory": f"{_gb(total_memory(torch.device('cpu')))}{free}",
        "bf16 instructions": "yes" if has_fast_bf16(device) else "no, emulated",
    }
    return found


def _gpu_memory(device: torch.device) -> str:
    free, total = torch.cuda.mem_get_info(device)
    return f"{_gb(total)}, {_gb(free)} free"


def _versions(device: torch.device) -> dict[str, str]:
    known = machine()
    commit = f" (commit {known['commit']})" if known["commit"] else ""
    found = {
        "transformer_vq": f"{__version__}{commit}",
        "Python": f"{platform.python_implementation()} {platform.python_version()}",
        "OS": platform.platform(),
        "PyTorch": torch.__version__,
        "CUDA": torch.version.cuda or "none",
        "ROCm": torch.version.hip or "none",
        "triton": _package("triton"),
        "NumPy": _package("numpy"),
    }
    if device.type == "cuda":
        found["cuDNN"] = str(torch.backends.cudnn.version())
        if torch.version.hip is None:
            found["driver"] = _try(_driver)
    return found


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.splitlines()[0].strip()


def _settings(device: torch.device) -> dict[str, str]:
    precision = torch.get_float32_matmul_precision()
    deterministic = torch.are_deterministic_algorithms_enabled()
    found = {
        "float32 matmul precision": f"{precision}, {'no ' * (precision == 'highest')}TF32",
        "deterministic algorithms": "on" if deterministic else "off",
    }
    if device.type == "cuda":
        found["cuDNN benchmark"] = "on" if torch.backends.cudnn.benchmark else "off"
    values = ((name, os.environ.get(name)) for name in VARIABLES)
    return found | {name: without_places(value) for name, value in values if value is not None}


def _instruction_sets() -> str:
    # In the process that runs, not only what the CPU has: ATEN_CPU_CAPABILITY may limit it.
    used = torch.backends.cpu.get_cpu_capability()
    capabilities = torch.cpu.get_capabilities().items()
    names = [name for name, value in capabilities if value is True]
    shown = sorted(name for name in names if name.startswith(INSTRUCTIONS))
    return f"{used} used by PyTorch; CPU has {', '.join(shown) or 'none that are known'}"


def _available_memory() -> int | None:
    """Return the host memory that can be allocated without swapping; None if it is unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return 1024 * int(found[0]) if found else None


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


def _gb(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:.1f} GB"
