"""auto-round's own checkpoints: the tensor names of compressed-tensors, with settings of their own.

A layer has the settings of the whole model, changed by those under `extra_config` for its path, for the end of its path
or for an expression that is found in it. FP8 has one scale per block (`weight_scale_inv`) or one per row
(`weight_scale`, a vector, with the scale of the inputs); the latter is only read. Codes of integers, and NVFP4 whose
scales are E5M3, are not read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from mxcli.errors import RefusedError, printable
from mxcli.files.layouts.known_settings import KnownSetting
from mxcli.files.layouts.layout import (
    WEIGHT,
    Config,
    Content,
    Entry,
    InputScale,
    Layout,
    OnDisk,
    Transforms,
    Unread,
    UnreadFormat,
    Weight,
    check_fit,
    matrix_refusal,
    module_of,
    weights_of,
)
from mxcli.files.layouts.loaders import Ignored
from mxcli.files.layouts.parts import CODES, ENCODE, SCALES, constant
from mxcli.files.patterns import stated_expression
from mxcli.numerics.blocks import grid_shape, packed_columns
from mxcli.numerics.formats import FORMATS
from mxcli.numerics.mantissa_rules import MantissaScaleRule
from mxcli.numerics.scheme import Rules, resolve

METHOD, VERSION = "auto-round", "0.16.1"
PACKED, SCALE, SCALE_INV, TENSOR_SCALE = "_packed", "_scale", "_scale_inv", "_global_scale"
BY_LAYER, BLOCKS = "extra_config", "block_name_to_quantize"
PLAIN_BITS = 16
"""The bits of a layer that is left as it is, and the least of one that has no codes."""
_SPECIAL = frozenset("*+?^$()[]{}|\\")
"""Characters with which a key of `extra_config` is an expression."""
_FAMILIES = {"mx_fp": "mx_fp", "nv_fp": "nv_fp", "fp": "fp"}
"""Beginnings of data types, and what they have in common; the first that fits decides."""


@dataclass(frozen=True, slots=True)
class Row:
    """auto-round's settings for one of our formats: of weights, of inputs and others; the packing, and the ending of
    the scales' name. `scale_dtypes` are those of scales that are read, the first one is written."""

    block_format: str
    packing: str
    weights: Mapping[str, object]
    inputs: Mapping[str, object]
    others: Mapping[str, object] = field(default_factory=dict)
    ending: str = SCALE
    scale_dtypes: tuple[str, ...] = ("U8",)

    @property
    def of_layer(self) -> dict[str, object]:
        """Return the settings that a single layer may have."""
        return {**self.weights, **self.inputs, "sym": True, "act_sym": True}

    def means(self, stated: Config) -> bool:
        """Return whether settings are those of this row."""
        sizes = stated.get("group_size")
        return (
            self.weights["bits"] == stated.get("bits")
            and self.weights["group_size"] == (list(sizes) if isinstance(sizes, Sequence) else sizes)
            and self.weights["data_type"] == _family(stated.get("data_type"))
        )


def _mx(block_format: str, bits: int) -> Row:
    weights = {"bits": bits, "group_size": 32, "data_type": "mx_fp"}
    inputs = {"act_bits": bits, "act_group_size": 32, "act_data_type": "mx_fp", "act_dynamic": True}
    return Row(block_format, "auto_round:llm_compressor", weights, inputs)


