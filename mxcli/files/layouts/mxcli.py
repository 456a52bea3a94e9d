"""The layout `mxcli`, for every format: the keys of compressed-tensors, and a configuration that states format and
rules.

A plain tensor `x` becomes

* `x_packed` (U8) for codes of 4 and 6 bits, packed row by row with element 0 in the low bits; codes of 8 bits keep the
  name `x`, as F8_E4M3, F8_E5M2, I8 (INT8, in units of 1/64) or U8;
* `x_scale`: E8M0 codes as U8, codes of other 8-bit scales as F8_E4M3 or F8_E5M2, binary32 scales as F32; one per block
  in the shape of the grid of blocks, or [1] for the whole tensor;
* with a tensor scale, `x_global_scale` (F32 [1], the encode scale, as compressed-tensors) and `x_scale_2` (F32 [], the
  decode scale, as ModelOpt). The named rule's order of operations decides which of them scales back, and how.

The quantization_config states what is true of most weights, and `tensors` the exceptions of a weight: its rules, the
dtype of the plain tensor, `axis` (codes are of the tensor with its last two dimensions exchanged), `columns` (its last
dimension, if whole bytes leave it open) and `hadamard_signs` (a sign for each element of a group: codes are of the
tensor after a random Hadamard transform of such groups along that dimension).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence

from mxcli.errors import InputError, UsageError, printable
from mxcli.files.layouts.layout import Content, Entry, Layout, OnDisk, Weight, check_fit, scale_shape, weights_of
from mxcli.files.layouts.loaders import Ignored, exactly, listed
from mxcli.files.layouts.parts import CODES, DECODE, ENCODE, SCALES
from mxcli.files.tensors import DTYPES, TensorInfo
from mxcli.numerics.blocks import COLUMN, ROW, packed_columns
from mxcli.numerics.floats import FloatFormat
from mxcli.numerics.formats import FORMATS, BlockFormat
from mxcli.numerics.hadamard import hadamard_of, signs_text
from mxcli.numerics.scheme import Rules, resolve

METHOD, VERSION = "mxcli", 1
_CODES = {"e4m3": "F8_E4M3", "e5m2": "F8_E5M2", "int8": "I8"}
_SCALES = {"e8m0": "U8", "e4m3": "F8_E4M3", "e5m2": "F8_E5M2", "fp32": "F32"}
_SETTINGS = ("format", "scale_rounding", "rounding", "dialect", "nonfinite", "dtype")
_EXCEPTIONS = (*_SETTINGS, "axis", "columns", "hadamard_signs")
_SCALE = "_scale"


def _codes_dtype(element: FloatFormat) -> str:
    return _CODES.get(element.name, "U8")


def _codes_name(name: str, fmt: BlockFormat) -> str:
    return name + ("_packed" if fmt.element.stored_bits < 8 else "")


def _contents(weight: Weight) -> tuple[Content, ...]:
    fmt, name = weight.format, weight.name
    codes_shape = (*weight.shape[:-1], packed_columns(fmt, weight.shape[-1]))
    found = (
        Content(Entry(_codes_name(name, fmt), _codes_dtype(fmt.element), codes_shape), CODES),
        Content(Entry(name + _SCALE, _SCALES[fmt.scale.name], scale_shape(weight)), SCALES),
    )
    if fmt.tensor_scale is None:
        return found
    encode, decode = Entry(name + "_global_scale", "F32", (1,)), Entry(name + "_scale_2", "F32", ())
    return (*found, Content(encode, ENCODE), Content(decode, DECODE))


def _settings(weights: Sequence[Weight], ignored: Sequence[str]) -> dict[str, object]:
    stated = {weight.name: _rules_of(weight) for weight in weights}
    # The commonest combination, since single settings that are common need not occur together.
    combinations = Counter(tuple(str(rules[key]) for key in _SETTINGS) for rules in stated.values())
    common = dict(zip(_SETTINGS, combinations.most_common(1)[0][0], strict=True))
    if len(signs := {rules.get("hadamard_signs", "") for rules in stated.values()}) == 1 and "" not in signs:
        common["hadamard_signs"] = str(signs.pop())
    exceptions = {
        name: {key: value for key, value in rules.items() if value != common.get(key)} for name, rules in stated.items()
    }
    return {
        "quant_method": METHOD,
        "version": VERSION,
        **common,
        "ignore": sorted(ignored),
        "tensors": {name: rules for name, rules in exceptions.items() if rules},
    }


def _rules_of(weight: Weight) -> dict[str, object]:
    scheme = weight.scheme
    rules: dict[str, object] = {
        "format": scheme.format.name if scheme.format.name in FORMATS else scheme.format.spelling,
        "scale_rounding": scheme.scale_rule.name,
        "rounding": scheme.rounding.name,
        "dialect": scheme.dialect.name,
        "nonfinite": scheme.nonfinite,
        "dtype": weight.dtype,
    }
    if weight.axis == COLUMN:
        rules["axis"] = COLUMN
    if scheme.hadamard is not None:
        rules["hadamard_signs"] = signs_text(scheme.hadamard)
    columns = weight.shape[-1]
    if _columns(weight.format, packed_columns(weight.format, columns)) != columns:
        rules["columns"] = columns
    return rules


def _columns(fmt: BlockFormat, packed: int) -> int:
    """Return the elements in a row of packed bytes, taking every bit as used."""
    return packed * 8 // fmt.element.stored_bits


def _weights(disk: OnDisk) -> list[Weight]:
    settings = disk.settings
    if not settings:
        raise InputError("config.json: without its quantization_config the codes cannot be read.")
    if settings.get("version") != VERSION:
        raise InputError(
            f"config.json: its quantization_config has version {printable(settings.get('version'))}; this program "
            f"reads {VERSION}."
        )
    exceptions = settings.get("tensors", {})
    if not isinstance(exceptions, Mapping):
        raise InputError("config.json: the 'tensors' of its quantization_config must be an object.")

    def weight_of(name: str) -> Weight | None:
        try:
            weight = _weight(name, {**settings, **_checked_entry(exceptions.get(name, {}))}, disk.tensors)
        except UsageError as fault:
            raise ValueError(str(fault)) from fault
        if weight is None and name in exceptions:
            raise ValueError(
                "has an entry in the 'tensors' of its quantization_config, but is not a quantized weight here"
            )
        return weight

    scaled = [name.removesuffix(_SCALE) for name in disk.tensors if name.endswith(_SCALE) and name != _SCALE]
    return weights_of(dict.fromkeys((*scaled, *map(str, exceptions))), weight_of)


def _checked_entry(entry: object) -> Mapping[str, object]:
    """Return the exceptions of one weight. Raises ValueError for an unknown key, such as a misspelled one."""
    if not isinstance(entry, Mapping):
        raise ValueError(
            f"its entry in the 'tensors' of its quantization_config is {printable(json.dumps(entry))}, not an object"
        )
    unknown = [key for key in entry if key not in _EXCEPTIONS]
    if unknown:
        raise ValueError(
            f"its entry in the 'tensors' of its quantization_config has {', '.join(map(printable, unknown))}; it may "
            f"have {', '.join(_EXCEPTIONS)}"
        )
    return entry


def _weight(name: str, settings: Mapping[str, object], tensors: Mapping[str, TensorInfo]) -> Weight | None:
    """Return the weight called `name`; None if a tensor merely ends in `_scale`. Raises ValueError for a misfit."""
    if name not in tensors and name + "_packed" not in tensors:
        return None
    scheme = resolve(
        str(settings.get("format")),
        Rules(
            scale_rounding=_text(settings, "scale_rounding"),
            rounding=_text(settings, "rounding"),
            dialect=_text(settings, "dialect"),
            nonfinite=_text(settings, "nonfinite") or "saturate",
            hadamard=hadamard_of(_text(settings, "hadamard_signs")),
        ),
    )
    codes = tensors.get(_codes_name(name, scheme.format))
    if codes is None or codes.dtype != _codes_dtype(scheme.format.element) or not codes.shape:
        return None
    columns = settings.get("columns", _columns(scheme.format, codes.shape[-1]))
    dtype, axis = settings.get("dtype"), settings.get("axis", ROW)
    if not isinstance(columns, int) or dtype not in DTYPES or axis not in (ROW, COLUMN):
        raise ValueError(f"columns {columns}, dtype {dtype} or axis {axis} of its quantization_config is invalid")
    weight = Weight(name, (*codes.shape[:-1], columns), scheme, str(dtype), str(axis))
    check_fit(_contents(weight), tensors, scheme.format.name)
    return weight


def _text(settings: Mapping[str, object], key: str) -> str | None:
    value = settings.get(key)
    return None if value is None else str(value)


def _ignored(disk: OnDisk) -> Ignored:
    """Return the list of modules left plain; mxcli does not read it, converters to other layouts may."""
    return Ignored("ignore", listed(disk.settings.get("ignore")), exactly, "a module by its path", strict=False)


MXCLI = Layout(
    name=METHOD,
    meaning="our own, for every format: read by mxcli dequantize, described in full by its configuration",
    source="mxcli",
    formats=tuple(FORMATS),
    refusal=lambda weight: None,
    contents=_contents,
    settings=_settings,
    weights=_weights,
    dialects=(METHOD,),
    rotations=True,
    names_rules=True,
    needs_config=True,
    ignored=_ignored,
)
