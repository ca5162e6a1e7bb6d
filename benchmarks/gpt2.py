"""The GPT-2 of Hugging Face transformers as a baseline, with about as many parameters as a model.

Its keys and values are kept for every token, so its memory grows with the context.
"""

from __future__ import annotations

import math
import time
from importlib.util import find_spec
from typing import Any

import torch

from common import Record, median_seconds
from measure import synchronize
from transformer_vq.config import ModelConfig
from transformer_vq.errors import missing_extra
from transformer_vq.memory_use import peak_bytes
from transformer_vq.nn.model import TransformerVQ

HEAD_WIDTH = 64


CHUNK = 2048
"""Tokens per forward pass of a prefill: as many as in ours."""


def n_parameters(config: ModelConfig) -> int:
    """Return the number of parameters of a model."""
    with torch.device("meta"):
        return sum(p.numel() for p in TransformerVQ(config).parameters())


def shape(config: ModelConfig) -> tuple[int, int]:
    """Return width and layers of a GPT-2 with about as many parameters, without positions."""
    n_layer = 2 * config.n_layer
    width = math.sqrt(n_parameters(config) / (12 * n_layer))
    return max(round(width / HEAD_WIDTH), 1) * HEAD_WIDTH, n_layer


def kv_bytes(config: ModelConfig, context: int, batch: int = 1) -> int:
    """Return the bytes of the keys and values of a context."""
    width, n_layer = shape(config)
    return 4 * batch * context * n_layer * 2 * width


def check_installed() -> None:
    """Raise UserError if transformers is not installed, without importing it."""
    if find_spec("transformers") is None:
        raise missing_extra("the gpt2 baseline", "transformers>=5")


def build(config: ModelConfig, n_positions: int) -> Any:
    """Return a GPT-2 with random weights that uses `scaled_dot_product_attention`."""
    check_installed()
    from transformers import GPT2Config, GPT2LMHeadModel

    width, n_layer = shape(config)
    settings = GPT2Config(
        vocab_size=config.vocab_size,
        n_positions=n_positions,
        n_embd=width,
        n_layer=n_layer,
        n_head=width // HEAD_WIDTH,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="sdpa",
    )
    return GPT2LMHeadModel(settings).eval()


def time_prefill(config: ModelConfig, n_tokens: int, device: torch.device) -> Record:
    """Return the time from a prompt of random tokens to the first token, and the peak memory.

    The prompt is processed in chunks. Positions start again in each chunk, so that the table of
    positions does not grow with the prompt; this does not change the time.
    """
    torch.manual_seed(0)
    model = build(config, CHUNK).to(device)
    from transformers import DynamicCache

    positions = torch.arange(CHUNK, device=device).unsqueeze(0)
    tokens = torch.randint(config.vocab_size, (1, n_tokens), device=device)

    def prefill(prompt: torch.Tensor) -> float:
        synchronize(device)
        start = time.perf_counter()
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            for chunk in prompt.split(CHUNK, dim=1):
                at = positions[:, : chunk.shape[1]]
                output = model(
                    chunk,
                    past_key_values=cache,
                    position_ids=at,
                    use_cache=True,
                    logits_to_keep=1,
                )
        output.logits[:, -1].argmax().item()
        return time.perf_counter() - start

    prefill(tokens[:, :CHUNK])  # warm-up
    seconds = median_seconds(lambda: prefill(tokens))
    return {"seconds": seconds, "peak_bytes": peak_bytes(device)}
