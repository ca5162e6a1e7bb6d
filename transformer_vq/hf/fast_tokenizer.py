"""Export of a Hugging Face tokenizer, so that AutoTokenizer loads it without custom code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformer_vq.data.tokenizer_files import CONFIG_FILE, JSON_FILE
from transformer_vq.data.tokenizers import HFTokenizer
from transformer_vq.files import read_json, write_json
from transformer_vq.hf.chat_template import Template, write_chat_template, writes_special_tokens


def write_fast_tokenizer(
    tokenizer: HFTokenizer, folder: Path, chat_template: Template | None = None
) -> None:
    """Write tokenizer.json and tokenizer_config.json, for a PreTrainedTokenizerFast.

    As in training, a bos token is put before each text, and names of special tokens inside a text
    are treated as text; the latter only if the chat template does not contain special tokens.
    Padding is on the left and uses the bos id. chat_template: replaces that of the tokenizer.
    """
    tokenizer.save_vocabulary(folder)
    template = tokenizer.settings.chat_template if chat_template is None else chat_template
    added = read_json(folder / JSON_FILE).get("added_tokens") or ()
    special = [token["content"] for token in added if token.get("special")]
    bos = tokenizer.token_name(tokenizer.bos)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "pad_token": bos,
        "padding_side": "left",
        "model_input_names": ["input_ids", "attention_mask"],
        "split_special_tokens": not writes_special_tokens(template, special),
        "clean_up_tokenization_spaces": False,
    }
    if tokenizer.eod is not None:
        config["eos_token"] = tokenizer.token_name(tokenizer.eod)
    write_json(folder / CONFIG_FILE, config | write_chat_template(template, folder))
