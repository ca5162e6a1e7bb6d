"""tvq: one subcommand = one library call.

Results go to stdout, progress and warnings to stderr. `main` is the one place that turns expected
failures into one line and exit status 2; anything else is a bug and shows its traceback.
"""

from __future__ import annotations

import json
import math
import os
import stat
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformer_vq.cli.arguments import (
    UsageError,
    as_options,
    check_can_read,
    check_range,
    check_unused,
    find_preset,
    first_word,
    nearest,
    parse,
)
from transformer_vq.cli.bench import bench
from transformer_vq.cli.commands import Eval, Export, Info, Plot, Prepare, Resume, Sample, Train
from transformer_vq.cli.report import (
    corpus_facts,
    corpus_table,
    drop_output,
    evaluation_table,
    one_line,
    print_any_text,
    reason,
    sizes_table,
)
from transformer_vq.config import DataConfig
from transformer_vq.data.corpus import Corpus, prepare
from transformer_vq.data.sources.enwik8 import download
from transformer_vq.data.tokenizers import Tokenizer
from transformer_vq.device import find_device, keep_freed_memory
from transformer_vq.errors import UserError, is_out_of_memory
from transformer_vq.evaluation import Protocol
from transformer_vq.files import check_can_write, write_verified_json
from transformer_vq.generation.images import sample_images, save_grid
from transformer_vq.generation.sampling import Sampling
from transformer_vq.generation.snapshot import load_context, save_context
from transformer_vq.generation.text import prefill_text, sample_text
from transformer_vq.nn.model import TransformerVQ
from transformer_vq.parallel.world import leave
from transformer_vq.presets import PRESETS
from transformer_vq.progress import IS_SILENT, TerminalReporter, reporting
from transformer_vq.training.checkpoint import load_model, read_config, read_tokenizer
from transformer_vq.training.evaluate import evaluate
from transformer_vq.training.loop import TrainingError, TrainingResult
from transformer_vq.training.run import resume as resume_run
from transformer_vq.training.run import train as train_run
from transformer_vq.training.sizes import memory_hint, sizes

PROTOCOLS: dict[str, tuple[Protocol, ...]] = {
    "windowed": ("windowed",),
    "streaming": ("streaming",),
    "both": ("windowed", "streaming"),
}
# Options of `tvq sample` that only one kind of run uses.
TEXT_ONLY = ("prompt", "prompt_file", "tokens", "stop", "save_state", "load_state")
IMAGES_ONLY = ("images", "keep", "out")
MAX_ROWS = 2**24  # as in the config of a run


def train(arguments: list[str]) -> int:
    name, rest = first_word(arguments, "train", "PRESET", f"presets: {', '.join(PRESETS)}")
    command = parse(Train, rest, f"train {name}", Train(find_preset(name), Path("runs") / name))
    with _memory_advice(memory_hint(command.run)):
        return _report(train_run(command.run, command.out), command.json)


def resume(arguments: list[str]) -> int:
    name, rest = first_word(arguments, "resume", "RUN", "RUN is the folder of a run")
    command = parse(Resume, rest, f"resume {name}", Resume(read_config(Path(name))))
    with _memory_advice("use --train.checkpoint-activations"):
        return _report(resume_run(Path(name), command.run), command.json)


def eval_(arguments: list[str]) -> None:
    name, rest = first_word(arguments, "eval", "RUN", "RUN is the folder of a run")
    run, config = Path(name), read_config(Path(name))
    command = parse(Eval, rest, f"eval {name}", Eval(config.data))
    check_can_write("--out", command.out, command.overwrite)
    if command.protocol == "streaming" and command.seq_len is not None:
        raise UsageError("--seq-len does not apply to --protocol streaming")
    check_range("--seq-len", command.seq_len, 1)
    check_range("--batch-size", command.batch_size, 1, MAX_ROWS)
    check_range("--max-tokens", command.max_tokens, 1)
    with _memory_advice("reduce --batch-size"):
        result = evaluate(
            run,
            data=command.data,
            split=command.split,
            protocols=PROTOCOLS.get(command.protocol),
            checkpoint=command.checkpoint,
            seq_len=command.seq_len,
            batch_size=command.batch_size,
            max_tokens=command.max_tokens,
            precision=command.precision,
            device=find_device(command.device),
        )
    print(evaluation_table(result))
    out = command.out
    if out is None and command.data == config.data and command.max_tokens is None:
        out = run / f"evaluation-{command.split}.json"
    if out is not None:
        write_verified_json(out, result.to_dict())
    _print_json(result.to_dict(), command.json)


