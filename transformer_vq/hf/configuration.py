"""`ModelConfig` as a transformers config, and the code of saved folders.

The conversion is lossless in both directions. Each saved folder has a Python file with the classes,
which `auto_map` names, for loading with `trust_remote_code=True`. It only imports them from this
package, so that models have one implementation and one set of registered classes.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from transformer_vq.config import ModelConfig
from transformer_vq.files import MANIFEST, write_text

UNLIMITED = 10**9
"""`max_position_embeddings`: tools read it as the maximum number of tokens; there is none."""
DERIVED = ("num_attention_heads", "num_key_value_heads")
MODULE = "transformer_vq_classes"
FILE = f"{MODULE}.py"
AUTO_MAP = {
    "AutoConfig": f"{MODULE}.TransformerVQConfig",
    "AutoModel": f"{MODULE}.TransformerVQModel",
    "AutoModelForCausalLM": f"{MODULE}.TransformerVQForCausalLM",
}
TOKENIZER_AUTO_MAP = {"AutoTokenizer": [f"{MODULE}.TransformerVQTokenizer", None]}
# transformers reports imports outside of `try` itself, and suggests a package name that is wrong.
CODE = '''\
"""Classes for `trust_remote_code=True`, imported from the package transformer-vq."""

try:
    from transformer_vq.hf import *
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "transformer_vq":
        raise
    raise ImportError(
        "this model needs the Python package transformer-vq: git clone its repository, then "
        "pip install 'PATH-OF-THE-CLONE[hf]'"
    ) from None
'''

_DEFAULTS = asdict(ModelConfig(vocab_size=256, d_model=768, n_layer=24))


class FixedAutoMap:
    """A class whose `auto_map` always names the file that `write_remote_code` writes."""

    @classmethod
    def register_for_auto_class(cls, auto_class: object = None) -> None:
        """Do nothing; in transformers, `save_pretrained` would copy the source of the class."""


class TransformerVQConfig(FixedAutoMap, PreTrainedConfig):
    """The fields of `ModelConfig` under the same names, plus the settings for generation.

    Values are validated by `ModelConfig`. bos_token_id: the token before each document.
    eos_token_id: the token after each document, at which generation stops; None if the model was
    trained without one. max_position_embeddings: read by tools that truncate their input.
    The numbers of heads follow from the other fields; they are only written.
    """

    model_type = "transformer_vq"
    keys_to_ignore_at_inference: ClassVar = ["past_key_values", "commit_loss"]
    attribute_map: ClassVar = {
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layer",
        "tie_word_embeddings": "tie_embeddings",
        "head_dim": "d_k",
    }

    def __init__(
        self,
        *,
        use_cache: bool = True,
        bos_token_id: int | None = 0,
        eos_token_id: int | None = None,
        pad_token_id: int | None = None,
        max_position_embeddings: int = UNLIMITED,
        **kwargs: Any,
    ) -> None:
        for name in DERIVED:
            kwargs.pop(name, None)
        for name, mapped in self.attribute_map.items():
            if name in kwargs:
                kwargs[mapped] = kwargs.pop(name)
        given = {name: kwargs.pop(name, default) for name, default in _DEFAULTS.items()}
        for name, value in asdict(ModelConfig(**given)).items():
            setattr(self, name, value)
        self.use_cache, self.max_position_embeddings = use_cache, max_position_embeddings
        self.bos_token_id, self.eos_token_id = bos_token_id, eos_token_id
        self.pad_token_id = pad_token_id
        super().__init__(**(kwargs | {"auto_map": dict(AUTO_MAP)}))

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any
    ) -> None:
        """Save a config and the code of `auto_map`; a model does so first when it is saved."""
        (Path(save_directory) / MANIFEST).unlink(missing_ok=True)  # its files are about to change
        super().save_pretrained(save_directory, *args, **kwargs)
        write_remote_code(save_directory)

    @classmethod
    def from_model_config(cls, config: ModelConfig, **kwargs: Any) -> TransformerVQConfig:
        return cls(**asdict(config), **kwargs)

    def to_model_config(self) -> ModelConfig:
        return ModelConfig(**{name: getattr(self, name) for name in _DEFAULTS})

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, and the numbers of heads, which tools such as PEFT look up."""
        values: dict[str, Any] = super().to_dict()
        return values | {name: getattr(self, name) for name in DERIVED}

    @property
    def num_attention_heads(self) -> int:
        """Number of query heads, which follows from the head type and the widths."""
        return self.to_model_config().layer.heads.n_head

    @property
    def num_key_value_heads(self) -> int:
        """Number of key and value heads, each with a codebook."""
        return self.to_model_config().layer.heads.n_kv_head


def write_remote_code(folder: str | os.PathLike[str]) -> None:
    """Write the file that `auto_map` refers to."""
    write_text(Path(folder) / FILE, CODE)
