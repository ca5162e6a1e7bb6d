"""Shape checks for public ops, in the letters of the einsums."""

from __future__ import annotations

from torch import Tensor


def check_shapes(**tensors: tuple[Tensor, str]) -> None:
    """Check that tensors have one axis per letter, and each letter the same size everywhere.

    check_shapes(q=(q, "bhgtk"), z=(z, "bht")) raises ValueError with both shapes.
    """
    sizes: dict[str, int] = {}
    for name, (tensor, letters) in tensors.items():
        shape = tuple(tensor.shape)
        want = [sizes.get(letter, letter) for letter in letters]
        fits = len(shape) == len(letters) and all(
            size == sizes.setdefault(letter, size)
            for letter, size in zip(letters, shape, strict=True)
        )
        if not fits:
            axes = ", ".join(letters)
            wanted = ", ".join(map(str, want))
            raise ValueError(f"{name} has shape {shape}, want [{axes}] = [{wanted}]")
