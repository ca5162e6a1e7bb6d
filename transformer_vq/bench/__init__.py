"""Measurements that write JSON; `plots` reads JSON and never measures."""

from __future__ import annotations

import sys
from collections.abc import Callable

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
