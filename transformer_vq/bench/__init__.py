"""Measurements that write JSON; `plots` reads JSON and never measures."""

from __future__ import annotations

import sys
from collections.abc import Callable


def run_main(main: Callable[[], None]) -> None:
    """Run a command; a mistake or Ctrl-C ends it with one line instead of a traceback."""
    try:
        main()
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
