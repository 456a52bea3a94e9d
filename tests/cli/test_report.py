"""The numbers of a report, in each of its forms."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import CAPTURES, SAMPLE, strict_json
from odd_files import odd_checkpoint, one_tensor
from safetensors.numpy import load_file, save_file

from mxcli.numerics.formats import FORMATS
from mxcli.numerics.metrics import METRICS


def layers(out: str) -> dict[str, dict[str, Any]]:
    report = strict_json(out)
    assert report["schema"] == "mxcli.report/1"
    return {layer["name"]: layer for layer in report["layers"]}


def test_floor_clips_957_to_896_and_rceil_does_not(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    source = one_tensor(tmp_path, 957.0)
    floor = layers(mxcli("report", source, "--scale-rounding", "floor", "--json").out)["layer.weight"]
    assert floor["saturated"] == 1
    assert floor["saturated_percent"] == 3.125
    assert floor["saturated_blocks"] == 1
    assert floor["max_abs_error"] == 61.0
    assert floor["max_rel_error"] == pytest.approx(61 / 957)
    assert floor["relative_error"] == pytest.approx(61 / 957)
    assert floor["sqnr_db"] == pytest.approx(23.9116420)
    assert floor["amax"] == 957.0
    assert (floor["scale_exponent_min"], floor["scale_exponent_max"]) == (1, 1)
    assert floor["scale_exponent_histogram"] == {"1": 1}
    assert floor["bits_per_element"] == 8.25
    assert floor["worst_blocks"] == [{"index": 0, "row": 0, "column": 0, "noise": 3721.0, "noise_percent": 100.0}]
    rceil = layers(mxcli("report", source, "--json").out)["layer.weight"]
    assert (rceil["saturated"], rceil["max_abs_error"], rceil["scale_exponent_max"]) == (0, 3.0, 2)


@pytest.mark.parametrize(("rule", "exponent"), [("floor", -1), ("rceil", -1), ("ceil", 0)])
def test_the_three_rules_for_150(mxcli: Callable[..., Any], tmp_path: Path, rule: str, exponent: int) -> None:
    source = one_tensor(tmp_path, 150.0)
    layer = layers(mxcli("report", source, "--scale-rounding", rule, "--json").out)["layer.weight"]
    assert layer["scale_exponent_max"] == exponent, f"scale byte {127 + exponent}"
    assert layer["scale_rounding"] == rule


def test_the_table(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    out = mxcli("report", one_tensor(tmp_path, 957.0), "--scale-rounding", "floor").out
    lines = out.splitlines()
    assert lines[0].endswith("one.safetensors: 32 elements, 1 tensor, 128 B; F32")
    assert lines[1] == (
        "mxfp8_e4m3: e4m3 elements, e8m0 scales by 1x32; scale rounding floor, element rounding nearest-even, as mxcli "
        "(1 tensor)"
    )
    assert lines[2] == "non-finite input: saturate; indivisible lengths: pad"
    assert lines[5].split() == [
        "tensor", "shape", "dB", "error", "%", "of", "elements", "%", "of", "elements", "exponents", "by", "them",
        "used/available", "decision",
    ]  # fmt: skip
    assert lines[6].split() == [
        "layer.weight", "1x32", "23.9", "0.0637", "3.12", "0", "1..1", "█", "17.8/17.8", "quantized"
    ]  # fmt: skip
    assert lines[8].split() == ["all", "1", "tensor", "23.9", "0.0637", "3.12", "0", "1..1", "█", "17.8/17.8"]
    assert lines[-1] == "quantized 1, padded 0, kept 0, tied 0"


def test_the_metric_of_the_order_has_a_column(mxcli: Callable[..., Any]) -> None:
    def heading(sort: str) -> list[list[str]]:
        lines = mxcli("report", SAMPLE, "--sort", sort, "--top", "1", "--wide").out.splitlines()
        (at,) = (at for at, line in enumerate(lines) if line.startswith("tensor "))
        return [line.split() for line in lines[at - 1 : at + 1]]

    usual = heading("sqnr_db")
    assert [heading(sort) for sort in ("name", "relative_error", "scale_exponent_min", "binades_used")] == [usual] * 4
    assert heading("max_abs_error") == [[*usual[0], "max", "abs"], [*usual[1][:-1], "error", "decision"]]


def test_worst_first_top_and_sorting(mxcli: Callable[..., Any]) -> None:
    def shown(*arguments: object) -> list[str]:
        lines = mxcli("report", SAMPLE, *arguments).out.splitlines()
        return [line.split()[0] for line in lines if line.startswith("model.")]

    by_sqnr = shown()
    measured = layers(mxcli("report", SAMPLE, "--json").out)
    assert by_sqnr == sorted(by_sqnr, key=lambda name: measured[name]["sqnr_db"])
    assert len(by_sqnr) == 28
    assert shown("--top", "3") == by_sqnr[:3]
    assert shown("--top", "0") == []
    assert shown("--sort", "name") == sorted(by_sqnr)
    by_bits = shown("--sort", "underflowed")
    assert by_bits == sorted(by_bits, key=lambda name: -measured[name]["underflowed"])
    assert "3 of 28 tensors shown, worst sqnr_db first" in mxcli("report", SAMPLE, "--top", "3").out


def test_totals_cover_all_and_roles_are_distinguished(mxcli: Callable[..., Any]) -> None:
    report = strict_json(mxcli("report", CAPTURES, "--format", "nvfp4", "--json").out)
    assert report["counts"] == {"quantized": 58, "padded": 0, "kept": 0, "tied": 0}
    assert set(report["by_role"]) == {"activation", "gradient"}
    for key in ("elements", "blocks", "saturated", "underflowed", "zero_blocks"):
        parts = sum(layer[key] for layer in report["layers"])
        assert report["totals"][key] == parts
        assert report["totals"][key] == sum(total[key] for total in report["by_role"].values())
    assert report["totals"]["tensors"] == 58
    assert report["totals"]["amax"] == max(layer["amax"] for layer in report["layers"])


def test_the_last_rule_wins_in_the_order_typed(mxcli: Callable[..., Any]) -> None:
    def taken(*selectors: str) -> int:
        return len(layers(mxcli("report", SAMPLE, *selectors, "--json").out))

    assert taken("--exclude", "*.mlp", "--include", "*.up_proj") == 20
    assert taken("--include", "*.up_proj", "--exclude", "*.layers.1") == 3
    assert taken("--exclude", "*.layers.1", "--include", "*.up_proj") == 22
    assert taken("--include=re:.*[qk]_proj.weight") == 8
    assert taken("--include", "@lm_head") == 1


def test_nothing_odd_breaks_a_report(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    source = odd_checkpoint(tmp_path)
    code, out, err = mxcli("report", source, "--format", "nvfp4", "--json", "-v")
    assert code == 0
    report, measured = strict_json(out), layers(out)
    assert report["counts"] == {"quantized": 6, "padded": 1, "kept": 2, "tied": 0}
    zero, all_nan, padded = measured["zero.weight"], measured["all_nan.weight"], measured["ragged.weight"]
    assert (zero["sqnr_db"], zero["relative_error"], zero["mse"]) == (None, None, 0.0)
    assert (all_nan["sqnr_db"], all_nan["mse"], all_nan["nonfinite"]) == (None, None, 32)
    assert padded["decision"] == "padded"
    assert padded["elements"] == 400
    assert "note: 1 tensor ('zero.weight') of zeros only." in err
    assert "('all_nan.weight', …) with NaN or infinities." in err
    kept = {layer["name"]: layer["reason"] for layer in report["kept"]}
    assert "without elements" in kept["empty.weight"]
    assert f"norm.weight: {kept['norm.weight']}" in err
    table = mxcli("report", source).out
    row = next(line.split() for line in table.splitlines() if line.startswith("zero.weight"))
    assert row[2:4] == ["exact", "exact"]
    row = next(line.split() for line in table.splitlines() if line.startswith("all_nan.weight"))
    assert row[2:4] == ["-", "-"]


@pytest.mark.parametrize("format", FORMATS)
def test_zeros_are_exact_in_every_format(mxcli: Callable[..., Any], tmp_path: Path, format: str) -> None:
    """A layer that is all zero, pruned or never trained, made an infinite scale of 2688 / 0 and a garbage model."""
    source = tmp_path / "zero.safetensors"
    save_file({"layer.weight": np.zeros((16, 32), np.float32)}, source, {"format": "pt"})
    code, out, err = mxcli("report", source, "--format", format, "--json")
    assert (code, err) == (0, "note: 1 tensor ('layer.weight') of zeros only.\n")
    zero = layers(out)["layer.weight"]
    assert (zero["amax"], zero["mse"], zero["max_abs_error"], zero["max_rel_error"], zero["bias"]) == (0, 0, 0, 0, 0)
    assert (zero["saturated"], zero["underflowed"], zero["nonfinite"]) == (0, 0, 0)
    assert (zero["sqnr_db"], zero["relative_error"]) == (None, None)
    table = mxcli("report", source, "--format", format).out
    row = next(line.split() for line in table.splitlines() if line.startswith("layer.weight"))
    assert row[1:6] == ["16x32", "exact", "exact", "0", "0"]


def test_one_wild_block_in_a_hundred_is_seen(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    """A tensor's smallest and largest scale do not show whether one block is wild or half of them are."""
    x = np.ones((100, 32), np.float32)
    x[42, 5] = 1792
    source, arrays = tmp_path / "wild.safetensors", tmp_path / "blocks.safetensors"
    save_file({"layer.weight": x}, source)
    words = ("report", source, "--format", "mxfp4", "--scale-rounding", "floor", "--per-block", arrays)
    wild = layers(mxcli(*words, "--json").out)["layer.weight"]
    assert wild["scale_exponent_histogram"] == {"-2": 99, "8": 1}
    assert (wild["saturated"], wild["saturated_blocks"], wild["underflowed"]) == (1, 1, 31)
    assert wild["block_sqnr_histogram"] == {"16": 1, "exact": 99}
    assert wild["block_sqnr_db"]["p0"] == pytest.approx(16.89995, abs=1e-5)
    assert wild["block_sqnr_db"]["p50"] is None
    assert wild["worst_blocks"] == [{"index": 0, "row": 42, "column": 0, "noise": 65567.0, "noise_percent": 100.0}]
    stored = {name.removeprefix("layer.weight."): array for name, array in load_file(arrays).items()}
    assert {name: array[42, 0].item() for name, array in stored.items()} == {
        "amax": 1792.0, "decode": 256.0, "saturated": 1, "underflowed": 31, "noise": 65567.0
    }  # fmt: skip
    assert {name: np.delete(array, 42).sum().item() for name, array in stored.items()} == {
        "amax": 99.0, "decode": 24.75, "saturated": 0, "underflowed": 0, "noise": 0.0
    }  # fmt: skip