def sample(arguments: list[str]) -> None:
    name, rest = first_word(arguments, "sample", "RUN", "RUN is the folder of a run")
    run = Path(name)
    command = parse(Sample, rest, f"sample {name}")
    sampling = Sampling(command.temperature, command.top_p, command.top_k)
    check_range("--batch", command.batch, 1, MAX_ROWS)
    check_range("--tokens", command.tokens, 0)
    check_range("--seed", command.seed, 0, 2**63 - 1)
    check_can_write("--out", command.out, command.overwrite)
    check_can_write("--save-state", command.save_state, command.overwrite)
    check_can_read("--load-state", command.load_state)
    for path in command.images:
        check_can_read("--images", path)
    config = read_config(run)
    kind, unused = ("images", TEXT_ONLY) if config.data.has_images else ("text", IMAGES_ONLY)
    given = {name: getattr(command, name) for name in unused}
    check_unused(kind, given, vars(Sample()))
    with _memory_advice("reduce --batch"):
        model, _ = load_model(run, command.checkpoint)
        model.to(find_device(command.device))
        if config.data.has_images:
            _sample_images(command, run, model, sampling)
        else:
            texts = _sample_text(command, model, read_tokenizer(run), sampling)
            _print_json({"run": str(run), "texts": texts}, command.json)


def _sample_images(command: Sample, run: Path, model: TransformerVQ, sampling: Sampling) -> None:
    out = run / "samples.png" if command.out is None else command.out
    drawn = sample_images(
        model,
        read_tokenizer(run).bos,
        sampling,
        n=command.batch,
        images=command.images,
        keep=command.keep,
        seed=command.seed,
        compiled=command.compile,
    )
    save_grid(drawn, out)
    print(out)
    _print_json({"run": str(run), "image": str(out)}, command.json)


def _sample_text(
    command: Sample, model: TransformerVQ, tokenizer: Tokenizer, sampling: Sampling
) -> list[str]:
    """Read, keep what was read if asked, then write; one sample appears as it is made."""
    if command.prompt is not None and command.prompt_file is not None:
        raise UsageError("give --prompt or --prompt-file, not both")
    prompt = command.prompt or ""
    if command.prompt_file is not None:
        prompt = _read_prompt(command.prompt_file)
    context = None
    if command.load_state is not None:
        context = load_context(command.load_state, model)
    context = prefill_text(model, tokenizer, prompt, context)
    if command.save_state is not None:
        save_context(command.save_state, model, context)
    alone = command.batch == 1

    def write(text: str) -> None:
        if alone:
            print(text, end="", flush=True)

    if alone and command.prompt:
        write(command.prompt)
    texts = sample_text(
        model,
        tokenizer,
        context.repeat(command.batch),
        command.tokens,
        sampling,
        seed=command.seed,
        stop=command.stop,
        compiled=command.compile,
        write=write,
    )
    if alone:
        print()
    else:
        for number, text in enumerate(texts, start=1):
            print(f"--- {number} ---\n{command.prompt or ''}{text}")
    return texts


def _read_prompt(path: Path) -> str:
    """The text of a file, or of a pipe or terminal; bytes that are not UTF-8 are kept."""
    try:
        with open(path, "rb") as file:
            kind = os.fstat(file.fileno())
            is_device = stat.S_ISCHR(kind.st_mode) or stat.S_ISBLK(kind.st_mode)
            is_null = kind.st_rdev == os.stat(os.devnull).st_rdev
            if is_device and not is_null and not file.isatty():
                raise UsageError(f"--prompt-file {path}: is a device; give a file with text")
            return file.read().decode(errors="surrogateescape")
    except OSError as error:
        raise UsageError(
            f"--prompt-file {path}: {error.strerror}; give a file with text"
        ) from error


def prepare_(arguments: list[str]) -> None:
    command = parse(Prepare, arguments, "prepare")
    check_range("--vocab-size", command.vocab_size, 1, MAX_ROWS)
    if command.vocab_size is not None and command.dataset != "pg19":
        raise UsageError(f"--vocab-size: {command.dataset} has its own tokens; leave it out")
    try:
        corpus = _prepared(command)
    except UserError as error:
        # The same options have no section here.
        message = as_options(str(error)).replace("--data.", "--")
        raise UserError(message.replace("--model.vocab-size", "--vocab-size")) from error
    print(corpus_table(corpus))
    _print_json(corpus_facts(corpus), command.json)


def _prepared(command: Prepare) -> Corpus:
    data = DataConfig(command.dataset, command.path, command.tokenizer, command.cache)
    if command.dataset == "enwik8" and command.path is None:
        cache = os.path.expanduser(command.cache)
        if cache.startswith("~"):
            raise UsageError(f"--cache {cache}: there is no such home folder; give a full path")
        download(Path(cache))
    return prepare(data, command.vocab_size)


def export_(arguments: list[str]) -> None:
    name, rest = first_word(arguments, "export", "RUN", "RUN is the folder of a run")
    command = parse(Export, rest, f"export {name}")
    from transformer_vq.hf.export import export  # transformers takes seconds to import

    export(Path(name), command.folder, command.checkpoint)
    print(f"{command.folder}: load it with transformers after `import transformer_vq.hf`")


