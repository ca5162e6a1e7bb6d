"""Import of weights from the official JAX code.

The official parameter tree, flattened with "/", stacks all layers of a type along the first axis
and stores kernels as [in, out]. `official_names` maps our parameter names to the official ones.

The official attention "vq" multiplies the codebook statistics of a batch by the number of blocks of
a sequence. `load_official` divides by it, so that training continues with our own update.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from transformer_vq.config import ModelConfig, Reduction
from transformer_vq.errors import UserError
from transformer_vq.nn.model import TransformerVQ

_ATTENTION = {
    **{f"{x}_proj.weight": f"qkvg_producer/{x}_proj/kernel" for x in "qkvg"},
    "r_proj.weight": "xl_bias_producer/xl_r_proj/kernel",
    "o_proj.weight": "res_proj/kernel",
    "u": "xl_bias_producer/xl_u",
    "v": "xl_bias_producer/xl_v",
    "quantizer.c_sum": "quantizer/c_sum",
    "quantizer.c_count": "quantizer/c_count",
}
_FEED_FORWARD = {"in_proj.weight": "Dense_0/kernel", "out_proj.weight": "Dense_1/kernel"}

MIN_COUNT = 0.01  # codeword = sum / max(count, MIN_COUNT), here and in the official code
_OLD = re.compile(r"^stack/ScannedAttnOld_(\d)/[^/]*(VQ|Full)AttentionOld_0/")


@dataclass(frozen=True)
class OfficialName:
    """Location of a tensor in the official tree: its name and, for stacked layers, the index."""

    name: str
    layer: int | None = None

    def read(self, params: Mapping[str, Any]) -> np.ndarray:
        """Return the array of this layer in PyTorch order, kernels as [out, in]."""
        array = np.asarray(params[self.name])
        if self.layer is not None:
            array = array[self.layer, 0]
        return array.T if self.name.endswith("/kernel") else array


def official_names(config: ModelConfig) -> dict[str, OfficialName]:
    """Return a map from names in our `state_dict` to names in the official tree."""
    names = {"embed.weight": OfficialName("token_embed/embedding")}
    if config.absolute_positions:
        names["positions.scale"] = OfficialName("pos_embed/scale")
    if not config.tie_embeddings:
        names["head.weight"] = OfficialName("out_proj/kernel")
        names["head.bias"] = OfficialName("out_proj/bias")
    attention = "VQAttention" if config.attention == "vq" else "FullAttention"
    is_shga = config.head_type == "shga"
    for layer in range(config.n_layer):
        second = (f"{attention}_1", _ATTENTION)
        if not is_shga:
            second = ("MultiLayerPerceptron_0", _FEED_FORWARD)
        for branch, (module, table) in enumerate([(f"{attention}_0", _ATTENTION), second]):
            for ours, official in table.items():
                if ours == "g_proj.weight" and not is_shga:
                    continue
                if ours.startswith("quantizer") and config.attention != "vq":
                    continue
                key = f"branches.{2 * layer + branch}.{ours}"
                names[key] = OfficialName(f"stack/{module}/{official}", layer)
    return names


def load_official(
    params: Mapping[str, Any],
    config: ModelConfig,
    reduction: Reduction = "auto",
    *,
    sequence_len: int | None = None,
) -> TransformerVQ:
    """Return a model with weights and codebooks of the official code's "optimized" branch.

    params: maps flattened names, such as "stack/VQAttention_0/res_proj/kernel", to arrays.
    sequence_len: tokens per sequence in the official training, which determines the scale of the
    codebook statistics of "vq". It does not affect the codewords, so it only matters if training
    continues. With None, the statistics keep the official scale.
    Raises ValueError if names or shapes do not match the config.
    """
    n_blocks = 1  # by this factor, the official codebook statistics are larger than ours
    if sequence_len is not None:
        n_blocks, rest = divmod(sequence_len, config.block_len)
        if rest or n_blocks < 3:
            needed = f"whole blocks, at least 3 blocks of block_len={config.block_len} tokens"
            raise UserError(f"sequence_len={sequence_len}: the official code needs {needed}")
        if any(map(_OLD.match, params)):  # "vq_old" averages over blocks, which cancels the factor
            n_blocks = 1
    params = {_OLD.sub(r"stack/\2Attention_\1/", name): array for name, array in params.items()}
    names = official_names(config)
    wanted = {official.name for official in names.values()}
    # The official code always creates a position scale, even if it is not used.
    missing, unknown = wanted - set(params), set(params) - wanted - {"pos_embed/scale"}
    if missing or unknown:
        found = f"missing {sorted(missing) or 'none'}, unexpected {sorted(unknown) or 'none'}"
        raise ValueError(f"the parameters do not match the config: {found}")
    model = TransformerVQ(config, reduction=reduction)
    tensors = model.state_dict()
    for ours, official in names.items():
        first, want = np.shape(params[official.name])[:2], tuple(tensors[ours].shape)
        if official.layer is not None and first != (config.n_layer, 1):
            raise ValueError(f"{official.name} starts with {first}, not (n_layer, 1)")
        array = np.atleast_1d(official.read(params))  # ours has no scalars
        if array.shape != want:
            problem = f"{official.name} has shape {array.shape}, but {ours} has shape {want}"
            raise ValueError(f"{problem}; check d_model, d_k, n_code and vocab_size")
        tensors[ours].copy_(torch.from_numpy(array.copy()))
    for name, tensor in tensors.items():
        if name.endswith("quantizer.started"):  # keep the loaded codebooks
            tensor.fill_(True)
        if name.endswith("quantizer.c_count"):
            rescale_statistics(tensors[name.replace("c_count", "c_sum")], tensor, n_blocks)
    return model


@torch.no_grad()
def rescale_statistics(c_sum: Tensor, c_count: Tensor, n_blocks: int) -> None:
    """Divide codebook statistics by n_blocks in place, without changing a codeword.

    c_sum: [h, s, k], c_count: [h, s]. Counts are not reduced below the minimum in the codeword,
    sum / max(count, 0.01); smaller ones stay as they are. These codes are unused.
    """
    scaled = torch.maximum(c_count / n_blocks, c_count.clamp(max=MIN_COUNT))
    factor = torch.where(c_count > 0, scaled.double() / c_count.double(), 1.0)
    c_sum.copy_(c_sum.double() * factor.unsqueeze(-1))
    c_count.copy_(scaled)
