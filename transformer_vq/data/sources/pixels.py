"""Images as tokens: 64x64 pixels in raster order, with red, green and blue of a pixel in a row."""

from __future__ import annotations

import numpy as np

SIDE = 64
N_TOKENS = 3 * SIDE * SIDE  # per image


def images_to_tokens(images: np.ndarray) -> np.ndarray:
    """Return tokens [n, 12288] of images [n, 64, 64, 3], both uint8."""
    if images.shape[1:] != (SIDE, SIDE, 3) or images.dtype != np.uint8:
        got = f"{images.dtype} {list(images.shape)}"
        raise ValueError(f"images must be uint8 [n, {SIDE}, {SIDE}, 3], not {got}")
    return images.reshape(-1, N_TOKENS)


def tokens_to_images(tokens: np.ndarray) -> np.ndarray:
    """Return images [n, 64, 64, 3] as uint8. tokens: [n, 12288], integers from 0 to 255."""
    if tokens.shape[1:] != (N_TOKENS,):
        raise ValueError(f"tokens must be [n, {N_TOKENS}], not {list(tokens.shape)}")
    if tokens.size and (tokens.min() < 0 or tokens.max() > 255):
        raise ValueError("image tokens must be from 0 to 255")
    return tokens.astype(np.uint8).reshape(-1, SIDE, SIDE, 3)
