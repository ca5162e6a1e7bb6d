"""Errors that a user can fix. The message is one line: what is wrong, then the fix.

The command line prints a `UserError` without a traceback and exits with status 2. Any other
exception is a bug and keeps its traceback.
"""

from __future__ import annotations

OUT_OF_MEMORY_SIGNS = ("allocate memory", "bad_alloc", "memory object")  # torch, libstdc++, oneDNN


class UserError(ValueError):
    """Invalid input or an unusable file; the message names the fix."""


class TrainingError(RuntimeError):
    """A run that cannot continue; the message says what was saved, and the fix."""


class MissingExtraError(UserError, ImportError):
    """An optional package is not installed."""


def missing_extra(feature: str, package: str, extra: str | None) -> MissingExtraError:
    """Return the error for a feature whose optional package is missing.

    extra: name of the extra that installs the package, or None.
    """
    target = package if extra is None else f"'transformer-vq[{extra}]'"
    return MissingExtraError(f"{feature} needs {package}: pip install {target}")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that the host or a device is out of memory."""
    # Compare torch.OutOfMemoryError by name, because importing torch is slow.
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(x in str(error) for x in OUT_OF_MEMORY_SIGNS)
