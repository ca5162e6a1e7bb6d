"""The arguments of transformers models, translated to those of the core model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_UNSUPPORTED = {"output_attentions": "the attention matrix is never computed"}


def check_inputs(
    input_ids: Tensor | None, inputs_embeds: Tensor | None, options: Mapping[str, Any]
) -> Tensor:
    """Return the tokens or their embeddings; reject options that cannot be supported."""
    for name, why in _UNSUPPORTED.items():
        if options.get(name) is not None and options[name] is not False:
            raise ValueError(f"{name} is not supported: {why}")
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("give either input_ids or inputs_embeds")
    given = inputs_embeds if input_ids is None else input_ids
    assert given is not None
    if inputs_embeds is not None and inputs_embeds.ndim != 3:
        raise ValueError(
            f"inputs_embeds has shape {tuple(inputs_embeds.shape)}, want [batch, tokens, width]"
        )
    return given


def valid_tokens(attention_mask: Tensor | None, given: Tensor) -> Tensor | None:
    """Return the mask of tokens that are not padding, [b, t], or None if there is no padding.

    given: [b, t, ...] tokens or embeddings.
    """
    if attention_mask is None:
        return None
    n_rows, n_columns = given.shape[:2]
    fits = attention_mask.ndim == 2 and attention_mask.shape[0] == n_rows
    if not fits or attention_mask.shape[1] < n_columns:
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}, expected at least "
            f"[{n_rows}, {n_columns}]; extra columns are for earlier tokens"
        )
    valid = attention_mask[:, -n_columns:].bool()
    # Waits for a GPU; but a mask without padding, the usual one, would cost more in every layer.
    return None if not torch.compiler.is_compiling() and valid.all() else valid


def document_ids_of(position_ids: Tensor | None) -> Tensor | None:
    """Return the ids of packed documents, which begin at position 0: [b, t], or None."""
    return None if position_ids is None else (position_ids == 0).cumsum(-1)
