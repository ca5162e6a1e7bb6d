"""Conversion between core models and those for transformers, without copying tensors."""

from __future__ import annotations

from typing import Any

from torch import nn


def share_tensors(source: nn.Module, target: nn.Module) -> None:
    """Give `target` the tensors of `source` with the same names, without copying them."""
    for kind in ("_parameters", "_buffers"):
        own = getattr(target, kind)
        own.update({n: getattr(source, n) for n in own if own[n] is not None})
    for name, module in target.named_children():
        if name in source._modules:
            setattr(target, name, shared_module(getattr(source, name), module))


def shared_module(source: nn.Module, target: nn.Module) -> Any:
    """Return `target` with the tensors of `source`; or `source`, if a library has replaced it.

    Modules with adapters or quantized weights are such replacements.
    """
    if not (isinstance(source, type(target)) or isinstance(target, type(source))):
        return source
    share_tensors(source, target)
    return target
