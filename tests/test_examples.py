"""The scripts in examples/ run without warnings, and their output shows what they promise."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
GOLDEN = ROOT / "tests" / "data" / "golden" / "vq_serial_mha.npz"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
SECONDS = 120
CHECKS = {  # command -> conditions for the numbers that it prints
    "custom_model.py": {
        r"loss (\S+) nats": lambda x: x[0] > 5 and x[-1] < 2.5,
        r"layer \d: (\d+)% of the codes in use": lambda x: len(x) == 2,
    },
    "hugging_face.py": {
        r"'loss': '(\S+)'": lambda x: x[-1] < 0.7 * x[0],
        r"(\d+)% of the codes": lambda x: x == [100],
    },
    "training_loop.py": {
        r"before training: (\S+) bits": lambda x: x[0] > 8,
        r"after training: (\S+) bits": lambda x: x[0] < 5,
    },
    "long_document.py": {
        r"(\S+) tokens: state": lambda x: x[-1] > 50_000,
        r"state of (\S+) bytes": lambda x: len(x) == 3 and len(set(x)) == 1,
        r"prompt together: (\S+)": lambda x: x[0] < 1e-4,
    },
    "packed_documents.py": {
        r"(?:packed|padded).*: (\S+e\S+)": lambda x: len(x) == 3 and max(x) < 1e-10,
    },
    "image_generation.py --rows 2": {
        r"validation: (\S+) bits": lambda x: x[0] < 0.5,
        r"(\d+)% of the values are correct": lambda x: x[0] > 80,
    },
    "context_parallel.py": {
        r"processes: 2, tokens per process: (\d+)": lambda x: x == [256],
        r"from a single process: (\S+)": lambda x: x[0] < 1e-5,
    },
    "official_weights.py": {
        r"shga, 2 layers of width 64, (\d+) codes": lambda x: x == [64],
        r"recorded logits: (\S+)": lambda x: x[0] < 1e-5,
    },
    f"official_weights.py {GOLDEN} --block-len 8": {
        r"mha, 2 layers of width 16, (\d+) codes": lambda x: x == [12],
        r"recorded logits: (\S+)": lambda x: x[0] < 1e-4,
    },
}
FILES = {"hugging_face.py": "my-model/model.safetensors", "image_generation.py": "images.png"}
QUICK = {"packed_documents.py", f"official_weights.py {GOLDEN} --block-len 8"}


def test_every_example_is_tested_and_listed():
    names = {path.name for path in EXAMPLES.glob("*.py")}
    assert names == {command.split()[0] for command in CHECKS}
    assert names == set(re.findall(r"\]\((\w+\.py)\)", (EXAMPLES / "README.md").read_text()))


@pytest.mark.parametrize(
    "command",
    [pytest.param(x, marks=() if x in QUICK else pytest.mark.slow) for x in CHECKS],
    ids=lambda command: command.replace(str(GOLDEN.parent), ""),
)
def test_example_prints_what_it_promises(command, tmp_path):
    name, *options = command.split()
    launcher = TORCHRUN if name == "context_parallel.py" else []
    process = subprocess.run(
        [sys.executable, *launcher, str(EXAMPLES / name), *options],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert process.returncode == 0, process.stderr
    assert process.stderr == ""
    for pattern, is_fine in CHECKS[command].items():
        found = re.findall(pattern, process.stdout)
        assert found, pattern
        assert is_fine([float(number.replace(",", "")) for number in found]), (pattern, found)
    assert (tmp_path / FILES.get(name, ".")).exists()
