"""The code blocks of every page run in order, as a reader would paste them.

An indented block contains shell commands. They run in a temporary folder with small files and with
presets of a few steps. A block that cannot run has an invisible marker before it, for example
`<!-- not run: needs a GPU -->`. `parsed only` instead of `not run` still checks its `tvq` commands:
command, preset, options and values. `on this page:` applies to all blocks of shell commands.
"""

import contextlib
import gzip
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from transformer_vq import PRESETS, RunConfig
from transformer_vq.cli.main import main

ROOT = Path(__file__).parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/RESULTS.md")),
    ROOT / "transformer_vq/models/books/README.md",
    *sorted(set(ROOT.glob("docs/**/*.md")) - set(ROOT.glob("docs/reference/*"))),
]
QUICK_PAGES = {"README.md", "CONTRIBUTING.md"}
BLOCK = re.compile(
    r"^!!!.*\n(?: {4}.*\n)+"  # an admonition, which is text
    r"|(?:^<!-- (not run|parsed only): .+ -->\n\n)?"
    r"(?:^```(\w*)\n((?s:.*?))^```$|(?<=\n\n)((?: {4}.*\n)+(?:\n(?: {4}.*\n)+)*))",
    re.MULTILINE,
)
WHOLE_PAGE = re.compile(r"^<!-- (not run|parsed only) on this page: .+ -->$", re.MULTILINE)

TEXT = (ROOT / "docs/attention.md").read_text()
FILES = """
    my-texts/1.txt my-texts/2.txt other-texts/1.txt code/1.py books/1.txt.gz books/2.txt.gz
    my-book.txt book.txt books.txt articles.txt other.txt held-out.txt prose.jsonl articles.jsonl
    train.jsonl valid.jsonl test.jsonl dump.jsonl.gz dump/1.jsonl.zst
"""
TOO_LONG = {"demo", "doctor", "serve", "enwik8"}  # or needs a network
# Numbers in commands are divided by these.
SCALES = {"--train.steps": 100, "--tokens": 10, "--model.vocab-size": 25, "--vocab-size": 50}


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> Iterator[tuple[str, str, str]]:
    """Return language, marker and code of each block."""
    text = page.read_text()
    marked = WHOLE_PAGE.search(text)
    for marker, language, fenced, indented in BLOCK.findall(text):
        if indented or language == "bash":
            yield "shell", marker or (marked[1] if marked else ""), indented or fenced
        elif language == "python":
            yield "python", marker, fenced


def commands(code: str) -> Iterator[list[str]]:
    """Return the words of each command."""
    for line in code.replace("\\\n", " ").splitlines():
        words = shlex.shlex(line, posix=True, punctuation_chars=True)
        words.whitespace_split = True
        command: list[str] = []
        for word in [*words, ";"]:
            if word != ";":
                command.append(word)
            elif command:
                yield command
                command = []


def small(config: RunConfig) -> RunConfig:
    """Return a preset with a model and a training of milliseconds."""
    vocab_size = min(config.model.vocab_size, 300)
    sizes = {"d_model": 16, "n_layer": 1, "d_k": 8, "n_code": 8, "block_len": 8}
    lengths = {"steps": 4, "batch_size": 8, "seq_len": 32, "backprop_len": 16, "eval_tokens": 64}
    is_text = config.data.dataset == "text"
    return replace(
        config,
        model=replace(config.model, vocab_size=vocab_size, **sizes),
        data=replace(config.data, path=("my-texts",)) if is_text else config.data,
        optim=replace(config.optim, warmup=1),
        train=replace(config.train, **lengths),
    )


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with the files that the pages mention."""
    for file in map(tmp_path.joinpath, FILES.split()):
        file.parent.mkdir(exist_ok=True)
        data = TEXT.encode()
        if ".jsonl" in file.suffixes:
            data = b"".join(json.dumps({"text": x}).encode() + b"\n" for x in TEXT.split("\n\n"))
        if file.suffix == ".gz":
            data = gzip.compress(data)
        if file.suffix == ".zst":
            data = pytest.importorskip("zstandard").compress(data)
        file.write_bytes(data)
    (tmp_path / "README.md").write_text((ROOT / "README.md").read_text())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a `tvq` command in this process, with its numbers scaled down."""
    with contextlib.ExitStack() as files:
        if ">" in command:
            *command, _, out = command
            files.enter_context(contextlib.redirect_stdout(files.enter_context(open(out, "w"))))
        if "|" in command:
            at = command.index("|")
            Path("stdin").write_bytes(subprocess.check_output(command[:at]))
            monkeypatch.setattr(sys, "stdin", files.enter_context(open("stdin")))
            command = command[at + 1 :]
        assert command[0] == "tvq", f"cannot run {command[0]}: mark the block as `not run`"
        assert not TOO_LONG & set(command), f"mark the block as `parsed only`: {command}"
        for number, option in enumerate(command):
            if option in SCALES:
                command[number + 1] = str(int(command[number + 1]) // SCALES[option])
        if command[1] == "eval":
            command += ["--max-tokens", "100"]
        if command[1] == "sample" and "--tokens" not in command:
            command += ["--tokens", "20"]
        main(command[1:])


def parse(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Check a `tvq` command without running it; skip other programs."""
    if command[0] == "torchrun":
        command = ["tvq", *command[command.index("transformer_vq") + 1 :]]
    if command[0] != "tvq":
        return
    if ">" in command:
        command = command[: command.index(">")]
    if command[1] in ("eval", "sample", "export"):
        command[2] = "books"  # must exist
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main([*command[1:], "--no-such-option"])
    assert stop.value.code == 2
    assert "Unrecognized options: --no-such-option" in capsys.readouterr().err


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(
            page, marks=() if name(page) in QUICK_PAGES else pytest.mark.slow, id=name(page)
        )
        for page in PAGES
        if any(marker != "not run" for _, marker, _ in blocks(page))
    ],
)
def test_blocks_run_in_order(page, folder, monkeypatch, capsys):
    namespace: dict[str, object] = {"__name__": "docs"}
    for language, marker, code in blocks(page):
        if language == "shell" and marker == "parsed only":
            for command in commands(code):
                parse(command, capsys)
        elif marker != "not run":
            with monkeypatch.context() as patch:
                for key, config in PRESETS.items():
                    patch.setitem(PRESETS, key, small(config))
                if language == "python":
                    exec(compile(code, str(page), "exec"), namespace)
                    continue
                for command in commands(code):
                    run(command, patch)