@pytest.mark.parametrize(
    "words",
    [
        ("report", "--format", "nvfp4"),
        ("report", "--format", "fp8_e4m3"),
        ("compare", "--formats", "mxfp4,nvfp4,fp8_e4m3_channel"),
        ("recommend", "--formats", "mxfp4,fp8_e4m3", "--bits", "8.5"),
    ],
)
def test_tensors_without_elements_break_nothing(
    mxcli: Callable[..., Any], tmp_path: Path, words: tuple[str, ...]
) -> None:
    """What was measured is divided by the number of elements, and of these there is none."""
    shapes = {"scalar": (), "a.weight": (0,), "b.weight": (0, 32), "c.weight": (5, 0)}
    tensors = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "empty.safetensors", {"format": "pt"})
    save_file(tensors | {"layer.weight": np.ones((2, 32), np.float32)}, tmp_path / "x.safetensors", {"format": "pt"})
    verb, *options = words
    code, out, err = mxcli(verb, tmp_path / "x.safetensors", *options, "--json")
    assert code == 0
    assert err.startswith("note: 3 tensors ('a.weight', …) without elements.\n")
    measured = strict_json(out)
    assert [each["name"] for each in measured["tensors" if verb == "recommend" else "layers"]] == ["layer.weight"]
    code, out, err = mxcli(verb, tmp_path / "empty.safetensors", *options)
    assert (code, out) == (4, "")
    assert "nothing to quantize among 4 tensors" in err
    assert "kept: weight, without elements" in err


