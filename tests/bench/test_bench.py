"""Behaviour that several benchmarks share, and the equality that the demo prints."""

import subprocess
import sys

import pytest

from transformer_vq.bench import context
from transformer_vq.bench.equality import differences
from transformer_vq.cli.bench import BENCHES
from transformer_vq.cli.main import main
from transformer_vq.errors import UserError
from transformer_vq.files import check_can_write


def test_linear_time_attention_equals_the_definition():
    found = list(differences(seq_len=50, block_len=8))
    names = ["auto", "serial", "matmul", "associative", "input_scan"]
    assert [row[:2] for row in found] == [
        (h, name) for h in ("shga", "mqa", "mha") for name in names
    ]
    assert all(output < 1e-12 and gradients < 1e-12 for _, _, output, gradients in found)


def failing(monkeypatch, error):
    """Run a benchmark that raises an error; return its exit status."""

    def fail(time_limit):
        raise error

    monkeypatch.setattr(context, "measure", fail)
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "context"])
    return stopped.value.code


def test_interrupt_is_one_line(monkeypatch, capsys):
    assert failing(monkeypatch, KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == "tvq: interrupted\n"


def test_user_error_is_one_line(monkeypatch, capsys):
    assert failing(monkeypatch, UserError("wrong; do this")) == 2
    assert capsys.readouterr().err == "tvq: wrong; do this\n"


@pytest.mark.parametrize("bug", [ValueError("a bug"), RuntimeError("a bug"), KeyError("a bug")])
def test_bug_shows_its_traceback(bug, monkeypatch, capsys):
    assert failing(monkeypatch, bug) == 1
    error = capsys.readouterr().err
    assert error.startswith("Traceback")
    assert f"{type(bug).__name__}: {bug}" in error


@pytest.mark.parametrize(
    "command",
    ["compare run", "context", "decode", "documents", "first-token run --text x", "train"],
)
def test_output_in_a_missing_folder_is_one_line(command, tmp_path, capsys):
    path = tmp_path / "missing" / "record.json"
    with pytest.raises(SystemExit) as stopped:
        main(["bench", *command.split(), "--out", str(path)])
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(path.parent) in line


def test_check_can_write_rejects_an_existing_file_without_overwrite(tmp_path):
    path = tmp_path / "record.json"
    check_can_write("--out", None, False)
    check_can_write("--out", path, False)
    path.touch()
    with pytest.raises(UserError, match="--overwrite"):
        check_can_write("--out", path, False)
    check_can_write("--out", path, True)
    for bad in (tmp_path, tmp_path / "missing" / "record.json"):
        with pytest.raises(UserError, match="--out"):
            check_can_write("--out", bad, True)


@pytest.mark.parametrize("command", ["compare run", "context", "first-token run --text x"])
def test_benchmark_keeps_an_existing_output_file(command, tmp_path, capsys):
    path = tmp_path / "record.json"
    path.write_text("kept")
    with pytest.raises(SystemExit) as stopped:
        main(["bench", *command.split(), "--out", str(path)])
    assert stopped.value.code == 2
    assert "--overwrite" in capsys.readouterr().err
    assert path.read_text() == "kept"


def test_help_of_every_benchmark_does_not_import_torch():
    program = """
import sys
from transformer_vq.cli.main import main
for name in sys.argv[1:]:
    try:
        main(["bench", *name.split(), "--help"])
    except SystemExit as stop:
        assert not stop.code
assert "torch" not in sys.modules
"""
    command = [sys.executable, "-c", program, "", *BENCHES]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert all(f"tvq bench {name}" in printed for name in BENCHES)
