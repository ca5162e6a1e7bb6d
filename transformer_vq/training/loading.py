"""Models from any folder: a run, or one that `tvq export` wrote for Hugging Face transformers.

Also the model that a run starts from: a new one, or that of `train.init_from` for fine-tuning,
which is a run folder, a model file or an exported folder. transformers itself is not needed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from dataclasses import fields
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from transformer_vq.config import DataConfig, ModelConfig, RunConfig
from transformer_vq.data.tokenizers import TEMPLATE_FILE, TOKENIZER_FILES, Tokenizer, load_tokenizer
from transformer_vq.device import meta_device
from transformer_vq.errors import UserError
from transformer_vq.files import (
    MANIFEST,
    CorruptFileError,
    check_manifest,
    read_json,
    read_manifest,
    read_object,
)
from transformer_vq.generation import TEMPERATURE, TOP_P
from transformer_vq.generation.sampling import Sampling
from transformer_vq.nn.model import TransformerVQ, check_tensors
from transformer_vq.progress import warn
from transformer_vq.training.checkpoint import (
    TOKENIZER_CONFIG,
    TRAINING_FIELDS,
    CheckpointError,
    differences,
    load_model,
    load_run,
    read_config,
    read_tokenizer,
)
from transformer_vq.training.packaged import ABOUT, LEGAL, find_run
from transformer_vq.training.run_list import CONFIG, MODEL

GENERATION = "generation_config.json"  # of exported and of converted models
SAMPLING = ("temperature", "top_p", "top_k")  # in it
INDEX = f"{MODEL}.index.json"  # of exported folders
MODEL_TYPE, ARCHITECTURE = "transformer_vq", "TransformerVQForCausalLM"


def has_images(path: str | os.PathLike[str]) -> bool:
    """Return whether a run was trained on images; an exported folder does not tell."""
    folder = find_run(path)
    is_run = (folder / CONFIG).is_file() and _read_export(folder) is None
    return is_run and read_config(folder).data.has_images


def read_chat_template(path: str | os.PathLike[str]) -> str | None:
    """Return the chat template next to a model, if there is one; of several, the default one."""
    folder = find_run(path)
    if (folder / TEMPLATE_FILE).is_file():
        return (folder / TEMPLATE_FILE).read_text("utf-8", errors="replace")
    if not (folder / TOKENIZER_CONFIG).is_file():
        return None
    found = read_json(folder / TOKENIZER_CONFIG).get("chat_template")
    if isinstance(found, list):
        found = {entry.get("name"): entry.get("template") for entry in found}
    if isinstance(found, dict):
        found = found.get("default")
    return found if isinstance(found, str) else None


def read_sampling(path: str | os.PathLike[str]) -> Sampling:
    """Return how to sample from a model: the settings next to it, else the usual ones."""
    file = find_run(path) / GENERATION
    given = read_object(file) if file.is_file() else {}
    try:
        return Sampling(TEMPERATURE, TOP_P).override(*map(given.get, SAMPLING))
    except (TypeError, UserError) as error:
        raise CheckpointError(f"{file}: {error}; fix or delete it") from error


def load_model_and_tokenizer(
    path: str | os.PathLike[str], checkpoint: str = "best"
) -> tuple[TransformerVQ, Tokenizer]:
    """Load a run folder, a packaged model by its name, or a folder that `tvq export` wrote.

    checkpoint: of a run folder. The model is in evaluation mode.
    """
    folder = find_run(path)
    values = _read_export(folder) if (folder / CONFIG).is_file() else None
    if values is None:
        model, tokenizer, _ = load_run(folder, checkpoint)
        return model, tokenizer
    has_end = values.get("eos_token_id") is not None
    return _load_export(folder, values).eval(), load_tokenizer(folder, end_of_document=has_end)


def _read_export(folder: Path) -> dict[str, Any] | None:
    """Return config.json of an exported folder, which names the model type; None of a run."""
    values = read_object(folder / CONFIG)
    kind = values.get("model_type")
    if kind not in (None, MODEL_TYPE):
        problem = f"{folder} is a model of type {kind!s:.40}"
        raise CheckpointError(f"{problem}; give one of type {MODEL_TYPE}")
    return None if kind is None else values


def _exported_config(values: dict[str, Any]) -> ModelConfig:
    names = {f.name for f in fields(ModelConfig)}
    return ModelConfig.from_dict({name: x for name, x in values.items() if name in names})


def _load_export(folder: Path, values: dict[str, Any]) -> TransformerVQ:
    """Return the model of an exported folder; raises CheckpointError if a file is corrupt.

    Folders that transformers saved are accepted as well, in any dtype and number of files.
    """
    check_export(folder)
    named = values.get("architectures") or [ARCHITECTURE]
    if ARCHITECTURE not in named:
        need = f"only {ARCHITECTURE} has an output head for text"
        raise CheckpointError(f"{folder} is a {named[0]!s:.60}; {need}")
    names = [MODEL]
    # transformers reads the index only if the single file does not exist.
    if (folder / INDEX).is_file() and not (folder / MODEL).is_file():
        names = sorted(set(read_object(folder / INDEX)["weight_map"].values()))
    tensors: dict[str, Tensor] = {}
    for name in names:
        try:
            with safe_open(folder / name, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118
                    x = file.get_tensor(key).clone()
                    name_here = key.removeprefix("model.").removeprefix("lm_")
                    tensors[name_here] = x.float() if x.is_floating_point() else x
        except (SafetensorError, OSError) as error:
            problem = f"{folder / name} is missing or corrupt ({error})"
            raise CheckpointError(f"{problem}; export the model again") from error
    with meta_device():
        model = TransformerVQ(_exported_config(values))
    try:
        model.load_state_dict(tensors, assign=True)
    except RuntimeError as error:
        reason = str(error).splitlines()[1].strip()
        problem = f"{folder} does not contain the tensors of its config: {reason:.200}"
        raise CheckpointError(f"{problem}; export the model again") from error
    check_tensors(folder, tensors, model)
    return model


WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
VOCABULARY = ("tokenizer.json", "*.model")
SETTINGS = (CONFIG, GENERATION, TOKENIZER_CONFIG)


def check_export(folder: object, *patterns: str) -> None:
    """Compare the files of an exported folder with its manifest; warn about edited settings.

    Raises CheckpointError if weights or vocabulary have changed. A folder without a manifest is not
    checked: transformers writes none, because other tools may change its files.
    folder: a local path; anything else, such as a Hub name, is not checked.
    patterns: the files to check, because hashing large weights is slow; all by default.
    """
    if not isinstance(folder, (str, os.PathLike)) or not (Path(folder) / MANIFEST).is_file():
        return
    root, patterns = Path(folder), patterns or (*SETTINGS, *WEIGHTS, *VOCABULARY)
    fix = f"export the model again, or delete {root / MANIFEST} if the change is intended"
    try:
        names = [n for n in read_manifest(root) if any(fnmatch(n, p) for p in patterns)]
        for name in check_manifest(root, fix, names, editable=SETTINGS):
            warn(f"{root / name} was edited")
    except CorruptFileError as error:
        message = str(error)
        raise CheckpointError(message if fix in message else f"{message}; {fix}") from error


class InitialModel:
    """The model that fine-tuning starts from: a run folder, a model file or an exported folder.

    Raises CheckpointError if `init_from` is none of them.
    """

    def __init__(self, init_from: str | os.PathLike[str]) -> None:
        self.name = str(init_from)
        self.path = find_run(Path(init_from).expanduser())
        self._export: dict[str, Any] | None = None
        self._run: RunConfig | None = None
        if self.path.is_file():
            self.config = TransformerVQ.load(self.path).config
        elif not (self.path / CONFIG).is_file():
            raise CheckpointError(
                f"--train.init-from {init_from} does not contain a model; give a run folder, a "
                "model file (.safetensors) or a folder written by `tvq export`"
            )
        else:
            self._export = _read_export(self.path)
            if self._export is None:
                self._run = read_config(self.path)
                self.config = self._run.model
            else:
                self.config = _exported_config(self._export)

    @property
    def vocabulary(self) -> Path | None:
        """The vocabulary file next to the model, if it has one."""
        paths = [self.path / name for name in TOKENIZER_FILES]
        return next((path for path in paths if path.is_file()), None)

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None for a model file, which has none."""
        if self.path.is_file():
            return None
        if self._run is None:
            return load_tokenizer(self.path)
        return read_tokenizer(self.path, self._run)

    def copy_terms(self, run: Path) -> None:
        """Copy license, origin and generation settings of a converted model to a run."""
        if (self.path / ABOUT).is_file() and "source" in read_object(self.path / ABOUT):
            for path in (x for name in (ABOUT, GENERATION, *LEGAL) for x in self.path.glob(name)):
                shutil.copyfile(path, run / path.name)

    def weights(self, config: ModelConfig) -> Iterable[tuple[str, Tensor]]:
        """Return the tensors of the model by name, for one with other training settings."""
        self.check_architecture(config)
        if self._export is None:
            loaded = load_model(self.path, config=self._run)[0]
        else:
            loaded = _load_export(self.path, self._export)
        return loaded.state_dict().items()

    def check_architecture(self, wanted: ModelConfig) -> None:
        """Raise CheckpointError if the model computes another function than `wanted`.

        The vocabulary is checked by `check_tokens`.
        """
        ignored = TRAINING_FIELDS | {"vocab_size"}
        if differing := [x for x in differences(self.config, wanted) if x[0] not in ignored]:
            named = ", ".join(f"model.{n} ({given}, here {here})" for n, given, here in differing)
            problem = f"--train.init-from {self.name}: its model differs in {named}"
            raise CheckpointError(f"{problem}; change these options to match")

    def check_tokens(self, data: DataConfig, tokenizer: Tokenizer) -> None:
        """Raise CheckpointError if the tokenizer of the data is not that of the model."""
        own, n_tokens = self.tokenizer, self.config.vocab_size
        is_same = own is None or own.sha256 == tokenizer.sha256
        if n_tokens == tokenizer.vocab_size and is_same:
            return
        fix = "use the tokenizer that it was trained with (--data.tokenizer)"
        has_bytes = own is None or own.sha256 is None
        if data.tokenizer_name == "bytes" and has_bytes and n_tokens in (256, 257):
            fix = f"use --data.{'no-' if n_tokens == 256 else ''}end-of-document"
        elif not is_same and not has_bytes:
            fix = "leave out --data.tokenizer"
        raise CheckpointError(
            f"--train.init-from {self.name} has {n_tokens:,} tokens ({_named(own)}), but the data "
            f"have {tokenizer.vocab_size:,} ({_named(tokenizer)}); {fix}"
        )


def _named(tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        return "unknown tokenizer"
    sha256 = tokenizer.sha256
    return "bytes" if sha256 is None else f"tokenizer {sha256[:12]}"
