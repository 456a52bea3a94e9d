"""Shares of a checkpoint that several machines wrote, made one: the same to the last byte as from one machine."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mxcli.files.writer_merge import Merging
from mxcli.flows.counted import gathered
from mxcli.flows.records import QUANTIZED, with_statistics

FINISHING: Mapping[str, Callable[[dict[str, Any], Sequence[str]], dict[str, object]]] = {
    QUANTIZED: lambda record, memos: with_statistics(record, gathered(map(json.loads, memos))),
}
"""How the record of a kind of output is completed from what was remembered of its tensors; others are complete."""


@dataclass(frozen=True, slots=True)
class Merged:
    """What was merged: where, from how many shares, and the files there are now."""

    folder: Path
    shares: int
    files: tuple[str, ...]


def merge_shares(folder: str | Path, *, force: bool = False) -> Merged:
    """Complete the output of which all shares are in a directory.

    With `force` it replaces an earlier output there. Raises InputError for what is no directory, RefusedError naming
    every share that is missing, unfinished, or of another output than the first, and EnvironmentFailure where the disk
    fails; then it can be done again.
    """
    with Merging(Path(folder), force=force) as merging:
        finish = FINISHING.get(merging.record["schema"])
        merging.publish(merging.record if finish is None else finish(merging.record, merging.memos))
        return Merged(merging.folder, len(merging.shares), tuple(merging.files))
