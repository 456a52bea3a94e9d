"""The JSON Schemas kept beside the code, held against what the verbs print. Run as a script, it refreshes them."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from mxcli.cli.app import run
from mxcli.output.schema import SCHEMAS

FOLDER = Path(__file__).parents[2] / "mxcli" / "output" / "schemas"
SAMPLE = Path(__file__).parents[2] / "samples" / "tiny-llama"


def text_of(verb: str) -> str:
    return json.dumps(SCHEMAS[verb](), indent=2) + "\n"


def printed(*words: object) -> Any:
    """What a command prints with `--json`; a NaN or Infinity token is an error."""

    def refuse(token: str) -> None:
        raise ValueError(f"{token} is no JSON")

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert run([*map(str, words), "--json", "-q"]) == 0
    return json.loads(out.getvalue(), parse_constant=refuse)


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


def test_both_axes_and_steps_are_valid(odd: Path, tmp_path: Path) -> None:
    valid(printed("report", odd, "--format", "mxfp4", "--axis", "both"), "report")
    valid(printed("report", odd, "--format", "mxfp4", "--axis", "both", "--on-indivisible", "keep"), "report")
    valid(printed("compare", odd, "--formats", "mxfp4", "--axis", "both"), "compare")
    for step in (1, 2):
        record = {"a.gradient": {"role": "gradient", "layer": "a", "step": step}}
        save_file(
            {"a.gradient": np.full((4, 32), step, np.float32)},
            tmp_path / f"step-{step:06d}.safetensors",
            {"mxcli.capture": json.dumps({"version": 1, "tensors": record})},
        )
    odd.unlink()
    for axis in ("row", "both"):
        found = printed("report", tmp_path, "--format", "mxfp4", "--axis", axis)
        valid(found, "report")
        assert found["by_step"][-1]["step"] == 2
    valid(printed("compare", tmp_path, "--formats", "mxfp4"), "compare")


def test_a_comparison_is_valid(odd: Path) -> None:
    valid(printed("compare", SAMPLE, "--formats", "mxfp8,nvfp4"), "compare")
    valid(printed("compare", odd, "--formats", "mxfp8", "--by", "layer"), "compare")


def test_a_recommendation_is_valid(odd: Path, tmp_path: Path) -> None:
    words = ("recommend", SAMPLE, "--formats", "mxfp4,nvfp4,mxfp8", "--save-recipe", tmp_path / "r.toml")
    valid(printed(*words, "--bits", "5"), "recommend")
    valid(printed("recommend", SAMPLE, "--formats", "nvfp4", "--keep-percent", "15"), "recommend")
    valid(
        printed("recommend", odd, "--formats", "mxfp8,nvfp4", "--min-sqnr", "20", "--nonfinite", "saturate"),
        "recommend",
    )
    nothing = printed("recommend", SAMPLE, "--formats", "mxfp4", "--min-sqnr", "90")
    valid(nothing, "recommend")
    assert nothing["predicted_totals"] is None


def test_samples_are_valid(tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((768, 1024)).astype(np.float32)
    save_file({"a.q_proj.weight": x, "b.weight": x[:4].copy()}, tmp_path / "x.safetensors")
    valid(printed("report", tmp_path / "x.safetensors", "--format", "nvfp4", "--sample", "0.1"), "report")
    valid(printed("compare", tmp_path / "x.safetensors", "--formats", "mxfp8", "--sample", "0.1"), "compare")


def test_training_is_valid() -> None:
    captures = SAMPLE.parent / "tiny-llama-captures.safetensors"
    words = ("report", SAMPLE, "--products", captures, "--include", "*layers.[03].*.k_proj", "--draws", "2")
    valid(printed(*words, "--training", "all"), "training")


def test_a_capture_is_valid(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "text.txt").write_text("a text to read, which is long enough")
    words = ("capture", SAMPLE, "--text", tmp_path / "text.txt", "--tokens", "8", "--forward-only", "--steps", "2")
    valid(printed(*words, "-o", tmp_path / "out", "--roles", "activation"), "capture")


def test_what_is_no_report() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"schema": "mxcli.report/2"}, SCHEMAS["report"]())


if __name__ == "__main__":
    for each in SCHEMAS:
        (FOLDER / f"{each}.json").write_text(text_of(each), encoding="utf-8")
