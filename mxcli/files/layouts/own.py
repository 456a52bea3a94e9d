"""Our own layout, for every format: the keys of compressed-tensors, and a configuration that names format and
rules.

A plain tensor `x` becomes

* `x_packed` (U8) for codes of 4 and 6 bits, packed row by row with element 0 in the low bits; codes of 8 bits
  keep the name `x`, as F8_E4M3, F8_E5M2, I8 (INT8, in units of 1/64) or U8;
* `x_scale`: E8M0 codes as U8, codes of other 8-bit scales as F8_E4M3 or F8_E5M2, binary32 scales as F32; one per
  block in the shape of the grid of blocks, or [1] for the whole tensor;
* with a tensor scale, `x_global_scale` (F32 [1], the encode scale, as compressed-tensors) and `x_scale_2` (F32
  [], the decode scale, as ModelOpt). Which of them scales back, and how, is the named rule's order of operations.

The quantization_config holds what is true of most weights, and `tensors` what is different of one: its rules, the
dtype of the plain tensor, `axis` (codes are of the tensor with its last two dimensions exchanged), `columns`
(its last dimension, where whole bytes do not tell it) and `hadamard_signs` (a sign for each element of a group: codes
are of the tensor after a random Hadamard transform of such groups along that dimension).
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


def _codes_name(name: str, row: BlockFormat) -> str:
    return name + ("_packed" if row.element.stored_bits < 8 else "")


def _contents(weight: Weight) -> tuple[Content, ...]:
    row, name = weight.format, weight.name
    codes_shape = (*weight.shape[:-1], packed_columns(row, weight.shape[-1]))
    found = (
        Content(Entry(_codes_name(name, row), _codes_dtype(row.element), codes_shape), CODES),
        Content(Entry(name + _SCALE, _SCALES[row.scale.name], scale_shape(weight)), SCALES),
    )
    if row.tensor_scale is None:
        return found
    encode, decode = Entry(name + "_global_scale", "F32", (1,)), Entry(name + "_scale_2", "F32", ())
    return (*found, Content(encode, ENCODE), Content(decode, DECODE))


def _settings(weights: Sequence[Weight], ignored: Sequence[str]) -> dict[str, object]:
    each = {weight.name: _of(weight) for weight in weights}
    # The commonest combination: settings that are common one by one need not go together.
    combinations = Counter(tuple(str(own[key]) for key in _SETTINGS) for own in each.values())
    usual = dict(zip(_SETTINGS, combinations.most_common(1)[0][0], strict=True))
    if len(signs := {own.get("hadamard_signs", "") for own in each.values()}) == 1 and "" not in signs:
        usual["hadamard_signs"] = str(signs.pop())
    exceptions = {name: {key: own[key] for key in own if own[key] != usual.get(key)} for name, own in each.items()}
    return {
        "quant_method": METHOD,
        "version": VERSION,
        **usual,
        "ignore": sorted(ignored),
        "tensors": {name: own for name, own in exceptions.items() if own},
    }


def _of(weight: Weight) -> dict[str, object]:
    scheme = weight.scheme
    own: dict[str, object] = {
        "format": scheme.format.name if scheme.format.name in FORMATS else scheme.format.spelling,
        "scale_rounding": scheme.scale_rule.name,
        "rounding": scheme.rounding.name,
        "dialect": scheme.dialect.name,
        "nonfinite": scheme.nonfinite,
        "dtype": weight.dtype,
    }
    if weight.axis == COLUMN:
        own["axis"] = COLUMN
    if scheme.hadamard is not None:
        own["hadamard_signs"] = signs_text(scheme.hadamard)
    columns = weight.shape[-1]
    if _columns(weight.format, packed_columns(weight.format, columns)) != columns:
        own["columns"] = columns
    return own


def _columns(row: BlockFormat, packed: int) -> int:
    """Elements in a row of packed bytes, taking every bit as used."""
    return packed * 8 // row.element.stored_bits


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
            weight = _weight(name, {**settings, **_entry(exceptions.get(name, {}))}, disk.tensors)
        except UsageError as fault:
            raise ValueError(str(fault)) from fault
        if weight is None and name in exceptions:
            raise ValueError(
                "has an entry in the 'tensors' of its quantization_config, and is no quantized weight here"
            )
        return weight

    scaled = [name.removesuffix(_SCALE) for name in disk.tensors if name.endswith(_SCALE) and name != _SCALE]
    return weights_of(dict.fromkeys((*scaled, *map(str, exceptions))), weight_of)


def _entry(own: object) -> Mapping[str, object]:
    """What is different of one weight; raises ValueError for what says nothing that is read, as a misspelled key."""
    if not isinstance(own, Mapping):
        raise ValueError(
            f"its entry in the 'tensors' of its quantization_config is {printable(json.dumps(own))}, not an object"
        )
    unknown = [key for key in own if key not in _EXCEPTIONS]
    if unknown:
        raise ValueError(
            f"its entry in the 'tensors' of its quantization_config has {', '.join(map(printable, unknown))}, and may "
            f"have {', '.join(_EXCEPTIONS)}"
        )
    return own


def _weight(name: str, settings: Mapping[str, object], tensors: Mapping[str, TensorInfo]) -> Weight | None:
    """The weight called `name`, or None where a tensor merely ends in `_scale`; raises ValueError for a misfit."""
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
        raise ValueError(f"columns {columns}, dtype {dtype} or axis {axis} of its quantization_config makes no sense")
    weight = Weight(name, (*codes.shape[:-1], columns), scheme, str(dtype), str(axis))
    check_fit(_contents(weight), tensors, scheme.format.name)
    return weight


def _text(settings: Mapping[str, object], key: str) -> str | None:
    value = settings.get(key)
    return None if value is None else str(value)


def _ignored(disk: OnDisk) -> Ignored:
    """Nothing is read by it here; converters to other layouts may."""
    return Ignored("ignore", listed(disk.settings.get("ignore")), exactly, "a module by its path", strict=False)


OWN = Layout(
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
