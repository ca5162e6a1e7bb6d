"""Intact runs, corpora, snapshots and exports for the mutation tests, and copies to mutate."""

from __future__ import annotations

import os
import random
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from content_mutations import SEALED, Mutate, Target
from forked import Ended, run_forked
from mutation_commands import COMMANDS, STOPPED_AT, in_folder, small_run
from mutation_subjects import SUBJECTS, Subject
from mutations import choose, mutations_of
from sentencepiece_models import train_sentencepiece

from transformer_vq.config import DataConfig, RunConfig
from transformer_vq.data.corpus import Corpus
from transformer_vq.data.prepare import prepare
from transformer_vq.training.run import train
from transformer_vq.training.step import Trainer

SECONDS, MEMORY_GB = 20.0, 4.0


@dataclass(frozen=True)
class Case:
    """One mutation of one file, and the command that runs after it."""

    subject: str
    number: int
    path: str
    mutate: Mutate
    command: str


class Workshop:
    """Intact files, the results of all commands on them, and a folder for mutated copies."""

    def __init__(self, root: Path) -> None:
        self.intact, self.copies = root / "intact", root / "copies"
        self.intact.mkdir()
        self.copies.mkdir()
        make_intact(self.intact)
        self._results: dict[tuple[str, ...], Any] = {}

    @contextmanager
    def copy(self, subject: Subject) -> Iterator[Path]:
        """Yield a folder with copies of the intact files."""
        with tempfile.TemporaryDirectory(dir=self.copies) as name:
            folder = Path(name)
            for new, old in subject.copies.items():
                source = self.intact / old
                (shutil.copytree if source.is_dir() else shutil.copy)(source, folder / new)
            for meta in folder.glob("home/cache/*/meta.json"):
                Corpus.open(meta.parent)  # mark as verified; later changes must be detected
            yield folder

    def run(self, folder: Path, command: str) -> Ended:
        home = folder / "home" if (folder / "home").exists() else self.intact / "home"
        work = in_folder(folder, home, COMMANDS[command].run)
        return run_forked(work, seconds=SECONDS, memory_gb=MEMORY_GB)

    def result(self, subject: Subject, command: str) -> Any:
        """Return the result of a command on intact files."""
        key = (*subject.copies.values(), command)
        if key not in self._results:
            with self.copy(subject) as folder:
                ended = self.run(folder, command)
                assert ended.status == 0, ended.err
                self._results[key] = COMMANDS[command].result(folder, ended)
        return self._results[key]

    def case(self, name: str, number: int, folder: Path) -> tuple[Case, Target]:
        """Return the case with this number: files take turns, mutation and command are random."""
        subject, generator = SUBJECTS[name], random.Random(f"{name} {number}")
        found = [
            (str(path.relative_to(folder)), commands)
            for pattern, commands in subject.commands.items()
            for path in sorted(folder.glob(pattern))
        ]
        path, commands = found[number % len(found)]
        target = Target(folder / path, generator, self._donors(subject, path, folder))
        kinds = mutations_of(target.path, bool(target.donors))
        if target.path.suffix == ".safetensors" and any(fnmatch(path, x) for x in subject.sealed):
            kinds += SEALED
        mutate = choose(kinds, generator)
        return Case(name, number, path, mutate, generator.choice(commands)), target

    def _donors(self, subject: Subject, path: str, folder: Path) -> tuple[Path, ...]:
        first, _, rest = path.partition("/")
        itself = self.intact / subject.copies[first] / rest
        names = [x for pattern, xs in subject.donors.items() if fnmatch(path, pattern) for x in xs]
        found = [self.intact / name for name in names]
        is_folder = (folder / path).is_dir()
        return tuple(x for x in found if x != itself and x.is_dir() == is_folder)


def make_intact(root: Path) -> None:
    """Create all files to mutate, in child processes as in the cases."""
    home = root / "home"
    home.mkdir()
    config = small_run(home)
    other = replace(config, model=replace(config.model, n_code=5))
    twin = replace(config, train=replace(config.train, seed=1))
    books = replace(
        config,
        model=replace(config.model, vocab_size=300),
        data=DataConfig(
            "pg19",
            path=_books(root / "texts" / "books"),
            tokenizer=str(root / "books.model"),
            cache="~/cache",
        ),
        train=replace(config.train, steps=3),
    )
    for path in [*home.rglob("*.txt"), *root.rglob("books/*/*.txt")]:
        os.utime(path, (1e9, 1e9))  # part of the names of corpora, which must not change
    for work in (
        lambda: train_sentencepiece(_lines("cat"), 300, root / "books.model"),
        lambda: train(config, root / "finished"),
        lambda: _stopped(config, root / "stopped"),
        lambda: _killed(config, root / "started"),
        lambda: train(other, root / "other"),
        lambda: train(twin, root / "twin"),
        lambda: train(books, root / "books"),
        lambda: train_sentencepiece(_lines("dog"), 300, root / "vocabulary.model"),
        lambda: _prepare_other_corpus(root),
    ):
        _done(run_forked(in_folder(root, home, work)), allowed=(0, -signal.SIGKILL))
    for arguments in (
        "eval finished --device cpu",
        "sample finished --tokens 0 --prompt the.cat --save-state state.safetensors",
        "sample other --tokens 0 --prompt the.cat --save-state other-state.safetensors",
        *("export finished export", "export other other-export", "export books books-export"),
    ):
        _done(run_forked(in_folder(root, home, arguments)))


def _done(ended: Ended, allowed: tuple[int, ...] = (0,)) -> None:
    assert ended.status in allowed, ended.err


def _stopped(config: RunConfig, run: Path) -> None:
    """Stop a run in the middle, with a checkpoint."""
    _signal_at(STOPPED_AT - 1, signal.SIGTERM)
    train(config, run)


def _killed(config: RunConfig, run: Path) -> None:
    """Kill a run before its first checkpoint."""
    _signal_at(1, signal.SIGKILL)
    train(config, run)


def _signal_at(step: int, number: int) -> None:
    train_step = Trainer.step

    def and_signal(self: Trainer, batch: Any, at: int, begins: bool, ends: bool) -> Any:
        if at == step:
            os.kill(os.getpid(), number)
        return train_step(self, batch, at, begins, ends)

    Trainer.step = and_signal  # type: ignore[method-assign]


def _prepare_other_corpus(root: Path) -> None:
    text = root / "texts" / "other"
    text.mkdir()
    for number in range(3):
        (text / f"{number}.txt").write_text("".join(_lines(f"{number} fox")))
    corpus = prepare(DataConfig(path=str(text), cache=str(root)))
    corpus.folder.rename(root / "other-corpus")


def _books(folder: Path) -> str:
    for split in ("train", "validation", "test"):
        (folder / split).mkdir(parents=True)
        n_lines = 60 if split == "train" else 6
        (folder / split / "1.txt").write_text("".join(_lines(f"{split} fox")[:n_lines]))
    return str(folder)


def _lines(who: str) -> list[str]:
    return [f"In {1800 + i} the {who} saw {i} of them.\n" for i in range(60)]
