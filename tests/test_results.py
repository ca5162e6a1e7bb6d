"""benchmarks/RESULTS.md says what the files beside it say."""

import json
import re
from pathlib import Path

import pytest

from transformer_vq.bench import train

FOLDER = Path(__file__).parent.parent / "benchmarks"
RESULTS = (FOLDER / "RESULTS.md").read_text()
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
    assert named >= {path.name for path in GRIDS}
    assert all((FOLDER / name).is_file() for name in named)


def test_what_is_claimed_was_measured():
    low, high = rows("bf16"), rows("fp32")
    shares = {head: low[head, "auto", 8192]["share_of_rate"]["bf16"] for head in train.HEAD_TYPES}
    assert shares["shga"] >= 0.85
    assert min(shares.values()) >= 0.70
    assert high["shga", "auto", 8192]["over_full"] >= 3.2
    assert low["shga", "auto", 2048]["over_full"] >= 1.0


@pytest.mark.parametrize(("name", "head"), [("shga", "shga"), ("heads", "mqa"), ("mha", "mha")])
def test_a_token_costs_as_much_in_a_long_sequence(name, head):
    found = rows(f"long-{name}")
    short, long = (found[head, "auto", n]["tokens_per_second"] for n in (8192, 131_072))
    assert long >= 0.9 * short
    assert f"{long / short:.2f} ({head.upper()}" in RESULTS
