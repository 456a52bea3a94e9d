"""Tensors next to codes, markers and algorithms that are not read: with them, the decoded values may be other ones."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from mxcli.errors import InputError, RefusedError, printable, together
from mxcli.files.checkpoint import Checkpoint, read
from mxcli.files.dialect import MARKER
from mxcli.files.layouts import Layout, OnDisk
from mxcli.files.layouts.algorithms import unread_algorithms
from mxcli.files.layouts.layout import WEIGHT
from mxcli.files.layouts.modelopt import MODELOPT
from mxcli.files.tensors import IN_MEMORY, TensorInfo

CACHE_SCALES = (".k_scale", ".v_scale", ".q_scale", ".kv_scale", ".output_scale", ".prob_scale", ".prob_output_scale")
"""Scales of attention, which do not belong to a weight."""
_SMALL_BYTES = 1 << 16
_INSTEAD = "Use the checkpoint that it was made from."


def refuse_unread_settings(checkpoint: Checkpoint, layout: Layout, disk: OnDisk) -> None:
    """Raise RefusedError for markers of another order of codes or scales than the layout has, and for algorithms that
    are not read."""
    found = [f"{printable(name)} {fault}" for name, fault in misread_markers(checkpoint, layout).items()]
    found += [unread_algorithm(where, name) for name, where in stated_algorithms(layout, disk).items()]
    if found:
        where = printable(checkpoint.where)
        raise together(RefusedError, where, [f"{where}: {each}. {_INSTEAD}" for each in found])


def stated_algorithms(layout: Layout, disk: OnDisk) -> dict[str, str]:
    """Return the algorithms that a checkpoint states and that are not read, with the layer that states each."""
    return unread_algorithms(disk) if layout is MODELOPT else {}


def unread_algorithm(where: str, name: str) -> str:
    """Return a clause on an algorithm that is not read, stated for a layer ("": for all)."""
    layer = f" of {printable(where)}" if where else ""
    return f"the quant_algo{layer} is {printable(name)}, which mxcli does not read"


def misread_markers(checkpoint: Checkpoint, layout: Layout) -> dict[str, str]:
    """Return the markers (`X.comfy_quant`) that do not state codes as the layout reads them, and what each states."""
    found: dict[str, str] = {}
    for name, info in checkpoint.tensors.items():
        if not name.endswith(MARKER):
            continue
        stated = _marked(checkpoint, info)
        codes = checkpoint.tensors.get(name.removesuffix(MARKER) + WEIGHT)
        if codes is None or layout.marked.get(stated) != codes.dtype:
            found[name] = f"states '{printable(stated)}', whose order of codes and scales mxcli does not read"
    return found


def _marked(checkpoint: Checkpoint, info: TensorInfo) -> str:
    """Return the format that a marker states; "unknown" if it cannot be read."""
    found = small_bytes(checkpoint, info) if info.dtype in ("U8", "I8") else None
    try:
        content = None if found is None else json.loads(found)
    except (ValueError, RecursionError):
        return "unknown"
    stated = content.get("format") if isinstance(content, Mapping) else None
    return stated if isinstance(stated, str) else "unknown"


def small_bytes(checkpoint: Checkpoint, info: TensorInfo) -> bytes | None:
    """Return the bytes of a tensor; None if they are many or cannot be read."""
    try:
        return read(checkpoint, info).tobytes() if info.nbytes <= _SMALL_BYTES else None
    except InputError:
        return None


def unread_parts(tensors: Mapping[str, TensorInfo], weights: Mapping[str, object]) -> Iterator[tuple[TensorInfo, str]]:
    """Yield each of the tensors that is named as a part of one of the weights, which are quantized, and is none: it is
    in the same module, or its name begins with that of the weight. Biases and scales of attention are none."""
    modules = {name.removesuffix(WEIGHT): name for name in weights if name.endswith(WEIGHT)}
    lengths = sorted({len(name) for name in weights})
    for name, info in tensors.items():
        parent, _, last = name.rpartition(".")
        if name in weights or last.endswith("bias") or name.endswith(CACHE_SCALES):
            continue
        if parent in modules:
            yield info, modules[parent]
        else:
            beginnings = (name[:at] for at in lengths if name[at : at + 1] in (".", "_"))
            if (weight := next((each for each in beginnings if each in weights), None)) is not None:
                yield info, weight


def refuse_unread_parts(
    checkpoint: Checkpoint, tensors: Mapping[str, TensorInfo], weights: Mapping[str, object]
) -> None:
    """Raise RefusedError with every tensor that is named as a part of a quantized weight and is not read."""
    where = printable(checkpoint.where)
    found = [
        f"{where}: {printable(info.name)} ({info.dtype} {list(info.shape)}) is next to the codes of "
        f"{printable(weight)} and is not read: with it, the weight may be another one. {_INSTEAD}"
        for info, weight in unread_parts(tensors, weights)
    ]
    if found:
        raise together(RefusedError, f"{where}: tensors next to codes are not read", found)


def parts_alone(tensors: Mapping[str, TensorInfo]) -> list[str]:
    """Return a sentence for each tensor that is a part of a quantized weight without the others."""
    return [_without_partner(info) for info in tensors.values() if _needs_partner(info)]


def _needs_partner(info: TensorInfo) -> bool:
    """Return whether a tensor without a weight is a part of one: read as plain numbers it would be garbage."""
    if info.offset == IN_MEMORY:
        return False
    # Other scales, of inputs and of the KV cache, are valid alone.
    return info.role == "codes" or (info.role == "scale" and "weight" in info.name.rpartition(".")[2])


def _without_partner(info: TensorInfo) -> str:
    what, lacks = (
        ("holds codes", "scales") if info.role == "codes" else ("is part of a quantized weight", "other parts")
    )
    return (
        f"{printable(info.name)} ({info.dtype} {list(info.shape)}): {what}, but its {lacks} are missing or do "
        "not fit; see `mxcli verify`."
    )
