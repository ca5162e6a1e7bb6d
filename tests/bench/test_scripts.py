"""Every benchmark runs with a tiny setting, writes its record, and prints its table."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # each script is a new process; test_results.py imports all of them
ROOT = Path(__file__).parents[2]
SHAPE = "--d-model 16 --n-layer 1 --d-k 8 --n-code 8 --block-len 8 --vocab-size 16 --device cpu"
RUN = (
    "tiny --model.d-model 16 --model.n-layer 1 --model.d-k 8 --model.n-code 8 --model.block-len 8 "
    "--train.batch-size 2 --train.seq-len 32 --train.backprop-len 16 --train.steps 2 "
    "--train.eval-every 2 --train.save-every 2 --train.eval-tokens 64 --data.path texts"
)
RECALL = (
    "--d-model 8 --n-layer 1 --d-k 4 --block-len 4 --steps 2 --step-tokens 64 --train-len 32 "
    "--lengths 20 32 --eval-sequences 2 --pairs 2 --copied 4 --value-len 2 --codes 3 --seeds 1"
)
LINES = {
    "train": (f"{SHAPE} --head-types shga --kinds full auto --lengths 16 --repeats 1", "rows"),
    "documents": (f"{SHAPE} --seq-len 32 --document-len 8 --repeats 1", "rows"),
    "profile_step": (f"{RUN} --steps 1", "profile"),
    "ablate": (f"{RUN} --codes 4 --seeds 1 --runs runs", "ablation"),
    "variants": (f"{RUN} --variants vq full:model.attention=full --seeds 1 --runs runs", "trials"),
    "scaling": (f"{RUN} --codes 2 3 --sizes 8x1 --seeds 1 --runs runs", "trials"),
    "recall": (f"{RECALL} --models full vq", "recall"),
    "decode": ("--preset tiny --contexts 8 --batches 1 --kinds vq --prefills 8", "decode"),
    "compress": ("--data.path texts/0.txt --train-path texts/1.txt --orders 0", "compression"),
    "prepare": ("--path texts --vocab-size 270 --megabytes 1", "rows"),
    "kernels": ("--targets sm_80 --dtypes bf16", "kernels"),
    "serve": ("books --text texts/0.txt --clients 1 --minutes 0.02 --requests 1 --max-prompt 4 "
              "--max-tokens 3", "serve"),
    "first_token": ("books --text texts/0.txt --tokens 8 --gpt2-tokens", "first_token"),
    "context": ("", "rows"),
    "distributed": ("--n-layer 1", "optimizers"),
}  # fmt: skip
WITHOUT_FIGURE = {"documents", "prepare", "kernels", "serve", "context", "distributed"}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "texts").mkdir()
    for i in range(3):
        text = " ".join(f"word{(i + 1) * j % 97}" for j in range(4000))
        (tmp_path / "texts" / f"{i}.txt").write_text(text)
    return tmp_path


def run(folder, script, line):
    environment = os.environ | {"XDG_CACHE_HOME": str(folder / "cache"), "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, ROOT / "benchmarks" / f"{script}.py", *line.split()],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("script", LINES)
def test_script_writes_its_record_and_prints_its_table(script, folder):
    line, key = LINES[script]
    if script == "kernels":
        pytest.importorskip("triton")
    done = run(folder, script, f"{line} --out new.json")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n|") >= 2
    assert json.loads((folder / "new.json").read_text())[key]
    assert (folder / "new.png").exists() == (script not in WITHOUT_FIGURE)


@pytest.mark.parametrize(
    ("script", "line", "message"),
    [
        ("profile_step", f"{RUN} --model.vocab-size 100", "vocabulary of 257 tokens"),
        ("decode", "--preset tiny --contexts 0 --kinds vq", "--contexts 0"),
        ("compress", "", "--data.path"),
    ],
)
def test_mistake_is_one_line(script, line, message, folder):
    done = run(folder, script, line)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
