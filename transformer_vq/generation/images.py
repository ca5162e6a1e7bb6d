"""Image generation: sample images pixel by pixel, and save them as a grid."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from transformer_vq.data.sources.images import decode_image
from transformer_vq.data.sources.pixels import N_TOKENS, SIDE, images_to_tokens, tokens_to_images
from transformer_vq.errors import UserError, missing_extra
from transformer_vq.files import atomic_write
from transformer_vq.generation.decode import stream
from transformer_vq.generation.prefill import prefill
from transformer_vq.generation.sampling import Sampling
from transformer_vq.nn.model import TransformerVQ
from transformer_vq.progress import progress_bar


def sample_images(
    model: TransformerVQ,
    bos: int,
    sampling: Sampling,
    *,
    n: int = 1,
    images: Sequence[Path] = (),
    keep: float = 0.5,
    seed: int | None = None,
    compiled: bool = False,
    state_dtype: torch.dtype | None = None,
) -> np.ndarray:
    """Return images, [n, 64, 64, 3]: new ones, or completions of the upper part of `images`."""
    prompts: list[list[int]] = [[bos]] * n
    if images:
        if not 0 < keep < 1:
            raise UserError(f"keep={keep}: must be above 0 and below 1")
        n_kept = min(round(keep * SIDE), SIDE - 1) * SIDE * 3  # whole rows of pixels
        rows = images_to_tokens(np.stack([_decode(path) for path in images]))
        prompts = [[bos, *row[:n_kept].tolist()] for row in rows for _ in range(n)]
    n_new = N_TOKENS - len(prompts[0]) + 1
    context = prefill(model, prompts)
    sampled = []
    with progress_bar("sampling", n_new, "tokens") as advance:
        steps = stream(
            model, context, n_new, sampling, seed, compiled=compiled, state_dtype=state_dtype
        )
        for tokens in steps:
            sampled.append(tokens)
            advance(1)
    finished = np.concatenate([np.array(prompts)[:, 1:], np.array(sampled).T], axis=1)
    return tokens_to_images(finished.astype(np.uint8))


def _decode(path: Path) -> np.ndarray:
    try:
        return decode_image(path)
    except UserError:
        raise
    except Exception as error:  # Pillow raises many kinds of errors for corrupt files
        why = getattr(error, "strerror", None) or "it is not an image, or it is corrupt"
        raise UserError(f"cannot read {path}: {why}; give another image") from error


def save_grid(images: np.ndarray, path: Path, scale: int = 4) -> None:
    """Write all images to one PNG, in a square grid, enlarged so that pixels are visible."""
    try:
        from PIL import Image
    except ImportError:
        raise missing_extra("a PNG file", "pillow") from None
    n, height, width, _ = images.shape
    columns = int(np.ceil(np.sqrt(n)))
    rows = -(-n // columns)
    grid = np.full((rows * height, columns * width, 3), 255, dtype=np.uint8)
    for i, image in enumerate(images):
        y, x = divmod(i, columns)
        grid[y * height : (y + 1) * height, x * width : (x + 1) * width] = image
    grid = grid.repeat(scale, 0).repeat(scale, 1)
    with atomic_write(path) as partial:
        Image.fromarray(grid).save(partial, format="PNG")
