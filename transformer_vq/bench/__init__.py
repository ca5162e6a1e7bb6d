"""Measurements that write JSON; `plots` reads JSON and never measures."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from transformer_vq.errors import UserError


def run_main(main: Callable[[], None]) -> None:
    """Run a command; a user's mistake or Ctrl-C prints one line, a bug prints a traceback."""
    try:
        main()
    except (UserError, OSError) as error:
        print(f"tvq: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("tvq: interrupted", file=sys.stderr)
        sys.exit(130)


def check_out(path: Path | None, overwrite: bool) -> None:
    """Raise UserError before the work if its result cannot be written to `--out`."""
    if path is None:
        return
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise UserError(f"--out {path}: give the name of a file in a folder that exists")
    if not overwrite and (path.exists() or path.is_symlink()):
        raise UserError(f"--out {path}: the file exists; use --overwrite or another name")