def test_values_that_are_not_finite_can_be_refused(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    code, out, err = mxcli("report", odd_checkpoint(tmp_path), "--nonfinite", "error")
    assert (code, out) == (4, "")
    assert "nan.weight: 2 of 256 values are NaN or infinite, the first at [1, 3]" in err
    assert "all_nan.weight: 32 of 32 values" in err


def test_json_lines_and_csv_have_the_names_of_the_json(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    source = odd_checkpoint(tmp_path)
    report = strict_json(mxcli("report", source, "--json").out)
    records = [*report["layers"], *report["kept"]]
    assert [strict_json(line) for line in mxcli("report", source, "--jsonl").out.splitlines()] == records
    rows = list(csv.DictReader(io.StringIO(mxcli("report", source, "--csv", "-").out)))
    assert list(rows[0]) == [
        "name", "dtype", "shape", "role", "decision", "reason", "format", "scale_rounding", "rounding", "dialect",
        "axis", *METRICS,
    ]  # fmt: skip
    for row, record in zip(rows, records, strict=True):
        for name, cell in row.items():
            value = record.get(name)
            if isinstance(value, (list, dict)):
                assert json.loads(cell) == value
            else:
                assert cell == ("" if value is None else str(value))


def test_forms_go_to_files_next_to_the_table(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    files = {form: tmp_path / f"r.{form}" for form in ("json", "jsonl", "csv")}
    table = mxcli("report", SAMPLE).out
    options = [word for form, file in files.items() for word in (f"--{form}", str(file))]
    assert mxcli("report", SAMPLE, *options).out == table
    assert files["json"].read_text() == mxcli("report", SAMPLE, "--json").out
    assert files["jsonl"].read_text() == mxcli("report", SAMPLE, "--jsonl").out
    assert files["csv"].read_text() == mxcli("report", SAMPLE, "--csv", "-").out


def test_per_block_arrays_add_up_to_the_report(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    arrays = tmp_path / "blocks.safetensors"
    report = layers(mxcli("report", SAMPLE, "--format", "nvfp4", "--per-block", arrays, "--json").out)
    stored = load_file(arrays)
    assert len(stored) == 5 * len(report)
    for name, layer in report.items():
        assert stored[f"{name}.amax"].size == layer["blocks"]
        assert stored[f"{name}.amax"].max() == layer["amax"]
        assert stored[f"{name}.saturated"].sum() == layer["saturated"]
        assert stored[f"{name}.underflowed"].sum() == layer["underflowed"]
        assert stored[f"{name}.noise"].sum() == pytest.approx(layer["mse"] * layer["elements"])
        assert stored[f"{name}.decode"].dtype == np.float32
    assert mxcli("report", SAMPLE, "--per-block", arrays).code == 4
    assert mxcli("report", SAMPLE, "--per-block", arrays, "--force").code == 0
    assert len(load_file(arrays)) == 5 * len(report)


def test_fused_layers_share_their_tensor_scale(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(4, 32)).astype(np.float32)
    gate, up = "mlp.gate_proj.weight", "mlp.up_proj.weight"
    save_file({gate: x, up: 3 * x}, tmp_path / "x.safetensors")

    def sqnr(name: str, *more: str) -> float:
        out = mxcli("report", tmp_path / "x.safetensors", "--format", "nvfp4", "--json", *more).out
        return float(layers(out)[name]["sqnr_db"])

    assert sqnr(up) == sqnr(up, "--include", up)
    assert sqnr(gate, "--include", gate) == pytest.approx(sqnr(up))
    assert sqnr(gate) != sqnr(gate, "--include", gate)


def test_a_plan(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    words = ("report", SAMPLE, "--format", "nvfp4", "--dry-run", "--device", "cpu")
    out = mxcli(*words, "--max-memory", "1G").out
    assert out.startswith(mxcli("report", SAMPLE, "--format", "nvfp4", "--top", "0").out.partition("\n\n")[0])
    assert "\nquantized 28, padded 0, kept 11 (norm 9, lm_head 1, embedding 1), tied 0\nsize if written 442 kB: " in out
    assert "\nwould measure 28 tensors: 1.57 MB read once\npeak memory about 67.4 MB of 1.07 GB allowed" in out
    assert out.endswith("\nwould compute on cpu\n")
    plan = strict_json(mxcli(*words, "--json").out)
    report = strict_json(mxcli(*words[:4], "--json").out)
    assert plan["schema"] == "mxcli.report.plan/1"
    for key in ("source", "elements", "bytes", "by_dtype", "options", "recipes", "counts"):
        assert plan[key] == report[key]
    assert {each["name"]: each["reason"] for each in plan["tensors"] if each["decision"] == "kept"} == {
        each["name"]: each["reason"] for each in report["kept"]
    }
    assert plan["quantized_bytes"] == 786_432 // 2 + 786_432 // 16 + 4 * 28
    assert mxcli(*words, "--fail-on", "sqnr_db<1").code == 2
    for more in (("--jsonl",), ("--per-block", tmp_path / "x.safetensors"), ("--html", tmp_path / "x.html")):
        code, _, err = mxcli(*words, *more)
        assert code == 2
        assert f"so there is no {more[0]}" in err
    assert list(tmp_path.iterdir()) == []


def test_both_axes(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    words = ("report", CAPTURES, "--format", "nvfp4", "--axis", "both")
    files = {form: tmp_path / f"r.{form}" for form in ("json", "csv", "jsonl", "html")}
    out = mxcli(*words, "--top", "4", *(word for form, file in files.items() for word in (f"--{form}", file))).out
    assert re.search(r"^tensor +axis +shape ", out, re.MULTILINE)
    assert re.search(r"^all 58 tensors +row +20\.8 ", out, re.MULTILINE)
    assert re.search(r"^gradient \(29\) +column +20\.7 ", out, re.MULTILINE)
    assert "\ngradient: blocks along columns have 20.71 dB SQNR, 0.16 dB more than along rows (20.55 dB).\n" in out
    assert "\n4 of 116 cases shown, worst sqnr_db first\nquantized 116, padded 0, kept 0, tied 0" in out
    both = strict_json(files["json"].read_text())
    assert (both["totals"], both["by_role"]) == (None, {})
    assert len(both["conclusion"]) == 2
    for axis in ("row", "column"):
        alone = strict_json(mxcli(*words[:-1], axis, "--json").out)
        assert both["by_axis"][axis] == {"totals": alone["totals"], "by_role": alone["by_role"]}
        assert [layer for layer in both["layers"] if layer["axis"] == axis] == alone["layers"]
    lines = [strict_json(line) for line in files["jsonl"].read_text().splitlines()]
    assert lines == both["layers"]
    rows = list(csv.DictReader(io.StringIO(files["csv"].read_text())))
    assert [row["axis"] for row in rows] == [layer["axis"] for layer in both["layers"]]
    page = files["html"].read_text(encoding="utf-8")
    assert "What each axis costs, everything taken together" in page
    assert "under each axis: every element" in page
    assert "Error along the layers, by axis" in page


def test_totals_of_different_tensors_are_not_held_against_each_other(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    x, source, page = np.random.default_rng(0).normal(size=(40, 64)), tmp_path / "x.safetensors", tmp_path / "r.html"
    save_file({"a.weight": x.astype(np.float32), "b.weight": x.T.astype(np.float32)}, source)
    words = ("report", source, "--format", "mxfp4", "--axis", "both", "--on-indivisible", "keep")
    both = strict_json(mxcli(*words, "--json", "--html", page).out)
    assert [(layer["name"], layer["axis"]) for layer in both["layers"]] == [("a.weight", "row"), ("b.weight", "column")]
    assert [(layer["name"], layer["axis"]) for layer in both["kept"]] == [("a.weight", "column"), ("b.weight", "row")]
    assert both["counts"] == {"quantized": 2, "padded": 0, "kept": 2, "tied": 0}
    assert both["conclusion"] == [
        "2 tensors are measured along one axis only, so totals of the two axes cannot be compared."
    ]
    assert "column: kept: last dimension 40 is not a multiple of 32" in page.read_text(encoding="utf-8")


def test_a_plan_for_both_axes(mxcli: Callable[..., Any]) -> None:
    words = ("report", SAMPLE, "--format", "nvfp4", "--axis", "both", "--dry-run", "--device", "cpu")
    out = mxcli(*words).out
    assert "\nsize if written along both axes 885 kB: 4.50 bits per element\n" in out
    assert "\nwould measure 28 tensors under both axes: 56 measurements, 1.57 MB read once\n" in out
    plan = strict_json(mxcli(*words, "--json").out)
    assert (plan["measurements"], len(plan["tensors"])) == (56, 39)


def test_limits_name_the_axis(mxcli: Callable[..., Any]) -> None:
    code, _, err = mxcli("report", CAPTURES, "--format", "nvfp4", "--axis", "both", "--fail-on", "sqnr_db<19.8", "-q")
    assert code == 5
    assert "model.layers.0.self_attn.k_proj.gradient along rows" in err
    assert "along columns" not in err


def test_series_over_steps(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    """Three steps; one element of each tensor is twice as large at every step as at the one before."""
    folder, random = tmp_path / "steps", np.random.default_rng(0)
    folder.mkdir()
    for at, step in enumerate((100, 200, 300)):
        tensors, records = {}, {}
        for role in ("activation", "gradient"):
            name = f"model.layers.0.mlp.up_proj.{role}"
            tensors[name] = random.standard_normal((8, 64)).astype(np.float32)
            tensors[name][0, 0] = 8 * 2**at
            records[name] = {"role": role, "layer": "model.layers.0.mlp.up_proj", "step": step}
        record = json.dumps({"version": 1, "tensors": records})
        save_file(tensors, folder / f"step-{step:06d}.safetensors", {"mxcli.capture": record})
    words = ("report", folder, "--format", "nvfp4", "--top", "0")
    page = tmp_path / "r.html"
    out = mxcli(*words, "--html", page).out
    assert re.search(r"^over 3 steps +step ", out, re.MULTILINE)
    assert re.search(r"^activation, first.* 100 ", out, re.MULTILINE)
    assert re.search(r"^gradient, last.* 300 ", out, re.MULTILINE)
    report = strict_json(mxcli(*words, "--json").out)
    assert [(each["step"], each["role"]) for each in report["by_step"]] == [
        (step, role) for step in (100, 200, 300) for role in ("activation", "gradient")
    ]
    alone = strict_json(mxcli("report", folder / "step-000200.safetensors", "--format", "nvfp4", "--json").out)
    assert "by_step" not in alone
    for role, each in zip(("activation", "gradient"), report["by_step"][2:4], strict=True):
        assert {key: alone["by_role"][role][key] for key in each if key not in ("step", "role")} == {
            key: value for key, value in each.items() if key not in ("step", "role")
        }
    assert "Error over the steps, by role" in page.read_text(encoding="utf-8")
