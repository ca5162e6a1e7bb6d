"""Fixtures for the Hugging Face adapters; downloads and progress bars are disabled."""

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
    """Return a byte-level model with random weights."""
    return TransformerVQ(tiny_config(vocab_size=256)).eval()


@pytest.fixture
def model(core) -> TransformerVQForCausalLM:
    return TransformerVQForCausalLM.from_core(core)


@pytest.fixture
def folder(model, tmp_path):
    """Return a folder with the saved model and its tokenizer."""
    model.save_pretrained(tmp_path / "model")
    TransformerVQTokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"
