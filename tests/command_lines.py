"""Random command lines for `tvq`: valid ones with a few odd values mixed in.

Options and their types come from the dataclasses of the commands, so new options are included
automatically. A number determines a command line: `command_line(7)` is always the same.
"""

from __future__ import annotations

import itertools
import random
import types
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from transformer_vq.cli.arguments import option_classes
from transformer_vq.cli.main import COMMANDS
from transformer_vq.presets import PRESETS

MODEL = "--model.d-model 8 --model.n-layer 1 --model.d-k 4 --model.n-code 4 --model.block-len 4"
TRAIN = (
    "--train.steps 2 --train.batch-size 2 --train.seq-len 16 --train.backprop-len 8 "
    "--train.eval-tokens 20 --train.device cpu --optim.warmup 0"
)
TINY = f"{MODEL} --model.vocab-size 256 {TRAIN}"

BASES: dict[str, tuple[str, ...]] = {
    "train": (
        f"tiny {TINY} --data.path texts --out new-run",
        f"small {TINY} --data.path texts books/train --train.eval-every 1 --out new-run --json",
        f"pg19-1.3b {MODEL} {TRAIN} --model.vocab-size 270 --data.tokenizer bpe --data.path books"
        " --out new-run",
        f"imagenet64-190m {TINY} --data.dataset images --data.path images --out new-run",
        f"enwik8-190m {TINY} --data.path texts/0.txt --out new-run",
        "--config my.toml --out new-run",
        "small --config my.toml --train.steps 1",
    ),
    "resume": ("text-run", "image-run", "books-run", "full-run --json", "corrupt-run"),
    "eval": (
        "text-run",
        "books-run --json",
        "full-run --split validation",
        "text-run --max-tokens 5",
        "text-run --data.path books/train",
        "image-run --max-tokens 40 --protocol windowed",
        "corrupt-run --checkpoint last",
    ),
    "sample": (
        "text-run --tokens 3 --prompt hello --seed 0 --json",
        "text-run --tokens 3 --load-state state.safetensors",
        "books-run --tokens 4 --prompt-file note.txt --batch 2",
        "full-run --tokens 3 --save-state new-state",
        "image-run --images image.png --keep 0.98",
        "corrupt-run --tokens 2",
    ),
    "serve": (
        "text-run --port 0",
        "books-run --port 0 --slots 2 --store new-store --prefix-memory-mb 1",
        "image-run --port 0",
        "corrupt-run --port 0",
    ),
    "prepare": (
        "text --path texts",
        "text --path odd-texts --cache new-cache",
        "pg19 --path books --tokenizer bpe --vocab-size 270 --json",
        "pg19 --path books --tokenizer books-run/tokenizer.json",
        "images --path images --cache new-cache",
        "enwik8",
    ),
    "convert": (
        "corrupt-run --out new-run",
        "texts --out new-run --attention full --json",
        "note.txt --out new-run",
    ),
    "export": (
        "text-run new-export",
        "books-run new-export",
        "image-run empty-folder",
        "corrupt-run new-export",
    ),
    "info": (*PRESETS, "text-run", "books-run --json", "corrupt-run", "--config my.toml"),
    "config": (*PRESETS, "text-run", "--config my.json"),
    "runs": ("", ".", "--sort loss --json", "texts", "text-run --sort name"),
    "plot": ("text-run", "image-run", "text-run full-run --x time --out new.png"),
    "doctor": ("--device cpu --quick", "--device cpu --quick --json"),
    "demo": ("--steps 1 --out new-run",),
}
"""Valid command lines that run in well under a second; odd options are added to them."""

KNOWN: dict[str, tuple[str, ...]] = {
    "path": ("texts", "texts/0.txt", "books", "images", "odd-texts"),
    "out": ("new-run", "new.json", "new.png", "folder/new"),
    "tokenizer": ("books-run/tokenizer.json",),
    "cache": ("new-cache", "~/cache"),
    "config": ("my.toml", "my.json", "broken.toml", "text-run", "text-run/config.json"),
    "init_from": ("text-run", "full-run", "text-run/best/model.safetensors"),
    "device": ("cpu", "auto"),
    "checkpoint": ("best", "last", "2"),
    "prompt_file": ("note.txt", "texts/1.txt"),
    "save_state": ("new-state",),
    "load_state": ("state.safetensors",),
    "images": ("image.png", "images/0.png"),
    "host": ("127.0.0.1", "localhost"),
    "port": ("0",),
    "store": ("new-store",),
}
"""Valid values by option name; other options get values by type."""

