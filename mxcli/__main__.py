"""`mxcli` and `python -m mxcli`."""

from __future__ import annotations

import gc
from typing import NoReturn

INTERRUPTED = 130


def main() -> NoReturn:
    """Run the command line of this process and exit with its code; an interruption while modules are imported ends it
    without a word."""
    gc.disable()  # nothing that imports make is garbage, and looking for it takes a tenth of the start
    try:
        from mxcli.cli.app import main as run
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    finally:
        gc.enable()
    run()


if __name__ == "__main__":
    main()
