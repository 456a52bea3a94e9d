"""The content of a source, from its headers: tensors, roles, ties, layout, totals and everything odd."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mxcli.files.captured_layers import captured_layers, ranks_of, steps_of
from mxcli.files.captures import CAPTURED_ROLES, Capture
from mxcli.files.checkpoint import Checkpoint
from mxcli.files.models.known import UNKNOWN, Model
from mxcli.files.tensors import TensorInfo


@dataclass(frozen=True, slots=True)
class Total:
    """The number, elements and bytes of several tensors."""

    tensors: int = 0
    elements: int = 0
    bytes: int = 0

    @classmethod
    def of(cls, infos: Iterable[TensorInfo]) -> Total:
        """Return the total of some tensors."""
        listed = list(infos)
        return cls(len(listed), sum(info.elements for info in listed), sum(info.nbytes for info in listed))


@dataclass(frozen=True, slots=True)
class Captured:
    """The content of captures: the number of layers, the recorded steps and ranks, and the tensors by role."""

    layers: int
    steps: tuple[int, ...]
    ranks: tuple[int, ...]
    roles: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Inspection:
    """A source as its headers show it; `dialect` names a quantized layout (None: plain tensors), `captured` sums up
    captures (None: not captures)."""

    source: str
    kind: str
    files: Mapping[Path, int]
    index: Path | None
    dialect: str | None
    tensors: tuple[TensorInfo, ...]
    tied: Mapping[str, str]
    captures: Mapping[str, Capture]
    total: Total
    by_dtype: Mapping[str, Total]
    by_role: Mapping[str, Total]
    notes: tuple[str, ...]
    model: Model = UNKNOWN
    captured: Captured | None = None


def inspect_checkpoint(source: str, checkpoint: Checkpoint) -> Inspection:
    """Return the inspection of an opened source, which the user calls `source`."""
    tensors = tuple(checkpoint.tensors.values())
    return Inspection(
        source=source,
        kind=checkpoint.kind,
        files={path: path.stat().st_size for path in checkpoint.files},
        index=checkpoint.index,
        dialect=checkpoint.dialect,
        tensors=tensors,
        tied=checkpoint.tied,
        captures=checkpoint.captures,
        total=Total.of(tensors),
        by_dtype=totals_by(lambda info: info.type_name, tensors),
        by_role=totals_by(lambda info: info.role, tensors),
        notes=checkpoint.notes,
        model=checkpoint.model,
        captured=_captured(checkpoint) if checkpoint.captures else None,
    )


def _captured(checkpoint: Checkpoint) -> Captured:
    layers = captured_layers(checkpoint.tensors, checkpoint.captures)
    count = Counter(str(record["role"]) for record in checkpoint.captures.values())
    return Captured(
        len({each.layer for each in layers}),
        steps_of(layers),
        ranks_of(layers),
        {role: count[role] for role in CAPTURED_ROLES if count[role]},
    )


def totals_by(key: Callable[[TensorInfo], str], infos: Iterable[TensorInfo]) -> dict[str, Total]:
    """Return totals by a property of tensors, the one with most bytes first."""
    groups: dict[str, list[TensorInfo]] = {}
    for info in infos:
        groups.setdefault(key(info), []).append(info)
    totals = {value: Total.of(group) for value, group in groups.items()}
    return dict(sorted(totals.items(), key=lambda item: -item[1].bytes))
