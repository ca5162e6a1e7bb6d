"""TransformerVQ: a stack of residual branches and an output head; one forward for everything."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from transformer_vq.config import ModelConfig, Reduction
from transformer_vq.device import meta_device
from transformer_vq.errors import UserError
from transformer_vq.files import read_tensors, write_tensors
from transformer_vq.nn.layers import Head
from transformer_vq.nn.quantizer import CodeUsage, NotFiniteError
from transformer_vq.nn.stack import Stack
from transformer_vq.nn.state import ModelState
from transformer_vq.ops.cache import accumulation_dtype
from transformer_vq.ops.execution import Execution
from transformer_vq.ops.tree import tensor_tree

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""The dtypes that a model can have."""


@tensor_tree
@dataclass(frozen=True)
class ModelOutput:
    """logits: [b, t, vocab_size] in float32 or better, state: for the next segment."""

    logits: Tensor
    state: ModelState
    commit_loss: Tensor
    """Squared quantization error of the keys: mean over tokens, sum over heads and layers."""
    code_usage: tuple[CodeUsage, ...]
    """One per codebook, for `update_codebooks`; empty for full attention, and in evaluation mode
    without gradients."""


class TransformerVQ(Stack):
    """A decoder-only transformer with dense softmax attention in linear time.

    reduction, checkpoint_activations, execution: how the function is computed; they do not change
    it. execution: sizes of segments and tiles; None selects those for the device of the input.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        reduction: Reduction = "auto",
        checkpoint_activations: bool = False,
        execution: Execution | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.build(config, reduction, checkpoint_activations, execution=execution)
        if config.tie_embeddings:
            with meta_device():
                self.head = Head(config.d_model, config.vocab_size, bias=False)
            self.head.weight = self.embed.weight
            self.register_state_dict_post_hook(_omit_tied_weight)  # type: ignore[no-untyped-call]
            self.register_load_state_dict_post_hook(_tie_weights)  # type: ignore[no-untyped-call]
        else:
            self.head = Head(config.d_model, config.vocab_size)

    def forward(
        self,
        tokens: Tensor,
        state: ModelState | None = None,
        valid: Tensor | None = None,
        document_ids: Tensor | None = None,
        key_priority: Tensor | None = None,
        *,
        n_logits: int | None = None,
    ) -> ModelOutput:
        """Return logits for the next segment of each sequence, and the state after it.

        tokens: [b, t] with any t >= 1, state: as returned for the previous segment.
        valid: [b, t], False for padding, which may be anywhere; it is ignored by the state, the
        loss, the codebooks and the positions. document_ids: [b, t], several documents per row, each
        processed independently; the current document of the state continues under the same id.
        key_priority: [b, t] of int64, for training: the keys of the tokens with the lowest numbers
        may become codes (`codebook_init="keys"`, `revive_below`); a hash of row and place by
        default. n_logits: number of last columns to return logits for; all by default.
        """
        output = self.run(tokens, state, valid, document_ids, key_priority)
        x = output.x if n_logits is None else last_columns(output.x, n_logits)
        return ModelOutput(self.logits(x), output.state, output.commit_loss, output.code_usage)

    def logits(self, x: Tensor) -> Tensor:
        """Return logits from features, [..., d_model], in float32 or better."""
        logits: Tensor = self.head(scaled_features(x, self.config.logit_scale))
        return logits

    def save(self, path: str | os.PathLike[str], **metadata: str) -> str:
        """Write weights, codebooks and config to one safetensors file, atomically.

        metadata: more values to store in the file. Return the checksum stored in the file.
        """
        metadata["config"] = json.dumps(asdict(self.config))
        return write_tensors(Path(path), self.state_dict(), metadata)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        device: torch.device | str | None = None,
        *,
        digest: str | None = None,
    ) -> TransformerVQ:
        """Load a model that `save` wrote; digest: the checksum it returned, if known.

        Raise UserError if the file is corrupt or does not contain a model, and NotFiniteError if a
        weight or codebook is NaN or infinite.
        """
        if (Path(path) / "checkpoints").is_dir():
            raise UserError(
                f"{path} is a run folder, not a model file; use transformer_vq.load_run"
            )
        tensors, metadata = read_tensors(Path(path), digest)
        if "config" not in metadata:
            raise UserError(f"{path} has no model config; was it written by TransformerVQ.save?")
        try:
            config = ModelConfig.from_dict(json.loads(metadata["config"]))
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path} has an invalid model config: {error}") from error
        # Before anything is built: the config of another model could need any amount of memory.
        n_branches = len({name.split(".")[1] for name in tensors if name.startswith("branches.")})
        if n_branches != 2 * config.n_layer:
            raise UserError(
                f"{path} has the tensors of {n_branches // 2} layers, its config says "
                f"{config.n_layer}; write it again with TransformerVQ.save"
            )
        with meta_device():
            model = cls(config)
        wanted = {name: x.shape for name, x in model.state_dict().items()}
        found = {name: x.shape for name, x in tensors.items()}
        if wrong := sorted(name for name in wanted | found if wanted.get(name) != found.get(name)):
            raise UserError(
                f"{path} does not fit its own config: {wrong[0]} and {len(wrong) - 1} more tensors "
                "are missing, unknown or of another shape"
            )
        check_tensors(path, tensors, model)
        model.load_state_dict(tensors, assign=True)
        return model if device is None else model.to(device)


def check_tensors(source: object, tensors: Mapping[str, Tensor], model: nn.Module) -> None:
    """Raise UserError if a tensor of a file has a wrong dtype, or NaN or infinity in it.

    All parameters have one dtype; codebooks may have another. model: has tensors of the same names.
    source: the file or folder, for the message.
    """
    parameters = dict(model.named_parameters())
    floats = [x.dtype for name, x in tensors.items() if name in parameters]
    dtype = max((x for x in floats if x in FLOATS), key=floats.count, default=torch.float32)
    for name, wanted in model.state_dict().items():
        found = tensors[name].dtype
        expected = dtype if wanted.is_floating_point() else wanted.dtype
        is_codebook = wanted.is_floating_point() and name not in parameters
        if found != expected and not (is_codebook and found in FLOATS):
            raise UserError(
                f"{source}: {name} is {found}, expected {expected}; write it again with "
                "TransformerVQ.save"
            )
    check_finite(source, tensors)


def check_finite(source: object, tensors: Mapping[str, Tensor]) -> None:
    """Raise NotFiniteError if a tensor contains NaN or infinity. source: as in `check_tensors`."""
    for name, x in tensors.items():
        if not x.isfinite().all():
            raise NotFiniteError(
                f"{source}: {name} contains NaN or infinity; use another checkpoint or file"
            )


def last_columns(x: Tensor, n: int) -> Tensor:
    """Return the last n columns of x: [b, t, ...]; n may be 0."""
    return x[:, max(x.shape[1] - n, 0) :]


def scaled_features(x: Tensor, logit_scale: float) -> Tensor:
    """Return the input of the output head: features times a constant, in float32 or better."""
    return x if logit_scale == 1.0 else x.to(accumulation_dtype(x.dtype)) * logit_scale


def _omit_tied_weight(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any]
) -> None:
    """Leave the tied weight of the head out of files: it is that of the embeddings."""
    state_dict.pop(f"{prefix}head.weight", None)


def _tie_weights(module: nn.Module, incompatible_keys: Any) -> None:
    """Share the weight of the embeddings with the head again, after loading."""
    assert isinstance(module, TransformerVQ)
    module.head.weight = module.embed.weight
    missing = incompatible_keys.missing_keys
    missing[:] = [name for name in missing if not name.endswith("head.weight")]
