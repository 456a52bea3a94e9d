"""JSON Schemas made from the fields of records, compared with what the verbs print."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import mxcli
from mxcli.cli.app import run
from mxcli.flows.measure.report import KEPT, PADDED, QUANTIZED, TIED
from mxcli.flows.plan.overrides import Override
from mxcli.flows.plan.plan import INDIVISIBLE_POLICIES, Options
from mxcli.flows.write.records import options_record, scheme_record
from mxcli.numerics.hadamard import find_hadamard
from mxcli.numerics.metrics import METRICS
from mxcli.numerics.scheme import Rules, resolve
from mxcli.output import fields
from mxcli.output.documents import DOCUMENTS
from mxcli.output.report import COMBINED
from mxcli.output.schema import RECORDS, schema

SAMPLE = Path(__file__).parents[2] / "samples" / "tiny-llama"


def printed(*words: object) -> Any:
    """Return what a command prints with `--json -q`."""
    return printed_by(*words, "-q")


def printed_by(*words: object) -> Any:
    """Return what a command prints with `--json`; a NaN or Infinity token is an error."""

    def refuse(token: str) -> None:
        raise ValueError(f"{token} is not JSON")

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert run([*map(str, words), "--json"]) == 0
    return json.loads(out.getvalue(), parse_constant=refuse)


def valid(document: Any, verb: str) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    errors = jsonschema.Draft202012Validator(schema(verb)).iter_errors(document)
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


def test_schemas_are_written_with_the_standard_library_only(tmp_path: Path) -> None:
    root = Path(mxcli.__file__).parents[1]
    code = (
        "import runpy, sys; sys.modules.update(dict.fromkeys(['numpy', 'rich', 'torch', 'typer']));"
        "runpy.run_module('mxcli.output.schema', run_name='__main__')"
    )
    command = [sys.executable, "-S", "-c", code, tmp_path / "schemas"]
    subprocess.run(command, env={"PYTHONPATH": str(root)}, cwd=tmp_path, check=True)
    written = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in (tmp_path / "schemas").iterdir()}
    assert written == {verb: schema(verb) for verb in (*RECORDS, *DOCUMENTS)}


def test_literal_values_are_those_of_the_flows() -> None:
    found = schema("report")["properties"]
    assert found["layers"]["items"]["properties"]["decision"]["enum"] == [QUANTIZED, PADDED, KEPT, TIED]
    assert found["options"]["properties"]["on_indivisible"]["enum"] == list(INDIVISIBLE_POLICIES)
    scheme = resolve("nvfp4", Rules(rounding="stochastic", seed=7, hadamard=find_hadamard(16, seed=3)))
    record = fields.Fields(fields.SCHEME, fields.SCHEME_OPTIONS).record(scheme)
    assert record == scheme_record(scheme)
    assert {"seed", "hadamard"} <= record.keys()


def test_every_option_of_the_record_is_described() -> None:
    options = Options("nvfp4", Rules(hadamard=find_hadamard(16)), overrides=(Override("a.*", keep=True),))
    record = options_record(options)
    found = schema("report")["properties"]["options"]
    assert found["properties"].keys() == record.keys()
    assert {*found["required"], *COMBINED} == record.keys()
    assert found["properties"]["overrides"]["items"]["required"] == ["selector"]
    assert found["properties"]["hadamard"]["anyOf"][0]["required"] == ["size", "seed", "signs"]


def test_a_metric_is_one_row() -> None:
    row = replace(METRICS["mse"], name="new", unit="dB", meaning="a new one", formula="1 + 1")
    rows = fields.metric_fields({**METRICS, "new": row})
    assert rows.names[-2:] == ["new", "new_uncertainty"]
    assert rows.record({"new": 2.0})["new"] == 2.0
    assert rows.object_schema()["properties"]["new"] == {
        "type": ["number", "null"],
        "description": "a new one [dB]: 1 + 1",
    }
    assert "new" in rows.object_schema()["required"]
    assert "new_uncertainty" not in rows.object_schema()["required"]


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


def test_products_are_valid() -> None:
    captures = SAMPLE.parent / "tiny-llama-captures.safetensors"
    words = ("report", SAMPLE, "--products", captures, "--include", "*layers.[03].*.k_proj", "--format", "nvfp4")
    valid(printed(*words), "products")


def test_training_is_valid() -> None:
    captures = SAMPLE.parent / "tiny-llama-captures.safetensors"
    words = ("report", SAMPLE, "--products", captures, "--include", "*layers.[03].*.k_proj", "--draws", "2")
    valid(printed(*words, "--training", "all"), "training")


def test_a_capture_is_valid(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "text.txt").write_text("a text to read, which is long enough")
    words = ("capture", SAMPLE, "--text", tmp_path / "text.txt", "--tokens", "8", "--forward-only", "--steps", "2")
    valid(printed(*words, "-o", tmp_path / "out", "--roles", "activation"), "capture")


def test_another_version_is_refused() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"schema": "mxcli.report/2"}, schema("report"))


def test_plans_are_valid(tmp_path: Path) -> None:
    plans = (
        ("quantize", "--format", "nvfp4", "-o", tmp_path / "out"),
        ("report", "--format", "mxfp4", "--axis", "both"),
        ("compare", "--formats", "mxfp8,nvfp4"),
        ("recommend", "--formats", "nvfp4,mxfp8", "--bits", "6"),
    )
    for verb, *words in plans:
        found = printed(verb, SAMPLE, *words, "--dry-run")
        assert found["schema"] == f"mxcli.{verb}.plan/1"
        valid(found, f"{verb}.plan")


def test_a_plan_of_a_capture_is_valid(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "text.txt").write_text("a text to read, which is long enough")
    words = ("capture", SAMPLE, "--text", tmp_path / "text.txt", "--tokens", "8", "-o", tmp_path / "out", "--dry-run")
    valid(printed(*words), "capture.plan")


def test_outputs_are_valid(tmp_path: Path) -> None:
    out, shared = tmp_path / "out", tmp_path / "shared"
    found = printed("quantize", SAMPLE, "--format", "nvfp4", "-o", out)
    assert found["schema"] == "mxcli.quantize/1"
    valid(found, "quantize")
    valid(printed("quantize", SAMPLE, "--format", "nvfp4", "-o", out, "--resume"), "quantize")
    words = ("quantize", SAMPLE, "--format", "nvfp4", "-o", shared, "--max-shard-size", "200K", "--shard-range")
    for share in ("1/2", "2/2"):
        valid(printed(*words, share), "quantize")
    merged = printed_by("merge", shared)
    valid(merged, "merge")
    valid(printed("dequantize", out, "-o", tmp_path / "back"), "dequantize")
    valid(printed("convert", out, "--layout", "mxcli", "-o", tmp_path / "own"), "convert")
    valid(printed("convert", out, "--layout", "mxcli", "--dry-run"), "convert.plan")
    valid(printed("verify", out), "verify")
    valid(printed("diff", out, out), "diff")
    for source in (SAMPLE, out, SAMPLE.parent / "tiny-llama-captures.safetensors"):
        valid(printed_by("inspect", source), "inspect")


def test_what_the_machine_has_is_valid() -> None:
    valid(printed_by("doctor"), "doctor")
    valid(printed_by("formats"), "formats")
    valid(printed_by("formats", "nvfp4"), "formats")
    valid(printed_by("--version"), "version")


@pytest.mark.slow
def test_benchmarks_are_valid() -> None:
    valid(printed("bench", "quantize", "--size", "256", "--rounds", "3"), "bench.quantize")
