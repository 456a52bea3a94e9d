"""JSON, JSON lines and CSV: no NaN or infinity tokens, the same names in all three."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence

FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""How a cell begins that a spreadsheet evaluates."""


def json_text(verb: str, content: Mapping[str, object]) -> str:
    """Return a JSON object that begins with its schema, `mxcli.VERB/1`: a line per key, and per record of a list."""
    parts = {"schema": f"mxcli.{verb}/1", **content}
    lines = ",\n".join(f"{json.dumps(key)}: {_spread(part)}" for key, part in parts.items())
    return f"{{\n{lines}\n}}"


def json_line(value: object) -> str:
    """Return a value on one line; a number that is not finite becomes null."""
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False)


def csv_text(records: Iterable[Mapping[str, object]], names: Sequence[str]) -> str:
    """Return a header and a row per record as in RFC 4180; absent is empty, nested values are JSON in a cell.

    A text that a spreadsheet would take for a formula begins with an apostrophe, as OWASP recommends; numbers do not.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    careful = csv.writer(out, lineterminator="\n", quoting=csv.QUOTE_ALL)  # minimal quoting leaves \r bare
    writer.writerow(names)
    for record in records:
        row = [_cell(record.get(name)) for name in names]
        (careful if any(isinstance(cell, str) and "\r" in cell for cell in row) else writer).writerow(row)
    return out.getvalue().rstrip("\n")


def _spread(part: object) -> str:
    if isinstance(part, list) and part and isinstance(part[0], dict):
        return "[\n" + ",\n".join(map(json_line, part)) + "\n]"
    return json_line(part)


def _cell(value: object) -> object:
    if isinstance(value, str):
        return f"'{value}" if value.startswith(FORMULA) else value
    return json_line(value) if isinstance(value, (dict, list, tuple)) else _finite(value)


def _finite(value: object) -> object:
    """Return the value with numbers that are not finite as None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(part) for part in value]
    return value
