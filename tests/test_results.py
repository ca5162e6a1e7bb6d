"""benchmarks/RESULTS.md says what the files beside it say."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from transformer_vq import TransformerVQ
from transformer_vq.bench import ablate, profile, train
from transformer_vq.bench.steps import Cell

FOLDER = Path(__file__).parent.parent / "benchmarks"
RESULTS = (FOLDER / "RESULTS.md").read_text()
PROSE = "\n".join(line for line in RESULTS.splitlines() if not line.startswith("|"))
GRIDS = sorted(FOLDER.glob("train-*.json"))


def rows(name: str) -> dict[tuple[str, str, int], dict]:
    result = json.loads((FOLDER / f"train-{name}.json").read_text())
    return {
        (row["head_type"], train.kind(row), row["seq_len"]): row
        for row in result["rows"]
        if "failed" not in row
    }


@pytest.mark.parametrize("path", GRIDS, ids=lambda path: path.stem)
def test_a_grid_is_the_recorded_one(path):
    assert train.table(json.loads(path.read_text())) in RESULTS


def test_every_file_is_named_and_exists():
    named = set(re.findall(r"\(([\w-]+\.(?:json|png))\)", RESULTS))
    assert named >= {path.name for path in (*GRIDS, *FOLDER.glob("train-*.png"))}
    assert all((FOLDER / name).is_file() for name in named)


def test_what_is_claimed_was_measured():
    low, longer = rows("bf16"), rows("bf16-32k")
    shares = {head: low[head, "auto", 8192]["share_of_rate"]["bf16"] for head in train.HEAD_TYPES}
    assert shares["shga"] >= 0.85
    assert min(shares.values()) >= 0.70
    for found in (low, longer, rows("fp32"), rows("quick")):
        assert found["shga", "auto", 2048]["over_full"] >= 1.0
        assert f"{found['shga', 'auto', 8192]['over_full']:.2f}" in PROSE
    full, vq = longer["shga", "full", 32_768], longer["shga", "auto", 32_768]
    assert (full["recompute"], vq["recompute"]) == (True, False)
    assert vq["over_full"] >= 12.6
    assert f"{vq['over_full']:.2f} at 32,768" in PROSE
    again = rows("bf16-32k-recomputed")["shga", "auto", 32_768]
    equal = full["seconds"] / again["seconds"]
    assert f"it is {equal:.2f} there" in PROSE
    readme = (FOLDER.parent / "README.md").read_text()
    assert f"{longer['shga', 'auto', 8192]['over_full']:.1f} times as fast" in readme
    assert f"{vq['over_full']:.1f} times as fast at 32,768" in readme
    assert f"({equal:.1f} times with recomputation on both sides)" in readme


@pytest.mark.slow
def test_the_flops_of_full_attention_over_those_of_vq_are_as_told():
    def added(total, a, b, *_, **__):
        return 2 * math.prod(a) * b[-1]

    def flops(attention, seq_len, device):
        model = TransformerVQ(Cell("shga", attention, "auto", seq_len).config.model).to(device)
        tokens = torch.zeros(1, seq_len, dtype=torch.int64, device=device)
        accumulated = {torch.ops.aten.baddbmm_: added}  # which torch does not count
        with FlopCounterMode(display=False, custom_mapping=accumulated) as counter:
            model(tokens).logits.sum().backward()
        return counter.get_total_flops()

    for seq_len, told in ((8192, "{:.2f} times the FLOPs"), (32_768, "{:.1f} times at 32,768")):
        ratio = flops("full", seq_len, "meta") / flops("vq", seq_len, "cpu")
        assert told.format(ratio) in PROSE


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("shga", "shga"),
        ("heads", "mqa"),
        ("mha", "mha"),
        ("bf16-shga", "shga"),
        ("bf16-mqa", "mqa"),
        ("bf16-mha", "mha"),
    ],
)
def test_a_token_costs_as_much_in_a_long_sequence(name, head):
    found = rows(f"long-{name}")
    short, long = (found[head, "auto", n]["tokens_per_second"] for n in (8192, 131_072))
    assert long >= 0.9 * short
    assert f"{long / short:.2f} ({head.upper()}" in RESULTS


def test_the_profile_is_the_recorded_one():
    assert profile.table(json.loads((FOLDER / "profile.json").read_text())) in RESULTS


def test_the_ablation_shows_what_the_paper_shows():
    result = json.loads((FOLDER / "ablation.json").read_text())
    assert ablate.table(result) in RESULTS
    *by_size, without = result["ablation"]
    sizes = [row["n_code"] for row in by_size]
    means = [row["mean_bits_per_byte"] for row in by_size]
    assert sizes == sorted(sizes)
    assert means == sorted(means, reverse=True)
    pairs = zip(by_size[-1]["bits_per_byte"], without["bits_per_byte"], strict=True)
    assert (without["n_code"], without["compressive_cache"]) == (sizes[-1], False)
    assert all(with_cache < no_cache for with_cache, no_cache in pairs)
