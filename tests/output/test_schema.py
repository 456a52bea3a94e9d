"""The JSON Schemas kept beside the code, held against what the verbs print. Run as a script, it refreshes them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from mxcli.output.schema import SCHEMAS

FOLDER = Path(__file__).parents[2] / "mxcli" / "output" / "schemas"
SAMPLE = Path(__file__).parents[2] / "samples" / "tiny-llama"


def text_of(verb: str) -> str:
    return json.dumps(SCHEMAS[verb](), indent=2) + "\n"


def printed(*words: object) -> Any:
    command = [sys.executable, "-m", "mxcli", *map(str, words), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def valid(document: Any, verb: str) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    errors = jsonschema.Draft202012Validator(SCHEMAS[verb]()).iter_errors(document)
    assert [f"{list(error.path)}: {error.message}" for error in errors] == []


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    """Names and values that have broken reports."""
    x = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    broken = x.copy()
    broken[0, 0], broken[1, 1] = np.nan, np.inf
    tensors = {
        "a\n|b<c>.weight": x,
        "layers.0.q_proj.weight": broken,
        "zero.weight": 0 * x,
        "ragged.weight": x[:, :33].copy(),
    }
    save_file(tensors, tmp_path / "odd.safetensors")
    return tmp_path / "odd.safetensors"


@pytest.mark.parametrize("verb", SCHEMAS)
def test_the_files_are_the_rows(verb: str) -> None:
    """`python tests/output/test_schema.py` writes them anew."""
    assert (FOLDER / f"{verb}.json").read_text(encoding="utf-8") == text_of(verb)


def test_a_report_is_valid(odd: Path) -> None:
    valid(printed("report", SAMPLE, "--format", "nvfp4"), "report")
    valid(printed("report", odd, "--format", "mxfp4"), "report")


def test_a_comparison_is_valid(odd: Path) -> None:
    valid(printed("compare", SAMPLE, "--formats", "mxfp8,nvfp4"), "compare")
    valid(printed("compare", odd, "--formats", "mxfp8", "--by", "layer"), "compare")


def test_what_is_no_report() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"schema": "mxcli.report/2"}, SCHEMAS["report"]())


if __name__ == "__main__":
    for each in SCHEMAS:
        (FOLDER / f"{each}.json").write_text(text_of(each), encoding="utf-8")
