"""Saving and loading of transformers models, with the checks of an export."""

from __future__ import annotations

import warnings
from typing import Any, Self

from torch import nn

from transformer_vq.errors import UserError
from transformer_vq.hf.checksums import check_folder, write_checksums


class SavedModel:
    """`from_pretrained` and `save_pretrained` that reject corrupt and incomplete folders."""

    @classmethod
    def from_pretrained(
        cls, *args: Any, output_loading_info: bool = False, **kwargs: Any
    ) -> Self | tuple[Self, dict[str, Any]]:
        """Load a model as in transformers, but reject incomplete or corrupt folders.

        A head may be missing, as in transformers: it gets new weights.
        """
        check_folder(args[0] if args else kwargs.get("pretrained_model_name_or_path"))
        model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)  # type: ignore[misc]
        prefix = "" if model.base_model is model else f"{model.base_model_prefix}."
        missing = sorted(n for n in info["missing_keys"] if n.startswith(prefix))
        if missing and kwargs.get("state_dict") is None:
            raise UserError(f"the folder has no {', '.join(missing)}; export the model again")
        _align(model)
        return (model, info) if output_loading_info else model

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """Save the model as in transformers; warn if code usage has not been applied."""
        if self.code_usage is not None:  # type: ignore[attr-defined]
            warnings.warn(
                "the codebooks were not updated after the last training passes; call "
                "update_codebooks() after each optimizer step, or drop_code_usage()",
                stacklevel=2,
            )
        super().save_pretrained(*args, **kwargs)  # type: ignore[misc]
        write_checksums(args[0] if args else kwargs["save_directory"])


def _align(model: nn.Module) -> None:
    """Copy tensors of a mapped file to aligned memory.

    Matrix products round by alignment, so without this the logits could differ from the run's.
    """
    for x in (*model.parameters(), *model.buffers()):
        if x.device.type == "cpu" and x.data_ptr() % 64 != 0:
            x.data = x.data.clone()
