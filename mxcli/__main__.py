"""`mxcli` and `python -m mxcli`."""

from __future__ import annotations

from typing import NoReturn

INTERRUPTED = 130


def main() -> NoReturn:
    """Run the command line of this process and exit with its code; an interruption while modules are imported ends it
    without a word."""
    try:
        from mxcli.cli.app import main as run
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    run()


if __name__ == "__main__":
    main()
