"""Random command lines for `tvq`: valid ones with a few odd values mixed in.

Options and their types come from the dataclasses of the commands, so new options are included
automatically. A number determines a command line: `command_line(7)` is always the same.
"""

from __future__ import annotations

import random
import types
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from transformer_vq.cli.completion import option_classes
from transformer_vq.cli.main import COMMANDS
from transformer_vq.presets import PRESETS

OPTIONS = option_classes()
"""Option dataclass of every command."""

MODEL = "--model.d-model 8 --model.n-layer 1 --model.d-k 4 --model.n-code 4 --model.block-len 4"
TRAIN = (
    "--train.steps 2 --train.batch-size 2 --train.seq-len 16 --train.backprop-len 8 "
    "--train.eval-tokens 20 --train.device cpu --optim.warmup 0"
)
TINY = f"{MODEL} --model.vocab-size 256 {TRAIN}"

BASES: dict[str, tuple[str, ...]] = {
    "train": (
        f"tiny {TINY} --data.path texts --out new-run",
        f"small {TINY} --data.path texts --train.eval-every 1 --out new-run --json",
        f"pg19-1.3b {MODEL} {TRAIN} --model.vocab-size 270 --data.tokenizer bpe --data.path books"
        " --out new-run",
        f"imagenet64-190m {TINY} --data.dataset images --data.path images --out new-run",
        f"enwik8-190m {TINY} --data.path texts/0.txt --out new-run",
        f"tiny {TINY} --data.path texts books/train --out new-run",
        "--config my.toml --out new-run",
        "small --config my.toml --train.steps 1",
    ),
    "resume": ("text-run", "image-run", "books-run", "full-run --json", "corrupt-run"),
    "eval": (
        "text-run",
        "books-run --json",
        "full-run --split validation",
        "text-run --max-tokens 5 --out new.json",
        "text-run --data.path books/train",
        "image-run --max-tokens 40 --protocol windowed",
        "corrupt-run --checkpoint last",
    ),
    "sample": (
        "text-run --tokens 5",
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
        "full-run --port 0",
        "image-run --port 0",
        "corrupt-run --port 0",
    ),
    "prepare": (
        "text --path texts",
        "text --path odd-texts --cache new-cache",
        "pg19 --path books --tokenizer bpe --vocab-size 270 --json",
        "pg19 --path books --tokenizer books-run/tokenizer.json",
        "images --path images --cache new-cache",
        "imagenet64 --path npz",
        "enwik8",
        "enwik8 --path texts/1.txt",
    ),
    "export": (
        "text-run new-export",
        "books-run new-export",
        "image-run empty-folder",
        "full-run new-export --checkpoint last",
        "corrupt-run new-export",
    ),
    "info": (*PRESETS, "text-run", "books-run --json", "corrupt-run", "--config my.toml"),
    "config": (*PRESETS, "text-run --format json", "--config my.json --changed-only"),
    "runs": ("", ".", "--sort loss --json", "texts", "text-run --sort name"),
    "plot": (
        *("text-run", "full-run", "image-run"),
        *("text-run full-run", "text-run image-run --x time --out new.png"),
    ),
    "doctor": ("--device cpu --quick", "--device cpu --quick --out new.md --json"),
    "demo": ("--steps 1 --out new-run", "--out new-run"),
}
"""Valid command lines that run in well under a second; odd options are added to them."""

KNOWN: dict[str, tuple[str, ...]] = {
    "paths": ("text-run", "full-run"),
    "folder": (".", "texts", "text-run", "new-export"),
    "path": ("texts", "texts/0.txt", "books", "images", "npz", "books/train", "odd-texts"),
    "out": ("new-run", "new.json", "new.png", "folder/new"),
    "tokenizer": ("books-run/tokenizer.json",),
    "cache": ("new-cache", "~/cache"),
    "config": ("my.toml", "my.json", "broken.toml", "text-run", "text-run/config.json"),
    "init_from": ("text-run", "full-run", "text-run/best/model.safetensors"),
    "device": ("cpu", "auto"),
    "wandb": ("project",),
    "checkpoint": ("best", "last", "2"),
    "prompt": ("hello", "two words"),
    "prompt_file": ("note.txt", "texts/1.txt"),
    "save_state": ("new-state",),
    "load_state": ("state.safetensors",),
    "images": ("image.png", "images/0.png"),
    "preset": tuple(PRESETS),
    "stop": ("e", "the"),
    "host": ("127.0.0.1", "localhost"),
    "port": ("0",),
    "store": ("new-store",),
}
"""Valid values by option name; other options get values by type."""

