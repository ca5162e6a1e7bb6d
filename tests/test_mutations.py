"""Mutated files give the same result as intact files, or one error line and exit status 2.

If a command can continue without the file, it warns and the result is a documented one: `resume`
and `--checkpoint last` use an older checkpoint, a corpus is prepared again, and the intact lines of
metrics.jsonl are kept.
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from content_mutations import read_unchecked
from forked import Ended
from mutation_commands import BEFORE_LAST, COMMANDS, STEPS, STOPPED_AT, import_and_parse
from mutation_intact import SECONDS, Case, Workshop
from mutation_subjects import SUBJECTS, Subject
from mutations import exchange, folder_replaced_by_another
from safetensors import SafetensorError

from transformer_vq.files import DIGEST, CorruptFileError, read_json
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
        self.case, self.workshop = case, workshop
        subject = SUBJECTS[case.subject]
        self.result = workshop.result(subject, case.command)
        self.fallback, self.warning = None, ""
        path = folder / case.path
        if case.command == "eval last":
            self.fallback = workshop.result(subject, f"eval {BEFORE_LAST}")
            # Without its folder, a newer checkpoint cannot be detected.
            is_gone = not (path if "." not in path.name else path.parent).is_dir()
            self.warning = "" if is_gone else "trying the checkpoint before it"
        elif case.path == "run/evaluation-test.json" and not os.path.lexists(path):
            self.fallback = self._without_evaluation(subject)
        elif case.path == "run/metrics.jsonl" and case.subject != "run without checkpoint":
            kept, n_corrupt = _kept_lines(workshop.intact / subject.copies["run"], folder / "run")
            self.fallback = self._without_lines(subject, kept)
            self.warning = "are corrupt" if n_corrupt else ""
        self.must_succeed = self._is_recoverable(path)

    def _is_recoverable(self, path: Path) -> bool:
        """Whether the command can continue: a copy or the source of the file is still intact."""
        if self.case.path.startswith("home/cache/"):
            return True
        if self.case.path == "run/metrics.jsonl":
            return path.is_file() and self.fallback is not None
        # A checkpoint of another run is an error: either of the two runs could be meant.
        is_checkpoint = self.case.path.startswith("run/checkpoints/")
        return is_checkpoint and self.case.mutate not in (exchange, folder_replaced_by_another)

    def _without_lines(self, subject: Subject, kept: list[dict[str, Any]]) -> Any:
        if self.case.command == "resume":
            names = [(row["kind"], row["step"]) for row in kept]
            found = [x for x in self.result["losses"] if x[1] > STOPPED_AT or x[:2] in names]
            return {**self.result, "losses": found}
        with self.workshop.copy(subject) as folder:
            path = folder / "run" / "metrics.jsonl"
            path.write_text("".join(f"{json.dumps(row)}\n" for row in kept))
            ended = self.workshop.run(folder, self.case.command)
            return COMMANDS[self.case.command].result(folder, ended) if ended.status == 0 else None

    def _without_evaluation(self, subject: Subject) -> Any:
        name = "run/evaluation-test.png"
        files = {k: x for k, x in self.result["files"].items() if k != name}
        return {"out": self.result["out"].replace(f"{name}\n", ""), "files": files}

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
        if result == self.result:
            return None
        if result != self.fallback:
            return f"wrong result\n{result}\ninstead of\n{self.result}\n{ended.err}"
        return None if self.warning in ended.err else f"no warning {self.warning!r}\n{ended.err}"


def _kept_lines(intact: Path, run: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the rows of unmutated lines, and the number of mutated complete lines.

    A log without its last lines is valid: it looks like that of a shorter run.
    """
    rows = [json.loads(line) for line in (intact / "metrics.jsonl").read_text().splitlines()]
    path = run / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []
    found = [_parsed(line) for line in lines]
    return [row for row in found if row in rows], sum(row not in rows for row in found)


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


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


def trust_json(path: Path) -> dict[str, Any]:
    value = read_json(path)
    if not isinstance(value, dict):
        raise CorruptFileError(f"{path} does not contain an object")
    return {key: x for key, x in value.items() if key != DIGEST}


def trust_tensors(path: Path, digest: str | None = None) -> tuple[dict[str, Any], dict[str, str]]:
    try:
        tensors, metadata = read_unchecked(path)
    except (SafetensorError, OSError) as error:
        raise CorruptFileError(str(error)) from error
    return tensors, {key: x for key, x in metadata.items() if key != DIGEST}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("check", "replacement", "name"),
    [
        ("read_verified_json", trust_json, "config"),
        ("read_tensors", trust_tensors, "initial model"),
        ("verify", lambda folder, records: None, "corpus"),
        ("check_folder", lambda folder, only=None: None, "export"),
    ],
    ids=["json", "tensors", "corpus", "export"],
)
def test_mutations_detect_a_disabled_check(workshop, monkeypatch, check, replacement, name):
    for module in [x for key, x in sys.modules.items() if key.startswith("transformer_vq")]:
        if check in vars(module):
            monkeypatch.setattr(module, check, replacement)
    # Many mutations are detected in other ways, so this may need more cases than the other tests.
    assert any(problem(workshop, name, number) for number in range(400))


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


@pytest.mark.parametrize("command", ["load AutoConfig", "load our Config"])
def test_edited_config_of_an_export_is_rejected(workshop, command):
    def change(folder: Path) -> None:
        path = folder / "export" / "config.json"
        path.write_text(path.read_text().replace('"n_code": 7', '"n_code": 8'))

    assert "config.json" in ended_with(workshop, "export", command, change).err
