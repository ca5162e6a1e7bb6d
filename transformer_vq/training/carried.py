"""States carried through truncated BPTT, in the form in which checkpoints store them."""

from __future__ import annotations

import torch
from torch import Tensor


def split_states(tensors: dict[str, Tensor], n_parts: int) -> dict[str, Tensor]:
    """Return the states of a checkpoint, split among `n_parts` micro-batches.

    tensors: one state per micro-batch, `state0/...` to `state7/...`, each with the rows of all
    ranks; together they are the rows of a batch in order. Other names are ignored. The mask of the
    sinusoids belongs to a micro-batch, not to a row: a part gets that of its first row.
    """
    by_field: dict[str, list[Tensor]] = {}
    names = [name for name in tensors if name.startswith("state")]
    for name in sorted(names, key=_part):
        by_field.setdefault(name.partition("/")[2], []).append(tensors[name])
    found: dict[str, Tensor] = {}
    for field, parts in by_field.items():
        if len(parts) == n_parts:
            pieces = parts
        elif field.endswith("sinusoid_mask"):
            pieces = [parts[i * len(parts) // n_parts] for i in range(n_parts)]
        else:
            pieces = list(torch.cat(parts).chunk(n_parts))
        found |= {f"state{i}/{field}": x for i, x in enumerate(pieces)}
    return found


def _part(name: str) -> int:
    return int(name.partition("/")[0].removeprefix("state"))