_FLOATS = ("F32", "BF16", "F16")
ROWS: dict[str, Row] = {
    row.block_format: row
    for row in (
        _mx("mxfp4_e2m1", 4),
        _mx("mxfp8_e4m3", 8),
        Row(
            "nvfp4",
            "auto_round:llm_compressor",
            {"bits": 4, "group_size": 16, "data_type": "nv_fp"},
            {"act_bits": 4, "act_group_size": 16, "act_data_type": "nv_fp4_with_static_gs", "act_dynamic": True},
            scale_dtypes=("F8_E4M3",),
        ),
        Row(
            "fp8_e4m3_128x128",
            "auto_round:fp8",
            {"bits": 8, "group_size": [128, 128], "data_type": "fp"},
            {"act_bits": 8, "act_group_size": 128, "act_data_type": "fp", "act_dynamic": True},
            {"activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]},
            ending=SCALE_INV,
            scale_dtypes=_FLOATS,
        ),
        Row(
            "fp8_e4m3_channel",
            "auto_round:fp8_static",
            {"bits": 8, "group_size": -1, "data_type": "fp"},
            {"act_bits": 8, "act_group_size": 0, "act_data_type": "fp", "act_dynamic": False},
            scale_dtypes=_FLOATS,
        ),
    )
}
_WRITTEN = tuple(name for name in ROWS if name != "fp8_e4m3_channel")


def _family(data_type: object) -> str | None:
    return next((name for start, name in _FAMILIES.items() if str(data_type).startswith(start)), None)


def _refusal(weight: Weight) -> str | None:
    if weight.format.name not in _WRITTEN:
        return f"it has no {weight.format.name}"
    return matrix_refusal(weight)


def _contents(weight: Weight) -> tuple[Content, ...]:
    fmt, (rows, columns), row = weight.format, weight.shape, ROWS[weight.format.name]
    packed = fmt.element.stored_bits < 8
    codes = Entry(
        weight.name + (PACKED if packed else ""), "U8" if packed else "F8_E4M3", (rows, packed_columns(fmt, columns))
    )
    grid = grid_shape(fmt, weight.shape)
    scales = Entry(weight.name + row.ending, _scale_dtype(weight, row), (rows,) if fmt.block == (1, None) else grid)
    found = [Content(codes, CODES), Content(scales, SCALES)]
    if fmt.tensor_scale is not None:
        found.append(Content(Entry(weight.name + TENSOR_SCALE, "F32", (1,)), ENCODE))
    if weight.input_scale is not None:
        found.append(_input_scale(weight, weight.input_scale))
    return tuple(found)


def _input_scale(weight: Weight, scale: InputScale) -> Content:
    """Return the entry of the scale of a layer's inputs, the one to divide by."""
    return Content(Entry(f"{module_of(weight)}.input_global_scale", "F32", (1,)), constant(scale.encode))


def _scale_dtype(weight: Weight, row: Row) -> str:
    rule = weight.scheme.scale_rule
    if weight.variant or "BF16" not in row.scale_dtypes:
        return weight.variant or row.scale_dtypes[0]
    return "BF16" if isinstance(rule, MantissaScaleRule) and rule.bf16_scale else "F32"


def _settings(weights: Sequence[Weight], ignored: Sequence[str]) -> dict[str, object]:
    """Return the configuration: the settings of most weights, and those of other layers by path. Raises RefusedError
    for formats of several packings, since it states one for the model."""
    formats = Counter(weight.format.name for weight in weights)
    packings = {ROWS[weight.format.name].packing: weight for weight in weights}
    if len(packings) > 1:
        one, other = list(packings.values())[:2]
        raise RefusedError(
            f"{printable(one.name)} is {one.format.name} and {printable(other.name)} {other.format.name}: the layout "
            f"{METHOD} states one packing for a whole model. Use one format, or --layout compressed-tensors."
        )
    usual = ROWS[formats.most_common(1)[0][0]]
    blocks = _blocks(module_of(weight) for weight in weights)
    settings: dict[str, object] = {
        "quant_method": METHOD,
        "packing_format": usual.packing,
        "autoround_version": VERSION,
        **usual.of_layer,
        **usual.others,
    }
    by_layer: dict[str, object] = {name: {"bits": PLAIN_BITS, "act_bits": PLAIN_BITS} for name in ignored}
    for weight in weights:
        row, module = ROWS[weight.format.name], module_of(weight)
        if not _is_inside(module, blocks):
            by_layer[module] = row.of_layer
        elif row is not usual:
            by_layer[module] = {key: value for key, value in row.of_layer.items() if usual.of_layer[key] != value}
    if blocks:
        settings[BLOCKS] = ",".join(blocks)
    if by_layer:
        settings[BY_LAYER] = dict(sorted(by_layer.items()))
    return settings


def _blocks(modules: Iterable[str]) -> list[str]:
    """Return the lists of blocks that modules are in: their paths up to the first number."""
    found = set()
    for module in modules:
        parts = module.split(".")
        at = next((place for place, part in enumerate(parts) if part.isdecimal()), None)
        if at:
            found.add(".".join(parts[:at]))
    return sorted(found)


def _is_inside(module: str, blocks: Sequence[str]) -> bool:
    return any(module.startswith(f"{block}.") for block in blocks)


def _weights(disk: OnDisk) -> list[Weight]:
    integers = next((name for name in disk.tensors if name.endswith(".qweight")), None)
    if integers is not None:
        stated = disk.settings.get("data_type", "int")
        raise Unread(
            f"{printable(integers)}: the quantization_config states data_type {printable(stated)}, bits "
            f"{printable(disk.settings.get('bits'))}: integers with a scale of each group, which mxcli does not read; "
            "use the checkpoint that it was made from."
        )
    endings = (WEIGHT + PACKED, WEIGHT + SCALE, WEIGHT + SCALE_INV)
    modules = (name.removesuffix(ending) for name in disk.tensors for ending in endings if name.endswith(ending))
    coded = (
        name.removesuffix(WEIGHT) for name, info in disk.tensors.items() if name.endswith(WEIGHT) and info.dtype in _FP8
    )
    return weights_of(dict.fromkeys(chain(modules, coded)), lambda module: _weight(module, disk))


_FP8 = ("F8_E4M3", "F8_E5M2")


def _weight(module: str, disk: OnDisk) -> Weight:
    """Return the weight of a module. Raises ValueError if its tensors are not what its settings state, UnreadFormat for
    settings that are not read."""
    stated = settings_of(module, disk.settings)
    row = next((row for row in ROWS.values() if row.means(stated)), None)
    if row is None:
        shown = ", ".join(f"{key} {printable(str(stated.get(key)))}" for key in ("data_type", "bits", "group_size"))
        raise UnreadFormat(f"its settings are {shown}, which mxcli does not read; it reads {', '.join(ROWS)}")
    fmt, name = FORMATS[row.block_format], module + WEIGHT
    codes = disk.tensors.get(name + (PACKED if fmt.element.stored_bits < 8 else ""))
    scales = disk.tensors.get(name + row.ending)
    if codes is None or scales is None:
        missing = (PACKED if fmt.element.stored_bits < 8 else "") if codes is None else row.ending
        raise ValueError(f"{printable(name + missing)} is missing ({fmt.name}, as its settings state)")
    if len(codes.shape) != 2:
        raise ValueError(f"{list(codes.shape)} is not the shape of a matrix of codes ({fmt.name})")
    rule = "amax-bf16-scale" if scales.dtype == "BF16" and row.scale_dtypes == _FLOATS else None
    scheme = resolve(fmt, Rules(scale_rounding=rule, dialect=None if rule or fmt.scale.bits == 32 else METHOD))
    variant = "F16" if scales.dtype == "F16" and row.scale_dtypes == _FLOATS else ""
    shape = (codes.shape[0], codes.shape[1] * 8 // fmt.element.stored_bits)
    weight = Weight(name, shape, scheme, disk.dtype, variant=variant)
    if (fault := matrix_refusal(weight)) is not None:
        raise ValueError(f"{list(codes.shape)} is not a shape of {fmt.name} codes: {fault}")
    check_fit(_contents(weight), disk.tensors, fmt.name)
    return weight


def settings_of(module: str, settings: Config) -> Config:
    """Return the settings of a module: those of its path, of the end of its path, or of the first expression that is
    found in it, and for what these leave out those of the model. Raises ValueError for an invalid expression."""
    by_layer = settings.get(BY_LAYER)
    entries = by_layer if isinstance(by_layer, Mapping) else {}
    own = entries.get(module)
    if not isinstance(own, Mapping):
        own = next(
            (each for key, each in entries.items() if isinstance(each, Mapping) and _names(str(key), module)), {}
        )
    return {**settings, **own}


def _names(key: str, module: str) -> bool:
    """Return whether a key of `extra_config` names a module. Raises ValueError for an invalid expression."""
    if _SPECIAL.isdisjoint(key):
        return module == key or module.endswith(f".{key}")
    return stated_expression(key).search(module) is not None


def _ignored(disk: OnDisk) -> Ignored:
    by_layer = disk.settings.get(BY_LAYER)
    entries = by_layer.items() if isinstance(by_layer, Mapping) else ()
    plain = tuple(
        str(key)
        for key, each in entries
        if isinstance(each, Mapping) and isinstance(bits := each.get("bits"), int) and bits >= PLAIN_BITS
    )
    stated = disk.settings.get(BLOCKS)
    blocks = (
        stated.split(",") if isinstance(stated, str) else list(map(str, stated)) if isinstance(stated, list) else []
    )
    return Ignored(
        BY_LAYER,
        plain,
        _names,
        "a module by its path or the end of it, or by an expression that is found in it, with bits 16",
        targeted=lambda module: _is_inside(module, blocks) if blocks else not module.endswith("lm_head"),
    )


def _transforms(disk: OnDisk) -> Transforms:
    """Return the rotations that loaders apply to activations."""
    stated = [key for key in ("rotation_config", "spinquant_config") if disk.settings.get(key)]
    if not stated:
        return Transforms()
    return Transforms(
        f"its {stated[0]} states rotations that loaders apply to activations: its weights alone are other ones"
    )


def _remarks(weights: Sequence[Weight]) -> list[str]:
    return [
        f"auto-round's settings state inputs of {ROWS[name].inputs['act_bits']} bits for {name}: its loaders quantize "
        "them too."
        for name in dict.fromkeys(weight.format.name for weight in weights)
    ]


_ANY_LAYER = rf"(?:{BY_LAYER}\n[^\n]+\n)?"
AUTO_ROUND_SETTINGS = (
    KnownSetting("quant_method", (METHOD,), required=True),
    KnownSetting(_ANY_LAYER + "bits", (2, 3, 4, 5, 6, 7, 8, PLAIN_BITS)),
    KnownSetting(_ANY_LAYER + "sym", (True, False), of_formats=dict.fromkeys(ROWS, (True,))),
    KnownSetting(_ANY_LAYER + "act_bits", (4, 8, PLAIN_BITS)),
)


AUTO_ROUND = Layout(
    name=METHOD,
    meaning="auto-round's own files: names of compressed-tensors, settings of its own",
    source="auto-round 0.16.1 (run); vLLM 0.33 (read)",
    formats=_WRITTEN,
    refusal=_refusal,
    contents=_contents,
    settings=_settings,
    weights=_weights,
    aliases=("autoround",),
    dialects=(METHOD,),
    needs_config=True,
    is_chosen=False,
    remarks=_remarks,
    ignored=_ignored,
    transforms=_transforms,
    known_settings=AUTO_ROUND_SETTINGS,
    model_scales=True,
    input_scales=("nvfp4",),
    needs_input_scales=("nvfp4",),
)
