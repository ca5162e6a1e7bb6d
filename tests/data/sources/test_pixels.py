"""Images as tokens and back."""

import numpy as np
import pytest

from transformer_vq.data.sources.pixels import images_to_tokens, tokens_to_images


def test_images_round_trip_through_tokens():
    images = np.random.default_rng(0).integers(0, 256, (2, 64, 64, 3), dtype=np.uint8)
    tokens = images_to_tokens(images)
    assert tokens.shape == (2, 12288)
    assert tokens[1, 3 * 64 : 3 * 64 + 3].tolist() == images[1, 1, 0].tolist()
    assert (tokens_to_images(tokens.astype(np.int64)) == images).all()


def test_other_shapes_and_values_are_rejected():
    with pytest.raises(ValueError, match=r"\[n, 64, 64, 3\], not uint8 \[1, 32, 32, 3\]"):
        images_to_tokens(np.zeros((1, 32, 32, 3), dtype=np.uint8))
    with pytest.raises(ValueError, match=r"not float64"):
        images_to_tokens(np.zeros((1, 64, 64, 3)))
    with pytest.raises(ValueError, match=r"\[n, 12288\], not \[12288\]"):
        tokens_to_images(np.zeros(12288, dtype=np.uint8))
    with pytest.raises(ValueError, match="from 0 to 255"):
        tokens_to_images(np.full((1, 12288), 256))
