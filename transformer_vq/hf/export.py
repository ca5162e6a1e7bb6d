"""Export of a run as a folder for Hugging Face transformers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, get_args

import torch
from safetensors import SafetensorError
from transformers.utils import logging

from transformer_vq.data.hf_tokenizer import TEMPLATE_FILE
from transformer_vq.data.tokenizers import MODEL_FILE, TOKENIZER_FILES, HFTokenizer, Tokenizer
from transformer_vq.errors import UserError
from transformer_vq.files import atomic_folder, write_text
from transformer_vq.hf.chat_template import read_chat_template, writes_special_tokens
from transformer_vq.hf.checksums import write_checksums
from transformer_vq.hf.fast_tokenizer import write_fast_tokenizer
from transformer_vq.hf.model_card import model_card
from transformer_vq.hf.modeling_transformer_vq import TransformerVQForCausalLM
from transformer_vq.hf.tokenization_transformer_vq import TransformerVQTokenizer
from transformer_vq.training.checkpoint import (
    CheckpointError,
    load_model,
    read_config,
    read_tokenizer,
)

Dtype = Literal["float32", "bfloat16", "float16"]
MAX_SHARD_SIZE = "50GB"  # the default of transformers


def export(
    run: Path,
    folder: Path,
    checkpoint: str = "best",
    *,
    dtype: Dtype = "float32",
    max_shard_size: str = MAX_SHARD_SIZE,
    chat_template: Path | None = None,
    name: str | None = None,
    license_id: str | None = None,
) -> str:
    """Write config, weights, codebooks, tokenizer and model card to a new folder, atomically.

    checkpoint: `best`, `last` or a step number. dtype: of the weights; codebooks stay float32.
    max_shard_size: of a weight file, such as "2GB"; larger models are split. chat_template: a Jinja
    file; by default the template of the run's tokenizer, or chat_template.jinja in the run.
    name: of the model in the model card; the name of the folder by default. license_id: of the
    model, as on the Hub, such as "mit" or "cc-by-4.0"; by default only packaged models state one.

    Returns the name of the exported checkpoint. Runs on images have no tokenizer, because their
    tokens are not text.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} is not empty; choose another folder")
    if dtype not in get_args(Dtype):
        raise UserError(f"dtype={dtype!r}: choose one of {', '.join(get_args(Dtype))}")
    _check_shard_size(max_shard_size)
    if license_id is not None and not re.fullmatch(r"[a-z][a-z0-9.+-]*", license_id):
        raise UserError(
            f"license={license_id!r}: give a name of the Hugging Face Hub, such as mit or cc-by-4.0"
        )
    has_images = read_config(run).data.has_images
    template = _read_template(run, chat_template, has_images)
    model, which = load_model(run, checkpoint)
    tokenizer = read_tokenizer(run)
    if tokenizer.vocab_size != model.config.vocab_size:
        raise CheckpointError(
            f"{run}: the model has {model.config.vocab_size} tokens, the tokenizer "
            f"{tokenizer.vocab_size}; check that {' or '.join(TOKENIZER_FILES)} is not missing"
        )
    _convert(model, dtype)
    # Tools that batch need a padding token. Padding is masked, so any token can be used; bos
    # exists in every vocabulary, and it is also the padding token of the tokenizer.
    wrapped = TransformerVQForCausalLM.from_core(
        model,
        bos_token_id=tokenizer.bos,
        eos_token_id=tokenizer.eod,
        pad_token_id=tokenizer.bos,
    )
    card = model_card(run, name or folder.absolute().name, model, which, license_id)
    try:
        with atomic_folder(folder) as partial:
            with _without_progress_bars():
                wrapped.save_pretrained(partial, max_shard_size=max_shard_size)
            if not has_images:
                _save_tokenizer(tokenizer, run, partial, template)
            write_text(partial / "README.md", card)
            write_checksums(partial)
            for path in partial.iterdir():  # safetensors creates files with mode 600
                path.chmod(0o666 & ~_umask(partial))
    except SafetensorError as error:
        raise OSError(f"cannot write {folder}: {error}") from error
    return which


def _check_shard_size(size: str) -> None:
    """Raise UserError if a size is not a number with a unit, such as 500MB or 2GB."""
    if not re.fullmatch(r"[1-9][0-9]*[KMGT]B", size):
        raise UserError(f"max_shard_size={size}: give a number with a unit, such as 500MB or 2GB")


def _read_template(run: Path, given: Path | None, has_images: bool) -> str | None:
    if given is None:
        given = run / TEMPLATE_FILE if (run / TEMPLATE_FILE).is_file() else None
    elif has_images:
        raise UserError(f"{run} is a run on images, which has no chat template")
    return None if given is None else read_chat_template(given)


def _convert(model: torch.nn.Module, dtype: Dtype) -> None:
    """Convert the parameters of a model; buffers stay float32, because they are codebooks."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(getattr(torch, dtype))


def _save_tokenizer(tokenizer: Tokenizer, run: Path, folder: Path, template: str | None) -> None:
    if isinstance(tokenizer, HFTokenizer):
        write_fast_tokenizer(tokenizer, folder, template)
        return
    vocabulary = run / MODEL_FILE
    own = TransformerVQTokenizer(
        str(vocabulary) if vocabulary.is_file() else None,
        end_of_document=tokenizer.eod is not None,
        chat_template=template,
    )
    own.split_special_tokens = not writes_special_tokens(template, own.all_special_tokens)
    own.save_pretrained(folder)


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    is_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if is_enabled:
            logging.enable_progress_bar()


def _umask(folder: Path) -> int:
    """Return the umask, derived from the mode of a newly created folder."""
    return 0o777 & ~folder.stat().st_mode
