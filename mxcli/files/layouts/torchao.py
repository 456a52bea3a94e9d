"""torchao's tensors in safetensors, as transformers saves and loads them.

A parameter `a.b.weight` becomes `a.b._weight_qdata`, `a.b._weight_scale` and, for NVFP4,
`a.b._weight_per_tensor_scale`, a decode scale; E8M0 scales have the dtype F8_E8M0, 6-bit codes take a byte each. The
header of every file describes all parameters: transformers looks them up in the last file it opened, by their names
in memory. Its own files of models that it renames on load use those names there, and others for the tensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from mxcli.errors import printable
from mxcli.files.layouts.in_memory import names_in_memory
from mxcli.files.layouts.known_settings import TORCHAO_SETTINGS
from mxcli.files.layouts.layout import (
    DTYPES,
    WEIGHT,
    Content,
    Entry,
    Layout,
    OnDisk,
    UnreadFormat,
    Weight,
    check_fit,
    found_weights,
    matrix_refusal,
    module_of,
)
from mxcli.files.layouts.loaders import Ignored, by_path, is_usual_layer, listed
from mxcli.files.layouts.parts import CODES, DECODE, SCALES, SPREAD_SIXES, SWIZZLED_SCALES, Part
from mxcli.files.layouts.torchao_tensors import KINDS, MX, OTHER_TENSORS, PLAIN, SWIZZLED, TENSOR_SCALE, Kind
from mxcli.files.models.names import is_expert
from mxcli.files.packing import TILE_COLUMNS, TILE_ROWS
from mxcli.numerics.blocks import grid_shape, packed_columns
from mxcli.numerics.scheme import Rules, resolve

METHOD = "torchao"
QDATA = "_qdata"
LEFT_ALONE = "modules_to_not_convert"
MX_DTYPES = ("BF16", "F32")
AS_IN_MEMORY = ", described as in memory"
"""The ending of the variant of a weight whose description has the name that transformers gives it in memory."""
_CODES = {"e4m3": "F8_E4M3", "e5m2": "F8_E5M2"}
_SCALES = {"e8m0": "F8_E8M0", "e4m3": "F8_E4M3", "fp32": "F32"}


def _refusal(weight: Weight) -> str | None:
    if weight.format.name not in KINDS:
        return f"it has no {weight.format.name}"
    if KINDS[weight.format.name].tensor == MX and weight.dtype not in MX_DTYPES:
        return f"torchao quantizes the inputs of MX layers too, but no {weight.dtype} ones"
    if is_expert(weight.name):
        return "transformers stacks experts, and cannot stack them when torchao has quantized each"
    return matrix_refusal(weight)


def _contents(order: str, weight: Weight) -> tuple[Content, ...]:
    """Return the stored tensors of a weight; `order` is the order of its scales unless its variant states one."""
    content_of: dict[str, Callable[[Weight, str], Content]] = {
        "qdata": _qdata,
        "scale": partial(_scale, _order(weight) or order),
        TENSOR_SCALE: _per_tensor_scale,
    }
    # Codes come first: a dequantized tensor takes their position.
    parts = sorted(KINDS[weight.format.name].parts, key=lambda part: part != "qdata")
    return tuple(content_of[part](weight, f"{_stem(weight.name)}_{part}") for part in parts)


def _order(weight: Weight) -> str:
    """Return the order of scales that the variant of a weight states; "" if it states none."""
    return weight.variant.removesuffix(AS_IN_MEMORY)


def _stem(name: str) -> str:
    module, _, parameter = name.rpartition(".")
    return f"{module}._{parameter}"


def _qdata(weight: Weight, name: str) -> Content:
    fmt, (rows, columns) = weight.format, weight.shape
    if fmt.element.stored_bits == 6:
        return Content(Entry(name, "U8", (rows, columns)), SPREAD_SIXES)
    return Content(Entry(name, _CODES.get(fmt.element.name, "U8"), (rows, packed_columns(fmt, columns))), CODES)


def _scale(order: str, weight: Weight, name: str) -> Content:
    down, across = grid_shape(weight.format, weight.shape)
    shape, part = _IN_ORDER[order if KINDS[weight.format.name].has_variants else PLAIN]
    return Content(Entry(name, _SCALES[weight.format.scale.name], shape(down, across)), part)


def _tiles(rows: int, columns: int) -> tuple[int, int]:
    """Return the shape of 128x4 tiles of scales, each stored as 32 rows of 16."""
    return 32 * -(-rows // TILE_ROWS), 16 * -(-columns // TILE_COLUMNS)


_IN_ORDER: dict[str, tuple[Callable[[int, int], tuple[int, int]], Part]] = {
    PLAIN: (lambda rows, columns: (rows, columns), SCALES),
    SWIZZLED: (_tiles, SWIZZLED_SCALES),
}


def _per_tensor_scale(weight: Weight, name: str) -> Content:
    return Content(Entry(name, "F32", ()), DECODE)


def _settings(weights: Sequence[Weight], ignored: Sequence[str]) -> dict[str, object]:
    """Return one configuration for all layers; if they differ, one per module name."""
    made_by = {module_of(weight): KINDS[weight.format.name].made_by(weight) for weight in weights}
    configs = list(made_by.values())
    mixed = {"_type": "FqnToConfig", "_version": 1, "_data": {"fqn_to_config": made_by}}
    return {
        "quant_method": METHOD,
        "quant_type": {"default": configs[0] if all(each == configs[0] for each in configs) else mixed},
        LEFT_ALONE: sorted(ignored),
        "include_input_output_embeddings": False,
        "untie_embedding_weights": False,
    }


def _metadata(order: str, weights: Sequence[Weight], names: Sequence[str]) -> dict[str, str]:
    """Return the header's description of every quantized parameter, and of the others by their names."""
    described = {
        weight.name: KINDS[weight.format.name].header(weight, (_order(weight) or order) == SWIZZLED)
        for weight in weights
    }
    described |= {name: {"_type": "Tensor"} for name in names}
    return {"tensor_names": json.dumps(list(described)), **{name: json.dumps(each) for name, each in described.items()}}


