"""A plain checkpoint with the names, dtypes and row order that its tensors have in a GGUF file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from mxcli.errors import InputError, RefusedError, printable, together
from mxcli.files.checkpoint import Checkpoint, read
from mxcli.files.gguf_model import FAMILIES, outline_of
from mxcli.files.outline import Destination
from mxcli.files.roles import role_of
from mxcli.files.tensors import IN_MEMORY, Array, TensorInfo, byte_count


def named_as_gguf(source: Checkpoint) -> Checkpoint:
    """Return a plain checkpoint as a GGUF file holds it; a tensor is read, and its rows reordered, when it is read.

    Raises RefusedError for a model whose names in GGUF files are not known.
    """
    kind = (source.config or {}).get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        what = "it has no config.json with a model_type" if kind is None else f"its model_type is '{printable(kind)}'"
        raise RefusedError(
            f"{printable(source.where)}: cannot be compared with a GGUF file: {what}, and the names of its tensors in "
            f"GGUF files are known for {', '.join(FAMILIES)} only. Compare with a GGUF file of the same model."
        )
    aliases = {alias: replace(source.tensors[name], name=alias) for alias, name in _ties(source)}
    try:
        outline = outline_of(source.config, (aliases | dict(source.tensors)).values())
    except (RefusedError, InputError) as error:
        headline = f"{printable(source.where)}: cannot be compared with a GGUF file"
        raise together(RefusedError, headline, [f"{headline}: {reason}" for reason in error.reasons]) from error
    found: dict[str, tuple[TensorInfo, Destination]] = {}
    for name, info in source.tensors.items():
        target = outline.targets[name]
        if target is not None:
            found[target.name] = info, target
    tensors = {name: _as_stored(name, target.dtype, info) for name, (info, target) in found.items()}
    first = next(iter(source.tensors.values()))
    for name, values in outline.constants.items():
        tensors[name] = _as_stored(name, "F32", replace(first, shape=values.shape))

    def decode(info: TensorInfo) -> Array:
        if info.name in outline.constants:
            return outline.constants[info.name]
        stored, target = found[info.name]
        return target.of(read(source, stored), stored.dtype)

    decoders: dict[Path, Callable[[TensorInfo], Array]] = dict.fromkeys(source.files, decode)
    return replace(
        source,
        tensors=tensors,
        tied={
            one.name: other.name
            for alias, name in source.tied.items()
            if (one := outline.targets.get(alias)) is not None and (other := outline.targets.get(name)) is not None
        },
        decoders=decoders,
        stored=source.stored or source,
    )


def _ties(source: Checkpoint) -> list[tuple[str, str]]:
    """Return the aliases that are not stored, with the names of what they stand for."""
    return [
        (alias, name) for alias, name in source.tied.items() if alias not in source.tensors and name in source.tensors
    ]


def _as_stored(name: str, dtype: str, info: TensorInfo) -> TensorInfo:
    role = role_of(name, info.shape, dtype)
    return TensorInfo(name, dtype, info.shape, role, info.file, IN_MEMORY, byte_count(dtype, info.shape))
