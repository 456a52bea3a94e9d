"""`mxcli` and `python -m mxcli`."""

from __future__ import annotations

import gc
import sys
from typing import NoReturn

INTERRUPTED = 130
OBJECTS_TO_SEARCH = 250_000
"""New objects after which Python looks for garbage: the default of 700 takes a tenth of the time of a command, since
modules and headers of checkpoints make many objects, of which none is garbage."""

SECONDS_BEFORE_A_SWITCH = 0.0005
"""How long a thread that runs Python keeps one that reads, hashes or writes waiting before its next piece: the default
of 5 ms is several times what a piece takes."""


def main() -> NoReturn:
    """Run the command line of this process and exit with its code; an interruption while modules are imported ends it
    without a word."""
    gc.set_threshold(OBJECTS_TO_SEARCH)
    sys.setswitchinterval(SECONDS_BEFORE_A_SWITCH)
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