def _weights(disk: OnDisk) -> list[Weight]:
    descriptions = _descriptions(disk)
    return found_weights(disk, QDATA, lambda stem: _weight(stem, disk, descriptions))


def _name_of(stem: str) -> str:
    """Return the parameter whose tensors begin with `stem`."""
    module, dot, parameter = stem.rpartition(".")
    return module + dot + parameter.removeprefix("_")


def _descriptions(disk: OnDisk) -> Mapping[str, str]:
    """Return the names that headers describe parameters by, if they are others than those of the file."""
    stems = (name.removesuffix(QDATA) for name in disk.tensors if name.endswith(QDATA))
    names = {_name_of(stem) for stem in stems}
    other = [name for name in names if name not in disk.metadata]
    described = [name for name in disk.metadata if name not in names and name not in disk.tensors] if other else []
    return names_in_memory(other, described)


def _weight(stem: str, disk: OnDisk, descriptions: Mapping[str, str]) -> Weight:
    """Return the weight whose tensors begin with `stem`, as the header describes it, else inferred from dtypes and
    shapes. Raises ValueError for a misfit, and if they are ambiguous."""
    name = _name_of(stem)
    codes = disk.tensors[stem + QDATA]
    if len(codes.shape) != 2:
        raise ValueError(f"{list(codes.shape)} is not the shape of a matrix of codes (torchao)")
    header = _header(descriptions.get(name, name), disk.metadata)
    if not header:
        return _inferred(name, disk)
    attributes: Mapping[str, Any] = header["_data"]
    kinds = [kind for kind in KINDS.values() if kind.matches(header, attributes)]
    if not kinds:
        raise _other_tensor(header, attributes)
    dtype = DTYPES.get(_spelled(attributes.get("orig_dtype", attributes.get("dtype"))), disk.dtype)
    order = SWIZZLED if attributes.get("is_swizzled_scales") else PLAIN
    candidates = [_described(kind, name, disk, dtype, order) for kind in kinds]
    faults = [_fault(weight, disk) for weight in candidates]
    if None not in faults:
        raise ValueError(faults[0])
    found = candidates[faults.index(None)]
    return replace(found, variant=found.variant + AS_IN_MEMORY) if name in descriptions else found


def _other_tensor(header: Mapping[str, Any], attributes: Mapping[str, Any]) -> ValueError:
    """Return the error for a description of a tensor that is none of ours."""
    if header.get("_type") in OTHER_TENSORS:
        return UnreadFormat(f"its header states torchao's {header['_type']}, which mxcli does not read")
    known = ", ".join(sorted({kind.tensor for kind in KINDS.values()}))
    stated = f"{printable(header.get('_type'))} of {printable(_spelled(attributes.get('elem_dtype')))}"
    return ValueError(
        f"its header states {stated}, block size {printable(attributes.get('block_size'))}; mxcli reads {known} as "
        f"{', '.join(KINDS)}"
    )


