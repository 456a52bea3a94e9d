"""The scores of windows in a file, line by line, so that an interrupted evaluation continues where it was."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mxcli.errors import RefusedError, printable, written_to
from mxcli.files.plain import file_problem
from mxcli.flows.evaluate.scores import WindowScores

SUFFIX = ".scores"
_COLUMNS = {"nll": np.float32, "kl": np.float32, "agrees": np.bool_, "change": np.float32}


class ScoreLog:
    """A file with a line for the run and one for each scored window; each line is synced when it is written.

    Without `resume` an earlier file of scores gives way if `replace`; a file of anything else never does. `found` has
    the scores that an earlier run left, by candidate and window, and `seconds` the time of each.
    """

    def __init__(self, path: Path, identity: Mapping[str, object], *, resume: bool, replace: bool = False) -> None:
        self.path = path
        self.found: dict[tuple[str, int], WindowScores] = {}
        self.seconds: dict[tuple[str, int], float] = {}
        kept = self._read(identity) if resume and os.path.lexists(path) else 0
        if replace and not resume and os.path.lexists(path):
            self._discard()
        with written_to(path):
            flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | (0 if kept else os.O_EXCL)
            self._file = open(os.open(path, flags, 0o666), "wb", buffering=0)  # noqa: SIM115 - closed by __exit__
            self._file.truncate(kept)
            self._file.seek(kept)
        if not kept:
            self._write({"run": dict(identity)})

    def __enter__(self) -> ScoreLog:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, candidate: str, window: int, scores: WindowScores, seconds: float) -> None:
        """Write the scores of a window."""
        columns = {name: base64.b64encode(getattr(scores, name).tobytes()).decode() for name in _COLUMNS}
        self._write({"candidate": candidate, "window": window, "seconds": seconds, **columns})

    def _write(self, content: Mapping[str, object]) -> None:
        with written_to(self.path):
            self._file.write(json.dumps(content, sort_keys=True).encode() + b"\n")
            os.fsync(self._file.fileno())

    def _discard(self) -> None:
        """Remove what an earlier run left. Raises RefusedError for a file that is not one of scores."""
        first = b"" if file_problem(self.path) else self.path.read_bytes().partition(b"\n")[0] + b"\n"
        content = _content(first)
        if content is None or not isinstance(content.get("run"), dict):
            raise RefusedError(
                f"{printable(self.path)}: is not a file of scores that `mxcli evaluate` wrote; move it away."
            )
        self.path.unlink()

    def _read(self, identity: Mapping[str, object]) -> int:
        """Read what an earlier run left, and return the bytes of its whole lines. Raises RefusedError for the file of
        another run, or of none."""
        shown = printable(self.path)
        if problem := file_problem(self.path):
            raise RefusedError(f"{shown}: {problem}; move it away.")
        kept = 0
        for number, line in enumerate(self.path.read_bytes().splitlines(keepends=True)):
            content = _content(line)
            if content is None:
                break
            if number == 0 and content.get("run") != json.loads(json.dumps(dict(identity))):
                raise RefusedError(
                    f"{shown}: has the scores of another run (model, text, reading or version differ); give another "
                    "--baseline FILE, or --force to begin again."
                )
            if number and not self._take(content):
                break
            kept += len(line)
        if not kept:
            raise RefusedError(f"{shown}: is not a file of scores that `mxcli evaluate` wrote; move it away.")
        return kept

    def _take(self, content: Mapping[str, object]) -> bool:
        """Keep the scores of a line; return whether they are whole."""
        candidate, window, seconds = (content.get(key) for key in ("candidate", "window", "seconds"))
        columns = [_column(content.get(name), kind) for name, kind in _COLUMNS.items()]
        known = [column for column in columns if column is not None]
        if len(known) < len(columns) or len({len(column) for column in known}) != 1:
            return False
        if not (isinstance(candidate, str) and type(window) is int and isinstance(seconds, float)):
            return False
        self.found[candidate, window] = WindowScores(*known)  # type: ignore[arg-type]
        self.seconds[candidate, window] = seconds
        return True


def _content(line: bytes) -> Mapping[str, object] | None:
    """Return the object of a whole line."""
    try:
        content = json.loads(line) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def _column(text: object, kind: type) -> NDArray[np.generic] | None:
    if not isinstance(text, str):
        return None
    try:
        data = base64.b64decode(text, validate=True)
        return np.frombuffer(data, kind)
    except ValueError:
        return None
