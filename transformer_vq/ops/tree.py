"""Dataclasses of tensors as nodes of PyTorch's pytrees."""

from __future__ import annotations

from typing import TypeVar

from torch.utils import _pytree

T = TypeVar("T")


def tensor_tree(kind: type[T]) -> type[T]:
    """Register a dataclass, so that torch.export and FSDP find the tensors in it. A decorator."""
    _pytree.register_dataclass(kind, serialized_type_name=f"{kind.__module__}.{kind.__qualname__}")
    return kind
