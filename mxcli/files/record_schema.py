"""The keys that the record of an output must have, by its schema: a record without one of them proves nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from mxcli.errors import printable
from mxcli.files.accounting import ACCOUNTING, is_accounting
from mxcli.files.tensors import DTYPES

QUANTIZED, DEQUANTIZED = "mxcli.quantized/3", "mxcli.dequantized/3"
UNACCOUNTED_QUANTIZED, UNACCOUNTED_DEQUANTIZED = "mxcli.quantized/2", "mxcli.dequantized/2"
"""Schemas of earlier versions, whose records have no accounting of the source."""
EARLIER_QUANTIZED, EARLIER_DEQUANTIZED = "mxcli.quantized/1", "mxcli.dequantized/1"
"""Schemas of still earlier versions, whose records may lack hashes too."""
ALL_QUANTIZED = (QUANTIZED, UNACCOUNTED_QUANTIZED, EARLIER_QUANTIZED)
CONVERTED = "mxcli.converted/1"
SCHEMA, TENSORS = "schema", "tensors"
REQUANTIZED_FROM, CONVERTED_FROM, ORIGIN = "requantized_from", "converted_from", "origin"


@dataclass(frozen=True, slots=True)
class RecordKey:
    """A key of a record: what its value must be, and a check of it."""

    key: str
    needs: str
    is_valid: Callable[[object], bool]


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _is_full(value: object) -> bool:
    return isinstance(value, dict | list) and bool(value)


def _is_full_object(value: object) -> bool:
    return isinstance(value, dict) and bool(value)


def _are_inputs(value: object) -> bool:
    files = value.values() if isinstance(value, dict) else ()
    return (
        bool(files)
        and all(isinstance(each, dict) and type(each.get("bytes")) is int for each in files)
        and _are_finite(value)
    )


def _are_options(value: object) -> bool:
    return isinstance(value, dict) and "format" in value and _are_finite(value)


def _are_dtypes(value: object) -> bool:
    return isinstance(value, dict) and all(each in DTYPES for each in map(str, value.values()))


def _are_finite(value: object) -> bool:
    """Return whether every number in a JSON value is one as a float too."""
    if isinstance(value, dict | list):
        return all(map(_are_finite, value.values() if isinstance(value, dict) else value))
    if type(value) is int:
        return value.bit_length() <= _MOST_BITS
    return not isinstance(value, float) or math.isfinite(value)


_MOST_BITS = 1023
"""Bits of an integer that every float can stand for."""


def _is_statistic(value: object) -> bool:
    """Return whether a value is a number from 0, or null, which stands for one that is not finite."""
    if value is None:
        return True
    return isinstance(value, int | float) and not isinstance(value, bool) and _are_finite(value) and value >= 0


def _is_histogram(value: object) -> bool:
    return value is None or (isinstance(value, dict) and all(type(count) is int for count in value.values()))


def _are_statistics(value: object) -> bool:
    """Return whether a value has statistics as they are written; tensors that are not quantized have none."""
    if not isinstance(value, dict):
        return value is None
    numbers, histograms = ("amax", "max_abs_error"), ("scale_exponent_histogram", "element_exponent_histogram")
    return all(_is_statistic(value.get(key)) for key in numbers) and all(
        _is_histogram(value.get(key)) for key in histograms
    )


_COMMON = (
    RecordKey("version", "text", _is_text),
    RecordKey("command", "a list of texts", _are_texts),
    RecordKey("input", "the files of the source with their sizes", _are_inputs),
    RecordKey("layout", "the name of a layout", _is_text),
    RecordKey("notes", "a list of texts", _are_texts),
    RecordKey("files", "the names of the files", _is_full),
)
_OF_QUANTIZED = (
    *_COMMON,
    RecordKey("options", "the options of the run", _are_options),
    RecordKey(REQUANTIZED_FROM, "the name of a layout or null", lambda value: value is None or _is_text(value)),
    RecordKey(TENSORS, "the decision on every tensor", _is_full_object),
)
_OF_DEQUANTIZED = (*_COMMON, RecordKey("dtypes", "the dtypes of the tensors", _are_dtypes))
_OF_CONVERTED = (
    *_COMMON,
    RecordKey(CONVERTED_FROM, "the name of a layout", _is_text),
    RecordKey(ORIGIN, "how the codes were made or null", lambda value: value is None or isinstance(value, dict)),
    RecordKey(TENSORS, "what is known of every tensor", _is_full_object),
)
_OF_HASHES = (
    *(
        RecordKey(key, "the hashes of the output", _is_full_object)
        for key in ("headers", "sha256", "source_hashes", "stored")
    ),
    RecordKey("verified", "true or false", lambda value: isinstance(value, bool)),
)
_OF_ACCOUNTING = (RecordKey(ACCOUNTING, "the files of the source with sums that agree", is_accounting),)
SCHEMAS: Mapping[str, tuple[RecordKey, ...]] = {
    QUANTIZED: (*_OF_QUANTIZED, *_OF_HASHES, *_OF_ACCOUNTING),
    DEQUANTIZED: (*_OF_DEQUANTIZED, *_OF_HASHES, *_OF_ACCOUNTING),
    CONVERTED: (*_OF_CONVERTED, *_OF_HASHES, *_OF_ACCOUNTING),
    UNACCOUNTED_QUANTIZED: (*_OF_QUANTIZED, *_OF_HASHES),
    UNACCOUNTED_DEQUANTIZED: (*_OF_DEQUANTIZED, *_OF_HASHES),
    EARLIER_QUANTIZED: _OF_QUANTIZED,
    EARLIER_DEQUANTIZED: _OF_DEQUANTIZED,
}
"""The keys of each kind and version of a record. Records of version 1 have all hashes or none."""
_OF_TENSOR = (
    RecordKey("decision", "quantized, kept or tied", lambda value: value in ("quantized", "kept", "tied")),
    RecordKey("dtype", "a dtype", lambda value: isinstance(value, str) and value in DTYPES),
    RecordKey(
        "shape", "a list of sizes", lambda value: isinstance(value, list) and all(type(each) is int for each in value)
    ),
    *(RecordKey(key, "finite numbers", _are_finite) for key in ("seed", "hadamard", "input_scale")),
    RecordKey("statistics", "numbers and counts", _are_statistics),
)


def schema_faults(content: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Yield each key that a record lacks or whose value is not what its schema has, and what it must have."""
    schema = content.get(SCHEMA)
    rows = SCHEMAS.get(schema) if isinstance(schema, str) else None
    if rows is None:
        stated = "is missing" if SCHEMA not in content else f"is {printable(_as_json(schema))}"
        yield SCHEMA, f"{stated}; it must be one of {', '.join(SCHEMAS)}"
        return
    hashed = any(row.key in content for row in _OF_HASHES)
    for row in (*rows, *(_OF_HASHES if hashed and _OF_HASHES[0] not in rows else ())):
        if row.key not in content:
            yield row.key, f"is missing; it must have {row.needs}"
        elif not row.is_valid(content[row.key]):
            yield row.key, f"must have {row.needs}"
    tensors = content.get(TENSORS)
    for name, tensor in tensors.items() if isinstance(tensors, dict) else ():
        fault = tensor_fault(tensor)
        if fault is not None:
            yield TENSORS, f"must have {fault.needs} as the {fault.key} of {printable(name)}"
            return


def tensor_fault(tensor: object) -> RecordKey | None:
    """Return the key of the record of a tensor whose value is not what it must be; None without one."""
    known = tensor if isinstance(tensor, dict) else {}
    return next((row for row in _OF_TENSOR if not row.is_valid(known.get(row.key))), None)


def _as_json(value: object) -> str:
    return "null" if value is None else f"'{value}'"
