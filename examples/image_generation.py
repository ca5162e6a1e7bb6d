"""Train a tiny model on images, complete images with it and save a PNG grid.

The training images are generated: vertical stripes in eight colors. An image is a sequence of
64 * 64 * 3 = 12,288 tokens, one per color value, row by row. The model gets the upper rows of new
images and samples the remaining ones. To do so, it learns to copy the row above, 192 tokens back.

Run:     python examples/image_generation.py [--out images.png] [--rows 8] [--steps 40]
         Needs Pillow, which is in the extra `image`: pip install pillow
         Sampling takes about 0.3 s per row on one core. --rows 63 keeps only the first row.
Prints:  validation bits per byte, the share of correct values, and the path of the PNG
"""

import argparse
import math
import tempfile
from pathlib import Path

import numpy as np

from transformer_vq import (
    DataConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    Sampling,
    TrainConfig,
    load_run,
    sample_images,
    save_grid,
    train,
)

SIDE, ROW_LEN, IMAGE_LEN = 64, 192, 12_288  # pixels per side, tokens per row and per image


def write_images(folder: Path, n: int, seed: int) -> np.ndarray:
    """Write PNG files with vertical stripes in random colors; return them, [n, 64, 64, 3]."""
    colors = 255 * np.random.default_rng(seed).integers(0, 2, (n, 1, 8, 3), dtype=np.uint8)
    images = colors.repeat(SIDE // 8, axis=2).repeat(SIDE, axis=1)
    folder.mkdir()
    for number, image in enumerate(images):
        save_grid(image[None], folder / f"{number}.png", scale=1)
    return images


parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, default=Path("images.png"))
parser.add_argument("--rows", type=int, default=8, help="rows of pixels to sample, 1 to 63")
parser.add_argument("--steps", type=int, default=40, help="training steps")
options = parser.parse_args()

with tempfile.TemporaryDirectory() as temporary:
    folder = Path(temporary)
    write_images(folder / "images", 20, seed=0)
    config = RunConfig(
        # Without the cache, attention is limited to one row of pixels. This task needs no more, and
        # long-range attention slows down the first steps of training.
        model=ModelConfig(256, 64, 1, d_k=32, n_code=32, block_len=192, compressive_cache=False),
        data=DataConfig("images", path=str(folder / "images"), cache=str(folder / "cache")),
        optim=OptimConfig(lr=1e-2, warmup=2, lr_final_share=1.0, grad_clip=1.0),
        train=TrainConfig(
            steps=options.steps,
            batch_size=2,
            seq_len=IMAGE_LEN,
            backprop_len=4 * ROW_LEN,
            eval_every=options.steps,
            device="cpu",
        ),
    )
    result = train(config, folder / "run")
    print(f"validation: {result.best_loss / math.log(2):.3f} bits per byte")

    expected = write_images(folder / "prompts", 4, seed=1)
    prompts = [folder / "prompts" / f"{number}.png" for number in range(len(expected))]
    model = load_run(folder / "run").model
    keep = 1 - options.rows / SIDE
    images = sample_images(model, 0, Sampling(), images=prompts, keep=keep, seed=0)

share = (images == expected)[:, -options.rows :].mean()
print(f"sampled {options.rows} rows of {len(images)} images: {share:.0%} of the values are correct")
save_grid(images, options.out)
print(f"wrote {options.out}")
