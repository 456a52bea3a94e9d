"""`mxcli` and `python -m mxcli`."""

from __future__ import annotations

import gc
from typing import NoReturn

INTERRUPTED = 130
OBJECTS_TO_SEARCH = 250_000
"""New objects after which Python looks for garbage: the default of 700 takes a tenth of the time of a command, since
modules and headers of checkpoints make many objects, of which none is garbage."""


def main() -> NoReturn:
    """Run the command line of this process and exit with its code; an interruption while modules are imported ends it
    without a word."""
    gc.set_threshold(OBJECTS_TO_SEARCH)
    try:
        from mxcli.cli.app import main as run
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    try:
        run()
    finally:
        # Python would look at all objects once more for garbage; their memory goes back as a whole.
        gc.freeze()


if __name__ == "__main__":
    main()
