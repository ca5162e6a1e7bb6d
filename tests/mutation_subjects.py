"""Files that the mutation tests mutate, and the commands that read them."""

from __future__ import annotations

from dataclasses import dataclass, field

from mutation_commands import BEFORE_LAST, LOAD, STEPS, STOPPED_AT

from transformer_vq.training.checkpoint import METADATA, MODEL, TENSORS


@dataclass(frozen=True)
class Subject:
    """Files to mutate, and commands whose results depend on them."""

    n_cases: int
    """Number of mutations tested by default; the slow tests use ten times as many."""
    copies: dict[str, str]
    """Files of a case: name in its folder -> name in the intact folder."""
    commands: dict[str, tuple[str, ...]]
    """Pattern of the paths to mutate -> commands to run afterwards."""
    donors: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Pattern of paths -> intact files or folders of the same kind that may replace them."""
    sealed: tuple[str, ...] = ()
    """Patterns of safetensors files whose checksum may be recomputed after a mutation."""


def _checkpoint_donors(run: str, *steps: int) -> dict[str, tuple[str, ...]]:
    folders = [f"{run}/checkpoints/step-{step:08d}" for step in steps]
    folders += [f"{other}/checkpoints/step-{STEPS:08d}" for other in ("other", "twin")]
    parts = {
        f"run/checkpoints/step-*/{name}": tuple(f"{folder}/{name}" for folder in folders)
        for name in (MODEL, TENSORS, METADATA)
    }
    return {**parts, "run/checkpoints/step-*": tuple(folders)}


OTHER_BEST = {"run/best/*": ("other/best/model.safetensors", "books/best/model.safetensors")}
OTHER_CONFIG = {"run/config.json": ("other/config.json", "books/config.json")}
OTHER_CORPUS = {
    "home/cache/text-*": ("other-corpus",),
    **{
        f"home/cache/text-*/{name}": (f"other-corpus/{name}",)
        for name in ("meta.json", "tokens.bin", "train.npy", "test.npy", "manifest.json")
    },
}
SUBJECTS = {
    "stopped run": Subject(
        8,
        {"run": "stopped"},
        {
            **{
                f"run/{name}": ("resume",)
                for name in ("config.json", "manifest.json", "metrics.jsonl", ".lock")
            },
            "run/checkpoints/*": ("resume",),
            "run/checkpoints/*/*": ("resume", "resume and eval"),
            "run/best": ("resume and eval",),
            "run/best/*": ("resume and eval",),
        },
        {**OTHER_CONFIG, **OTHER_BEST, **_checkpoint_donors("stopped", BEFORE_LAST, STOPPED_AT)},
        sealed=("run/checkpoints/*/*",),
    ),
    # This run has only a config, so the config of another run would make it that run.
    "run without checkpoint": Subject(4, {"run": "started"}, {"run/*": ("resume",)}),
    "finished run": Subject(
        7,
        {"run": "finished"},
        {
            "run/config.json": ("eval", "eval last", "sample", "export"),
            "run/best/*": ("eval", "sample", "export"),
            "run/checkpoints/*": ("eval last", "resume"),
            "run/checkpoints/*/*": ("eval last",),
        },
        {**OTHER_BEST, **OTHER_CONFIG, **_checkpoint_donors("finished", BEFORE_LAST, STEPS)},
        sealed=("run/best/*", "run/checkpoints/*/*"),
    ),
    "figures": Subject(
        2,
        {"run": "finished"},
        {"run/metrics.jsonl": ("plot",), "run/evaluation-test.json": ("plot",)},
    ),
    # `tvq info` reads only the config, so the config of another run changes the result.
    "config": Subject(4, {"run": "finished"}, {"run/config.json": ("info",)}),
    "run with a vocabulary": Subject(
        6,
        {"run": "books"},
        {
            "run/tokenizer.model": ("eval", "sample", "export"),
            "run/config.json": ("eval", "sample", "export"),
            "run/best/*": ("eval", "sample"),
        },
        {
            "run/tokenizer.model": ("vocabulary.model",),
            "run/config.json": ("finished/config.json",),
            "run/best/*": ("finished/best/model.safetensors",),
        },
        sealed=("run/best/*",),
    ),
    "corpus": Subject(
        6,
        {"run": "stopped", "home": "home"},
        {f"home/cache/text-*{files}": ("eval", "resume") for files in ("", "/*")},
        OTHER_CORPUS,
    ),
    "corpus of a run without checkpoint": Subject(
        4,
        {"run": "started", "home": "home"},
        {f"home/cache/text-*{files}": ("resume",) for files in ("", "/*")},
        OTHER_CORPUS,
    ),
    "corpus with a vocabulary": Subject(
        4,
        {"run": "books", "home": "home"},
        {f"home/cache/pg19-*{files}": ("eval",) for files in ("", "/*")},
        {"home/cache/pg19-*/tokenizer.model": ("vocabulary.model",)},
    ),
    "snapshot": Subject(
        6,
        {"run": "finished", "state.safetensors": "state.safetensors"},
        {"state.safetensors": ("sample from state",)},
        {"state.safetensors": ("other-state.safetensors", "finished/best/model.safetensors")},
        sealed=("state.safetensors",),
    ),
    "initial model": Subject(
        6,
        {"model.safetensors": "finished/best/model.safetensors"},
        {"model.safetensors": ("train",)},
        {"model.safetensors": ("other/best/model.safetensors", "state.safetensors")},
        sealed=("model.safetensors",),
    ),
    "export": Subject(
        7,
        {"export": "export"},
        {"export/*": LOAD},
        {
            f"export/{name}": (f"other-export/{name}",)
            for name in ("manifest.json", "config.json", "model.safetensors")
        },
    ),
    "export with a vocabulary": Subject(
        4,
        {"export": "books-export"},
        {"export/*": LOAD},
        {"export/tokenizer.model": ("vocabulary.model",)},
    ),
}
