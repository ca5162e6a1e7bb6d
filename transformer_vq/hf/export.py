"""Export of a run as a folder for Hugging Face transformers."""

from __future__ import annotations

import re
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from transformers.utils import logging

from transformer_vq.data import tokenizers
from transformer_vq.data.chat_template import read_chat_template, writes_special_tokens
from transformer_vq.data.tokenizers import TEMPLATE_FILE, HFTokenizer
from transformer_vq.errors import UserError
from transformer_vq.files import (
    atomic_folder,
    read_json,
    read_object,
    write_json,
    write_manifest,
    write_text,
)
from transformer_vq.hf.model_card import model_card
from transformer_vq.hf.modeling import TransformerVQForCausalLM
from transformer_vq.hf.tokenization import TransformerVQTokenizer
from transformer_vq.training.checkpoint import (
    CheckpointError,
    load_model,
    read_config,
    read_tokenizer,
)
from transformer_vq.training.loading import GENERATION, SAMPLING
from transformer_vq.training.packaged import LEGAL

Dtype = Literal["float32", "bfloat16", "float16"]


def export(
    run: Path,
    folder: Path,
    checkpoint: str = "best",
    *,
    dtype: Dtype = "float32",
    chat_template: Path | None = None,
    name: str | None = None,
    license_id: str | None = None,
) -> str:
    """Write config, weights, codebooks, tokenizer and model card to a new folder, atomically.

    checkpoint: `best`, `last` or a step number. dtype: of the weights; codebooks stay float32.
    chat_template: a Jinja file; by default chat_template.jinja in the run, or the template of its
    tokenizer. name: of the model in the model card, by default that of the folder. license_id: as
    on the Hub, such as "mit"; by default only packaged models state one.

    Returns the name of the exported checkpoint. Runs on images have no tokenizer.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} is not empty; choose another folder")
    if license_id is not None and not re.fullmatch(r"[a-z][a-z0-9.+-]*", license_id):
        raise UserError(f"license={license_id!r}: give a name as on the Hub, such as mit")
    has_images = read_config(run).data.has_images
    template = _read_template(run, chat_template, has_images)
    model, which = load_model(run, checkpoint)
    tokenizer = read_tokenizer(run)
    if tokenizer.vocab_size != model.config.vocab_size:
        sizes = f"{model.config.vocab_size} tokens, the tokenizer {tokenizer.vocab_size}"
        files = " or ".join(tokenizers.TOKENIZER_FILES)
        raise CheckpointError(f"{run}: the model has {sizes}; check that {files} is not missing")
    for parameter in model.parameters():  # buffers stay float32, because they are codebooks
        parameter.data = parameter.data.to(getattr(torch, dtype))
    # Tools that batch need a padding token. Padding is masked, so any token can be used; bos
    # exists in every vocabulary, and it is also the padding token of the tokenizer.
    wrapped = TransformerVQForCausalLM.from_core(
        model, bos_token_id=tokenizer.bos, eos_token_id=tokenizer.eod, pad_token_id=tokenizer.bos
    )
    if tokenizer.stops:
        ends = {*tokenizer.stops, *([] if tokenizer.eod is None else [tokenizer.eod])}
        wrapped.generation_config.eos_token_id = sorted(ends)
        if (run / GENERATION).is_file():
            given = read_object(run / GENERATION)
            found = {name: given[name] for name in SAMPLING if name in given}
            wrapped.generation_config.update(do_sample=bool(found), **found)
    card = model_card(run, name or folder.absolute().name, model, which, license_id)
    try:
        with atomic_folder(folder) as partial, ExitStack() as restored:
            if logging.is_progress_bar_enabled():
                logging.disable_progress_bar()
                restored.callback(logging.enable_progress_bar)
            wrapped.save_pretrained(partial)
            if isinstance(tokenizer, HFTokenizer):
                _write_fast_tokenizer(tokenizer, partial, template)
            elif not has_images:
                vocabulary = run / tokenizers.MODEL_FILE
                own = TransformerVQTokenizer(
                    str(vocabulary) if vocabulary.is_file() else None,
                    end_of_document=tokenizer.eod is not None,
                    chat_template=template,
                )
                special = own.all_special_tokens
                own.split_special_tokens = not writes_special_tokens(template, special)
                own.save_pretrained(partial)
            for path in (x for pattern in LEGAL for x in run.glob(pattern)):
                shutil.copyfile(path, partial / path.name)
            write_text(partial / "README.md", card)
            write_manifest(partial)
            umask = 0o777 & ~partial.stat().st_mode
            for path in partial.iterdir():  # safetensors creates files with mode 600
                path.chmod(0o666 & ~umask)
    except SafetensorError as error:
        raise OSError(f"cannot write {folder}: {error}") from error
    return which


def _read_template(run: Path, given: Path | None, has_images: bool) -> str | None:
    if given is not None and has_images:
        raise UserError(f"{run} is a run on images, which has no chat template")
    path = given or run / TEMPLATE_FILE
    if given is None and not path.is_file():
        return None
    if path.exists() and not path.is_file():
        raise UserError(f"cannot read {path}: not a file; give a Jinja file")
    template = read_chat_template(path)
    if not template.strip():
        raise UserError(f"{path} is empty; give a Jinja file")
    return template


def _write_fast_tokenizer(tokenizer: HFTokenizer, folder: Path, template: str | None) -> None:
    """Write a PreTrainedTokenizerFast, which AutoTokenizer loads without custom code.

    As in training, a bos token is put before each text, and names of special tokens inside a text
    are treated as text; the latter only if the chat template does not contain special tokens.
    Padding is on the left and uses the bos id. template: replaces that of the tokenizer.
    """
    tokenizer.save(folder)
    added = read_json(folder / tokenizers.JSON_FILE).get("added_tokens") or ()
    special = [token["content"] for token in added if token.get("special")]
    chosen = tokenizer.settings.get("chat_template") if template is None else template
    bos = tokenizer.names[tokenizer.bos]
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "pad_token": bos,
        "padding_side": "left",
        "model_input_names": ["input_ids", "attention_mask"],
        "split_special_tokens": not writes_special_tokens(chosen, special),
        "clean_up_tokenization_spaces": False,
    }
    if tokenizer.eod is not None:
        config["eos_token"] = tokenizer.names[tokenizer.eod]
    for key in ("stop_tokens", "padded_vocab_size"):
        if key in tokenizer.settings:
            config[key] = tokenizer.settings[key]
    if isinstance(chosen, str):
        write_text(folder / TEMPLATE_FILE, chosen)
    elif chosen is not None:  # several templates with names
        config["chat_template"] = chosen
    write_json(folder / tokenizers.CONFIG_FILE, config)
