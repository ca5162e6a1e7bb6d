"""Embeddings and residual branches: the model without its output head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transformer_vq.config import ModelConfig, Reduction
from transformer_vq.nn.attention import FullAttention, VQAttention
from transformer_vq.nn.layers import FeedForward, ScaledSinusoids, draw_keep, rms_norm
from transformer_vq.nn.quantizer import CodeUsage
from transformer_vq.nn.state import ModelState
from transformer_vq.ops.checks import check_values
from transformer_vq.ops.execution import Execution
from transformer_vq.ops.ragged import read_packing
from transformer_vq.ops.reductions import check_reduction
from transformer_vq.ops.state import AttentionState


@dataclass(frozen=True)
class BranchTypes:
    """The classes of the residual branches; adapters may use subclasses."""

    vq: type[VQAttention] = VQAttention
    full: type[FullAttention] = FullAttention
    feed_forward: type[FeedForward] = FeedForward


@dataclass(frozen=True)
class StackOutput:
    """x: [b, t, d_model] features, state: for the next segment, commit_loss and code_usage: as in
    `ModelOutput`, hidden: the embeddings and the features after each layer, if they were requested.
    """

    x: Tensor
    state: ModelState
    commit_loss: Tensor
    code_usage: tuple[CodeUsage, ...]
    hidden: tuple[Tensor, ...] | None = None


class Stack(nn.Module):
    """Embeddings and residual branches, to be completed by a subclass with `forward`."""

    config: Any
    """A `ModelConfig`, or another object with its fields."""
    embed: nn.Embedding
    positions: ScaledSinusoids | None
    branches: nn.ModuleList

    def build(
        self,
        config: ModelConfig,
        reduction: Reduction = "auto",
        checkpoint_activations: bool = False,
        types: BranchTypes | None = None,
        execution: Execution | None = None,
    ) -> None:
        """Create the modules; called by the constructors of subclasses."""
        self.embed = nn.Embedding(config.vocab_size, config.d_model)
        self.positions = (
            ScaledSinusoids(config.d_model, config.pe_wavelength)
            if config.absolute_positions
            else None
        )
        self.branches = nn.ModuleList(
            branch
            for _ in range(config.n_layer)
            for branch in _layer(config, reduction, checkpoint_activations, types or BranchTypes())
        )
        self.set_execution(execution=execution)

    def _attentions(self) -> list[VQAttention | FullAttention]:
        return [b for b in self.branches if isinstance(b, (VQAttention, FullAttention))]

    @property
    def uses_candidates(self) -> bool:
        """Whether training replaces codes with keys, at the start or later."""
        layers = [layer for layer in self._attentions() if isinstance(layer, VQAttention)]
        return any(layer.quantizer.uses_candidates for layer in layers)

    def set_execution(
        self,
        *,
        reduction: Reduction | None = None,
        checkpoint_activations: bool | None = None,
        execution: Execution | None = None,
    ) -> None:
        """Change how the function is computed; None keeps a setting."""
        if reduction is not None:
            check_reduction(reduction)
        for branch in self.branches:
            if checkpoint_activations is not None:
                branch.checkpoint_activations = checkpoint_activations  # type: ignore[assignment]
            if reduction is not None and isinstance(branch, VQAttention):
                branch.reduction = reduction
            if execution is not None and isinstance(branch, VQAttention):
                branch.execution = execution

    def init_state(self, batch_size: int, device: torch.device | None = None) -> ModelState:
        """Return the state before the first token of `batch_size` sequences."""
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: must be at least 1")
        layers = self._attentions()
        return ModelState(tuple(layer.init_state(batch_size, device) for layer in layers))

    def run(
        self,
        tokens: Tensor | None,
        state: ModelState | None = None,
        valid: Tensor | None = None,
        document_ids: Tensor | None = None,
        key_priority: Tensor | None = None,
        *,
        embeds: Tensor | None = None,
        keep_hidden: bool = False,
    ) -> StackOutput:
        """Return the features of the next segment of each sequence, and the state after it.

        tokens: [b, t], or None if embeds: [b, t, d_model] are given. The other arguments are those
        of `TransformerVQ.forward`.
        """
        given = embeds if tokens is None else tokens
        assert given is not None
        if tokens is not None:
            if valid is not None and valid.shape == tokens.shape and valid.dtype == torch.bool:
                tokens = tokens.masked_fill(~valid, 0)  # padding may have any number
            self.check_tokens(tokens)
        self._check_state(given, state)
        if state is None:
            state = self.init_state(given.shape[0], given.device)
        seq_len = given.shape[1]
        packing = read_packing(state.layers[0], seq_len, valid, document_ids)
        if tokens is not None:
            embeds = self.embed((tokens if packing is None else packing.gather(tokens)).long())
        elif packing is not None and embeds is not None:
            embeds = packing.gather(embeds)
        x: Tensor = embeds  # type: ignore[assignment]
        if self.positions is not None:
            steps = torch.arange(seq_len, device=x.device)
            plain = state.position.unsqueeze(-1) + steps
            x = x + self.positions(plain if packing is None else packing.positions)

        if key_priority is not None and packing is not None:
            key_priority = packing.gather(key_priority)
        sinusoids = self._attentions()[0].sinusoids(state.layers[0], seq_len)
        n_blocks = self._attentions()[0].symbolic_blocks(seq_len)
        branch_keep = self._branch_keep(state)
        commit_loss = torch.zeros((), dtype=x.dtype, device=x.device)
        states: list[AttentionState] = []
        usages: list[CodeUsage] = []
        hidden = [x]
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
                    n_blocks=n_blocks,
                )
                y = output.y
                commit_loss = commit_loss + output.commit_loss.to(commit_loss.device)
                states.append(output.state)
                if output.code_usage is not None:
                    usages.append(output.code_usage)
            y = F.dropout(y, self.config.p_dropres, self.training)
            if branch_keep is not None:
                y = y * branch_keep[:, i, None, None] / (1 - self.config.p_droplyr)
            x = x.to(y.device) + y  # the branches may be on several devices
            if keep_hidden and i % 2 == 1 and i + 1 < len(self.branches):
                hidden.append(x)
        x = self.finish(x)
        if keep_hidden:
            hidden.append(x)
        if packing is not None:
            x = packing.scatter(x)
            hidden = [packing.scatter(h) for h in hidden[:-1]] + [x]
        after = ModelState(tuple(states), branch_keep)
        return StackOutput(
            x, after, commit_loss, tuple(usages), tuple(hidden) if keep_hidden else None
        )

    def finish(self, x: Tensor) -> Tensor:
        """Return the features from the output of the last branch: [..., d_model]."""
        return rms_norm(x) if self.config.final_norm else x

    @torch.no_grad()
    def update_codebooks(self, code_usage: Sequence[CodeUsage]) -> None:
        """Move every codebook toward the keys of `code_usage`; call once per optimizer step."""
        layers = [layer for layer in self._attentions() if isinstance(layer, VQAttention)]
        if len(layers) != len(code_usage):
            raise ValueError(
                f"code_usage has {len(code_usage)} entries for {len(layers)} codebooks; take it "
                "from a forward pass in training mode or with gradients"
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

    def check_tokens(self, tokens: Tensor) -> None:
        """Raise ValueError for a wrong shape or type, and for tokens outside the vocabulary."""
        if tokens.ndim != 2 or tokens.shape[0] < 1 or tokens.shape[1] < 1:
            raise ValueError(f"tokens have shape {tuple(tokens.shape)}, want [batch, tokens >= 1]")
        if tokens.dtype not in (torch.int64, torch.int32, torch.int16, torch.uint8):
            raise ValueError(f"tokens are {tokens.dtype}, want integers (torch.int64)")
        if torch.compiler.is_compiling():  # the embedding checks its own index
            return
        low, high = (x.long() for x in tokens.aminmax())
        size = self.config.vocab_size

        def error() -> ValueError:
            token = int(low if low < 0 else high)
            return ValueError(
                f"token {token} is outside the vocabulary of {size}; check the tokenizer, or "
                "vocab_size in ModelConfig"
            )

        check_values((low >= 0) & (high < size), "a token is outside the vocabulary", error)

    def _check_state(self, given: Tensor, state: ModelState | None) -> None:
        """Check that a state fits the model and the batch; given: tokens or embeddings."""
        if state is None:
            return
        if len(state.layers) != len(self._attentions()):
            raise ValueError(
                f"state comes from another model: it has {len(state.layers)} attention layers, "
                f"this one {len(self._attentions())}; start from init_state(batch_size)"
            )
        if state.position.shape[0] != given.shape[0]:
            raise ValueError(
                f"state has a batch size of {state.position.shape[0]}, tokens have "
                f"{given.shape[0]} rows; use init_state(batch_size) or state.select(rows)"
            )


def _layer(
    config: ModelConfig, reduction: Reduction, checkpoint_activations: bool, types: BranchTypes
) -> list[nn.Module]:
    """Return the two residual branches of one transformer layer."""
    options = vars(config.layer)

    def attention() -> nn.Module:
        if config.attention == "full":
            return types.full(**options, checkpoint_activations=checkpoint_activations)
        return types.vq(
            **options, reduction=reduction, checkpoint_activations=checkpoint_activations
        )

    if config.n_attention == 2:
        return [attention(), attention()]
    return [attention(), types.feed_forward(config.d_model, config.d_ff, checkpoint_activations)]
