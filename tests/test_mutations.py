"""Damaged files: a command gives the exact result of intact files, or one line and exit status 2.

Each case damages one file or folder, chosen by its number, so failures are reproducible. If a
command can continue without the file, it must: `resume` and `eval --checkpoint last` use an older
checkpoint, and a corpus is prepared again. Settings that may be edited are used with a warning.
"""

from __future__ import annotations

import hashlib
import io
import json
import random
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import interrupt_after, losses, tiny_run
from safetensors import safe_open
from safetensors.torch import save_file

from transformer_vq import train
from transformer_vq.cli.main import main
from transformer_vq.files import check_large_files, write_tensors

N_QUICK, N_SLOW = 30, 240
STEPS, STOPPED_AT = 6, 5  # checkpoints: steps 2, 4 and 5
EVAL = "eval run --json --device cpu"
SAMPLE = "sample run --device cpu --seed 1 --tokens 12"


# Commands: each one returns its result, which must not depend on damage that it survives.


def tvq(line: str) -> None:
    main(line.split())


def resume() -> Any:
    tvq("resume run")
    return losses(Path("run")), digests("run/checkpoints/step-00000006/shard-00000.safetensors")


def export() -> Any:
    tvq("export run new-export")
    return digests("new-export/*")


def load(name: str) -> Callable[[], Any]:
    """Load an exported folder with transformers; errors are reported as `tvq` does."""

    def command() -> Any:
        import transformers

        import transformer_vq.hf  # noqa: F401  registers the Auto classes

        try:
            loaded = getattr(transformers, name).from_pretrained("export")
        except Exception as error:  # of any type, because transformers reads some files first
            print("tvq:", " ".join(str(error).split())[:500], file=sys.stderr)
            raise SystemExit(2) from error
        if name == "AutoConfig":
            return loaded.to_diff_dict()
        if name == "AutoTokenizer":
            return loaded("In 1805 the fox").input_ids
        return loaded(input_ids=torch.tensor([[0, 73, 110, 32]])).logits.tolist()

    return command


def digests(pattern: str) -> dict[str, str]:
    files = sorted(Path().glob(pattern))
    return {str(x): hashlib.sha256(x.read_bytes()).hexdigest() for x in files}


COMMANDS: dict[str, Callable[[], Any]] = {
    "resume": resume,
    "eval": lambda: tvq(EVAL),
    "eval last": lambda: tvq(f"{EVAL} --checkpoint last"),
    "eval 4": lambda: tvq(f"{EVAL} --checkpoint 4"),
    "sample": lambda: tvq(SAMPLE),
    "sample from state": lambda: tvq(f"{SAMPLE} --load-state state.safetensors"),
    "plot": lambda: tvq("plot run"),
    "info": lambda: tvq("info run"),
    "export": export,
    **{name: load(name) for name in ("AutoConfig", "AutoTokenizer", "AutoModelForCausalLM")},
}
READERS = {  # pattern of the files and folders to damage -> commands that read them
    "run/config.json": ("resume", "eval", "sample", "export", "info"),
    "run/manifest.json": ("resume", "eval", "sample"),
    "run/tokenizer*": ("resume", "eval", "sample", "export"),
    "run/metrics.jsonl": ("resume", "plot"),
    "run/.lock": ("resume",),
    "run/best": ("eval",),
    "run/best/*": ("eval", "sample", "export"),
    "run/checkpoints/*": ("resume", "eval last"),
    "run/checkpoints/*/*": ("resume", "eval last"),
    "cache/*/*": ("eval", "resume"),
    "state.safetensors": ("sample from state",),
    "export/*": ("AutoConfig", "AutoTokenizer", "AutoModelForCausalLM"),
}


# Damage: functions of a path, a random generator, and other intact files of the same kind.


def truncate(path: Path, rng: random.Random, others: list[Path]) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: rng.randrange(max(len(data), 1))])


def empty(path: Path, rng: random.Random, others: list[Path]) -> None:
    path.write_bytes(b"")


def flip(path: Path, rng: random.Random, others: list[Path]) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(rng.choice((1, 30)) if data else 0):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def overwrite(path: Path, rng: random.Random, others: list[Path]) -> None:
    data = bytearray(path.read_bytes())
    start = rng.randrange(max(len(data), 1))
    n = min(len(data) - start, rng.choice((8, 100, 4096)))
    data[start : start + n] = rng.choice((bytes(n), rng.randbytes(n)))
    path.write_bytes(data)


def append(path: Path, rng: random.Random, others: list[Path]) -> None:
    path.write_bytes(path.read_bytes() + rng.randbytes(rng.choice((1, 1000))))


