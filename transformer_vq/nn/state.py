"""The state of a model, and its tensors by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from torch import Tensor

from transformer_vq.ops.cache import CacheStats
from transformer_vq.ops.state import AttentionState, RowState
from transformer_vq.ops.tree import tensor_tree


@tensor_tree
@dataclass(frozen=True)
class ModelState(RowState):
    """Everything a model carries from one segment to the next: one state per attention layer."""

    layers: tuple[AttentionState, ...]
    branch_keep: Tensor | None = None
    """LayerDrop, [b, n_branch]: the branches each row keeps; drawn once per sequence."""

    @property
    def position(self) -> Tensor:
        """Number of tokens of the current document that each row has seen: [b]."""
        return self.layers[0].position

    @property
    def document(self) -> Tensor | None:
        """Id of the current document of each row, if ids were given: [b]."""
        return self.layers[0].document

    def to_tensors(self, prefix: str = "state") -> dict[str, Tensor]:
        """Return all tensors by name, such as `state/layers/0/cache/mean`."""
        return _flatten(self, prefix)

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], prefix: str = "state") -> ModelState:
        """Return the state whose `to_tensors` gave these; other names are ignored."""
        start = f"{prefix}/"
        tree = _nest({k.removeprefix(start): x for k, x in tensors.items() if k.startswith(start)})
        layers = tree["layers"]
        states = tuple(_attention_state(layers[str(i)]) for i in range(len(layers)))
        return cls(states, tree.get("branch_keep"))


def _attention_state(parts: dict[str, Any]) -> AttentionState:
    cache = parts.get("cache")
    return AttentionState(**{**parts, "cache": None if cache is None else CacheStats(**cache)})


def _flatten(tree: Any, name: str) -> dict[str, Tensor]:
    if isinstance(tree, Tensor):
        return {name: tree}
    if isinstance(tree, tuple):
        items = [(str(i), item) for i, item in enumerate(tree)]
    elif is_dataclass(tree):
        items = [(f.name, getattr(tree, f.name)) for f in fields(tree)]
    else:
        return {}
    return {k: x for key, item in items for k, x in _flatten(item, f"{name}/{key}").items()}


def _nest(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, x in tensors.items():
        *parents, last = name.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = x
    return tree
