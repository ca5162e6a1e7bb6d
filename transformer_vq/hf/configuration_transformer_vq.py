"""`ModelConfig` as transformers keeps it, in config.json; nothing is lost either way."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any, ClassVar

from transformers import PreTrainedConfig
from transformers.utils import CONFIG_NAME

from transformer_vq.config import ModelConfig
from transformer_vq.hf.checksums import check_folder

_DEFAULTS = asdict(ModelConfig(vocab_size=256, d_model=768, n_layer=24))


class TransformerVQConfig(PreTrainedConfig):
    """The fields of `ModelConfig` under their own names, checked by it, and what generation needs.

    bos_token_id: what stands before a document. There is no end token: no model has learned one.
    """

    model_type = "transformer_vq"
    keys_to_ignore_at_inference: ClassVar = ["past_key_values", "commit_loss"]
    attribute_map: ClassVar = {
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layer",
        "tie_word_embeddings": "tie_embeddings",
    }

    def __init__(
        self, *, use_cache: bool = True, bos_token_id: int | None = 0, **kwargs: Any
    ) -> None:
        for name, mapped in self.attribute_map.items():
            if name in kwargs:
                kwargs[mapped] = kwargs.pop(name)
        given = {name: kwargs.pop(name, default) for name, default in _DEFAULTS.items()}
        for name, value in asdict(ModelConfig(**given)).items():
            setattr(self, name, value)
        self.use_cache = use_cache
        self.bos_token_id = bos_token_id
        super().__init__(**kwargs)

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> TransformerVQConfig:
        """As for every transformers config, but damaged files are rejected."""
        check_folder(args[0] if args else kwargs.get("pretrained_model_name_or_path"), CONFIG_NAME)
        return super().from_pretrained(*args, **kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> TransformerVQConfig:
        """As for every transformers config; `AutoConfig` calls this with the name of the folder."""
        check_folder(kwargs.get("name_or_path"), CONFIG_NAME)
        return super().from_dict(config_dict, **kwargs)

    @classmethod
    def from_model_config(cls, config: ModelConfig, **kwargs: Any) -> TransformerVQConfig:
        return cls(**asdict(config), **kwargs)

    def to_model_config(self) -> ModelConfig:
        return ModelConfig(
            **{field.name: getattr(self, field.name) for field in fields(ModelConfig)}
        )