NUMBERS = ("0", "-1", "1", "2", "7", "1000", "2147483648", "9223372036854775807", str(10**30))
REALS = ("nan", "inf", "-inf", "1e308", "1e-320", "1e999", "0.0", "-0.5", "1.0", "3e-5")
WORDS = (
    *("", " ", "1e3", "None", "true", "x" * 300, "y" * 40, "\u4e2d\u6587 \u00e9", "0x10"),
    *("a\nb", "\x1b[31m", "\x01", "100%", "{}", "'\"", "\\", "a,b", "\udcff", "-", "--", "=x"),
)
PATHS = (
    *("texts", "odd-texts", "note.txt", "nothing", "nothing/below", "note.txt/below", "."),
    *("empty-folder", "empty.txt", "words.jsonl", "image.png", "broken.png", "text-run"),
    *("image-run", "state.safetensors"),
    *("~/x", "broken-link", "link.txt", "new\nline.txt", "\udcff.txt"),
    *("corrupt-run", "text-run/config.json", "text-run/best/model.safetensors", "x" * 300),
)
ODD = (*NUMBERS, *REALS, *WORDS, *PATHS)


@dataclass(frozen=True)
class Option:
    """An option as typed, the field that it sets, and the type of its values."""

    typed: str
    name: str
    hint: Any


def options_of(kind: Any, prefix: str = "--") -> list[Option]:
    """Return all options of a command, including those of nested configs."""
    found = []
    hints = get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        hint, inner = hints[field.name], _plain(hints[field.name])
        if is_dataclass(inner):
            is_flat = get_origin(hint) is Annotated  # its options have no prefix
            found += options_of(inner, prefix if is_flat else f"{prefix}{field.name}.")
        elif "Positional" not in repr(hint):
            found.append(Option(f"{prefix}{field.name.replace('_', '-')}", field.name, inner))
    return found


def _plain(hint: Any) -> Any:
    """Return a type without its annotations and without None."""
    if get_origin(hint) is Annotated:
        return _plain(hint.__origin__)
    if get_origin(hint) in (Union, types.UnionType):
        return _plain(next(x for x in get_args(hint) if x is not types.NoneType))
    return hint


OPTIONS = {command: options_of(kind) for command, kind in option_classes().items()}


def command_line(number: int) -> list[str]:
    """Return the command line with this number; consecutive numbers cycle through all commands."""
    rng = random.Random(number)
    everything = [*OPTIONS, ""]
    command = everything[number % len(everything)]
    if command == "":
        first = [*ODD, "trian", "TRAIN", "help", "--help", "-h", "--version"]
        more = [*COMMANDS, *PRESETS, "--help", "--json", *ODD]
        return [rng.choice(first), *rng.choices(more, k=rng.randrange(3))]
    words = rng.choice(BASES[command]).split()
    first = [i for i, x in enumerate([*words, "--"]) if x.startswith("--")]
    groups = [words[i:j] for i, j in itertools.pairwise(first)]
    words = [command, *words[: first[0]]]
    for _ in range(rng.choices((0, 1, 2, 3), (1, 4, 3, 2))[0]):
        groups.append(_random_option(rng, OPTIONS[command]))
    if rng.random() < 0.1:
        groups.insert(0, [rng.choice(("--help", "-h", "--hlep", *ODD))])
    return [*words, *(x for group in groups for x in group)]


def _random_option(rng: random.Random, options: list[Option]) -> list[str]:
    option = rng.choice(options)
    hint, n = option.hint, 1
    if hint is bool:
        return [option.typed] if rng.random() < 0.95 else [option.typed, "no"]
    if get_origin(hint) is tuple:
        *_, last = get_args(hint)
        n = rng.choice((0, 1, 1, 2)) if last is ... else len(get_args(hint))
        hint = _plain(get_args(hint)[0])
    values = [_value(rng, option.name, hint) for _ in range(n)]
    if n == 1 and rng.random() < 0.1:
        return [f"{option.typed}={values[0]}"]
    return [option.typed, *values]


def _value(rng: random.Random, name: str, hint: Any) -> str:
    """Return a random value, usually one that parses, so that the command itself is tested."""
    kind = rng.random()
    if kind < 0.05:
        return rng.choice(ODD)
    if name in KNOWN and kind < 0.5:
        return rng.choice(KNOWN[name])
    if get_origin(hint) is Literal:
        return rng.choice(get_args(hint)) if kind < 0.95 else "OTHER"
    if hint is int:
        return rng.choice(("1", "2", "3", "4", "8", "16", "64") if kind < 0.6 else NUMBERS)
    if hint is float:
        return rng.choice(("0.1", "0.5", "1", "0.99") if kind < 0.5 else (*REALS, *NUMBERS))
    return rng.choice(PATHS if hint is Path else (*PATHS, *WORDS))