NUMBERS = ("0", "-1", "1", "2", "7", "1000", "2147483648", "9223372036854775807", str(10**30))
REALS = ("nan", "inf", "-inf", "1e308", "-1e308", "1e-320", "1e999", "0.0", "-0.5", "1.0", "3e-5")
WORDS = (
    "",
    " ",
    "1e3",
    "1_0",
    "None",
    "none",
    "true",
    "False",
    "x" * 300,
    "y" * 5000,
    "\u4e2d\u6587 \u00e9",
    "\u0663",
    "0x10",
)
STRANGE = ("a\nb", "tab\there", "\x1b[31m", "\x01", "100%", "{}", "'\"", "\\", "a,b", "\udcff", "-")
PATHS = (
    *("texts", "odd-texts", "note.txt", "nothing", "nothing/below", "note.txt/below", "."),
    *("empty-folder", "empty.txt", "words.jsonl", "image.png", "broken.png", "text-run"),
    *("image-run", "state.safetensors", "unreadable.txt"),
    *("pipe", "/dev/null", "/dev/zero", "/dev/full", "/dev/null/x", "/proc/nothing", "~/x"),
    *("~unknown-user/x", "loop", "broken-link", "link.txt", "new\nline.txt", "\udcff.txt"),
    *("corrupt-run", "text-run/config.json", "text-run/best/model.safetensors", "x" * 300, ""),
)
ODD = (*NUMBERS, *REALS, *WORDS, *STRANGE, *PATHS)


@dataclass(frozen=True)
class Option:
    """An option as typed, and the field that it sets."""

    typed: str
    name: str
    hint: Any
    is_optional: bool = False
    is_positional: bool = False


def options_of(kind: Any, prefix: str = "") -> list[Option]:
    """Return all options of a command, including those of nested configs."""
    found = []
    hints = get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        hint, section = hints[field.name], field.name
        is_positional = False
        if get_origin(hint) is Annotated:
            for mark in hint.__metadata__:
                section = "" if getattr(mark, "name", None) == "" else section
                is_positional |= repr(mark) == "Positional"
            hint = hint.__origin__
        inner, is_optional = _without_none(hint)
        if isinstance(inner, type) and is_dataclass(inner):
            found += options_of(inner, ".".join(filter(None, [prefix, section])))
        else:
            name = field.name.replace("_", "-")
            typed = f"--{prefix}.{name}" if prefix else f"--{name}"
            found.append(Option(typed, field.name, inner, is_optional, is_positional))
    return found


def _without_none(hint: Any) -> tuple[Any, bool]:
    if get_origin(hint) is Annotated:
        hint = hint.__origin__
    if get_origin(hint) in (Union, types.UnionType):
        rest = [x for x in get_args(hint) if x is not types.NoneType]
        return _without_none(rest[0])[0], True
    return hint, False


ALL_OPTIONS = {command: options_of(kind) for command, kind in OPTIONS.items()}


def command_line(number: int) -> list[str]:
    """Return the command line with this number; consecutive numbers cycle through all commands."""
    rng = random.Random(number)
    everything = [*OPTIONS, "", "help"]
    command = everything[number % len(everything)]
    if command in ("", "help"):
        return _other_words(rng, command)
    arguments = rng.choice(BASES[command]).split()
    n_first = next((i for i, x in enumerate(arguments) if x.startswith("-")), len(arguments))
    groups = _grouped(arguments[n_first:])
    for _ in range(rng.choices((0, 1, 2, 3), (1, 4, 3, 2))[0]):
        groups.append(_random_option(rng, ALL_OPTIONS[command]))
    words = [*command.split(), *arguments[:n_first]]
    if rng.random() < 0.25:
        rng.shuffle(groups)
    for _ in range(rng.choices((0, 1, 2), (14, 5, 1))[0]):
        rng.choice(MUTATIONS)(rng, words, groups)
    return [*words, *(x for group in groups for x in group)]


def _grouped(arguments: list[str]) -> list[list[str]]:
    """Group every option with its values."""
    groups: list[list[str]] = []
    for argument in arguments:
        if argument.startswith("--"):
            groups.append([argument])
        else:
            groups[-1].append(argument)
    return groups


