"""Weights of the official JAX code into our model.

The official tree, flattened with "/", stacks all layers of a kind along the first axis and stores
kernels as [in, out]. `official_names` is the one table of who is who.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from transformer_vq.config import ModelConfig, Reduction
from transformer_vq.nn.model import TransformerVQ

_ATTENTION = {
    "q_proj.weight": "qkvg_producer/q_proj/kernel",
    "k_proj.weight": "qkvg_producer/k_proj/kernel",
    "v_proj.weight": "qkvg_producer/v_proj/kernel",
    "g_proj.weight": "qkvg_producer/g_proj/kernel",
    "r_proj.weight": "xl_bias_producer/xl_r_proj/kernel",
    "o_proj.weight": "res_proj/kernel",
    "u": "xl_bias_producer/xl_u",
    "v": "xl_bias_producer/xl_v",
    "quantizer.c_sum": "quantizer/c_sum",
    "quantizer.c_count": "quantizer/c_count",
}
_FEED_FORWARD = {"in_proj.weight": "Dense_0/kernel", "out_proj.weight": "Dense_1/kernel"}


@dataclass(frozen=True)
class OfficialName:
    """Where one of our tensors is found: a name and, in a stack of layers, which layer."""

    name: str
    layer: int | None = None

    def read(self, params: Mapping[str, Any]) -> np.ndarray:
        """The array in our layout: that layer's, kernels as [out, in]."""
        array = np.asarray(params[self.name])
        if self.layer is not None:
            array = array[self.layer, 0]
        return array.T if self.name.endswith("/kernel") else array


def official_names(config: ModelConfig) -> dict[str, OfficialName]:
    """Name in our `state_dict` -> name in the official tree."""
    names = {"embed.weight": OfficialName("token_embed/embedding")}
    if config.absolute_positions:
        names["positions.scale"] = OfficialName("pos_embed/scale")
    if not config.tie_embeddings:
        names["head.weight"] = OfficialName("out_proj/kernel")
        names["head.bias"] = OfficialName("out_proj/bias")
    attention = "VQAttention" if config.attention == "vq" else "FullAttention"
    is_shga = config.head_type == "shga"
    for layer in range(config.n_layer):
        halves = [
            (f"{attention}_0", _ATTENTION),
            (f"{attention}_1", _ATTENTION)
            if is_shga
            else ("MultiLayerPerceptron_0", _FEED_FORWARD),
        ]
        for half, (block, table) in enumerate(halves):
            for ours, theirs in table.items():
                if ours == "g_proj.weight" and not is_shga:
                    continue
                if ours.startswith("quantizer") and config.attention != "vq":
                    continue
                key = f"branches.{2 * layer + half}.{ours}"
                names[key] = OfficialName(f"stack/{block}/{theirs}", layer)
    return names


def load_official(
    params: Mapping[str, Any], config: ModelConfig, reduction: Reduction = "auto"
) -> TransformerVQ:
    """A model with the weights and codebooks of the official code's "optimized" branch.

    params: flattened names, such as "stack/VQAttention_0/res_proj/kernel", to arrays.
    Raises ValueError when names or shapes do not fit the config.
    """
    names = official_names(config)
    wanted = {official.name for official in names.values()}
    # The official code always makes a position scale, used or not.
    missing, unknown = wanted - set(params), set(params) - wanted - {"pos_embed/scale"}
    if missing or unknown:
        raise ValueError(
            "the parameters do not fit the config: "
            f"missing {sorted(missing) or 'none'}, not expected {sorted(unknown) or 'none'}"
        )
    model = TransformerVQ(config, reduction=reduction)
    tensors = model.state_dict()
    for ours, official in names.items():
        stack = np.asarray(params[official.name])
        if official.layer is not None and stack.shape[:2] != (config.n_layer, 1):
            raise ValueError(
                f"{official.name} begins with {stack.shape[:2]}, want (n_layer, 1) = "
                f"({config.n_layer}, 1)"
            )
        array = official.read(params)
        if array.shape != tuple(tensors[ours].shape):
            raise ValueError(
                f"{official.name} gives {array.shape}, {ours} has shape "
                f"{tuple(tensors[ours].shape)}; check d_model, d_k, n_code and vocab_size"
            )
        tensors[ours].copy_(torch.from_numpy(array.copy()))
    for name, tensor in tensors.items():
        if name.endswith("quantizer.started"):  # these codebooks are not to be initialised again
            tensor.fill_(True)
    return model
