"""JSON and CSV read back as they were written, for any name of a tensor."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from test_schema import printed, valid

from mxcli.numerics.metrics import METRICS, NUMBERS
from mxcli.output.export import csv_text
from mxcli.output.recommendation import RECORD_KEYS as OPTION_KEYS

NAMES = (
    "line\nfeed.weight",
    "carriage\rreturn.weight",
    "both\r\n.weight",
    'quotes"and,commas";.weight',
    "</script><script>alert(1)</script>.weight",
    "n" * 293 + ".weight",
    "kö.层.\U0001f52c.weight",
    "=1+1.weight",
    "  spaces  .weight",
    "'single'\t.weight",
)
DECIDED = ("name", "dtype", "shape", "role", "decision", "reason")
RULES = ("format", "scale_rounding", "rounding", "dialect")
REPORT_KEYS = (*DECIDED, *RULES, "axis", *METRICS)
COMPARED_KEYS = (
    *DECIDED, "best", "combination", *RULES, "seed", "hadamard", "axis",
    "sqnr_db_delta", "saturated_percent_delta", "underflowed_percent_delta", *NUMBERS,
)  # fmt: skip
FORMATS = {
    "report": ("--format", "nvfp4"),
    "compare": ("--formats", "mxfp8,nvfp4"),
    "recommend": ("--formats", "mxfp8"),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Odd names, and values that have no SQNR, no scale, no number."""
    x = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    broken = x.copy()
    broken[0, 0], broken[1, 1] = np.nan, np.inf
    tensors = {name: x + at for at, name in enumerate(NAMES)}
    tensors |= {"nan.weight": x * np.float32(np.nan), "broken.weight": broken, "zero.weight": 0 * x}
    tensors |= {
        "huge.weight": x / abs(x).max() * np.float32(3e38),
        "tiny.weight": x * np.float32(1e-42),
        "norm.weight": x[0],
    }
    path = tmp_path_factory.mktemp("odd") / "odd.safetensors"
    save_file(tensors, path)
    return path


@pytest.fixture(scope="module", params=FORMATS)
def forms(request: pytest.FixtureRequest, source: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A verb, its JSON, and the rows of its CSV as cells by name."""
    verb, file = request.param, tmp_path_factory.mktemp("forms") / "x.csv"
    target = ("--bits", "8.5", "--nonfinite", "saturate") if verb == "recommend" else ()
    document = printed(verb, source, *FORMATS[verb], *target, "--csv", file)
    with file.open(encoding="utf-8", newline="") as lines:
        names, *rows = csv.reader(lines)
    return verb, document, [dict(zip(names, row, strict=True)) for row in rows]


def records(verb: str, document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The rows of a CSV, from the JSON."""
    if verb == "report":
        yield from (*document["layers"], *document["kept"])
    elif verb == "recommend":
        for tensor in document["tensors"]:
            for name, option in tensor["options"].items():
                yield {**tensor, "option": name, **option}
    else:
        recipes = {each["name"]: each for each in document["combinations"]}
        for layer in (*document["layers"], *document["kept"]):
            for name, metrics in layer["metrics"].items() or [("", {})]:
                recipe = {key: recipes[name][key] for key in COMPARED_KEYS if key in recipes.get(name, ()) and name}
                yield {**layer, **recipe, "name": layer["name"], "combination": name, **metrics}


def test_json_is_valid(forms: Any) -> None:
    verb, document, _ = forms
    valid(document, verb)
    found = document["tensors" if verb == "recommend" else "layers"]
    assert {*NAMES} <= {each["name"] for each in found}


def test_csv_reads_back_as_the_json(forms: Any) -> None:
    """Null is an empty cell, lists and objects are JSON in a cell, all else is written as it is."""
    verb, document, rows = forms
    keys = {"report": REPORT_KEYS, "compare": COMPARED_KEYS, "recommend": OPTION_KEYS}[verb]
    expected = list(records(verb, document))
    assert len(rows) == len(expected)
    for row, record in zip(rows, expected, strict=True):
        assert tuple(row) == keys
        for key, cell in row.items():
            value = record.get(key)
            if isinstance(value, (list, dict)):
                assert json.loads(cell) == value
            else:
                assert cell == ("" if value is None else guarded(value)), key
        assert not {"nan", "inf", "-inf"} & {cell.lower() for cell in row.values()}


def guarded(value: object) -> str:
    """Return a cell of a text that a spreadsheet does not evaluate, or of a number."""
    is_formula = isinstance(value, str) and value[:1] in {"=", "+", "-", "@", "\t", "\r"}
    return f"'{value}" if is_formula else str(value)


def test_every_name_survives_a_csv() -> None:
    text = csv_text([{"name": name, "n": 1} for name in NAMES], ["name", "n"])
    assert [row[0] for row in csv.reader(io.StringIO(text, newline=""))] == ["name", *map(guarded, NAMES)]


def test_cells_that_a_spreadsheet_would_evaluate() -> None:
    names = ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "=cmd|' /C calc'!A0", "a=b", "", "'=1"]
    text = csv_text([{"name": name, "number": -1.5, "count": -2} for name in names], ["name", "number", "count"])
    rows = list(csv.reader(io.StringIO(text, newline="")))[1:]
    assert [name for name, _, _ in rows] == [
        "'=1+1", "'+1", "'-1", "'@SUM(A1)", "'\t=1", "'\r=1", "'=cmd|' /C calc'!A0", "a=b", "", "'=1",
    ]  # fmt: skip
    assert {(number, count) for _, number, count in rows} == {("-1.5", "-2")}
