"""Errors that a user can fix. The message is one line: what is wrong, then the fix.

The command line prints a `UserError` without a traceback and exits with status 2. Any other
exception is a bug and keeps its traceback.
"""

from __future__ import annotations

import importlib
import shlex
import warnings
from typing import Any

EXTRAS = {
    "datasets": "data",
    "fastapi": "serve",
    "gguf": "convert",
    "lm-eval": "clients",
    "matplotlib": "plot",
    "pillow": "image",
    "prometheus-client": "serve",
    "pyppmd": "compress",
    "sentencepiece": "text",
    "tensorboard": "log",
    "tokenizers": "text",
    "transformers": "hf",
    "triton": "triton",
    "uvicorn": "serve",
    "pyarrow": "data",
}
OUT_OF_MEMORY_SIGNS = ("allocate memory", "bad_alloc", "memory object")  # torch, libstdc++, oneDNN


class UserError(ValueError):
    """Invalid input or an unusable file; the message names the fix."""


class NotEnoughMemoryError(UserError):
    """The host or a device is out of memory."""


class TrainingError(RuntimeError):
    """A run that cannot continue; the message says what was saved, and the fix."""


class MissingExtraError(UserError, ImportError):
    """An optional package is not installed."""


def missing_extra(feature: str, package: str) -> MissingExtraError:
    """Return the error for a feature whose optional package is missing.

    package: as for pip, such as "transformers>=5". Installing it always works, even if
    transformer_vq itself is not in the package index; the extra is named as well.
    """
    name = package.replace(">=", " ")
    extra = EXTRAS.get(name.split()[0])
    which = "" if extra is None else f" (extra {extra!r})"
    return MissingExtraError(f"{feature} needs {name}{which}: pip install {shlex.quote(package)}")


def import_extra(module: str, feature: str, package: str | None = None) -> Any:
    """Import an optional package; raise MissingExtraError, which names the feature, without it.

    package: its name for pip, if that is not the name of the module.
    """
    try:
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            return importlib.import_module(module)
    except ImportError:
        raise missing_extra(feature, package or module) from None


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that the host or a device is out of memory."""
    # Compare torch.OutOfMemoryError by name, because importing torch is slow.
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(x in str(error) for x in OUT_OF_MEMORY_SIGNS)
