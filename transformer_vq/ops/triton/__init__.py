"""GPU kernels in Triton, behind `backend="triton"` only; each equals a function of `ops`.

The kernels are in `attention_kernels` and `code_kernels`. `blocks` and `decode` launch them;
`attention` is the autograd function for a segment.
Nothing here is imported unless asked for. docs/concepts/kernels.md lists what was verified and what
was not.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch

from transformer_vq.errors import UserError, missing_extra


def check_package() -> None:
    """Raise MissingExtraError if Triton is not installed."""
    if find_spec("triton") is None:
        raise missing_extra("backend='triton'", "triton")


def check_device(device: torch.device) -> None:
    """Raise UserError unless kernels can run on the device, or in Triton's interpreter.

    The device "meta" is for collecting launches, not for running them.
    """
    check_package()

    from transformer_vq.ops.triton.launch import is_interpreted

    if device.type not in ("cuda", "meta") and not (device.type == "cpu" and is_interpreted()):
        problem = f"backend='triton' needs a GPU, but the tensors are on {device.type}"
        raise UserError(f"{problem}; use backend='auto' or a CUDA device")
