"""A folder with small runs, datasets and odd files, in which any command line is safe to run.

Every command runs in a forked child, with this folder as its home, cache and working directory,
without a network and with limits on time and memory.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import signal
import socket
import stat
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
import torch
from command_lines import TINY
from forked import Ended, import_commands, run_forked
from helpers import interrupt_after

import transformer_vq.demo
from transformer_vq import doctor
from transformer_vq.cli import demo
from transformer_vq.cli import main as cli
from transformer_vq.config_files import read_config_file
from transformer_vq.doctor import Diagnosis
from transformer_vq.serve import server

LIMIT = 120.0  # seconds until a command is considered to hang
MEMORY_GB = 4.0

Snapshot = dict[Path, tuple[object, ...]]


class Sandbox:
    """Created once; `restore` undoes the changes of a command."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.home, self.tmp, self.work = (root / name for name in ("home", "tmp", "work"))
        for folder in (self.home, self.tmp, self.work):
            folder.mkdir(parents=True)
        warm_up()
        _write_datasets(self.work)
        self._train_runs()
        _write_odd_files(self.work)
        self._copy = root.with_name(f"{root.name}-copy")
        shutil.copytree(root, self._copy, symlinks=True)
        self.before = snapshot(root)

    def run(
        self,
        arguments: Sequence[str],
        prepare: Callable[[], object] | None = None,
        memory_gb: float = MEMORY_GB,
        patience: float | None = None,
    ) -> Ended:
        """Run a command line in a child process; `prepare` is called in the child before it.

        patience: seconds until the first simulated Ctrl-C; it is repeated every 2 * patience.
        """

        def child() -> None:
            _enter(self)
            if patience is not None:
                signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
                signal.setitimer(signal.ITIMER_REAL, patience, 2 * patience)
            if prepare is not None:
                prepare()
            cli.main(list(arguments))

        seconds = LIMIT if patience is None else 6 * patience
        return run_forked(child, seconds=seconds, memory_gb=memory_gb)

    def restore(self) -> None:
        if snapshot(self.root) != self.before:
            shutil.rmtree(self.root)
            shutil.copytree(self._copy, self.root, symlinks=True)

    def _train_runs(self) -> None:
        """Train runs that are stopped after two of four steps."""
        bytes_ = [*TINY.split(), "--train.steps", "4", "--train.eval-every", "1"]
        books = ["--model.vocab-size", "270", "--data.dataset", "pg19", "--data.path", "books"]
        books += ["--data.tokenizer", "bpe"]
        fast = ["--model.block-len", "64"]  # images are long prompts
        runs = {
            "text-run": ["--data.path", "texts"],
            "full-run": ["--data.path", "texts", "--model.attention", "full"],
            "image-run": ["--data.dataset", "images", "--data.path", "images", *fast],
            "books-run": books,
        }
        for name, options in runs.items():
            line = ["train", "tiny", *bytes_, *options, "--out", name]
            self._must(128 + signal.SIGINT, line, lambda: interrupt_after(pytest.MonkeyPatch(), 1))
        for name in ("text-run", "full-run"):
            self._must(0, ["eval", name])
        self._must(0, ["sample", "text-run", "--tokens", "0", "--save-state", "state.safetensors"])
        shutil.copytree(self.work / "text-run", self.work / "corrupt-run")

    def _must(
        self, status: int, line: list[str], prepare: Callable[[], object] | None = None
    ) -> None:
        ended = self.run(line, prepare)
        assert ended.status == status, f"{line}: {ended}"


def warm_up() -> None:
    """Import and parse in the parent, so that the forked children need not."""
    import sentencepiece  # noqa: F401
    from matplotlib import pyplot  # noqa: F401
    from torch.utils.tensorboard import SummaryWriter  # noqa: F401

    import_commands()
    for command in ("train", "eval", "sample"):
        with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
            cli.main([command, "--help"])


def short_message(err: str) -> str:
    """Return the last line of what a failed command printed, or tyro's box as one line."""
    assert "Traceback" not in err, err
    assert "this is a bug" not in err, err
    lines = err.splitlines()
    if "For full helptext" in err:
        return " ".join(re.sub(r"[\u2500-\u257f]|-{5,}", " ", err).split())
    assert [x.startswith("tvq: ") for x in lines] == [*[False] * (len(lines) - 1), True], err
    return lines[-1]


