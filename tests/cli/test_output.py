"""Output that several commands share."""

import sys

import pytest

from transformer_vq.cli.output import program_name


@pytest.mark.parametrize(
    ("path", "typed", "expected"),
    [
        ("", ".venv/bin/tvq", ".venv/bin/tvq"),
        ("bin", "bin/tvq", "tvq"),
        ("bin", "other/tvq", "other/tvq"),
        ("", "x/__main__.py", f"{sys.executable} -m transformer_vq"),
    ],
)
def test_suggested_commands_start_as_the_current_one(tmp_path, monkeypatch, path, typed, expected):
    for name in (".venv/bin", "bin", "other"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "tvq").touch(mode=0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / path) if path else "")
    monkeypatch.setattr("sys.argv", [typed, "demo"])
    assert program_name() == expected
