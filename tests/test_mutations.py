"""Damaged files: a command gives the exact result of intact files, or one line and exit status 2.

Each case damages one file or folder, chosen by its number, so failures are reproducible. If a
command can continue without the file, it must: `resume` and `eval --checkpoint last` use an older
checkpoint, and a corpus is prepared again. Settings that may be edited are used with a warning.
"""

from __future__ import annotations

import hashlib
import io
import random
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import cache, partial
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
LOADED = ("AutoConfig", "AutoTokenizer", "AutoModelForCausalLM")
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
    "export/*": LOADED,
}


# Commands: each one returns its result, which must not depend on damage that it survives.


def tvq(line: str) -> None:
    main(line.split())


def digests(pattern: str) -> dict[str, str]:
    files = sorted(Path().glob(pattern))
    return {str(x): hashlib.sha256(x.read_bytes()).hexdigest() for x in files}


def resume() -> Any:
    tvq("resume run")
    return losses(Path("run")), digests("run/checkpoints/step-00000006/shard-00000.safetensors")


def export() -> Any:
    tvq("export run new-export")
    return digests("new-export/*")


def load(name: str) -> Any:
    """Load an exported folder with transformers; errors are reported as `tvq` does."""
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


EVAL = "eval run --json --device cpu"
SAMPLE = "sample run --device cpu --seed 1 --tokens 12"
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
    **{name: partial(load, name) for name in LOADED},
}


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


# Damage to the content of a file: functions of its bytes and a random generator.


def truncated(data: bytearray, rng: random.Random) -> bytes:
    return data[: rng.choice((0, rng.randrange(len(data) + 1)))]


def flipped(data: bytearray, rng: random.Random) -> bytes:
    for _ in range(rng.choice((1, 30)) if data else 0):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return data


def overwritten(data: bytearray, rng: random.Random) -> bytes:
    start = rng.randrange(len(data) + 1)
    n = min(len(data) - start, rng.choice((8, 100, 4096)))
    data[start : start + n] = rng.choice((bytes(n), rng.randbytes(n)))
    return data


def appended(data: bytearray, rng: random.Random) -> bytes:
    return data + rng.randbytes(rng.choice((1, 1000)))


def json_value(data: bytearray, rng: random.Random) -> bytes:
    """Replace a key or value of JSON, or a character of it."""
    found = rng.choice(list(re.finditer(rb'"[^"\\]*"|-?\d[\d.e+-]*|true|false|null', data)))
    place = rng.randrange(*found.span())
    if rng.random() < 0.5:
        return data[:place] + rng.choice("0123456789abcdef").encode() + data[place + 1 :]
    values = b'null [] {} "" "x" -1 0 1e308 NaN true [1] 2.5'.split()
    return data[: found.start()] + rng.choice(values) + data[found.end() :]


def json_document(data: bytearray, rng: random.Random) -> bytes:
    return rng.choice((b"[1, 2]", b"5", b"null", b'"x"', b"{}", b"true", b"NaN", b"[" * 99))


def change_tensors(path: Path, rng: random.Random) -> None:
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
        # The step of the best model is a label: without it, the results are the same.
        key = rng.choice(sorted(set(metadata) - {"sha256", "step"}) or ["format"])
        metadata[key] = rng.choice(("", "x", "[1, 2]", "null", "{}"))
    checksum = metadata.pop("sha256", None)
    if rng.random() < 0.5:
        write_tensors(path, found, metadata)
    else:
        save_file(found, path, {**metadata, "sha256": checksum} if checksum else metadata)


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


