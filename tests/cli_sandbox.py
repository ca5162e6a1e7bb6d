"""A folder with small runs, datasets and odd files, in which command lines can do no harm.

Every command runs in a forked child, with this folder as its home, cache and working directory,
without a network and with limits on time and memory.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.error import URLError

import numpy as np
import torch
from command_lines import BASES, TINY
from forked import Ended, run_forked

from transformer_vq.bench import decode, profile, train
from transformer_vq.cli import main as cli
from transformer_vq.data.sources import enwik8
from transformer_vq.errors import is_out_of_memory
from transformer_vq.training.step import Trainer

LIMIT = 120.0  # seconds until a command counts as hanging
MEMORY_GB = 4.0
DEVICES = ("/dev/null", "/dev/full", "/dev/zero")
WROTE_OUTSIDE = 99  # exit status
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

Snapshot = dict[Path, tuple[object, ...]]


class Sandbox:
    """Made once; `restore` brings back what a command has changed."""

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
        _copy_tree(root, self._copy)
        self.before = snapshot(root)

    def run(
        self,
        arguments: Sequence[str],
        prepare: Callable[[], object] | None = None,
        memory_gb: float = MEMORY_GB,
        patience: float | None = None,
    ) -> Ended:
        """Run a command line; `prepare` is called in the child before it.

        patience: seconds until it is interrupted as by Ctrl-C, and again after more of them.
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
            _copy_tree(self._copy, self.root)

    def _train_runs(self) -> None:
        """Runs that were stopped after two of four steps."""

        def stop_after_two() -> None:
            update = Trainer.update

            def and_stop(self: Trainer, batch: Any, step: int, begins: bool) -> Any:
                if step == 1:
                    os.kill(os.getpid(), signal.SIGINT)
                return update(self, batch, step, begins)

            Trainer.update = and_stop  # type: ignore[method-assign]

        bytes_ = [*TINY.split(), "--train.steps", "4", "--train.eval-every", "1"]
        books = ["--model.vocab-size", "300", "--data.dataset", "pg19", "--data.path", "books"]
        fast = ["--model.block-len", "64"]  # images are long prompts
        runs = {
            "text-run": ["--data.path", "texts"],
            "full-run": ["--data.path", "texts", "--model.attention", "full"],
            "image-run": ["--data.dataset", "images", "--data.path", "images", *fast],
            "books-run": books,
        }
        for name, options in runs.items():
            line = ["train", "tiny", *bytes_, *options, "--out", name]
            self._must(128 + signal.SIGINT, line, stop_after_two)
        for name in ("text-run", "full-run"):
            self._must(0, ["eval", name])
        self._must(0, ["sample", "text-run", "--tokens", "0", "--save-state", "state.safetensors"])
        shutil.copytree(self.work / "text-run", self.work / "damaged-run")
        (line,) = (x for x in BASES["bench decode"] if "gpt2" not in x)
        self._must(0, ["bench", "decode", *line.split(), "--out", "decode.json"])
        shutil.copy(self.work / "text-run" / "evaluation-test.json", self.work / "evaluation.json")

    def _must(
        self, status: int, line: list[str], prepare: Callable[[], object] | None = None
    ) -> None:
        ended = self.run(line, prepare)
        assert ended.status == status, f"{line}: {ended}"


def warm_up() -> None:
    """Import and parse here what every child would otherwise import and parse again."""
    import sentencepiece  # noqa: F401
    from matplotlib import pyplot  # noqa: F401
    from torch.utils.tensorboard import SummaryWriter  # noqa: F401

    import transformer_vq.hf.export  # noqa: F401

    # Here, not in a child, since tyro keeps the types that it has seen.
    for command in (["train", "tiny"], ["bench", "profile"], ["eval", "none"]):
        run_help = [*command, "--help"]
        with open(os.devnull, "w") as nothing:
            out, sys.stdout = sys.stdout, nothing
            try:
                cli.main(run_help)
            except SystemExit:
                pass
            finally:
                sys.stdout = out


def snapshot(root: Path) -> Snapshot:
    """Everything below a folder, by what changes when it is written."""
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


def _copy_tree(source: Path, target: Path) -> None:
    """With times, since they decide whether a dataset has changed; pipes are made again."""

    def copy(path: str, to: str) -> str:
        if stat.S_ISFIFO(os.lstat(path).st_mode):
            os.mkfifo(to)
            status = os.lstat(path)
            os.utime(to, ns=(status.st_atime_ns, status.st_mtime_ns))
            return to
        return str(shutil.copy2(path, to, follow_symlinks=False))

    shutil.copytree(source, target, symlinks=True, copy_function=copy)


