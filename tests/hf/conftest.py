"""Nothing is fetched, and no bars are drawn."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
from helpers import tiny_config
from transformers.utils import logging

from transformer_vq import TransformerVQ
from transformer_vq.hf import TransformerVQForCausalLM, TransformerVQTokenizer

logging.disable_progress_bar()


@pytest.fixture
def core() -> TransformerVQ:
    """A model of bytes with random weights."""
    return TransformerVQ(tiny_config(vocab_size=256)).eval()


@pytest.fixture
def model(core) -> TransformerVQForCausalLM:
    return TransformerVQForCausalLM.from_core(core)


@pytest.fixture
def folder(model, tmp_path):
    """The model and its tokenizer on disk."""
    model.save_pretrained(tmp_path / "model")
    TransformerVQTokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"
