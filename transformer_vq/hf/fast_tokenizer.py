"""Export of a Hugging Face tokenizer, so that AutoTokenizer loads it without custom code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformer_vq.data.tokenizer_files import CONFIG_FILE
from transformer_vq.data.tokenizers import HFTokenizer
from transformer_vq.files import write_json


def write_fast_tokenizer(tokenizer: HFTokenizer, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, for a PreTrainedTokenizerFast.

    As in training, a bos token is put before each text, and names of special tokens inside a text
    are treated as text. Padding is on the left and uses the bos id. The chat template is kept.
    """
    tokenizer.save_vocabulary(folder)
    bos = tokenizer.token_name(tokenizer.bos)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "pad_token": bos,
        "padding_side": "left",
        "model_input_names": ["input_ids", "attention_mask"],
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
    }
    if tokenizer.eod is not None:
        config["eos_token"] = tokenizer.token_name(tokenizer.eod)
    if tokenizer.settings.chat_template is not None:
        config["chat_template"] = tokenizer.settings.chat_template
    write_json(folder / CONFIG_FILE, config)
