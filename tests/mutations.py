"""Mutations of files and folders, chosen by a seed so that failures are reproducible."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from content_mutations import (
    JSON,
    TENSORS,
    Mutate,
    Target,
    json_value,
    json_value_altered,
    tensor_cast,
    tensor_is_nan,
)


def truncate(target: Target) -> None:
    data = target.path.read_bytes()
    size = target.random.randrange(max(len(data), 1))
    target.note = f"to {size} of {len(data)} bytes"
    target.path.write_bytes(data[:size])


def empty(target: Target) -> None:
    target.path.write_bytes(b"")


def flip_bit(target: Target) -> None:
    _flip(target, 1)


def flip_bits(target: Target) -> None:
    _flip(target, target.random.randint(2, 40))


def _flip(target: Target, n: int) -> None:
    data = bytearray(target.path.read_bytes())
    places = [target.random.randrange(8 * len(data)) for _ in range(n if data else 0)]
    for place in places:
        data[place // 8] ^= 1 << place % 8
    target.note = f"bits {places}"
    target.path.write_bytes(data)


def zero_range(target: Target) -> None:
    _overwrite(target, lambda n: bytes(n))


def random_range(target: Target) -> None:
    _overwrite(target, target.random.randbytes)


def _overwrite(target: Target, content: Callable[[int], bytes]) -> None:
    data = bytearray(target.path.read_bytes())
    start = target.random.randrange(max(len(data), 1))
    stop = min(len(data), start + target.random.choice((1, 8, 100, 4096)))
    data[start:stop] = content(stop - start)
    target.note = f"bytes {start} to {stop} of {len(data)}"
    target.path.write_bytes(data)


def append(target: Target) -> None:
    with open(target.path, "ab") as file:
        file.write(target.random.randbytes(target.random.choice((1, 8, 1000))))


def delete(target: Target) -> None:
    target.path.unlink()


def replace_by_folder(target: Target) -> None:
    target.path.unlink()
    target.path.mkdir()


def replace_by_broken_link(target: Target) -> None:
    target.path.unlink()
    target.path.symlink_to("does-not-exist")


def replace_by_another(target: Target) -> None:
    donor = target.random.choice(target.donors)
    target.note = f"by {donor}"
    data = donor.read_bytes()
    target.path.write_bytes(data)


def exchange(target: Target) -> None:
    """Exchange a checkpoint, or one of its files, with that of another step."""
    other = target.random.choice(_siblings(target.path))
    target.note = f"with {other.parent.name}/{other.name}"
    aside = target.path.with_name("aside")
    target.path.rename(aside)
    other.rename(target.path)
    aside.rename(other)


def _siblings(path: Path) -> list[Path]:
    if path.name.startswith("step-"):
        found = path.parent.glob("step-*")
    elif path.parent.name.startswith("step-"):
        found = path.parent.parent.glob(f"step-*/{path.name}")
    else:
        return []
    return sorted(other for other in found if other != path)


def folder_renamed(target: Target) -> None:
    """Rename a checkpoint folder to another step or to an invalid step."""
    target.path.rename(target.path.with_name(_other_name(target)))


def folder_duplicated(target: Target) -> None:
    shutil.copytree(target.path, target.path.with_name(_other_name(target)))


def folder_deleted(target: Target) -> None:
    shutil.rmtree(target.path)


def folder_replaced_by_another(target: Target) -> None:
    shutil.rmtree(target.path)
    donor = target.random.choice(target.donors)
    target.note = f"by {donor}"
    shutil.copytree(donor, target.path)


def folder_replaced_by_file(target: Target) -> None:
    shutil.rmtree(target.path)
    target.path.write_bytes(b"x")


def _other_name(target: Target) -> str:
    taken = {path.name for path in target.path.parent.iterdir()}
    names = [f"step-{n:08d}" for n in (0, 1, 2, 5, 7, 10, 11, 99_999_999, 10**40)]
    names += ["step-5", "step-\u00b2", "step-\u0663", "step--1", "step-", "step-x", "x"]
    target.note = target.random.choice([name for name in names if name not in taken])
    return target.note


FILE = (
    *(truncate, empty, flip_bit, flip_bits, zero_range, random_range, append, delete),
    *(replace_by_folder, replace_by_broken_link),
)
FOLDER = (folder_renamed, folder_duplicated, folder_deleted, folder_replaced_by_file)

# Chosen more often: the file stays readable, so that only a checksum can detect the mutation.
WEIGHTS = {
    **dict.fromkeys((flip_bit, zero_range, random_range, exchange, folder_renamed), 2),
    **dict.fromkeys((tensor_is_nan, tensor_cast, json_value), 3),
    **dict.fromkeys((replace_by_another, folder_replaced_by_another), 4),
    json_value_altered: 14,
}


def mutations_of(path: Path, has_donors: bool) -> tuple[Mutate, ...]:
    """Return the mutations that apply to a file or folder."""
    found: tuple[Mutate, ...] = FOLDER if path.is_dir() else FILE
    if has_donors:
        found += (folder_replaced_by_another if path.is_dir() else replace_by_another,)
    if _siblings(path):
        found += (exchange,)
    if path.suffix in (".json", ".jsonl"):
        found += JSON
    if path.suffix == ".safetensors":
        found += TENSORS
    return found


def choose(kinds: Sequence[Mutate], generator: random.Random) -> Mutate:
    return generator.choices(kinds, [WEIGHTS.get(kind, 1) for kind in kinds])[0]
