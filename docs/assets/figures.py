"""Draw every figure of the README and the documentation from the records in benchmarks/.

Run `make figures`, or this script from any folder.
"""

from pathlib import Path

from transformer_vq.bench.plots import plot_decode, plot_path
from transformer_vq.bench.step_plots import plot_time_per_token
from transformer_vq.files import read_json

ASSETS = Path(__file__).parent
BENCHMARKS = ASSETS.parent.parent / "benchmarks"
RECORDS = (
    *("ablation", "compression-books", "decode", "first-token", "profile", "scaling", "small"),
    *("laws-wiki", "recall", "train-bf16", "train-bf16-32k", "train-fp32"),
    *("variants-books", "variants-wiki"),
)

if __name__ == "__main__":
    plot_time_per_token(read_json(BENCHMARKS / "scaling.json"), ASSETS / "time-per-token.png")
    plot_decode(read_json(BENCHMARKS / "decode.json"), ASSETS / "decode.png", batches=[1])
    for name in RECORDS:
        plot_path(BENCHMARKS / f"{name}.json")
