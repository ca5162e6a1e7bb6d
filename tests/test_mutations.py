"""Mutated files give the same result as intact files, or one error line and exit status 2.

If a command can continue without the file, it warns and the result is a documented one: `resume`
and `--checkpoint last` use an older checkpoint, and a corpus is prepared again. Files that may be
edited are used with a warning. Logs have no checksums; they never change a model.
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from forked import Ended
from mutation_commands import BEFORE_LAST, COMMANDS, STEPS, import_and_parse
from mutation_intact import SECONDS, Case, Workshop
from mutation_subjects import SUBJECTS
from mutations import exchange, folder_replaced_by_another

from transformer_vq.training.checkpoint import checkpoint_folder

SLOW = 10  # factor for the number of cases


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    import_and_parse()
    root = tmp_path_factory.mktemp("mutations")
    yield Workshop(root)
    shutil.rmtree(root)


def problem(workshop: Workshop, name: str, number: int) -> str | None:
    """Run one case; return what went wrong, or None."""
    with workshop.copy(SUBJECTS[name]) as folder:
        case, target = workshop.case(name, number, folder)
        case.mutate(target)
        expected = Expected(workshop, case, folder)
        ended = workshop.run(folder, case.command)
        wrong = expected.problem(folder, ended)
    what = f"{case.mutate.__name__} of {case.path} ({target.note}), then {case.command}"
    return None if wrong is None else f"case {number} of {name!r}: {what}: {wrong}"


class Expected:
    """The outcomes that are allowed after a mutation."""

    def __init__(self, workshop: Workshop, case: Case, folder: Path) -> None:
        self.case = case
        subject = SUBJECTS[case.subject]
        self.result = workshop.result(subject, case.command)
        self.fallback, self.warning = None, ""
        path = folder / case.path
        if case.command == "eval last":
            self.fallback = workshop.result(subject, f"eval {BEFORE_LAST}")
            # Without its folder, a newer checkpoint cannot be detected.
            is_gone = not (path if "." not in path.name else path.parent).is_dir()
            self.warning = "" if is_gone else "trying the checkpoint before it"
        self.must_succeed = self._is_recoverable(path)

    def _is_recoverable(self, path: Path) -> bool:
        """Whether the command can continue: a copy or the source of the file is still intact."""
        if self.case.path.startswith("home/cache/"):
            return True
        if self.case.path == "run/metrics.jsonl":
            return self.case.command == "resume" and path.is_file()
        # A checkpoint of another run is an error: either of the two runs could be meant.
        is_checkpoint = self.case.path.startswith("run/checkpoints/")
        return is_checkpoint and self.case.mutate not in (exchange, folder_replaced_by_another)

    def _is_reported_or_a_log(self, result: Any, ended: Ended) -> bool:
        """Whether another result is allowed: files that may be edited, and logs of results."""
        if "was edited" in ended.err or self.case.command in ("info", "plot"):
            return True
        is_log = self.case.path == "run/metrics.jsonl"
        return is_log and result["model"] == self.result["model"]

    def problem(self, folder: Path, ended: Ended) -> str | None:
        if ended.timed_out:
            return f"not done after {SECONDS} s"
        if ended.has_traceback or ended.status not in (0, 2):
            return f"exit status {ended.status}\n{ended.err}"
        if ended.status == 2 and self.must_succeed:
            return f"should have continued\n{ended.err}"
        if ended.status == 2:
            *before, last = ended.err.splitlines() or [""]
            is_one_line = last.startswith("tvq: ") and not any(
                x.startswith("tvq: ") for x in before
            )
            return None if is_one_line else f"not exactly one error line\n{ended.err}"
        result = COMMANDS[self.case.command].result(folder, ended)
        if result == self.result or self._is_reported_or_a_log(result, ended):
            return None
        if result != self.fallback:
            return f"wrong result\n{result}\ninstead of\n{self.result}\n{ended.err}"
        return None if self.warning in ended.err else f"no warning {self.warning!r}\n{ended.err}"


def check(workshop: Workshop, name: str, numbers: range) -> None:
    found = [wrong for n in numbers if (wrong := problem(workshop, name, n)) is not None]
    assert not found, f"{len(found)} of {len(numbers)}:\n\n" + "\n\n".join(found)


@pytest.mark.parametrize("name", SUBJECTS)
def test_mutated_files_give_the_exact_result_or_one_line(workshop, name):
    check(workshop, name, range(SUBJECTS[name].n_cases))


@pytest.mark.slow
@pytest.mark.parametrize("name", SUBJECTS)
def test_many_mutated_files_give_the_exact_result_or_one_line(workshop, name):
    n = SUBJECTS[name].n_cases
    check(workshop, name, range(n, n + SLOW * n))


@pytest.mark.slow
def test_mutations_detect_a_disabled_check(workshop, monkeypatch):
    for module in [x for key, x in sys.modules.items() if key.startswith("transformer_vq")]:
        if "check_manifest" in vars(module):
            monkeypatch.setattr(module, "check_manifest", lambda *args, **kwargs: [])
    # Many mutations are detected in other ways, so this may need more cases than the other tests.
    assert any(problem(workshop, "export", number) for number in range(400))


def ended_with(workshop: Workshop, name: str, command: str, change: Callable[[Path], Any]) -> Any:
    """Change a copy of the intact files and run a command; return its result or how it ended."""
    with workshop.copy(SUBJECTS[name]) as folder:
        change(folder)
        ended = workshop.run(folder, command)
        return COMMANDS[command].result(folder, ended) if ended.status == 0 else ended


@pytest.mark.parametrize("other", ["other", "twin"])
def test_eval_last_rejects_a_checkpoint_of_another_run(workshop, other):
    def change(folder: Path) -> None:
        shutil.rmtree(last := checkpoint_folder(folder / "run", STEPS))
        shutil.copytree(checkpoint_folder(workshop.intact / other, STEPS), last)

    ended = ended_with(workshop, "finished run", "eval last", change)
    assert ended.status == 2
    assert "another run" in ended.err


def test_resume_replaces_a_file_with_the_name_of_a_checkpoint(workshop):
    def change(folder: Path) -> None:
        shutil.rmtree(last := checkpoint_folder(folder / "run", STEPS))
        last.write_text("")

    result = ended_with(workshop, "finished run", "resume", change)
    assert result == workshop.result(SUBJECTS["finished run"], "resume")


def test_checkpoint_folders_with_invalid_names_are_ignored(workshop):
    def change(folder: Path) -> None:
        (folder / "run" / "checkpoints" / "step-\u00b2").mkdir()

    result = ended_with(workshop, "finished run", "eval last", change)
    assert result == workshop.result(SUBJECTS["finished run"], "eval last")


@pytest.mark.parametrize("command", ["eval", "resume"])
def test_corpus_of_other_data_is_prepared_again(workshop, command):
    def change(folder: Path) -> None:
        (corpus,) = folder.glob("home/cache/text-*")
        shutil.rmtree(corpus)
        shutil.copytree(workshop.intact / "other-corpus", corpus)

    assert ended_with(workshop, "corpus", command, change) == workshop.result(
        SUBJECTS["corpus"], command
    )


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("config.json", "load AutoConfig"),
        ("config.json", "load our Config"),
        ("tokenizer_config.json", "load our Tokenizer"),
        ("generation_config.json", "load our ModelForCausalLM"),
    ],
)
def test_edited_settings_of_an_export_are_reported(workshop, name, command):
    with workshop.copy(SUBJECTS["export"]) as folder:
        path = folder / "export" / name
        path.write_text(path.read_text() + "\n")
        ended = workshop.run(folder, command)
    assert ended.status == 0
    assert f"{name} was edited" in ended.err
