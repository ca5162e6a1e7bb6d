"""The help of every command: readable at 80 columns, important options first."""

import re
from pathlib import Path

import pytest
from command_lines import OPTIONS

from transformer_vq import PRESETS
from transformer_vq.cli.arguments import config_fields, parse
from transformer_vq.cli.main import main
from transformer_vq.cli.train import TrainOptions
from transformer_vq.config import FREE_FIELDS

SECTIONS = ("data", "train", "model", "optim", "parallel")


def help_of(capsys, *arguments, flag="--help"):
    """Return what a command prints that must exit with status 0."""
    capsys.readouterr()
    status = 0
    try:
        main([*arguments, flag])
    except SystemExit as stop:
        status = stop.code
    assert not status
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def listed(out):
    """Return the options that a help text explains, in order."""
    return re.findall(r"^\W*(--[a-z][a-z.-]+)", out, re.MULTILINE)


@pytest.mark.parametrize("command", [*OPTIONS, "train tiny", ""])
def test_help_fits_80_columns(capsys, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    out = help_of(capsys, *command.split(), flag="--help-all")
    assert not [line for line in out.splitlines() if len(line) > 80]


@pytest.mark.parametrize("command", ["train", "resume", "doctor"])
def test_help_for_narrow_terminals_does_not_break_options(capsys, monkeypatch, command):
    found = []
    for columns in ("80", "40"):
        monkeypatch.setenv("COLUMNS", columns)
        found.append(set(re.findall(r"--[a-z][a-z.-]+|optim\.[a-z-]+", help_of(capsys, command))))
    assert found[0] == found[1]


@pytest.mark.parametrize("command", ["train", "train tiny", "info", "config"])
def test_help_lists_the_settings_that_people_use_and_where_all_are(capsys, command):
    short = help_of(capsys, *command.split())
    names = [name for name in listed(short) if "." in name]
    assert 10 < len(names) < 20
    assert {"--data.path", "--train.steps", "--train.init-from", "--optim.lr"} <= set(names)
    assert "--help-all" in short
    assert "tvq config" in " ".join(short.split())
    everything = help_of(capsys, *command.split(), flag="--help-all")
    settings = {f"--{name.replace('_', '-')}" for name in config_fields()}
    assert {name for name in listed(everything) if "." in name} == settings


def test_help_is_shown_although_other_options_are_given(capsys):
    assert "--data.path" in help_of(capsys, "train", "tiny", "--model.n-code", "3")


@pytest.mark.parametrize("command", ["train", "info"])
def test_help_lists_the_sections_that_change_most_first(capsys, command):
    names = listed(help_of(capsys, *command.split(), flag="--help-all"))
    sections = [name[2:].partition(".")[0] for name in names if "." in name]
    assert list(dict.fromkeys(sections)) == list(SECTIONS)
    assert "." not in names[0]


def test_help_of_train_starts_with_its_own_options(capsys):
    assert listed(help_of(capsys, "train"))[:3] == ["--out", "--config", "--json"]


def test_help_shows_options_with_any_number_of_values_readably(capsys):
    out = help_of(capsys, "train", flag="--help-all")
    assert "--data.path PATH ..." in out
    assert "(default: )" not in out
    assert "--images PATH ..." in help_of(capsys, "sample")


def test_help_joins_the_lines_of_a_sentence(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    out = help_of(capsys, "train", flag="--help-all")
    assert "at every step, independent of the learning rate." in out


def test_help_of_resume_lists_only_options_that_may_change(capsys):
    names = listed(help_of(capsys, "resume", flag="--help-all"))
    assert {name for name in names if "." in name} == {
        f"--{name.replace('_', '-')}" for name in FREE_FIELDS
    }


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [([], None), (["--train.compile"], True), (["--train.no-compile"], False)],
)
def test_an_option_that_may_be_none_is_a_pair_of_flags(arguments, expected):
    tiny = TrainOptions(PRESETS["tiny"], Path("run"))
    assert parse(TrainOptions, arguments, "train", tiny).run.train.compile is expected