def delete(path: Path, rng: random.Random, others: list[Path]) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def broken_link(path: Path, rng: random.Random, others: list[Path]) -> None:
    delete(path, rng, others)
    path.symlink_to("does-not-exist")


def other_kind(path: Path, rng: random.Random, others: list[Path]) -> None:
    """Replace a file by a folder, or a folder by a file."""
    is_folder = path.is_dir()
    delete(path, rng, others)
    path.write_bytes(b"x") if is_folder else path.mkdir()


def swap(path: Path, rng: random.Random, others: list[Path]) -> None:
    """Replace a file or folder by another one of the same kind."""
    other = rng.choice(others)
    delete(path, rng, others)
    (shutil.copytree if other.is_dir() else shutil.copy)(other, path)


def rename(path: Path, rng: random.Random, others: list[Path]) -> None:
    path.rename(path.with_name(rng.choice(("step-00000001", "step-00000009", "step-\u00b2", "x"))))


def json_value(path: Path, rng: random.Random, others: list[Path]) -> None:
    """Change, replace or delete a value of a JSON file, or of a line of a JSONL file."""
    lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    number = rng.randrange(len(lines))
    document = json.loads(lines[number])
    parent, key = rng.choice(places(document))
    kind = rng.randrange(4)
    if kind == 0:
        del parent[key]
    elif kind == 1:
        parent[key] = rng.choice((None, [], {}, "", "x", -1, 1e308, float("nan"), True, [1]))
    else:
        parent[key] = altered(parent[key], rng)
    lines[number] = json.dumps(document)
    path.write_text("\n".join(lines) + "\n")


def places(tree: Any) -> list[tuple[Any, Any]]:
    """Return all pairs (parent, key) of a JSON tree."""
    items = list(tree.items() if isinstance(tree, dict) else enumerate(tree))
    inner = [x for _, item in items if isinstance(item, (dict, list)) for x in places(item)]
    return [(tree, key) for key, _ in items] + inner


