"""The README is short and quotes the records; `test_commands.py` runs its commands."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def rows(name: str) -> list[dict]:
    return json.loads((ROOT / "benchmarks" / f"{name}.json").read_text())["rows"]


def test_speed_ups_are_those_of_the_records():
    (full,) = (
        row["seconds"]
        for row in rows("train-bf16-32k")
        if row["attention"] == "full" and row["seq_len"] == 32768
    )
    (vq,) = rows("train-bf16-32k-recomputed")
    assert vq["checkpoint_activations"]
    assert f"{full / vq['seconds']:.1f}x; the paper reports 12.6x" in README
    over = {2048: [], 8192: [], 32768: []}
    for row in rows("train-quick") + rows("train-fp32"):
        if row["attention"] == "vq":
            over[row["seq_len"]].append(row["over_sdpa"])
    ranges = [f"{min(x):.1f}x to {max(x):.1f}x" for x in (over[2048], over[8192])]
    at_32k = f"{over[32768][0]:.1f}x"
    assert f"{ranges[0]} at 2,048 tokens, {ranges[1]} at 8,192, {at_32k} at 32,768" in README
    (scaled,) = (
        row["over_full"]
        for row in rows("scaling")
        if row["attention"] == "vq" and row["seq_len"] == 8192
    )
    assert f"{scaled:.1f}x faster than full attention at 8,192" in README


def test_recall_and_window_results_are_those_of_the_tables():
    evidence = (ROOT / "docs" / "evidence.md").read_text()
    for task, column in (("mqar", 7), ("copy", 5)):
        table = evidence.partition(f"| {task}: accuracy")[2].partition("\n\n")[0]
        cells = {line.split(" | ")[0]: line.split(" | ") for line in table.split("\n| ")}
        models = ("VQ, 128 codes", "full attention", "window only")
        vq, full, window = (cells[model][column].split()[0] for model in models)
        assert f"VQ {vq}%, full attention {full}%, window alone {window}%" in README
    bits = dict(
        re.findall(r"^\| (full|vq|window) \| 688.*? \| .*? \| .*? \| (\S+)", evidence, re.M)
    )
    want = f"alone {bits['window']}, VQ {bits['vq']}, full attention {bits['full']}"
    assert want in README


def test_cpu_version_of_torch_is_the_pinned_one():
    (pinned,) = re.findall(r"^torch==\S+$", (ROOT / "constraints.txt").read_text(), re.M)
    for page in (README, (ROOT / "docs" / "getting-started.md").read_text()):
        assert f"pip install {pinned} --index-url https://download.pytorch.org/whl/cpu" in page


def test_the_readme_is_short():
    assert len(README.encode()) <= 12_000