def damage(path: Path, rng: random.Random) -> str:
    """Damage a file or folder in a way that applies to it; return its name."""
    others, is_folder = same_kind(path), path.is_dir()
    kinds: list[Any] = ["deletion", "broken link", "other type", *["swap"] * (2 * bool(others))]
    if is_folder:
        kinds += ["rename"]
    else:
        kinds += [truncated, flipped, overwritten, appended]
    if path.suffix in (".json", ".jsonl"):
        kinds += [json_value] * 5 + [json_document]
    if path.suffix == ".safetensors":
        kinds += [change_tensors] * 3
    kind = rng.choice(kinds)
    if kind is change_tensors:
        change_tensors(path, rng)
    elif callable(kind):
        path.write_bytes(kind(bytearray(path.read_bytes()), rng))
    elif kind == "rename":
        names = ("step-00000001", "step-00000009", "step-\u00b2", "x")
        path.rename(path.with_name(rng.choice(names)))
    else:
        shutil.rmtree(path) if is_folder else path.unlink()
        if kind == "broken link":
            path.symlink_to("does-not-exist")
        elif kind == "other type":
            path.write_bytes(b"x") if is_folder else path.mkdir()
        elif kind == "swap":
            (shutil.copytree if is_folder else shutil.copy)(rng.choice(others), path)
    return getattr(kind, "__name__", kind)


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Write a stopped run, another run, their corpus and exports, and states after a prompt."""
    root = tmp_path_factory.mktemp("mutations") / "work"
    sizes = {"steps": STEPS, "batch_size": 2, "save_every": 2, "eval_every": 3, "eval_tokens": 50}
    config = tiny_run(root, model={"n_layer": 1, "vocab_size": 270}, train=sizes)
    config = replace(config, data=replace(config.data, tokenizer="bpe"))
    with chdir(root), warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("always")
        train(replace(config, train=replace(config.train, seed=1)), "other")
        interrupt_after(patch, STOPPED_AT - 1)
        train(config, "run")
        for name, prefix in (("run", ""), ("other", "other-")):
            tvq(f"eval {name} --device cpu")
            tvq(f"export {name} {prefix}export")
            state = f"{prefix}state.safetensors"
            tvq(f"sample {name} --tokens 0 --prompt the.cat --save-state {state}")
    yield root.rename(root.with_name("intact"))
    shutil.rmtree(root.parent)


@contextmanager
def fresh_copy(intact: Path) -> Iterator[None]:
    """Work in a copy of the intact files, always at the same path."""
    folder = intact.with_name("work")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(intact, folder, symlinks=True)
    with chdir(folder):
        for manifest in Path("cache").glob("*/manifest.json"):
            check_large_files(manifest.parent, "")  # later damage must show
        yield


@cache
def result_of_intact_files(intact: Path, command: str) -> Any:
    with fresh_copy(intact):
        status, result, err = run(command)
    assert status == 0, err
    return result


@pytest.mark.parametrize(
    "number",
    [
        *range(N_QUICK),
        *(pytest.param(n, marks=pytest.mark.slow) for n in range(N_QUICK, N_QUICK + N_SLOW)),
    ],
)
def test_damaged_file_gives_the_exact_result_or_one_line(intact, number):
    rng = random.Random(number)
    with fresh_copy(intact):
        pattern = list(READERS)[number % len(READERS)]
        path = rng.choice(sorted(Path().glob(pattern)))
        kind, command = damage(path, rng), rng.choice(READERS[pattern])
        status, result, err = run(command)
    case = f"{kind} of {path}, then {command}: exit status {status}\n{err}"
    # What was damaged can be made again, or an older checkpoint is there. A checkpoint of another
    # run is an error: either of the two runs could be meant.
    must_continue = path.parts[0] == "cache" or ("checkpoints" in path.parts and kind != "swap")
    # Settings that may be edited, and logs.
    may_differ = "was edited" in err or command in ("info", "plot") or path.name == "metrics.jsonl"
    assert status in (0, 2), case
    assert "Traceback" not in err, case
    if status == 2:
        assert not must_continue, case
        (message,) = [line for line in err.splitlines() if line.startswith("tvq: ")]
        assert err.endswith(f"{message}\n"), case
        assert len(message) < 600, case
    elif result != result_of_intact_files(intact, command) and not may_differ:
        assert command == "eval last", f"{case}\n{result}"
        assert result == result_of_intact_files(intact, "eval 4"), case
        # Without its folder, a newer checkpoint cannot be noticed.
        assert "trying the checkpoint before it" in err or path.name == "step-00000005", case