def _enter(sandbox: Sandbox) -> None:
    """Turn this process, a child, into one that starts in the sandbox."""
    os.environ.update(HOME=str(sandbox.home), TMPDIR=str(sandbox.tmp), HF_HUB_OFFLINE="1")
    os.environ.pop("XDG_CACHE_HOME", None)
    tempfile.tempdir = None
    os.chdir(sandbox.work)
    sys.dont_write_bytecode = True
    sys.stderr.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    warnings.resetwarnings()  # tests turn them into errors
    torch.use_deterministic_algorithms(False)
    torch.compile = lambda function=None, **_: function  # it takes half a minute
    enwik8.urlopen = _no_network
    for module in (train, decode, profile):
        module.alone = _in_this_process  # type: ignore[attr-defined]
    sys.addaudithook(lambda event, details: _watch(sandbox.root, event, details))


def _no_network(*_: object, **__: object) -> None:
    raise URLError("no network in tests")


def _in_this_process(
    measure: Callable[..., dict[str, Any]], *arguments: Any, **limits: Any
) -> dict[str, Any]:
    """A measurement without the seconds that a new interpreter takes."""
    if measure.__name__ == "matmul_rates":
        return {}
    try:
        return measure(*arguments)
    except Exception as error:
        if is_out_of_memory(error):
            return {"failed": "out of memory"}
        raise


def _watch(root: Path, event: str, details: tuple[Any, ...]) -> None:
    """End the process before it writes anywhere else."""
    if event == "open":
        path, _, flags = details
        written = [path] if flags & _WRITES else []
    elif event in ("os.rename", "os.link", "os.symlink"):
        written = list(details[:2])
    elif event in ("os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.chmod", "os.utime"):
        written = [details[0]]
    else:
        return
    for path in written:
        if isinstance(path, int):
            continue
        name = os.path.abspath(os.fsdecode(path))
        if event == "os.mkdir" and os.path.lexists(name):
            continue  # fails, and is meant to
        # Devices take what is written to them; nothing can be made below them, nor in /proc.
        is_device = event == "open" and name in (*DEVICES, "/dev/tty")
        harmless = (f"{root}/", "/proc/", *(f"{device}/" for device in DEVICES))
        if not (name.startswith(harmless) or is_device):
            os.write(2, f"{event} {name}\n".encode(errors="replace"))
            os._exit(WROTE_OUTSIDE)


def _write_datasets(work: Path) -> None:
    from PIL import Image

    words = ["the", "a", "cat", "mat", "sat", "on", "and", "then", "it", "ran", "off", "up"]
    chance = np.random.default_rng(0)
    for folder, n in {"texts": 3, "books/train": 3, "books/validation": 1, "books/test": 1}.items():
        (work / folder).mkdir(parents=True)
        for i in range(n):
            (work / folder / f"{i}.txt").write_text(" ".join(chance.choice(words, 400)))
    (work / "images").mkdir()
    for i in range(4):
        pixels = chance.integers(256, size=(8, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(work / "images" / f"{i}.png")
    shutil.copy(work / "images" / "0.png", work / "image.png")
    (work / "npz").mkdir()
    for name, n in {"train_data_batch_1": 20, "val_data": 2}.items():
        rows = chance.integers(256, size=(n, 12288), dtype=np.uint8)
        np.savez(work / "npz" / f"{name}.npz", data=rows)


def _write_odd_files(work: Path) -> None:
    (work / "note.txt").write_text("a note, not too long\n")
    (work / "empty.txt").write_text("")
    (work / "empty-folder").mkdir()
    (work / "folder").mkdir()
    lines = [json.dumps({"text": f"line {i}"}) for i in range(40)]
    (work / "words.jsonl").write_text("\n".join(lines))
    (work / "broken.png").write_bytes((work / "image.png").read_bytes()[:60])
    (work / "link.txt").symlink_to("note.txt")
    (work / "broken-link").symlink_to("nothing")
    (work / "loop").symlink_to("loop")
    os.mkfifo(work / "pipe")
    (work / "new\nline.txt").write_text("a name with a newline " * 20)
    (work / "\udcff.txt").write_bytes(b"\xff\xfe and a name that is not UTF-8 " * 20)
    (work / "unreadable.txt").write_text("secret")
    (work / "unreadable.txt").chmod(0)
    odd = work / "odd-texts"
    odd.mkdir()
    (odd / "binary").write_bytes(bytes(range(256)) * 8)
    (odd / "empty").write_bytes(b"")
    (odd / ".hidden").write_text("not read")
    (odd / "broken.link").symlink_to("nothing")
    (odd / "\udcfe").write_bytes(b"\n" * 50)
    os.mkfifo(odd / "pipe")
    damaged = work / "damaged-run"
    (damaged / "metrics.jsonl").write_text('{"step": 1}\nnot JSON\n[]\n')
    best = damaged / "best" / "model.safetensors"
    best.write_bytes(best.read_bytes()[:-8])
