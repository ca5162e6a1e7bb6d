"""Failures that a user can fix: one line that says what is wrong and how to fix it.

The command line prints a `UserError` without a traceback and exits with status 2. Everything else
is a bug and shows where it happened.
"""

from __future__ import annotations

OUT_OF_MEMORY_SIGNS = ("allocate memory", "bad_alloc", "memory object")  # torch, libstdc++, oneDNN


class UserError(ValueError):
    """A mistake of the user, or a file that cannot be used; the message names the fix."""


class MissingExtraError(UserError, ImportError):
    """An optional package is not installed."""


def missing_extra(feature: str, package: str, extra: str | None) -> MissingExtraError:
    """Return the error for a feature whose package is missing; `extra` installs it, if one does."""
    target = package if extra is None else f"'transformer-vq[{extra}]'"
    return MissingExtraError(f"{feature} needs {package}: pip install {target}")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that the host or a device has no memory left."""
    # torch.OutOfMemoryError by name: the command line must not wait for torch to be imported.
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(x in str(error) for x in OUT_OF_MEMORY_SIGNS)
