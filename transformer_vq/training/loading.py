"""Models from any folder: a run, or one that `tvq export` wrote for Hugging Face transformers.

Also the model that a run starts from: a new one, or that of `train.init_from` for fine-tuning,
which is a run folder, a model file or an exported folder. transformers itself is not needed.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, fields, replace
from fnmatch import fnmatch
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from transformer_vq.config import ModelConfig, RunConfig
from transformer_vq.data.corpus import Corpus
from transformer_vq.data.hf_tokenizer import TEMPLATE_FILE
from transformer_vq.data.tokenizers import (
    TOKENIZER_FILES,
    ByteTokenizer,
    Tokenizer,
    load_tokenizer,
)
from transformer_vq.device import meta_device
from transformer_vq.files import (
    MANIFEST,
    CorruptFileError,
    check_manifest,
    read_json,
    read_manifest,
)
from transformer_vq.nn.model import TransformerVQ, check_tensors
from transformer_vq.progress import warn
from transformer_vq.training.checkpoint import (
    CONFIG,
    MODEL,
    TOKENIZER_CONFIG,
    TRAINING_FIELDS,
    CheckpointError,
    load_model,
    load_run,
    read_config,
    read_tokenizer,
)
from transformer_vq.training.packaged import find_run

INDEX = f"{MODEL}.index.json"  # of exported folders
MODEL_TYPE, ARCHITECTURE = "transformer_vq", "TransformerVQForCausalLM"


def has_images(path: str | os.PathLike[str]) -> bool:
    """Return whether a run was trained on images; an exported folder does not tell."""
    folder = find_run(path)
    is_run = (folder / CONFIG).is_file() and not is_export(folder)
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


def load_model_and_tokenizer(
    path: str | os.PathLike[str], checkpoint: str = "best"
) -> tuple[TransformerVQ, Tokenizer]:
    """Load a run folder, a packaged model by its name, or a folder that `tvq export` wrote.

    checkpoint: of a run folder. The model is in evaluation mode.
    """
    folder = find_run(path)
    if not ((folder / CONFIG).is_file() and is_export(folder)):
        model, tokenizer, _ = load_run(folder, checkpoint)
        return model, tokenizer
    has_end = read_json(folder / CONFIG).get("eos_token_id") is not None
    return load_export(folder).eval(), load_tokenizer(folder, end_of_document=has_end)


def is_export(folder: Path) -> bool:
    """Return whether a folder is an export of ours; its config.json names the model type."""
    if not folder.is_dir():
        return False
    values = read_json(folder / CONFIG)
    kind = values.get("model_type") if isinstance(values, dict) else None
    if kind not in (None, MODEL_TYPE):
        raise CheckpointError(
            f"{folder} is a model of type {kind!s:.40}; give one of type {MODEL_TYPE}"
        )
    return kind is not None


def exported_config(folder: Path) -> ModelConfig:
    values = read_json(folder / CONFIG)
    names = {f.name for f in fields(ModelConfig)}
    return ModelConfig.from_dict({name: x for name, x in values.items() if name in names})


def load_export(folder: Path) -> TransformerVQ:
    """Return the model of an exported folder; raises CheckpointError if a file is corrupt.

    Folders that transformers saved are accepted as well, in any dtype and number of shards.
    """
    check_export(folder)
    _check_architecture(folder)
    names = [MODEL]
    # transformers reads the index only if the single file does not exist.
    if (folder / INDEX).is_file() and not (folder / MODEL).is_file():
        names = sorted(set(read_json(folder / INDEX)["weight_map"].values()))
    tensors: dict[str, Tensor] = {}
    for name in names:
        try:
            with safe_open(folder / name, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118
                    name_here = key.removeprefix("model.").removeprefix("lm_")
                    tensors[name_here] = file.get_tensor(key).clone()
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{folder / name} is missing or corrupt ({error}); export the model again"
            ) from error
    with meta_device():
        model = TransformerVQ(exported_config(folder))
    wanted = model.state_dict()
    wrong = sorted(
        name
        for name in wanted.keys() | tensors.keys()
        if getattr(wanted.get(name), "shape", None) != getattr(tensors.get(name), "shape", None)
    )
    if wrong:
        raise CheckpointError(
            f"{folder} does not contain the tensors of its config: {wrong[0]} and {len(wrong) - 1} "
            "more are missing, unknown or of another shape; export the model again"
        )
    as_float = {n: x.float() if x.is_floating_point() else x for n, x in tensors.items()}
    check_tensors(folder, as_float, model)
    model.load_state_dict(as_float, assign=True)
    return model


def _check_architecture(folder: Path) -> None:
    """Raise CheckpointError if transformers saved a model with another head."""
    named = read_json(folder / CONFIG).get("architectures") or [ARCHITECTURE]
    if ARCHITECTURE not in named:
        raise CheckpointError(
            f"{folder} is a {named[0]!s:.60}; only {ARCHITECTURE} has an output head for text"
        )


WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
VOCABULARY = ("tokenizer.json", "*.model")
SETTINGS = (CONFIG, "generation_config.json", "tokenizer_config.json")


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


def initial_model_config(init_from: str | os.PathLike[str]) -> ModelConfig:
    """Return the model config of a run folder, model file or exported folder.

    Raises CheckpointError if it is none of them.
    """
    path = _existing(init_from)
    if path.is_file():
        return _config_of_file(path)
    return exported_config(path) if is_export(path) else read_config(path).model


def with_initial_tokenizer(config: RunConfig) -> RunConfig:
    """Return the config of a run with the tokenizer of `train.init_from`, if it names no other.

    Raises CheckpointError if the data will have other bytes than the model. Other vocabularies are
    known only when the data are prepared; see `check_vocabulary`.
    """
    source = config.train.init_from
    if source is None:
        return config
    path = next((p for n in TOKENIZER_FILES if (p := _existing(source) / n).is_file()), None)
    if path is not None and config.data.tokenizer is None and not config.data.has_images:
        return replace(config, data=replace(config.data, tokenizer=str(path)))
    if config.data.tokenizer_name == "bytes":
        _check_tokens(config, ByteTokenizer(config.data.ends_documents))
    return config


def initial_model(config: RunConfig) -> TransformerVQ:
    """Return a new model, or that of `train.init_from` with the training settings of `config`.

    Raises CheckpointError if its architecture differs from that of `config`.
    """
    source = config.train.init_from
    if source is None:
        return TransformerVQ(config.model)
    check_same_architecture(config)
    path = _existing(source)
    loaded = load_export(path) if is_export(path) else load_model(path)[0]
    with meta_device():
        model = TransformerVQ(config.model)
    model.load_state_dict(loaded.state_dict(), assign=True)
    return model


def check_same_architecture(config: RunConfig) -> None:
    """Raise CheckpointError if the model of `train.init_from` computes another function.

    The vocabulary is checked by `check_vocabulary`.
    """
    source = config.train.init_from
    if source is None:
        return
    given, wanted = asdict(initial_model_config(source)), asdict(config.model)
    ignored = TRAINING_FIELDS | {"vocab_size"}
    if differing := [n for n in wanted if n not in ignored and given[n] != wanted[n]]:
        named = ", ".join(f"model.{n} ({given[n]}, here {wanted[n]})" for n in differing)
        raise CheckpointError(
            f"--train.init-from {source}: its model differs in {named}; change these options to "
            "match"
        )


def check_vocabulary(config: RunConfig, corpus: Corpus) -> None:
    """Raise CheckpointError if the data have other tokens than the model of `train.init_from`."""
    if config.train.init_from is not None:
        _check_tokens(config, corpus.tokenizer())


def _check_tokens(config: RunConfig, tokenizer: Tokenizer) -> None:
    """Raise CheckpointError if this tokenizer of the data is not that of `train.init_from`."""
    source = str(config.train.init_from)
    path, n_tokens = _existing(source), initial_model_config(source).vocab_size
    own = None if path.is_file() else _tokenizer(path)  # a model file has no tokenizer
    if n_tokens == tokenizer.vocab_size and (own is None or own.sha256 == tokenizer.sha256):
        return
    fix = "use the tokenizer that it was trained with (--data.tokenizer)"
    has_bytes = own is None or own.sha256 is None
    if config.data.tokenizer_name == "bytes" and has_bytes and n_tokens in (256, 257):
        fix = f"use --data.{'no-' if n_tokens == 256 else ''}end-of-document"
    elif own is not None and own.sha256 == tokenizer.sha256:
        fix = (
            "its vocabulary was resized; save it again after "
            f"model.resize_token_embeddings({tokenizer.vocab_size})"
        )
    elif own is not None and own.sha256 is not None:
        fix = "leave out --data.tokenizer"
    raise CheckpointError(
        f"--train.init-from {source} has {n_tokens:,} tokens ({_name(own)}), but the data have "
        f"{tokenizer.vocab_size:,} ({_name(tokenizer)}); {fix}"
    )


def _name(tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        return "unknown tokenizer"
    sha256 = tokenizer.sha256
    return "bytes" if sha256 is None else f"tokenizer {sha256[:12]}"


def _tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(folder) if is_export(folder) else read_tokenizer(folder)


def _existing(init_from: str | os.PathLike[str]) -> Path:
    path = find_run(Path(init_from).expanduser())
    if path.is_file() or (path / CONFIG).is_file():
        return path
    what = "is not a run or exported folder (no config.json)" if path.is_dir() else "does not exist"
    raise CheckpointError(
        f"--train.init-from {init_from} {what}; give a run folder, a model file (.safetensors) or "
        "a folder written by `tvq export`"
    )


def _config_of_file(path: Path) -> ModelConfig:
    """Return the config in the metadata of a model file, without reading its tensors."""
    try:
        with safe_open(path, framework="pt") as file:
            config = json.loads((file.metadata() or {})["config"])
    except (SafetensorError, OSError, KeyError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"--train.init-from {path} is not a model file; give one that TransformerVQ.save wrote"
        ) from error
    return ModelConfig.from_dict(config)
