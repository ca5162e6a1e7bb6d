"""TransformerVQ: embeddings, residual branches and an output head; one forward for everything."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path

from transformer_vq.config import Backend, ModelConfig, Reduction
from transformer_vq.device import meta_device
from transformer_vq.errors import UserError
from transformer_vq.files import read_tensors, write_tensors
from transformer_vq.nn.attention import FullAttention, VQAttention
from transformer_vq.nn.layers import FeedForward, Head, RMSNorm, ScaledSinusoids, draw_keep
from transformer_vq.nn.quantizer import CodeUsage, NotFiniteError
from transformer_vq.nn.rotary import RotaryFullAttention, RotaryVQAttention
from transformer_vq.ops.cache import CacheStats, accumulation_dtype
from transformer_vq.ops.packing import read_packing
from transformer_vq.ops.reductions import check_method
from transformer_vq.ops.runtime import check_values, tensor_tree
from transformer_vq.ops.state import (
    AttentionState,
    FullState,
    RotaryState,
    RowState,
    Slots,
    VQState,
)


@tensor_tree
@dataclass(frozen=True)
class ModelState(RowState):
    """Everything a model carries from one segment to the next: one state per attention layer."""

    layers: tuple[AttentionState, ...]
    branch_keep: Tensor | None = None
    """LayerDrop, [b, n_branch]: the branches each row keeps; drawn once per sequence."""

    @property
    def position(self) -> Tensor:
        """Number of tokens of the current document that each row has seen: [b]."""
        return self.layers[0].position

    @property
    def document(self) -> Tensor | None:
        """Id of the current document of each row, if ids were given: [b]."""
        return self.layers[0].document

    @property
    def vq_layers(self) -> tuple[VQState, ...]:
        """The states of VQ attention; none for full attention."""
        return tuple(layer for layer in self.layers if isinstance(layer, VQState))

    def to_tensors(self, prefix: str = "state") -> dict[str, Tensor]:
        """Return all tensors by name, such as `state/layers/0/cache/mean`."""
        found = {keystr(path): x for path, x in tree_flatten_with_path(self)[0]}
        table = str.maketrans({"[": "/", ".": "/", "]": None})
        return {prefix + n.translate(table): x for n, x in found.items() if isinstance(x, Tensor)}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], prefix: str = "state") -> ModelState:
        """Return the state whose `to_tensors` gave these; other names are ignored."""
        tree: dict[str, Any] = {}
        for name, x in tensors.items():
            if name.startswith(f"{prefix}/"):
                *parents, last = name.removeprefix(f"{prefix}/").split("/")
                node = tree
                for parent in parents:
                    node = node.setdefault(parent, {})
                node[last] = x
        layers = tree["layers"]
        states = tuple(_attention_state(layers[str(i)]) for i in range(len(layers)))
        return cls(states, tree.get("branch_keep"))


def _attention_state(tensors: dict[str, Any]) -> AttentionState:
    if "z" not in tensors:
        return FullState(**tensors)
    cache = tensors.get("cache")
    tensors = {**tensors, "cache": None if cache is None else CacheStats(**cache)}
    if "slots" not in tensors:
        return VQState(**tensors)
    return RotaryState(**{**tensors, "slots": Slots(**tensors["slots"])})


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
    """Embeddings and residual branches: tokens to features (`run`), without an output head."""

    def __init__(
        self,
        config: ModelConfig,
        reduction: Reduction = "auto",
        backend: Backend = "auto",
        checkpoint_activations: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.d_model)
        self.positions: ScaledSinusoids | None = None
        if config.absolute_positions:
            self.positions = ScaledSinusoids(config.d_model, config.pe_wavelength)
        self.branches = nn.ModuleList(
            branch
            for _ in range(config.n_layer)
            for branch in _layer(config, reduction, backend, checkpoint_activations)
        )
        self.norm = _final_norm(config)

    def _attentions(self) -> list[VQAttention | FullAttention]:
        return [b for b in self.branches if isinstance(b, (VQAttention, FullAttention))]

    def codebook_layers(self) -> list[VQAttention]:
        """Return the layers that have a codebook; none for full attention."""
        return [b for b in self.branches if isinstance(b, VQAttention)]

    @property
    def uses_candidates(self) -> bool:
        """Whether training replaces codes with keys, at the start or later."""
        return any(layer.quantizer.uses_candidates for layer in self.codebook_layers())

    def set_execution(
        self,
        *,
        reduction: Reduction | None = None,
        backend: Backend | None = None,
        checkpoint_activations: bool | None = None,
    ) -> None:
        """Change how the function is computed; None keeps a setting."""
        check_method(reduction or "auto", backend or "auto")
        for branch in self.branches:
            assert isinstance(branch, VQAttention | FullAttention | FeedForward)
            if checkpoint_activations is not None:
                branch.checkpoint_activations = checkpoint_activations
            if isinstance(branch, VQAttention):
                branch.set_method(reduction or branch.reduction, backend or branch.backend)

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
        n_rows, seq_len = given.shape[:2]
        if state is None:
            state = self.init_state(n_rows, given.device)
        else:
            self._check_state(n_rows, state)
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
        hidden.append(self.finish(x))
        if packing is not None:
            hidden = [packing.scatter(h) for h in (hidden if keep_hidden else hidden[-1:])]
        kept = tuple(hidden) if keep_hidden else None
        after = ModelState(tuple(states), branch_keep)
        return StackOutput(hidden[-1], after, commit_loss, tuple(usages), kept)

    def finish(self, x: Tensor) -> Tensor:
        """Return the features from the output of the last branch: [..., d_model]."""
        return x if self.norm is None else self.norm(x)

    @torch.no_grad()
    def update_codebooks(self, code_usage: Sequence[CodeUsage]) -> None:
        """Move every codebook toward the keys of `code_usage`; call once per optimizer step."""
        layers = self.codebook_layers()
        if len(layers) != len(code_usage):
            problem = f"code_usage has {len(code_usage)} entries for {len(layers)} codebooks"
            fix = "take it from a forward pass in training mode or with gradients"
            raise ValueError(f"{problem}; {fix}")
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
            problem = f"token {int(low if low < 0 else high)} is outside the vocabulary of {size}"
            return ValueError(f"{problem}; check the tokenizer, or vocab_size in ModelConfig")

        check_values((low >= 0) & (high < size), "a token is outside the vocabulary", error)

    def _check_state(self, batch_size: int, state: ModelState) -> None:
        """Raise ValueError if a state does not fit the model and the batch."""
        layers, n_found = self._attentions(), len(state.layers)
        if n_found != len(layers):
            problem = f"it has {n_found} attention layers, this one {len(layers)}"
            fix = "start from init_state(batch_size)"
            raise ValueError(f"state comes from another model: {problem}; {fix}")
        for layer, layer_state in zip(layers, state.layers, strict=True):
            layer.check_state(layer_state, batch_size)


def _final_norm(config: ModelConfig) -> RMSNorm | None:
    if not config.final_norm:
        return None
    return RMSNorm(config.d_model, config.norm_gain, config.norm_eps)


def _layer(
    config: ModelConfig, reduction: Reduction, backend: Backend, checkpoint_activations: bool
) -> list[nn.Module]:
    """Return the two residual branches of one transformer layer."""
    options = vars(config.layer) | {"checkpoint_activations": checkpoint_activations}

    is_rotary = config.position == "rope"

    def attention() -> nn.Module:
        if config.attention == "full":
            return (RotaryFullAttention if is_rotary else FullAttention)(**options)
        kind = RotaryVQAttention if is_rotary else VQAttention
        return kind(**options, reduction=reduction, backend=backend)

    if config.n_attention == 2:
        return [attention(), attention()]
    norm = RMSNorm(config.d_model, config.norm_gain, config.norm_eps)
    sizes = config.d_model, config.feed_forward_width, checkpoint_activations
    is_gated = config.feed_forward == "swiglu"
    return [attention(), FeedForward(*sizes, is_gated=is_gated, norm=norm)]


def initial_weights(config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a new model as `TransformerVQ(config)` draws them, in few bytes.

    Only one layer is in memory at a time.
    """

    def named(prefix: str, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        for name, x in module.state_dict().items():
            yield f"{prefix}.{name}", x

    yield from named("embed", nn.Embedding(config.vocab_size, config.d_model))
    if config.absolute_positions:
        yield from named("positions", ScaledSinusoids(config.d_model, config.pe_wavelength))
    for i in range(config.n_layer):
        for j, branch in enumerate(_layer(config, "auto", "auto", False)):
            yield from named(f"branches.{2 * i + j}", branch)
    if norm := _final_norm(config):
        yield from named("norm", norm)
    if not config.tie_embeddings:
        yield from named("head", Head(config.d_model, config.vocab_size, config.head_bias))


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

    reduction, backend, checkpoint_activations: how the function is computed, as for `VQAttention`;
    they do not change it.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        reduction: Reduction = "auto",
        backend: Backend = "auto",
        checkpoint_activations: bool = False,
    ) -> None:
        super().__init__(config, reduction, backend, checkpoint_activations)
        if config.tie_embeddings:
            with meta_device():
                self.head = Head(config.d_model, config.vocab_size, bias=False)
            self.tie_weights()
            self.register_state_dict_post_hook(_omit_tied_weight)  # type: ignore[no-untyped-call]
            self.register_load_state_dict_post_hook(_tie_weights)  # type: ignore[no-untyped-call]
        else:
            self.head = Head(config.d_model, config.vocab_size, config.head_bias)

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

    def tie_weights(self) -> None:
        """Make the head use the weight of the embeddings, if the config says so."""
        if self.config.tie_embeddings:
            self.head.weight = self.embed.weight

    def logits(self, x: Tensor) -> Tensor:
        """Return logits from features, [..., d_model], in float32 or better."""
        logits: Tensor = self.head(scaled_features(x, self.config.logit_scale))
        return logits

    def save(self, path: str | os.PathLike[str], **metadata: str) -> None:
        """Write weights, codebooks and config to one safetensors file, atomically.

        metadata: more values to store in the file.
        """
        write_tensors(Path(path), self.state_dict(), self.file_metadata(**metadata))

    def file_metadata(self, **metadata: str) -> dict[str, str]:
        """Return the metadata of a model file: the config and other values."""
        return metadata | {"config": json.dumps(asdict(self.config))}

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], device: torch.device | str | None = None
    ) -> TransformerVQ:
        """Load a model that `save` wrote.

        Raise UserError if the file is corrupt or does not contain a model, and NotFiniteError if a
        weight or codebook is NaN or infinite.
        """
        if (Path(path) / "checkpoints").is_dir():
            raise UserError(f"{path} is a run folder, not a model; use transformer_vq.load_run")
        tensors, metadata = read_tensors(Path(path))
        if "config" not in metadata:
            raise UserError(f"{path} has no model config; was it written by TransformerVQ.save?")
        try:
            config = ModelConfig.from_dict(json.loads(metadata["config"]))
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path} has an invalid model config: {error}") from error
        # Before anything is built: the config of another model could need any amount of memory.
        n_branches = len({name.split(".")[1] for name in tensors if name.startswith("branches.")})
        if n_branches != 2 * config.n_layer:
            problem = (
                f"has the tensors of {n_branches // 2} layers, its config says {config.n_layer}"
            )
            raise UserError(f"{path} {problem}; write it again with TransformerVQ.save")
        with meta_device():
            model = cls(config)
        wanted = {name: x.shape for name, x in model.state_dict().items()}
        found = {name: x.shape for name, x in tensors.items()}
        if wrong := sorted(name for name in wanted | found if wanted.get(name) != found.get(name)):
            what = f"{wrong[0]} and {len(wrong) - 1} more tensors"
            problem = f"{what} are missing, unknown or of another shape"
            raise UserError(f"{path} does not fit its own config: {problem}")
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
            problem = f"{name} is {found}, expected {expected}"
            raise UserError(f"{source}: {problem}; write it again with TransformerVQ.save")
    check_finite(source, tensors)


def check_finite(source: object, tensors: Mapping[str, Tensor]) -> None:
    """Raise NotFiniteError if a tensor contains NaN or infinity. source: as in `check_tensors`."""
    for name, x in tensors.items():
        if not x.isfinite().all():
            problem = f"{source}: {name} contains NaN or infinity"
            raise NotFiniteError(f"{problem}; use another checkpoint or file")


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
    module.tie_weights()
    missing = incompatible_keys.missing_keys
    missing[:] = [name for name in missing if not name.endswith("head.weight")]
