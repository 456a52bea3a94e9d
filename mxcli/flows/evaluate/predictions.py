"""The original's predictions on disk: log-probabilities of every scored token over the vocabulary, binary32."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from mxcli.atomic import whole_file
from mxcli.errors import EnvironmentFailure, InputError, RefusedError, printable, written_to

MAGIC = b"mxcli predictions 1\n"
_MOST_HEADER = 1 << 20
F32 = NDArray[np.float32]


class Predictions:
    """Log-probabilities [tokens, vocabulary] in a file, read and written a few rows at a time."""

    def __init__(self, file: BinaryIO, begin: int, vocabulary: int) -> None:
        self._file, self._begin, self._row = file, begin, 4 * vocabulary
        self._vocabulary = vocabulary

    def write(self, first: int, rows: F32) -> None:
        """Write rows, the first of which is token `first`."""
        self._file.seek(self._begin + first * self._row)
        self._file.write(np.ascontiguousarray(rows, np.float32).data)

    def read(self, first: int, count: int) -> F32:
        """Read rows. Raises InputError if the file ends before them."""
        rows = np.empty((count, self._vocabulary), np.float32)
        self._file.seek(self._begin + first * self._row)
        if self._file.readinto(rows.data.cast("B")) != rows.nbytes:  # type: ignore[attr-defined]
            raise InputError(f"{printable(str(self._file.name))}: ends before its last prediction; make it again.")
        return rows


def size_of(tokens: int, vocabulary: int) -> int:
    """Return the bytes of the predictions of a text."""
    return 4 * tokens * vocabulary


def check_space(folder: Path, nbytes: int) -> None:
    """Raise EnvironmentFailure if a folder has no room for predictions."""
    status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize
    if nbytes > free:
        raise EnvironmentFailure(
            f"{printable(folder)}: the original's predictions take {nbytes:,} bytes, and {free:,} are free; use fewer "
            "--tokens, or a --baseline FILE or TMPDIR on another disk."
        )


def temporary_folder() -> Path:
    """Return the folder of temporary files."""
    return Path(tempfile.gettempdir())


@contextmanager
def temporary(vocabulary: int) -> Iterator[Predictions]:
    """Yield predictions in a file that nobody else sees and that is gone at the end."""
    with written_to(temporary_folder()), tempfile.TemporaryFile(prefix="mxcli-") as file:
        yield Predictions(file, 0, vocabulary)


@contextmanager
def created(path: Path, identity: Mapping[str, object], vocabulary: int, *, replace: bool) -> Iterator[Predictions]:
    """Yield predictions in a new file, which gets its name when the block ends."""
    with written_to(path.parent), whole_file(path, replace=replace) as file:
        header = json.dumps(identity, sort_keys=True).encode() + b"\n"
        file.write(MAGIC + header)
        yield Predictions(file, len(MAGIC) + len(header), vocabulary)


@contextmanager
def opened(path: Path, identity: Mapping[str, object], tokens: int, vocabulary: int) -> Iterator[Predictions]:
    """Yield the predictions that an earlier run kept. Raises RefusedError, with what differs, if they are of another
    model, text or reading, and InputError for a file that is not one of predictions."""
    shown = printable(path)
    with path.open("rb") as file:
        header = file.readline(_MOST_HEADER) if file.read(len(MAGIC)) == MAGIC else b""
        try:
            found = json.loads(header)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise InputError(f"{shown}: is not a file of predictions that `mxcli evaluate --baseline` wrote.")
        wanted = json.loads(json.dumps(identity))
        changed = [
            f"{key} was {printable(str(found.get(key)))} and is {printable(str(value))}"
            for key, value in wanted.items()
            if found.get(key) != value
        ]
        if changed:
            raise RefusedError(
                f"{shown}: has predictions of another run: {'; '.join(changed)}. Give another --baseline FILE."
            )
        begin = len(MAGIC) + len(header)
        if os.fstat(file.fileno()).st_size != begin + size_of(tokens, vocabulary):
            raise InputError(f"{shown}: ends before its last prediction; remove it, or give another --baseline FILE.")
        yield Predictions(file, begin, vocabulary)