def snapshot(root: Path) -> Snapshot:
    """Return all files below a folder, with the metadata that writing changes."""
    found: Snapshot = {}
    for parent, folders, names in os.walk(root):
        for name in (*folders, *names):
            path = Path(parent, name)
            status = path.lstat()
            if stat.S_ISDIR(status.st_mode):
                found[path] = ("folder",)
            else:
                found[path] = (stat.S_IFMT(status.st_mode), status.st_size, status.st_mtime_ns)
    return found


def _enter(sandbox: Sandbox) -> None:
    """Make this child process run in the sandbox."""
    os.environ.update(HOME=str(sandbox.home), TMPDIR=str(sandbox.tmp), HF_HUB_OFFLINE="1")
    os.environ.pop("XDG_CACHE_HOME", None)
    tempfile.tempdir = None
    os.chdir(sandbox.work)
    sys.dont_write_bytecode = True
    sys.stderr.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    warnings.resetwarnings()  # tests turn them into errors
    torch.use_deterministic_algorithms(False)
    torch.compile = lambda function=None, **_: function  # compiling takes half a minute
    torch.hub.download_url_to_file = _no_network
    doctor.examine = lambda device, quick: Diagnosis(doctor.environment(device), (), quick, 0.0)
    demo.PRESETS = {"tiny": read_config_file(Path("my.toml")).apply()}
    transformer_vq.demo.differences = lambda: iter([("shga", "serial", 1e-16, 1e-15)])
    server.Server.run = _close


def _no_network(*_: object, **__: object) -> None:
    raise URLError("no network in tests")


def _close(self: server.Server, sockets: list[socket.socket]) -> None:
    """Replace a server that would run until a signal."""
    for listener in sockets:
        listener.close()


def _write_datasets(work: Path) -> None:
    from PIL import Image

    words = ["the", "a", "cat", "mat", "sat", "on", "and", "then", "it", "ran", "off", "up"]
    rng = np.random.default_rng(0)
    for folder, n in {"texts": 3, "books/train": 3, "books/validation": 1, "books/test": 1}.items():
        (work / folder).mkdir(parents=True)
        for i in range(n):
            (work / folder / f"{i}.txt").write_text(" ".join(rng.choice(words, 400)))
    (work / "images").mkdir()
    for i in range(4):
        pixels = rng.integers(256, size=(8, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(work / "images" / f"{i}.png")
    shutil.copy(work / "images" / "0.png", work / "image.png")
    values = {"d_model": 8, "n_layer": 1, "d_k": 4, "n_code": 4, "block_len": 4}
    lines = ['preset = "tiny"', "[model]", *(f"{key} = {value}" for key, value in values.items())]
    lines += ["[train]", "steps = 2", "batch_size = 2", "seq_len = 16", "backprop_len = 8"]
    lines += ["eval_tokens = 20", 'device = "cpu"', "[data]", 'path = ["texts"]']
    (work / "my.toml").write_text("\n".join(lines))


def _write_odd_files(work: Path) -> None:
    (work / "note.txt").write_text("a note, not too long\n")
    (work / "my.json").write_text('{"preset": "tiny", "model": {"n-code": 8}}')
    (work / "broken.toml").write_text("[model\nn_code = 3")
    (work / "empty.txt").write_text("")
    (work / "empty-folder").mkdir()
    (work / "folder").mkdir()
    lines = [json.dumps({"text": f"line {i}"}) for i in range(40)]
    (work / "words.jsonl").write_text("\n".join(lines))
    (work / "broken.png").write_bytes((work / "image.png").read_bytes()[:60])
    (work / "link.txt").symlink_to("note.txt")
    (work / "broken-link").symlink_to("nothing")
    (work / "new\nline.txt").write_text("a name with a newline " * 20)
    (work / "\udcff.txt").write_bytes(b"\xff\xfe and a name that is not UTF-8 " * 20)
    odd = work / "odd-texts"
    odd.mkdir()
    (odd / "binary").write_bytes(bytes(range(256)) * 8)
    (odd / "empty").write_bytes(b"")
    (odd / "\udcfe").write_bytes(b"\n" * 50)
    corrupt = work / "corrupt-run"
    (corrupt / "metrics.jsonl").write_text('{"step": 1}\nnot JSON\n[]\n')
    best = corrupt / "best" / "model.safetensors"
    best.write_bytes(best.read_bytes()[:-8])