def info(arguments: list[str]) -> None:
    name, rest = first_word(arguments, "info", "PRESET", f"presets: {', '.join(PRESETS)}")
    config = read_config(Path(name)) if Path(name).is_dir() else find_preset(name)
    command = parse(Info, rest, f"info {name}", Info(config))
    result = sizes(command.run)
    print(sizes_table(name, command.run, result))
    _print_json({"name": name, **vars(result), "train_bytes": result.train_bytes}, command.json)


def plot(arguments: list[str]) -> None:
    from transformer_vq.bench.plots import plot_path

    command = parse(Plot, arguments, "plot")
    check_can_write("--out", command.out, command.overwrite)
    if command.out is not None and command.out.suffix.lower() != ".png":
        raise UsageError(f"--out {command.out}: figures are PNG files; use a name ending in .png")
    for path in plot_path(command.path, command.out):
        print(path)


COMMANDS: dict[str, tuple[Callable[[list[str]], int | None], str]] = {
    "train": (train, "train a model from a preset"),
    "resume": (resume, "go on with a run"),
    "eval": (eval_, "score a split of the data: bits per byte, word-level perplexity"),
    "sample": (sample, "write text or draw images"),
    "prepare": (prepare_, "turn text, books or images into tokens; fetch enwik8"),
    "export": (export_, "write a run as a folder for Hugging Face transformers"),
    "info": (info, "parameters, FLOPs, state and memory of a preset or a run"),
    "bench": (bench, "measure speed and memory"),
    "plot": (plot, "draw the curves of a run or the figure of a benchmark"),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit: 0 done, 2 a mistake or bad file, 1 a run that could not continue."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    name, rest = arguments[0] if arguments else "help", arguments[1:]
    keep_freed_memory()
    if IS_SILENT:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    print_any_text()
    try:
        with reporting(TerminalReporter()):
            status = _run(name, rest)
        sys.stdout.flush()
        leave(status)
        if status:
            sys.exit(status)
    except TrainingError as error:
        _fail(str(error), 1)
    except BrokenPipeError:
        drop_output()
        sys.exit(0)  # the reader of the output has gone, as `head` does
    except UserError as error:
        _fail(str(error), 2)
    except OSError as error:
        drop_output()  # it may be what cannot be written
        _fail(reason(error), 2)
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    except Exception as error:
        if is_out_of_memory(error):
            _fail("out of memory; use a smaller model, batch or sequence", 2)
        traceback.print_exc()
        _fail("this is a bug; please report it together with the lines above", 1)


def _run(name: str, arguments: list[str]) -> int:
    """Run a command; return its exit status."""
    if name in ("-h", "--help", "help"):
        print(_overview())
        return 0
    if name not in COMMANDS:
        raise UsageError(f"there is no command {name!r}{nearest(name, COMMANDS)}; see tvq --help")
    return COMMANDS[name][0](arguments) or 0


@contextmanager
def _memory_advice(advice: str) -> Iterator[None]:
    """Name the options that reduce memory if there is not enough."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise UserError(f"out of memory; {advice}") from error
        raise


def _fail(message: str, status: int) -> None:
    if IS_SILENT:
        # Rank 0 reports what went wrong on all ranks, and torchrun ends this one.
        time.sleep(3)
        message = f"rank {os.environ['RANK']}: {message}"
    print(f"tvq: {one_line(as_options(message))}", file=sys.stderr)
    sys.exit(status)


def _overview() -> str:
    lines = [f"  {name:<9} {what}" for name, (_, what) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: tvq COMMAND ...",
            "",
            "Transformer-VQ: transformers whose dense softmax attention costs linear time.",
            "",
            *lines,
            "",
            f"presets: {', '.join(PRESETS)}",
            "`tvq COMMAND --help` tells the rest; `tvq train tiny --out demo-run` is a start.",
        ]
    )


def _report(result: TrainingResult, as_json: bool) -> int:
    """Print how training ended; return the exit status, that of the signal if one stopped it."""
    if result.stopped_by is None:
        print(f"{result.run}: {result.step} steps, best loss {result.best_loss:.4f} nats per token")
        print(f"next: tvq eval {result.run} --split test; tvq plot {result.run}")
    else:
        print(f"stopped at step {result.step} and saved; continue with: tvq resume {result.run}")
    best = result.best_loss if math.isfinite(result.best_loss) else None
    facts = {
        "run": str(result.run),
        "step": result.step,
        "finished": result.finished,
        "best_validation_nats_per_token": best,
    }
    _print_json(facts, as_json)
    return 0 if result.stopped_by is None else 128 + result.stopped_by


def _print_json(facts: dict[str, Any], wanted: bool) -> None:
    if wanted:
        print(json.dumps(facts))
