"""Codebooks of a converted model, from the keys of texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformer_vq.data.tokenizers import Tokenizer
from transformer_vq.errors import UserError
from transformer_vq.nn.model import TransformerVQ


def calibrate(
    model: TransformerVQ,
    tokenizer: Tokenizer,
    texts: Sequence[str] = (),
    *,
    n_tokens: int | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Set the codebooks of a model; return what was measured, for about.json."""
    raise UserError("codebooks are not calibrated yet; use --attention full")
