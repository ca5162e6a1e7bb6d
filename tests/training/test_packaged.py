"""Models in the package: found by name, loaded, evaluated, exported, fine-tuned, never changed."""

import fnmatch
import json
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from transformer_vq.cli.main import main
from transformer_vq.presets import PRESETS
from transformer_vq.training.checkpoint import read_config
from transformer_vq.training.metrics import read_metrics
from transformer_vq.training.packaged import (
    MODELS,
    find_run,
    is_packaged,
    packaged_models,
)

TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom.\n" * 40


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path


@pytest.fixture
def unchanged_package():
    before = {p: p.stat().st_mtime_ns for p in MODELS.rglob("*")}
    yield
    assert {p: p.stat().st_mtime_ns for p in MODELS.rglob("*")} == before


def test_name_of_a_packaged_model_is_found(here):
    assert "books" in packaged_models()
    assert find_run("books") == MODELS / "books"
    assert is_packaged(find_run("books"))
    assert find_run("nothing") == Path("nothing")
    assert find_run("../models/books") == Path("../models/books")


def test_loading_a_model_does_not_import_the_compiler():
    code = (
        "import sys, transformer_vq as t; model, tokenizer, _ = t.load_run('books'); "
        "assert 'torch._dynamo' not in sys.modules; print(len(tokenizer.encode('It was')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0


def test_run_folder_of_the_same_name_takes_precedence_over_the_package(here):
    (here / "books").mkdir()
    assert is_packaged(find_run("books"))  # a folder of texts, not a run
    (here / "books" / "config.json").write_text("{}")
    assert find_run("books") == Path("books")


def test_packaged_model_has_the_recipe_of_the_preset_and_fits_in_ten_megabytes():
    config = read_config(MODELS / "books")
    preset = PRESETS["books"]
    assert config.model == preset.model
    recipe = replace(config.train, compile=preset.train.compile)  # how it runs is not part of it
    assert (config.optim, recipe) == (preset.optim, preset.train)
    files = [path for path in (MODELS / "books").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 10_000_000
    about = "".join(path.read_text() for path in files if path.suffix in (".json", ".jsonl"))
    assert "/home/" not in about
    assert "/root/" not in about


def test_every_file_of_a_packaged_model_is_part_of_the_distribution():
    root = MODELS.parents[1]
    patterns = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = patterns["package-data"]["transformer_vq"]
    for path in MODELS.rglob("*"):
        name = path.relative_to(MODELS.parent).as_posix()
        assert path.is_dir() or any(fnmatch.fnmatch(name, pattern) for pattern in patterns), name


def test_sample_and_eval_take_the_name_and_write_nothing(here, unchanged_package, capsys):
    main(["sample", "books", "--prompt", "It was", "--tokens", "5", "--seed", "1", "--json"])
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert printed["run"] == "books"
    options = ["--data.path", "text.txt", "--data.cache", "cache", "--json"]
    main(["eval", "books", *options])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (result["run"], result["split"]) == ("books", "all")
    assert result["protocols"]["streaming"]["bytes"] == len(TEXT)
    assert 0 < result["protocols"]["streaming"]["bits_per_byte"] < 3
    assert {path.name for path in here.iterdir()} == {"text.txt", "cache"}


def run_command(capsys, command):
    """Run a command; return its exit status and stderr."""
    capsys.readouterr()
    try:
        main(command.split())
    except SystemExit as stop:
        return stop.code, capsys.readouterr().err
    return 0, capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "fix"),
    [
        ("eval books", "--data.path"),
        ("resume books", "--train.init-from books"),
        ("sample book", "run folder"),
    ],
)
def test_what_is_impossible_is_reported_with_the_fix(command, fix, here, capsys):
    status, error = run_command(capsys, command)
    assert status == 2
    assert fix in error
    assert error.count("\n") == 1


def test_plot_of_a_packaged_model_goes_to_the_working_directory(here, unchanged_package, capsys):
    main(["plot", "books"])
    assert capsys.readouterr().out.strip() == "books.png"
    assert (here / "books.png").stat().st_size > 10_000


SHORT = "--train.steps 1 --train.batch-size 1 --train.seq-len 64 --train.backprop-len 64"
SHORT += " --train.device cpu --optim.warmup 0 --data.path text.txt --data.cache cache"


@pytest.mark.parametrize("preset", ["books", "enwik8-190m --data.dataset text"])
def test_tokenizer_of_the_initial_model_takes_precedence_over_that_of_a_preset(
    here, capsys, preset
):
    wsd = "--optim.decay-share 1" if preset == "books" else "--train.precision fp32"
    command = f"train {preset} --train.init-from books {SHORT} {wsd} --out tuned"
    assert run_command(capsys, command)[0] == 0
    assert (here / "tuned/tokenizer.json").read_bytes() == (
        MODELS / "books/tokenizer.json"
    ).read_bytes()
    assert read_metrics(here / "tuned")[0]["nats_per_token"] < 6


def test_tokenizer_that_is_given_conflicts_with_that_of_the_initial_model(here, capsys):
    (here / "my.toml").write_text('preset = "tiny"\n[data]\ntokenizer = "bytes"\n')
    for given in ("tiny --data.tokenizer bytes", "--config my.toml"):
        status, err = run_command(
            capsys, f"train {given} --train.init-from books {SHORT} --out tuned"
        )
        assert status == 2
        assert "--data.tokenizer" in err
        assert err.count("\n") == 1
        assert not (here / "tuned").exists()