def _header(name: str, metadata: Mapping[str, str]) -> Mapping[str, Any]:
    """Return the header's description of a parameter; empty without one."""
    text = metadata.get(name)
    if text is None:
        return {}
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict) or not isinstance(header.get("_data"), dict):
        raise ValueError("the file's header does not describe it as a torchao tensor")
    return header


def _spelled(dtype: object) -> str:
    return str(dtype.get("_data") if isinstance(dtype, Mapping) else dtype)


def _inferred(name: str, disk: OnDisk) -> Weight:
    """Return the one weight that fits dtypes and shapes; FP8 of several blocks that fit means the same."""
    described = [_described(kind, name, disk, disk.dtype, order) for kind in KINDS.values() for order in _IN_ORDER]
    fitting: dict[tuple[str, str], Weight] = {}
    for weight in described:
        if not _fault(weight, disk):
            fitting.setdefault((weight.format.element.name, weight.variant), weight)
    if len(fitting) == 1:
        return next(iter(fitting.values()))
    forms = ", ".join(f"{weight.format.name} ({weight.variant})" for weight in fitting.values())
    raise ValueError(
        "the file's header does not describe it (torchao's metadata was lost), and its dtypes and shapes fit "
        f"{forms or 'no torchao tensor that mxcli reads'}; use the checkpoint as torchao wrote it"
    )


def _described(kind: Kind, name: str, disk: OnDisk, dtype: str, order: str) -> Weight:
    rows, bytes_across = disk.tensors[_stem(name) + QDATA].shape
    columns = bytes_across * 2 if kind.format.element.stored_bits == 4 else bytes_across
    scheme = resolve(kind.format, Rules(dialect=METHOD))
    return Weight(name, (rows, columns), scheme, dtype, variant=order if kind.has_variants else PLAIN)


def _fault(weight: Weight, disk: OnDisk) -> str | None:
    """Return why a weight is not what is stored; None if it is."""
    unused = f"{_stem(weight.name)}_{TENSOR_SCALE}"
    if unused in disk.tensors and TENSOR_SCALE not in KINDS[weight.format.name].parts:
        return f"has {printable(unused)}, which {weight.format.name} does not use"
    try:
        check_fit(_contents(PLAIN, weight), disk.tensors, weight.format.name)
    except ValueError as misfit:
        return str(misfit)
    return matrix_refusal(weight)


def _remarks(weights: Sequence[Weight]) -> list[str]:
    if all(KINDS[weight.format.name].tensor != MX for weight in weights):
        return []
    return [
        "torchao quantizes the inputs of MX layers to the format of their weights; layers marked EMULATED, as here, "
        "multiply dequantized values, on any device."
    ]


def _ignored(disk: OnDisk) -> Ignored:
    return Ignored(
        LEFT_ALONE,
        listed(disk.settings.get(LEFT_ALONE)),
        by_path,
        "a module by its path, or by that of one that contains it",
        targeted=lambda module: _is_targeted(module, disk),
        strict=False,
    )


def _is_targeted(module: str, disk: OnDisk) -> bool:
    """Return whether loaders look for the codes of a plain linear layer: experts and tied layers are left as they
    are."""
    return is_usual_layer(module) and module + WEIGHT in disk.tensors and not is_expert(f"{module}.")


def _layout(name: str, order: str, meaning: str, dialects: tuple[str, ...]) -> Layout:
    return Layout(
        name=name,
        meaning=meaning,
        source="torchao 0.18, transformers 5.24",
        formats=tuple(KINDS),
        refusal=_refusal,
        contents=partial(_contents, order),
        settings=_settings,
        weights=_weights,
        dialects=dialects,
        metadata=partial(_metadata, order),
        remarks=_remarks,
        ignored=_ignored,
        fused_by="vLLM",
        known_settings=TORCHAO_SETTINGS,
    )


TORCHAO = _layout(
    "torchao",
    SWIZZLED,
    "torchao's tensors, which transformers loads as such; scales in the 128x4 order of Blackwell's matrix products",
    (METHOD,),
)
TORCHAO_PLAIN = _layout(
    "torchao-plain",
    PLAIN,
    "torchao's tensors with scales in the order of the blocks, as its casts leave them; read back as torchao",
    (),
)
