"""Mutations of the contents of JSON and safetensors files; the files stay readable."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from transformer_vq.files import write_tensors

DEEP, LONG = "deeply nested list", "number of 5000 digits"  # Python cannot write these
EXTREMES: tuple[Any, ...] = (
    *(None, [], {}, "", "x", -1, 0, 1, 7, 1e308, -1e-320, float("nan"), float("inf"), True, False),
    *(10**30, LONG, DEEP, ["x", 1], {"x": 1}, "/", "\ud800", "x" * 10_000),
)
DOCUMENTS: tuple[Any, ...] = ([1, 2], 5, None, "x", [], {}, True, float("nan"), DEEP)


@dataclass
class Target:
    """A file or folder to mutate, and the random choices for it."""

    path: Path
    random: random.Random
    donors: Sequence[Path] = ()
    """Intact files of the same kind that may replace it."""
    note: str = ""
    """Details of the mutation, for messages."""


Mutate = Callable[[Target], None]


def json_value(target: Target) -> None:
    """Replace a value anywhere in the tree."""

    def mutate(document: Any) -> Any:
        parent, key = target.random.choice(_places(document))
        parent[key] = value = target.random.choice(EXTREMES)
        target.note = f"{key!r} becomes {value!r:.60}"
        return document

    _edit_json(target, mutate)


def json_value_altered(target: Target) -> None:
    """Replace a value by a plausible one."""

    def mutate(document: Any) -> Any:
        places = [(x, k) for x, k in _places(document) if isinstance(x[k], (int, float, str))]
        parent, key = target.random.choice(places)
        old = parent[key]
        parent[key] = new = _altered(old, target.random)
        target.note = f"{key!r} becomes {new!r:.60} instead of {old!r:.60}"
        return document

    _edit_json(target, mutate)


def _altered(value: float | str, random: random.Random) -> float | str:
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        place = random.randrange(len(value) + 1)
        return value[:place] + random.choice("0123456789abcdef") + value[place + 1 :]
    return random.choice((value + 1, value - 1, value * 2, value / 2))


def json_key_deleted(target: Target) -> None:
    def mutate(document: Any) -> Any:
        parent, key = target.random.choice(_places(document))
        target.note = repr(key)
        del parent[key]
        return document

    _edit_json(target, mutate)


def json_key_added(target: Target) -> None:
    def mutate(document: Any) -> Any:
        parents = [parent for parent, _ in _places(document) if isinstance(parent, dict)]
        key = target.random.choice(("x", "", "path", "n_layer", "format", "sha256 "))
        value = target.random.choice(EXTREMES)
        target.note = f"{key!r} with {value!r:.60}"
        target.random.choice(parents)[key] = value
        return document

    _edit_json(target, mutate)


def json_document(target: Target) -> None:
    """Replace the document."""

    def mutate(_: Any) -> Any:
        value = target.random.choice(DOCUMENTS)
        target.note = f"becomes {value!r}"
        return value

    _edit_json(target, mutate)


def _edit_json(target: Target, mutate: Callable[[Any], Any]) -> None:
    """Edit a JSON file, or one line of a JSON Lines file."""
    lines = [target.path.read_text()]
    if target.path.suffix == ".jsonl":
        lines = lines[0].splitlines(keepends=True)
    number = target.random.randrange(len(lines))
    value = mutate(json.loads(lines[number]))
    depth = target.random.choice((50, 900, 100_000))
    lines[number] = _text(value, depth) + "\n"
    target.note = f"line {number + 1}: {target.note}" if len(lines) > 1 else target.note
    target.path.write_text("".join(lines))


def _text(value: Any, depth: int) -> str:
    text = json.dumps(value).replace(f'"{LONG}"', "9" * 5000)
    return text.replace(f'"{DEEP}"', "[" * depth + "]" * depth)


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """Return all pairs (parent, key) of a JSON tree."""
    items: list[tuple[Any, Any]] = []
    if isinstance(tree, dict):
        items = list(tree.items())
    elif isinstance(tree, list):
        items = list(enumerate(tree))
    return [(tree, key) for key, _ in items] + [x for _, item in items for x in _places(item)]


def tensor_removed(target: Target) -> None:
    _edit_tensors(target, lambda tensors, name: tensors.pop(name))


def tensor_added(target: Target) -> None:
    def mutate(tensors: dict[str, torch.Tensor], name: str) -> None:
        tensors[f"{name}.{target.random.choice(('x', '0', 'weight'))}"] = tensors[name].clone()

    _edit_tensors(target, mutate)


def tensor_reshaped(target: Target) -> None:
    def mutate(tensors: dict[str, torch.Tensor], name: str) -> None:
        x = tensors[name]
        new = (x[None], x.flatten()[None], x.flatten()[:1].clone(), x[..., None])
        tensors[name] = target.random.choice(new)

    _edit_tensors(target, mutate)


def tensor_is_nan(target: Target) -> None:
    def mutate(tensors: dict[str, torch.Tensor], name: str) -> None:
        real = [name for name, x in tensors.items() if x.is_floating_point()]
        name = target.random.choice(real)
        tensors[name] = torch.full_like(tensors[name], target.random.choice((torch.nan, torch.inf)))

    _edit_tensors(target, mutate)


def tensor_cast(target: Target) -> None:
    def mutate(tensors: dict[str, torch.Tensor], name: str) -> None:
        dtypes = {torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8}
        dtype = target.random.choice(sorted(dtypes - {tensors[name].dtype}, key=str))
        tensors[name] = tensors[name].to(dtype)

    _edit_tensors(target, mutate)


def metadata_altered(target: Target) -> None:
    """Alter the JSON within the metadata, or the metadata itself."""
    tensors, metadata = read_unchecked(target.path)
    _alter(target, metadata)
    save_file(tensors, target.path, metadata=metadata)


def _alter(target: Target, metadata: dict[str, str]) -> None:
    key = target.random.choice(sorted(metadata))
    choice = target.random.randrange(4)
    try:
        inner = json.loads(metadata[key])
        names = sorted(inner)
    except (ValueError, TypeError):
        names = []
    if names and choice < 3:
        name = target.random.choice([*names, "n_layer", "d_model", "vocab_size"])
        value = target.random.choice((10**7, 4096, 2**24, *EXTREMES))
        target.note = f"{key}: {name!r} becomes {value!r:.60}"
        metadata[key] = _text(inner | {name: value}, 100_000)
    elif choice:
        metadata[key] = target.random.choice(("", "x", "[1, 2]", "null", "{}", "[" * 100_000))
        target.note = f"{key} becomes {metadata[key]:.20}"
    else:
        del metadata[key]
        target.note = f"{key} deleted"


def _edit_tensors(target: Target, mutate: Callable[[dict[str, torch.Tensor], str], Any]) -> None:
    tensors, metadata = read_unchecked(target.path)
    name = target.random.choice(sorted(tensors))
    target.note = name
    mutate(tensors, name)
    save_file({name: x.contiguous() for name, x in tensors.items()}, target.path, metadata=metadata)


def read_unchecked(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return tensors and metadata of a safetensors file without verifying the checksum."""
    with safe_open(path, framework="pt") as file:
        metadata = dict(file.metadata() or {})
        return {name: file.get_tensor(name) for name in file.keys()}, metadata  # noqa: SIM118


def sealed(mutate: Mutate) -> Mutate:
    """Return the same mutation of a safetensors file, followed by a new checksum."""

    def mutate_and_seal(target: Target) -> None:
        mutate(target)
        tensors, metadata = read_unchecked(target.path)
        metadata.pop("sha256", None)
        write_tensors(target.path, tensors, metadata)

    mutate_and_seal.__name__ = f"sealed_{mutate.__name__}"
    return mutate_and_seal


JSON = (json_value_altered, json_value, json_key_deleted, json_key_added, json_document)
TENSORS = (
    *(tensor_removed, tensor_added, tensor_reshaped, tensor_is_nan, tensor_cast),
    metadata_altered,
)
# Non-finite values and other types are valid content if the checksum matches.
SEALED = tuple(sealed(x) for x in (tensor_removed, tensor_added, tensor_reshaped, metadata_altered))
