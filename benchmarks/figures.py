"""Draw every figure of the README and the documentation from the records in this folder.

Run `make figures`, or this script from any folder.
"""

from pathlib import Path

from ablate import plot_ablation
from compress import plot_compression
from decode import plot_decode
from first_token import plot_first_token
from profile_step import plot_profile
from recall import plot_recall
from runs import plot_runs
from scaling import plot_scaling
from train import plot_time_per_token, plot_train
from transformer_vq.files import read_json
from variants import plot_variants

BENCHMARKS = Path(__file__).parent
ASSETS = BENCHMARKS.parent / "docs" / "assets"
FIGURES = {
    "ablation": plot_ablation,
    "compression-books": plot_compression,
    "decode": plot_decode,
    "first-token": plot_first_token,
    "laws-wiki": plot_scaling,
    "profile": plot_profile,
    "recall": plot_recall,
    "scaling": plot_train,
    "small": plot_runs,
    "train-bf16": plot_train,
    "train-bf16-32k": plot_train,
    "train-fp32": plot_train,
    "variants-books": plot_variants,
    "variants-wiki": plot_variants,
}

if __name__ == "__main__":
    plot_time_per_token(read_json(BENCHMARKS / "scaling.json"), ASSETS / "time-per-token.png")
    plot_decode(read_json(BENCHMARKS / "decode.json"), ASSETS / "decode.png", batches=[1])
    for name, plot in FIGURES.items():
        plot(read_json(BENCHMARKS / f"{name}.json"), BENCHMARKS / f"{name}.png")
