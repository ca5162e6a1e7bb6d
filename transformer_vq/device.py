"""Device selection, precision, evaluation mode, copies to and from a GPU, and memory settings."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from transformer_vq.errors import UserError
from transformer_vq.ops.runtime import execution_on

PINNED = {"cuda"}  # types of devices that copy from and to pinned memory


def find_device(name: str = "auto") -> torch.device:
    """Return the device with this name; `auto` selects a GPU if one is available.

    Raises UserError if the device cannot be used on this machine.
    """
    if name in ("cpu", "cpu:0"):
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if name == "auto":
        return accelerator or torch.device("cpu")
    choices, n_devices = ["auto", "cpu"], torch.accelerator.device_count()
    if accelerator is not None:
        choices += [accelerator.type, *(f"{accelerator.type}:{i}" for i in range(n_devices))]
    if name not in choices:
        raise UserError(f"device {name!r} is not available; use {' or '.join(choices)}")
    device = torch.device(name)
    try:
        torch.empty(0, device=device)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"device {name!r} does not work ({reason}); use cpu") from error
    return device


def cpu_name() -> str:
    """Return the model of the CPU of this machine."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def total_memory(device: torch.device) -> int:
    """Return the total memory of the device in bytes, including memory in use."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@contextmanager
def meta_device() -> Iterator[None]:
    """Create modules on the device "meta" in the context: shapes only, for tensors to come."""
    with torch.device("meta"), _WithoutRandomNumbers():
        yield


class _WithoutRandomNumbers(TorchFunctionMode):
    """Skip random initial values: drawing them on "meta" would import the compiler."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == nn.init.__name__:
            return kwargs["tensor"]
        return func(*args, **kwargs)


def matmul_precision(device: torch.device, precision: str) -> AbstractContextManager[object]:
    """Return an autocast context for bf16, or a no-op context for fp32; weights stay fp32."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Disable dropout and gradients in the context; restore the mode of the model afterwards."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def has_fast_bf16(device: torch.device) -> bool:
    """Return whether the device has bf16 instructions; CPUs without them emulate bf16."""
    if device.type != "cpu":
        return True
    found = torch.cpu.get_capabilities()
    return any(found.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"))


def compiles_training(choice: bool | None, device: torch.device) -> bool:
    """Return whether training uses torch.compile on a device.

    choice: as in `train.compile`; None compiles where `EXECUTIONS` says so and PyTorch can.
    """
    if choice is not None:
        return choice
    if not execution_on(device).compile or find_spec("triton") is None:
        return False
    # The compiler needs a GPU of the Volta generation or later.
    return torch.cuda.get_device_capability(device) >= (7, 0)


def compile_decoding(
    step: Callable[[Tensor], Tensor], device: torch.device, kept: Iterable[Tensor] = ()
) -> Callable[[Tensor], Tensor]:
    """Return a decoding step compiled with torch.compile; on GPUs as a CUDA graph.

    A CUDA graph launches all kernels of a step at once. The logits of a step are overwritten by the
    next one. kept: tensors that the step reads or updates in place on every call, such as
    `Decoder.tensors`; otherwise a CUDA graph would copy them on every step.
    """
    if device.type != "cuda":
        return torch.compile(step, fullgraph=True)
    for x in kept:
        torch._dynamo.mark_static_address(x)
    compiled = torch.compile(step, fullgraph=True, mode="reduce-overhead")

    def run(tokens: Tensor) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return compiled(tokens)

    return run


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Return x on a device; a copy to a GPU is only queued.

    A host that waits for the GPU cannot queue its next kernels, and the GPU runs dry. An ordinary
    copy waits until all queued work is done; a copy from or to pinned memory joins the queue.
    """
    if x.device.type != "cpu" or device.type not in PINNED:
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


class HostCopy:
    """A copy of a tensor on the host, queued when it is created and complete when it is read."""

    def __init__(self, x: Tensor) -> None:
        self._copy, self._done = x.detach(), None
        if x.device.type in PINNED:
            pinned = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
            self._copy = pinned.copy_(self._copy, non_blocking=True)
            self._done = torch.Event(x.device)
            self._done.record()

    def tolist(self) -> Any:
        """Return the values as numbers in nested lists; waits for this copy, not for later work."""
        if self._done is not None:
            self._done.synchronize()
        return self._copy.tolist()


def keep_freed_memory() -> None:
    """Configure glibc to reuse freed memory instead of returning it to the system.

    Page faults for the memory of large tensors take up to a third of a training step on a CPU.
    Allocations of 2 GB and more are still returned: gaps of that size would waste too much memory.
    """
    mmap_max, mmap_threshold, trim_threshold = -4, -3, -1  # constants from malloc.h
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(trim_threshold, -1)
    if not mallopt(mmap_threshold, 2**31 - 1):  # glibc before 2.35 accepts at most 32 MB
        mallopt(mmap_max, 0)
