"""Commands that the mutation tests run in child processes, and how to read their results."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from forked import Ended, import_commands
from helpers import losses, tiny_run

from transformer_vq.cli.arguments import parse
from transformer_vq.cli.eval import EvalOptions
from transformer_vq.cli.info import InfoOptions
from transformer_vq.cli.main import main
from transformer_vq.cli.resume import ResumeOptions
from transformer_vq.cli.sample import SampleOptions
from transformer_vq.cli.train import TrainOptions
from transformer_vq.config import RunConfig
from transformer_vq.files import read_tensors, tensors_digest
from transformer_vq.presets import PRESETS
from transformer_vq.training.checkpoint import MODEL, checkpoint_folder, checkpoint_steps

STEPS, STOPPED_AT, BEFORE_LAST = 6, 5, 4  # checkpoints: every second step and the last one


def small_run(home: Path) -> RunConfig:
    """Return the config of a run that takes under a second; its data is in the home folder."""
    sizes = {"steps": STEPS, "batch_size": 2, "save_every": 2, "eval_every": 3, "eval_tokens": 50}
    config = tiny_run(home, model={"n_layer": 1}, train=sizes)
    return replace(config, data=replace(config.data, cache="~/cache"))


def in_folder(folder: Path, home: Path, work: str | Callable[[], Any]) -> Callable[[], None]:
    """Return a function that runs a command in a folder, with warnings shown, not raised."""

    def run() -> None:
        os.chdir(folder)
        os.environ["HOME"] = str(home)
        warnings.resetwarnings()
        if isinstance(work, str):
            main(work.split())
        else:
            work()

    return run


def import_and_parse() -> None:
    """Import and parse in the parent, which saves each child a second."""
    import matplotlib
    import torch._dynamo  # noqa: F401

    import_commands()
    matplotlib.use("Agg")
    import matplotlib.pyplot

    tiny = PRESETS["tiny"]
    parse(TrainOptions, [], "train", TrainOptions(tiny, Path("run")))
    parse(ResumeOptions, [], "resume", ResumeOptions(tiny, "run"))
    parse(EvalOptions, [], "eval", EvalOptions(tiny.data, "run"))
    parse(SampleOptions, ["run"], "sample")
    parse(InfoOptions, [], "info", InfoOptions(tiny))


@dataclass(frozen=True)
class Command:
    """A command that runs in the folder of a case, and a function that reads its result."""

    run: str | Callable[[], None]
    """The arguments of `tvq`, or a function."""
    result: Callable[[Path, Ended], Any]


def printed(case: Path, ended: Ended) -> str:
    return ended.out


def trained(case: Path, ended: Ended) -> dict[str, Any]:
    """Return all losses and the last model; the best one is tested by other commands."""
    run = case / "run"
    step = max(step for step in checkpoint_steps(run) if step <= STEPS)
    tensors, _ = read_tensors(checkpoint_folder(run, step) / MODEL)
    return {"losses": losses(run), "step": step, "model": tensors_digest(tensors)}


def written(pattern: str) -> Callable[[Path, Ended], dict[str, Any]]:
    """Return a function that reads stdout and the digests of files."""

    def result(case: Path, ended: Ended) -> dict[str, Any]:
        digests = {
            str(path.relative_to(case)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(case.glob(pattern))
        }
        return {"out": ended.out, "files": digests}

    return result


def load_part(part: str, automatically: bool) -> Callable[[], None]:
    """Load a part of an export, with our classes or with the Auto classes of transformers.

    Expected errors are printed as by `tvq`. The Auto classes read the JSON files before they know
    which class to use. Errors that they raise before any code of ours runs may have any type, such
    as AttributeError for a config.json that contains a list.
    """

    def load() -> None:
        import transformers

        import transformer_vq.hf

        found: Any = transformers if automatically else transformer_vq.hf
        name = f"Auto{part}" if automatically else f"TransformerVQ{part.removeprefix('Model')}"
        try:
            loaded = getattr(found, name).from_pretrained("export")
        except Exception as error:
            files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
            is_ours = any("/transformer_vq/" in file for file in files)
            if not str(error) or (not isinstance(error, (ValueError, OSError)) and is_ours):
                raise
            print(f"tvq: {' '.join(str(error).split())}", file=sys.stderr)
            sys.exit(2)
        print(USES[part](loaded))

    return load


def use_config(config: Any) -> str:
    return json.dumps(config.to_diff_dict())


def use_tokenizer(tokenizer: Any) -> str:
    tokens = tokenizer("In 1805 the fox").input_ids
    return f"{tokens} {tokenizer.decode(tokens)!r} {tokenizer.bos_token_id}"


def use_model(model: Any) -> str:
    tokens = torch.tensor([[0, 73, 110, 32, 49]])
    logits = model(input_ids=tokens).logits
    written = model.generate(input_ids=tokens, max_new_tokens=8)
    return f"{written.tolist()} {tensors_digest({'logits': logits})}"


USES = {"Config": use_config, "Tokenizer": use_tokenizer, "ModelForCausalLM": use_model}
LOAD = tuple(f"load {auto}{part}" for auto in ("Auto", "our ") for part in USES)


def resume_and_evaluate() -> None:
    main(["resume", "run"])
    main(EVAL.split())


def train_one_step() -> None:
    """Start a run from a model file, with options for all settings that differ from a preset."""
    config = small_run(Path.home())
    one = replace(config, train=replace(config.train, steps=1, init_from="model.safetensors"))
    main(["train", "tiny", "--out", "run", *options_for(one)])


def options_for(config: RunConfig) -> list[str]:
    """Return the options of `tvq train tiny` that produce this config."""
    preset = PRESETS["tiny"].to_dict()
    found = []
    for part, fields in config.to_dict().items():
        for name, value in fields.items():
            if value != preset[part][name]:
                option = f"{part}.{name}".replace("_", "-")
                if isinstance(value, bool):
                    found.append(f"--{option}" if value else f"--{part}.no-{name}")
                else:
                    values = value if isinstance(value, tuple) else (value,)
                    found += [f"--{option}", *map(str, values)]
    return found


EVAL = "eval run --json --device cpu"
SAMPLE = "sample run --device cpu --seed 1 --tokens 20"
EVALUATION = written("run/evaluation-test.json")
COMMANDS = {
    "resume": Command("resume run", trained),
    "resume and eval": Command(
        resume_and_evaluate, lambda case, ended: [trained(case, ended), EVALUATION(case, ended)]
    ),
    "eval": Command(EVAL, EVALUATION),
    "eval last": Command(f"{EVAL} --checkpoint last", EVALUATION),
    f"eval {BEFORE_LAST}": Command(f"{EVAL} --checkpoint {BEFORE_LAST}", EVALUATION),
    "train": Command(train_one_step, trained),
    "sample": Command(SAMPLE, printed),
    "sample from state": Command(f"{SAMPLE} --load-state state.safetensors", printed),
    "plot": Command("plot run", written("run/*.png")),
    "export": Command("export run out", written("out/*")),
    "info": Command("info run", printed),
    **{
        f"load {auto}{part}": Command(load_part(part, auto == "Auto"), printed)
        for auto in ("Auto", "our ")
        for part in USES
    },
}