def _random_option(rng: random.Random, options: list[Option]) -> list[str]:
    option = rng.choice(options)
    values = _values(rng, option)
    if option.is_positional:
        return values
    if rng.random() < 0.1 and len(values) == 1:
        return [f"{option.typed}={values[0]}"]
    return [option.typed, *values]


def _values(rng: random.Random, option: Option) -> list[str]:
    if option.hint is bool:
        return [] if rng.random() < 0.95 else [rng.choice(("True", "no", "1"))]
    if get_origin(option.hint) is tuple:
        inner = get_args(option.hint)
        n = len(inner) if inner[-1] is not ... else rng.choices((0, 1, 2, 4), (1, 5, 3, 1))[0]
        return [_value(rng, option, _without_none(inner[0])[0]) for _ in range(n)]
    return [_value(rng, option, option.hint)]


def _value(rng: random.Random, option: Option, hint: Any) -> str:
    """Return a random value, usually one that parses, so that the command itself is tested."""
    kind = rng.random()
    if kind < 0.05:
        return rng.choice(ODD)
    if option.is_optional and kind < 0.1:
        return "None"
    if option.name in KNOWN and kind < 0.5:
        return rng.choice(KNOWN[option.name])
    if get_origin(hint) is Literal:
        choices = get_args(hint)
        return rng.choice(choices) if kind < 0.95 else choices[0].upper()
    if hint is int:
        return rng.choice(("1", "2", "3", "4", "8", "16", "64") if kind < 0.6 else NUMBERS)
    if hint is float:
        return rng.choice(("0.1", "0.5", "1", "0.99") if kind < 0.5 else (*REALS, *NUMBERS))
    return rng.choice(PATHS if hint is Path else (*PATHS, *WORDS, *STRANGE))


def _other_words(rng: random.Random, command: str) -> list[str]:
    """Return a command line that starts with help or with an unknown command."""
    first = (
        ["help", "--help", "-h", "--version"]
        if command == "help"
        else [*ODD, "trian", "TRAIN", "demos"]
    )
    words = [*([rng.choice(first)] if rng.random() < 0.95 else [])]
    for _ in range(rng.randrange(3)):
        words.append(rng.choice([*COMMANDS, *PRESETS, "--help", "--json", *ODD]))
    return words


Mutation = Callable[[random.Random, list[str], list[list[str]]], None]


def _insert(rng: random.Random, groups: list[list[str]], group: list[str]) -> None:
    groups.insert(rng.randint(0, len(groups)), group)


def _repeat(rng: random.Random, words: list[str], groups: list[list[str]]) -> None:
    if groups:
        _insert(rng, groups, list(rng.choice(groups)))


def _lose_value(rng: random.Random, words: list[str], groups: list[list[str]]) -> None:
    if groups and len(group := rng.choice(groups)) > 1:
        group.pop()


def _lose_word(rng: random.Random, words: list[str], groups: list[list[str]]) -> None:
    if len(words) > 1:
        words.pop(rng.randrange(1, len(words)))


def _odd_word(rng: random.Random, words: list[str], groups: list[list[str]]) -> None:
    if len(words) > 1:
        words[-1] = rng.choice(ODD)


def _foreign(rng: random.Random, words: list[str], groups: list[list[str]]) -> None:
    """Insert an option of another command."""
    _insert(rng, groups, _random_option(rng, ALL_OPTIONS[rng.choice(list(OPTIONS))]))


def _abbreviate(rng: random.Random, words: list[str], groups: list[list[str]]) -> None:
    if groups and len(group := rng.choice(groups)) > 0 and len(group[0]) > 4:
        group[0] = group[0][: rng.randint(3, len(group[0]) - 1)]


def _underscore(rng: random.Random, words: list[str], groups: list[list[str]]) -> None:
    if groups:
        group = rng.choice(groups)
        group[:1] = [x.replace("-", "_").replace("__", "--", 1) for x in group[:1]]


def _help(rng: random.Random, words: list[str], groups: list[list[str]]) -> None:
    _insert(rng, groups, [rng.choice(("--help", "-h", "--hlep"))])


def _stray(rng: random.Random, words: list[str], groups: list[list[str]]) -> None:
    _insert(rng, groups, [rng.choice(ODD)])


MUTATIONS: tuple[Mutation, ...] = (
    *(_repeat, _lose_value, _lose_word, _odd_word, _foreign, _abbreviate, _underscore),
    *(_help, _stray),
)
