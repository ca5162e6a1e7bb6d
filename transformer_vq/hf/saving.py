"""Saving and loading of transformers models, with the checks of an export."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any, Self

from torch import Tensor, nn
from transformers.utils import CONFIG_NAME

from transformer_vq.errors import UserError
from transformer_vq.hf.checksums import check_folder
from transformer_vq.hf.remote_code import AUTO_MAP, FixedAutoMap, write_remote_code
from transformer_vq.nn.model import check_finite


class SavedModel(FixedAutoMap):
    """`from_pretrained` and `save_pretrained` that reject corrupt and incomplete folders."""

    @classmethod
    def from_pretrained(
        cls, *args: Any, output_loading_info: bool = False, **kwargs: Any
    ) -> Self | tuple[Self, dict[str, Any]]:
        """Load a model as in transformers, but reject incomplete or corrupt folders.

        A head may be missing, as in transformers: it gets new weights. Other missing tensors are
        an error, unless the caller asks for them with `output_loading_info`.
        """
        folder = args[0] if args else kwargs.get("pretrained_model_name_or_path")
        check_folder(folder, CONFIG_NAME, "*.safetensors*")
        model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)  # type: ignore[misc]
        prefix = "" if model.base_model is model else f"{model.base_model_prefix}."
        missing = sorted(n for n in info["missing_keys"] if n.startswith(prefix))
        if missing and kwargs.get("state_dict") is None and not output_loading_info:
            raise UserError(
                f"the folder has no {missing[0]} and lacks {len(missing) - 1} more tensors; export "
                "the model again"
            )
        _align(model)
        plain = {n: x for n, x in model.state_dict().items() if type(x) is Tensor}
        check_finite(folder, {n: x for n, x in plain.items() if x.device.type == "cpu"})
        return (model, info) if output_loading_info else model

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Save the model as in transformers; warn if code usage has not been applied.

        The folder also gets the file for `trust_remote_code=True`.
        """
        if self.code_usage is not None:  # type: ignore[attr-defined]
            warnings.warn(
                "the codebooks were not updated after the last training passes; call "
                "update_codebooks() after each optimizer step, or drop_code_usage()",
                stacklevel=2,
            )
        self.config.auto_map = dict(AUTO_MAP)  # type: ignore[attr-defined]
        super().save_pretrained(save_directory, is_main_process, *args, **kwargs)  # type: ignore[misc]
        if is_main_process:
            _complete(Path(save_directory))

    def _upload_modified_files(self, working_dir: str, *args: Any, **kwargs: Any) -> Any:
        """Complete the folder before `push_to_hub` uploads it."""
        _complete(Path(working_dir))
        return super()._upload_modified_files(working_dir, *args, **kwargs)  # type: ignore[misc]


def _complete(folder: Path) -> None:
    """Add what belongs to a saved model; does nothing for an adapter, which has no config."""
    if (folder / CONFIG_NAME).is_file():
        write_remote_code(folder)


def _align(model: nn.Module) -> None:
    """Copy tensors of a mapped file to aligned memory.

    Matrix products round by alignment, so without this the logits could differ from the run's.
    """
    for x in (*model.parameters(), *model.buffers()):
        if x.device.type == "cpu" and x.data_ptr() % 64 != 0:
            x.data = x.data.clone()