def altered(value: Any, rng: random.Random) -> Any:
    """Return a plausible value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return rng.choice((value + 1, value - 1, value * 2, value / 2))
    if isinstance(value, str):
        place = rng.randrange(len(value) + 1)
        return value[:place] + rng.choice("0123456789abcdef") + value[place + 1 :]
    return [value]


def json_document(path: Path, rng: random.Random, others: list[Path]) -> None:
    path.write_text(rng.choice(("[1, 2]", "5", "null", '"x"', "[]", "{}", "true", "NaN", "[" * 99)))


def tensors(path: Path, rng: random.Random, others: list[Path]) -> None:
    """Change a tensor or the metadata; the checksum is the old one, a new one, or missing."""
    with safe_open(path, framework="pt") as file:
        metadata = dict(file.metadata() or {})
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    name = rng.choice(sorted(found))
    kind, x = rng.randrange(5), found.pop(name)
    if kind == 1:
        found[f"{name}.x"] = x
    elif kind == 2:
        found[name] = rng.choice((x[None], x.flatten()[:1].clone(), x[..., None])).contiguous()
    elif kind == 3:
        found[name] = x.to(torch.uint8)
    elif kind == 4:
        found[name] = x
        key = rng.choice(sorted(set(metadata) - {"sha256"}) or ["format"])
        metadata[key] = rng.choice(("", "x", "[1, 2]", "null", "{}"))
    checksum = metadata.pop("sha256", None)
    if rng.random() < 0.5:
        write_tensors(path, found, metadata)
    else:
        save_file(found, path, {**metadata, "sha256": checksum} if checksum else metadata)


def damage_for(path: Path, others: list[Path]) -> list[Callable[..., None]]:
    """Return the kinds of damage that apply to a file or folder."""
    kinds: list[Callable[..., None]] = [delete, broken_link, other_kind]
    if others:
        kinds += [swap, swap]
    if path.is_dir():
        return [*kinds, rename]
    kinds += [truncate, empty, flip, overwrite, append]
    if path.suffix in (".json", ".jsonl"):
        kinds += [json_value] * 5 + [json_document]
    if path.suffix == ".safetensors":
        kinds += [tensors] * 3
    return kinds


class Workshop:
    """Intact files, a folder with a copy to damage, and the results of commands on the copy."""

    def __init__(self, root: Path) -> None:
        self.intact, self.folder = root / "intact", root / "work"
        self.folder.mkdir()
        with chdir(self.folder), warnings.catch_warnings():
            warnings.simplefilter("always")
            make_intact(self.folder)
        self.folder.rename(self.intact)
        self._results: dict[str, Any] = {}

    @contextmanager
    def copy(self) -> Iterator[None]:
        """Work in a fresh copy of the intact files, always at the same path."""
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self.intact, self.folder, symlinks=True)
        with chdir(self.folder):
            for manifest in Path("cache").glob("*/manifest.json"):
                check_large_files(manifest.parent, "")  # later damage must show
            yield

    def result(self, command: str) -> Any:
        """Return the result of a command on intact files."""
        if command not in self._results:
            with self.copy():
                status, result, err = run(command)
                assert status == 0, err
            self._results[command] = result
        return self._results[command]


def make_intact(root: Path) -> None:
    """Write a stopped run, another run, their corpus and exports, and states after a prompt."""
    sizes = {"steps": STEPS, "batch_size": 2, "save_every": 2, "eval_every": 3, "eval_tokens": 50}
    config = tiny_run(root, model={"n_layer": 1, "vocab_size": 270}, train=sizes)
    config = replace(config, data=replace(config.data, tokenizer="bpe"))
    train(replace(config, train=replace(config.train, seed=1)), "other")
    with pytest.MonkeyPatch.context() as patch:
        interrupt_after(patch, STOPPED_AT - 1)
        train(config, "run")
    for name, exported, state in (
        ("run", "export", "state.safetensors"),
        ("other", "other-export", "other-state.safetensors"),
    ):
        tvq(f"eval {name} --device cpu")
        tvq(f"export {name} {exported}")
        tvq(f"sample {name} --tokens 0 --prompt the.cat --save-state {state}")


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    root = tmp_path_factory.mktemp("mutations")
    yield Workshop(root)
    shutil.rmtree(root)


def run(command: str) -> tuple[int, Any, str]:
    """Run a command; return its exit status, its result with stdout, and stderr."""
    out, err, status, result = io.StringIO(), io.StringIO(), 0, None
    with redirect_stdout(out), redirect_stderr(err), warnings.catch_warnings():
        warnings.simplefilter("always")
        try:
            result = COMMANDS[command]()
        except SystemExit as stop:
            status = stop.code
    return status, (result, out.getvalue()), err.getvalue()


def same_kind(path: Path) -> list[Path]:
    """Return other intact files or folders that may take the place of one."""
    first, *rest = path.parts
    if "best" in path.parts:  # a model of another run is not damage
        return [Path("state.safetensors")] if path.is_file() else []
    found = [Path({"run": "other", "export": "other-export"}.get(first, first), *rest)]
    if path.name == "state.safetensors":
        found += [Path("other-state.safetensors"), Path("run/best/model.safetensors")]
    if "checkpoints" in path.parts:
        found += Path("run/checkpoints").glob("/".join(["step-*", *path.parts[3:]]))
    if first == "cache":
        found += path.parent.glob(f"*{path.suffix}")
    return [x for x in sorted(set(found)) if x != path and x.exists()]


@pytest.mark.parametrize(
    "number",
    [
        *range(N_QUICK),
        *(pytest.param(n, marks=pytest.mark.slow) for n in range(N_QUICK, N_QUICK + N_SLOW)),
    ],
)
def test_damaged_file_gives_the_exact_result_or_one_line(workshop, number):
    rng = random.Random(number)
    with workshop.copy():
        pattern = list(READERS)[number % len(READERS)]
        path = rng.choice(sorted(Path().glob(pattern)))
        others = same_kind(path)
        damage, command = rng.choice(damage_for(path, others)), rng.choice(READERS[pattern])
        damage(path, rng, others)
        status, result, err = run(command)
    case = f"{damage.__name__} of {path}, then {command}: exit status {status}\n{err}"
    assert status in (0, 2), case
    assert "Traceback" not in err, case
    if status == 2:
        assert not must_continue(path, damage, command), case
        (message,) = [line for line in err.splitlines() if line.startswith("tvq: ")]
        assert err.endswith(f"{message}\n"), case
        assert len(message) < 600, case
    elif result != workshop.result(command) and not may_differ(path, command, err):
        assert command == "eval last", f"{case}\n{result}"
        assert result == workshop.result("eval 4"), case
        # Without its folder, a newer checkpoint cannot be noticed.
        assert "trying the checkpoint before it" in err or path.name == "step-00000005", case


def must_continue(path: Path, damage: Callable[..., None], command: str) -> bool:
    """Return whether what was damaged can be made again, or an older checkpoint is there."""
    if path.parts[0] == "cache":
        return True
    # A checkpoint of another run is an error: either of the two runs could be meant.
    return "checkpoints" in path.parts and damage is not swap


def may_differ(path: Path, command: str, err: str) -> bool:
    """Return whether another result is allowed: settings that may be edited, and logs."""
    if "was edited" in err or command in ("info", "plot"):
        return True
    return path.name == "metrics.jsonl"
