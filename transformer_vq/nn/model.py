"""TransformerVQ: embeddings, residual branches and output head; one forward for everything."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transformer_vq.config import ModelConfig, Reduction
from transformer_vq.errors import UserError
from transformer_vq.files import read_tensors, write_tensors
from transformer_vq.nn.attention import FullAttention, VQAttention
from transformer_vq.nn.layers import (
    FeedForward,
    ScaledSinusoids,
    draw_keep,
    linear,
    rms_norm,
)
from transformer_vq.nn.quantizer import CodeUsage
from transformer_vq.nn.state import ModelState
from transformer_vq.ops.cache import accumulation_dtype
from transformer_vq.ops.precision import full_precision
from transformer_vq.ops.ragged import read_packing
from transformer_vq.ops.state import AttentionState


@dataclass(frozen=True)
class ModelOutput:
    """logits: [b, t, vocab_size] in float32 or better, state: for the next segment."""

    logits: Tensor
    state: ModelState
    commit_loss: Tensor
    """Squared quantization error of the keys: mean over tokens, sum over heads and layers."""
    code_usage: tuple[CodeUsage, ...]
    """One per codebook, for `update_codebooks`; empty for full attention."""


class TransformerVQ(nn.Module):
    """A decoder-only transformer with dense softmax attention in linear time.

    reduction, checkpoint_activations: how the function is computed; they do not change it.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        reduction: Reduction = "auto",
        checkpoint_activations: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.d_model)
        self.positions = (
            ScaledSinusoids(config.d_model, config.pe_wavelength)
            if config.absolute_positions
            else None
        )
        self.branches = nn.ModuleList(
            branch
            for _ in range(config.n_layer)
            for branch in _layer(config, reduction, checkpoint_activations)
        )
        self.head = (
            None if config.tie_embeddings else linear(config.d_model, config.vocab_size, bias=True)
        )

    def _attentions(self) -> list[VQAttention | FullAttention]:
        return [b for b in self.branches if isinstance(b, (VQAttention, FullAttention))]

    @property
    def uses_candidates(self) -> bool:
        """Whether training replaces codes with keys, at the start or later."""
        layers = [layer for layer in self._attentions() if isinstance(layer, VQAttention)]
        return any(layer.quantizer.uses_candidates for layer in layers)

    def set_execution(
        self, *, reduction: Reduction | None = None, checkpoint_activations: bool | None = None
    ) -> None:
        """Change how the function is computed; None keeps a setting."""
        for branch in self.branches:
            if checkpoint_activations is not None:
                branch.checkpoint_activations = checkpoint_activations  # type: ignore[assignment]
            if reduction is not None and isinstance(branch, VQAttention):
                branch.reduction = reduction

    def init_state(self, batch_size: int) -> ModelState:
        """Return the state before the first token of `batch_size` sequences."""
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: must be at least 1")
        return ModelState(tuple(layer.init_state(batch_size) for layer in self._attentions()))

    def forward(
        self,
        tokens: Tensor,
        state: ModelState | None = None,
        valid: Tensor | None = None,
        document_ids: Tensor | None = None,
        key_priority: Tensor | None = None,
    ) -> ModelOutput:
        """Return logits for the next segment of each sequence, and the state after it.

        tokens: [b, t] with any t >= 1, state: as returned for the previous segment.
        valid: [b, t], False for padding, which may be anywhere; it is ignored by the state, the
        loss, the codebooks and the positions. document_ids: [b, t], several documents per row, each
        processed independently; the current document of the state continues under the same id.
        key_priority: [b, t] of int64, for training: the keys of the tokens with the lowest numbers
        may become codes (`codebook_init="keys"`, `revive_below`); a hash of row and place by
        default.
        """
        if valid is not None and valid.shape == tokens.shape and valid.dtype == torch.bool:
            tokens = tokens.masked_fill(~valid, 0)  # padding may have any number
        self._check(tokens, state)
        if state is None:
            state = self.init_state(tokens.shape[0])
        packing = read_packing(state.layers[0], tokens.shape[1], valid, document_ids)
        x = self.embed((tokens if packing is None else packing.gather(tokens)).long())
        if self.positions is not None:
            steps = torch.arange(tokens.shape[1], device=tokens.device)
            plain = state.position.unsqueeze(-1) + steps
            x = x + self.positions(plain if packing is None else packing.positions)

        if key_priority is not None and packing is not None:
            key_priority = packing.gather(key_priority)
        sinusoids = self._attentions()[0].sinusoids(state.layers[0], tokens.shape[1])
        branch_keep = self._branch_keep(state)
        commit_loss = torch.zeros((), dtype=x.dtype, device=x.device)
        states: list[AttentionState] = []
        usages: list[CodeUsage] = []
        for i, branch in enumerate(self.branches):
            if isinstance(branch, FeedForward):
                y = branch(x)
            else:
                output = branch(
                    x,
                    state.layers[len(states)],
                    packing=packing,
                    sinusoids=sinusoids,
                    key_priority=key_priority,
                )
                y = output.y
                commit_loss = commit_loss + output.commit_loss
                states.append(output.state)
                if output.code_usage is not None:
                    usages.append(output.code_usage)
            y = F.dropout(y, self.config.p_dropres, self.training)
            if branch_keep is not None:
                y = y * branch_keep[:, i, None, None] / (1 - self.config.p_droplyr)
            x = x + y
        if packing is not None:
            x = packing.scatter(x)
        return ModelOutput(
            self.logits(x), ModelState(tuple(states), branch_keep), commit_loss, tuple(usages)
        )

    @torch.no_grad()
    def update_codebooks(self, code_usage: Sequence[CodeUsage]) -> None:
        """Move every codebook towards the keys of `code_usage`; call once per optimizer step."""
        layers = [layer for layer in self._attentions() if isinstance(layer, VQAttention)]
        if len(layers) != len(code_usage):
            raise ValueError(
                f"code_usage has {len(code_usage)} entries for {len(layers)} codebooks"
            )
        for layer, usage in zip(layers, code_usage, strict=True):
            layer.update_codebook(usage)

    def _branch_keep(self, state: ModelState) -> Tensor | None:
        """LayerDrop: rows at their start draw anew, the others keep what they have."""
        if not self.training or self.config.p_droplyr == 0.0:
            return None
        shape = (state.position.shape[0], len(self.branches))
        drawn = draw_keep(shape, self.config.p_droplyr, state.position.device)
        if state.branch_keep is None:
            return drawn
        return torch.where(state.position.unsqueeze(-1) == 0, drawn, state.branch_keep)

    def logits(self, x: Tensor) -> Tensor:
        """Return logits from features, [..., d_model], in float32 or better."""
        with full_precision(x.device):
            weight = self.embed.weight if self.head is None else self.head.weight
            exact = accumulation_dtype(weight.dtype)
            x = x.to(exact)
            if self.config.final_norm:
                x = rms_norm(x)
            if self.config.logit_scale != 1.0:
                x = x * self.config.logit_scale
            bias = None if self.head is None else self.head.bias.to(exact)
            return F.linear(x, weight.to(exact), bias)

    def _check(self, tokens: Tensor, state: ModelState | None) -> None:
        if tokens.ndim != 2 or tokens.shape[0] < 1 or tokens.shape[1] < 1:
            raise ValueError(f"tokens have shape {tuple(tokens.shape)}, want [batch, tokens >= 1]")
        if tokens.dtype not in (torch.int64, torch.int32, torch.int16, torch.uint8):
            raise ValueError(f"tokens are {tokens.dtype}, want integers (torch.int64)")
        if state is not None and len(state.layers) != len(self._attentions()):
            raise ValueError(
                f"state comes from another model: it has {len(state.layers)} attention layers, "
                f"this one {len(self._attentions())}; start from init_state(batch_size)"
            )
        if state is not None and state.position.shape[0] != tokens.shape[0]:
            raise ValueError(
                f"state has a batch size of {state.position.shape[0]}, tokens have "
                f"{tokens.shape[0]} rows; use init_state(batch_size) or state.select(rows)"
            )
        # Reading values would break a compiled graph; there the embedding checks its own index.
        if not torch.compiler.is_compiling() and not tokens.is_meta:
            low, high = (int(x) for x in tokens.aminmax())
            if low < 0 or high >= self.config.vocab_size:
                raise ValueError(
                    f"token {low if low < 0 else high} is outside the vocabulary of "
                    f"{self.config.vocab_size}; check the tokenizer, or vocab_size in ModelConfig"
                )

    def save(self, path: str | os.PathLike[str]) -> str:
        """Write weights, codebooks and config to one safetensors file, atomically.

        Return the checksum stored in the file.
        """
        metadata = {"config": json.dumps(asdict(self.config))}
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

        Raise UserError if the file is corrupt or does not contain a model.
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
        with torch.device("meta"):
            model = cls(config)
        wanted = {name: x.shape for name, x in model.state_dict().items()}
        found = {name: x.shape for name, x in tensors.items()}
        if wrong := sorted(name for name in wanted | found if wanted.get(name) != found.get(name)):
            raise UserError(
                f"{path} does not fit its own config: {wrong[0]} and {len(wrong) - 1} more tensors "
                "are missing, unknown or of another shape"
            )
        model.load_state_dict(tensors, assign=True)
        return model if device is None else model.to(device)


def _layer(
    config: ModelConfig, reduction: Reduction, checkpoint_activations: bool
) -> list[nn.Module]:
    """Return the two residual branches of one transformer layer."""
    options = vars(config.layer)

    def attention() -> nn.Module:
        if config.attention == "full":
            return FullAttention(**options, checkpoint_activations=checkpoint_activations)
        return VQAttention(
            **options, reduction=reduction, checkpoint_activations=checkpoint_activations
        )

    if config.n_attention == 2:
        return [attention(), attention()]
    return [attention(), FeedForward(config.d_model, config.d_ff, checkpoint_activations)]
