"""Where, in which precision and in which mode a model works."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn

from transformer_vq.errors import UserError


def find_device(name: str = "auto") -> torch.device:
    """Return the device of that name; `auto` is a GPU if there is one.

    Raises UserError unless models can be trained and evaluated on it, on this machine.
    """
    if name in ("cpu", "cpu:0"):
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if name == "auto":
        return accelerator or torch.device("cpu")
    choices = ["auto", "cpu"]
    if accelerator is not None:
        n_devices = torch.accelerator.device_count()
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


def total_memory(device: torch.device) -> int:
    """Bytes that the device has, used or not: the same whenever it is asked."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def matmul_precision(device: torch.device, precision: str) -> AbstractContextManager[object]:
    """fp32, or bf16 for matrix products while weights and everything delicate stay fp32."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Without dropout and gradients; afterwards the model is in the mode it was in."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def has_fast_bf16(device: torch.device) -> bool:
    """False for a processor without bf16 instructions, on which such products are emulated."""
    if device.type != "cpu":
        return True
    found = torch.cpu.get_capabilities()
    return any(found.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"))


def keep_freed_memory() -> None:
    """Let the process keep what large tensors free, where the C library is glibc.

    It would give the memory back and ask for it again with the next tensor, and every new page of
    it costs time: up to a third of a training step on a processor. Tensors of two gigabytes are
    still given back: gaps of that size would be too much of the memory.
    """
    mmap_max, mmap_threshold, trim_threshold = -4, -3, -1  # numbers from malloc.h
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(trim_threshold, -1)
    if not mallopt(mmap_threshold, 2**31 - 1):  # glibc before 2.35 takes no more than 32 MB
        mallopt(mmap_max, 0)
