"""The text that a model reads: a file, a pipe, or stdin."""

from __future__ import annotations

import os
import stat
import sys
from contextlib import suppress
from io import UnsupportedOperation
from pathlib import Path
from typing import TYPE_CHECKING

from mxcli.errors import InputError, UsageError, printable

if TYPE_CHECKING:
    from mxcli.flows.capture.model import Text

STDIN = "-"


def check_text(file: str | None) -> str:
    """Return the name of the text; raises UsageError if it is missing or empty."""
    if file is None:
        raise UsageError("missing option '--text FILE': name the text that the model reads, or - for stdin.")
    if not file:
        raise UsageError("--text '': an empty name; give a file, or - for stdin.")
    return file


def read_text(file: str) -> Text:
    """Read a text. Raises InputError for a device or a named pipe, which may never end, and for what is not text."""
    from mxcli.flows.capture.model import parse_text

    if file == STDIN:
        with suppress(UnsupportedOperation):  # a stream of this process has no descriptor
            _refuse_device("stdin", os.fstat(sys.stdin.fileno()).st_mode, is_terminal=sys.stdin.isatty())
        return parse_text("stdin", sys.stdin.buffer.read())
    with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
        mode = os.fstat(opened.fileno()).st_mode
        _refuse_device(file, mode, is_terminal=opened.isatty())
        if stat.S_ISFIFO(mode) and Path(file).resolve().exists():  # a pipe of this process is nowhere
            raise InputError(f"{printable(file)}: a named pipe, which may never end; use --text - to read it.")
        os.set_blocking(opened.fileno(), True)
        return parse_text(file, opened.read())


def _refuse_device(name: str, mode: int, *, is_terminal: bool) -> None:
    """Raise InputError for a device, which may have no end; a terminal has one."""
    if stat.S_ISBLK(mode) or (stat.S_ISCHR(mode) and not is_terminal):
        raise InputError(f"{printable(name)}: a device; a text file or a pipe is needed.")
