"""Models from any folder: a run, or one that `tvq export` wrote for Hugging Face transformers.

transformers itself is not needed.
"""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from transformer_vq.config import ModelConfig
from transformer_vq.data.hf_tokenizer import TEMPLATE_FILE
from transformer_vq.data.tokenizer_files import CONFIG_FILE as TOKENIZER_CONFIG
from transformer_vq.data.tokenizers import Tokenizer, load_tokenizer
from transformer_vq.device import meta_device
from transformer_vq.files import CorruptFileError, file_digest, read_json, read_verified_json
from transformer_vq.nn.model import TransformerVQ, check_tensors
from transformer_vq.training.checkpoint import CONFIG, MODEL, CheckpointError, load_run, read_config
from transformer_vq.training.packaged import find_run

INDEX, CHECKSUMS = f"{MODEL}.index.json", "checksums.json"  # of exported folders
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
    _check_files(folder)
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


def _check_files(folder: Path) -> None:
    """Raise CheckpointError if a file differs from the checksums that the export recorded."""
    if not (folder / CHECKSUMS).is_file():
        return
    try:
        recorded: dict[str, Any] = read_verified_json(folder / CHECKSUMS)["files"]
        wrong = [name for name, digest in recorded.items() if file_digest(folder / name) != digest]
    except CorruptFileError as error:
        raise CheckpointError(f"{error}; export the model again") from error
    if wrong:
        raise CheckpointError(
            f"{folder / wrong[0]} is corrupt or was edited; export the model again, or delete "
            f"{folder / CHECKSUMS} if the change is intended"
        )
