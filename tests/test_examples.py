"""The scripts in examples/ run without warnings, and their output shows what they promise."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
GOLDEN = ROOT / "tests" / "data" / "golden"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
SECONDS = 120


@pytest.fixture
def run(tmp_path):
    """Return a function that runs an example in tmp_path and returns what it prints."""

    def run_example(name, *options, launcher=()):
        arguments = [*launcher, str(EXAMPLES / name), *map(str, options)]
        process = subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        assert process.returncode == 0, process.stderr
        assert process.stderr == ""
        return process.stdout

    return run_example


def numbers(pattern, text):
    """Return the number in each match of a pattern with one group."""
    return [float(number.replace(",", "")) for number in re.findall(pattern, text)]


def test_every_example_is_tested_and_listed():
    names = {path.name for path in EXAMPLES.glob("*.py")}
    assert names == set(re.findall(r'run\("(\w+\.py)"', Path(__file__).read_text()))
    assert names == set(re.findall(r"\]\((\w+\.py)\)", (EXAMPLES / "README.md").read_text()))


@pytest.mark.slow
def test_custom_model_lowers_its_loss(run):
    output = run("custom_model.py")
    first, *_, last = numbers(r"loss (\S+) nats", output)
    assert first > 5.0
    assert last < 2.5
    assert len(numbers(r"layer \d: (\d+)% of the codes in use", output)) == 2


@pytest.mark.slow
def test_hugging_face_trains_saves_and_continues_a_text(run, tmp_path):
    output = run("hugging_face.py")
    first, *_, last = numbers(r"'loss': '(\S+)'", output)
    assert last < 0.7 * first
    assert numbers(r"(\d+)% of the codes", output) == [100]
    assert (tmp_path / "my-model" / "model.safetensors").is_file()
    assert len(output.partition("    def ")[2]) > 50


@pytest.mark.slow
def test_training_loop_lowers_the_held_out_bits_per_byte(run):
    output = run("training_loop.py")
    (before,) = numbers(r"before training: (\S+) bits", output)
    (after,) = numbers(r"after training: (\S+) bits", output)
    assert before > 8
    assert after < 5


@pytest.mark.slow
def test_long_document_has_a_state_of_constant_size(run):
    output = run("long_document.py")
    assert numbers(r"(\S+) tokens: state", output)[-1] > 50_000
    sizes = numbers(r"state of (\S+) bytes", output)
    assert len(sizes) == 3
    assert len(set(sizes)) == 1
    assert numbers(r"prompt together: (\S+)", output)[0] < 1e-4


def test_packed_and_padded_documents_equal_separate_ones(run):
    output = run("packed_documents.py")
    differences = numbers(r"(?:packed|padded).*: (\S+e\S+)", output)
    assert len(differences) == 3
    assert max(differences) < 1e-10


@pytest.mark.slow
def test_image_generation_completes_images(run, tmp_path):
    image = pytest.importorskip("PIL.Image")
    output = run("image_generation.py", "--rows", 2)
    assert numbers(r"validation: (\S+) bits", output)[0] < 0.5
    assert numbers(r"(\d+)% of the values are correct", output)[0] > 80
    with image.open(tmp_path / "images.png") as grid:
        assert grid.size == (2 * 64 * 4, 2 * 64 * 4)  # 2 x 2 images, pixels enlarged 4 times


@pytest.mark.slow
def test_context_parallel_losses_equal_those_of_a_single_process(run):
    sharded = run("context_parallel.py", launcher=TORCHRUN)
    assert "processes: 2, tokens per process: 256" in sharded
    assert numbers(r"from a single process: (\S+)", sharded)[0] < 1e-5


@pytest.mark.slow
def test_official_weights_without_a_file(run):
    output = run("official_weights.py")
    assert "shga, 2 layers of width 64, 64 codes" in output
    assert numbers(r"recorded logits: (\S+)", output)[0] < 1e-5


def test_official_weights_give_the_recorded_logits(run):
    output = run("official_weights.py", GOLDEN / "vq_serial_mha.npz", "--block-len", 8)
    assert "mha, 2 layers of width 16, 12 codes" in output
    assert numbers(r"recorded logits: (\S+)", output)[0] < 1e-4
