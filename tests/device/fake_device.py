"""A device without memory and kernels, on which the host never gets a value without asking for it.

Tensors of the device are fake: they have a shape, a type and a device, but no values. Host tensors
are real, so programs run as on a GPU. Every operation that would make the host of a GPU wait is
recorded with its place in the package; on the device it gives zeros. Operations whose shape depends
on values, and operations on tensors of two devices, raise an error.

Importing this module changes PyTorch for the entire process: use a subprocess.
"""

from __future__ import annotations

import traceback
from collections import Counter
from typing import Any

import torch
import torch._subclasses.fake_tensor as fake_tensor
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree, backend_registration
from torch.utils._python_dispatch import TorchDispatchMode

import transformer_vq
from transformer_vq import device as devices
from transformer_vq.ops import runtime

NAME = "fake"
PACKAGE = transformer_vq.__file__.removesuffix("__init__.py")


class _Backend(backend_registration._DummyBackendModule):
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def get_rng_state(self, device: object = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: object = None) -> None:
        torch.set_rng_state(state)


def _register() -> torch.device:
    """Register the device."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_Backend())
    fake_tensor._is_privateuse1_backend_available = lambda: False
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(x, device=...) copies from the host
    devices.PINNED.add(NAME)
    runtime.ASSERTING.add(NAME)
    return torch.device(NAME, 0)


DEVICE = _register()


class FakeDevice(TorchDispatchMode):
    """Runs the operations of the device, and counts those that would make the host wait.

    waits: number of waits by place, such as "nn/model.py:forward", and kind.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[tuple[str, str]] = Counter()
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)

    def __enter__(self) -> FakeDevice:
        self._event = torch.Event
        torch.Event = lambda device: _Event(self)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.Event = self._event

    def wait(self, kind: str) -> None:
        frames = [f for f in traceback.extract_stack() if f.filename.startswith(PACKAGE)]
        place = f"{frames[-1].filename.removeprefix(PACKAGE)}:{frames[-1].name}" if frames else "?"
        self.waits[place, kind] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func._schema.name.removeprefix("aten::")
        tensors = [x for x in _pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        device = kwargs.get("device")
        to_fake = device is not None and torch.device(device).type == NAME
        if name in ("is_pinned", "_pin_memory"):
            return _pinned(args[0]) if name == "_pin_memory" else hasattr(args[0], "is_pinned_copy")
        if not to_fake and not any(isinstance(x, FakeTensor) for x in tensors):
            is_pinned = kwargs.pop("pin_memory", False)
            result = func(*args, **kwargs)  # on the host
            return _pinned(result) if is_pinned else result
        if name == "_local_scalar_dense":
            self.wait("read")
            return torch.zeros((), dtype=args[0].dtype).item()
        if name == "_to_copy" and device is not None and not to_fake:
            self.wait("copy to the host")
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        if name == "copy_" and not isinstance(args[0], FakeTensor):
            is_queued = kwargs.get("non_blocking", args[2:] == (True,))
            if not (is_queued and hasattr(args[0], "is_pinned_copy")):
                self.wait("copy to the host")
            return args[0].zero_()
        on_host = [x for x in tensors if not isinstance(x, FakeTensor)]
        if name in ("_to_copy", "copy_"):
            is_queued = kwargs.get("non_blocking", args[2:] == (True,))
            if on_host and not (is_queued and hasattr(on_host[0], "is_pinned_copy")):
                self.wait("copy from the host")
        elif any(x.ndim > 0 for x in on_host):
            raise RuntimeError(f"{name} has tensors of the host and of the device")
        return self._fake.dispatch(func, types, args, kwargs)


def _pinned(x: Tensor) -> Tensor:
    x = x.clone()
    x.is_pinned_copy = True
    return x


class _Event:
    def __init__(self, device: FakeDevice) -> None:
        self._device = device

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        self._device.wait("event")
