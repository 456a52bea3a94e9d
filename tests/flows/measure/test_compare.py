"""Comparisons: a report's numbers under each combination, each tensor read once."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from command_line import CAPTURES, SAMPLE
from kernel_oracle import expected, statistics
from safetensors.numpy import save_file
from tiny_models import LLAMA, llama, noise, write_model

from mxcli.backends import cpu
from mxcli.backends.cpu import Cpu
from mxcli.errors import RefusedError
from mxcli.files import checkpoint as checkpoints
from mxcli.files.checkpoint import open_checkpoint, read
from mxcli.files.selection import Rule
from mxcli.files.tensors import Array, TensorInfo
from mxcli.flows.measure import measure as measuring
from mxcli.flows.measure.compare import Compared, Comparison, make_comparison, plan_comparison
from mxcli.flows.measure.findings import best, best_of
from mxcli.flows.measure.measure import memory_to_measure
from mxcli.flows.measure.report import Report, make_report
from mxcli.flows.plan.memory import PROGRAM_BYTES, RESULT_BYTES, Need
from mxcli.flows.plan.plan import Options, make_plan
from mxcli.numerics.combinations import combine
from mxcli.numerics.metrics import NUMBERS, measured
from mxcli.numerics.scheme import Rules
from mxcli.numerics.streams import stream_of

FORMATS = ["mxfp8", "mxint8", "nvfp4", "nvfp4_2d", "fp8_e4m3", "e3m2:e8m0:1x16"]
RULES = ["floor", "rceil", "te", "ct", "amax"]
ELEMENT_FORMATS = ["mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4", "mxint8"]
ELEMENT_RULES = ["floor", "ceil", "rceil", "even", "nearest"]
SAMPLED = ("model.layers.0.self_attn.v_proj.weight", "model.layers.3.mlp.down_proj.weight")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_model(tmp_path / "m", llama(2), LLAMA)


def options(**more: object) -> Options:
    return Options("mxfp8", Rules(nonfinite="saturate"), on_indivisible="pad", analysis=True, **more)  # type: ignore[arg-type]


def compared(source: Path, formats: list[str], rules: list[str] | None = None, by: str = "role") -> Comparison:
    checkpoint = open_checkpoint(source)
    planned = plan_comparison(checkpoint, combine(formats, rules or []), options())
    return make_comparison("x", checkpoint, planned, backend=Cpu(2), by=by)


def reports(source: Path, comparison: Comparison) -> list[Report]:
    checkpoint, found = open_checkpoint(source), []
    for recipe in comparison.combinations.schemes:
        asked = Options(
            recipe.format.name,
            Rules(scale_rounding=recipe.scale_rule.name, nonfinite="saturate"),
            on_indivisible="pad",
            analysis=True,
        )
        plan = make_plan(checkpoint, asked)
        assert {step.scheme for step in plan.quantized} == {recipe}
        found.append(make_report("x", checkpoint, plan, backend=Cpu()))
    return found


@pytest.mark.parametrize("sample", [None, CAPTURES])
def test_the_numbers_are_those_of_reports(source: Path, sample: Path | None) -> None:
    where = sample or source
    comparison = compared(where, FORMATS, RULES)
    assert len(comparison.combinations.names) == 13
    for at, report in enumerate(reports(where, comparison)):
        assert [layer.name for layer in comparison.layers] == [layer.name for layer in report.layers]
        for layer, alone in zip(comparison.layers, report.layers, strict=True):
            assert dict(layer.metrics[at]) == {name: alone.metrics[name] for name in NUMBERS}
        assert comparison.sums[at] == report.sum
        assert {role: group[at] for role, group in comparison.groups.items()} == report.by_role


def test_every_element_and_rule_has_the_numbers_of_reports_and_of_the_oracle() -> None:
    """Two tools that call a rule by one name and mean two disagree in their numbers; here nothing may, on real weights:
    counts are the same, and errors equal to what sums in binary32 are off by. Only `even` does not serve integers."""
    comparison, checkpoint = compared(SAMPLE, ELEMENT_FORMATS, ELEMENT_RULES), open_checkpoint(SAMPLE)
    assert len(comparison.combinations.names) == 6 * 5 - 1
    layers = {layer.name: layer for layer in comparison.layers}
    weights = {name: read(checkpoint, checkpoint.tensors[name]).view(ml_dtypes.bfloat16) for name in SAMPLED}
    for at, (recipe, report) in enumerate(
        zip(comparison.combinations.schemes, reports(SAMPLE, comparison), strict=True)
    ):
        case = comparison.combinations.names[at]
        assert len(report.layers) == 28
        for alone in report.layers:
            assert dict(layers[alone.name].metrics[at]) == {name: alone.metrics[name] for name in NUMBERS}, case
        assert comparison.sums[at] == report.sum, case
        for name, x in weights.items():
            found, wanted = layers[name].metrics[at], statistics(x, recipe, expected(x, recipe))
            for key in ("elements", "blocks", "amax", "saturated", "saturated_blocks", "underflowed", "nonfinite"):
                assert found[key] == wanted[key], (case, name, key)
            for key in ("mse", "relative_error", "cosine", "max_abs_error", "max_rel_error", "binades_used"):
                assert found[key] == pytest.approx(wanted[key], rel=1e-5), (case, name, key)
            assert found["sqnr_db"] == pytest.approx(wanted["sqnr_db"], abs=1e-4), (case, name)


def test_a_default_rule_is_that_of_a_report(source: Path) -> None:
    comparison, checkpoint = compared(source, ["nvfp4", "mxfp8"]), open_checkpoint(source)
    plan = make_plan(checkpoint, Options("nvfp4", Rules(nonfinite="saturate"), analysis=True))
    assert comparison.sums[0] == make_report("x", checkpoint, plan, backend=Cpu()).sum


def test_every_tensor_is_read_once(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: Counter[str] = Counter()

    def counted(checkpoint: checkpoints.Checkpoint, info: TensorInfo) -> Array:
        reads[info.name] += 1
        return checkpoints.read(checkpoint, info)

    monkeypatch.setattr(measuring, "read", counted)
    comparison = compared(source, FORMATS, RULES)
    assert reads == {layer.name: 1 for layer in comparison.layers}
    assert len(reads) == 14


def test_amax_is_found_once_for_all_recipes(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, ...]] = []
    amax = Cpu.amax
    monkeypatch.setattr(Cpu, "amax", lambda self, x, *more: calls.append(x.shape) or amax(self, x, *more))
    comparison = compared(source, ["nvfp4"], ["te", "ct", "paper"])
    assert len(calls) == len(comparison.layers)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_axes_have_the_numbers_of_reports_along_them(source: Path, format: str) -> None:
    """The last two dimensions are exchanged, fused sets share their tensor scale, and each tensor is read once."""
    for where in (source, CAPTURES):
        checkpoint = open_checkpoint(where)
        planned = plan_comparison(checkpoint, combine([format], axes=("row", "column")), options())
        comparison = make_comparison("x", checkpoint, planned, backend=Cpu(2))
        for at, axis in enumerate(("row", "column")):
            asked = Options(format, Rules(nonfinite="saturate"), on_indivisible="pad", axis=axis, analysis=True)
            report = make_report("x", checkpoint, make_plan(checkpoint, asked), backend=Cpu(2))
            assert comparison.sums[at] == report.sum
            for layer, alone in zip(comparison.layers, report.layers, strict=True):
                assert dict(layer.metrics[at]) == {name: alone.metrics[name] for name in NUMBERS}


def test_what_is_kept_along_one_axis_is_not_compared(tmp_path: Path) -> None:
    source = write_model(tmp_path / "m", {"a.weight": noise(40, 64), "b.weight": noise(64, 64)})
    checkpoint = open_checkpoint(source)
    asked = Options("mxfp8", Rules(nonfinite="saturate"), on_indivisible="keep", analysis=True)
    planned = plan_comparison(checkpoint, combine(["mxfp8"], axes=("row", "column")), asked)
    comparison = make_comparison("x", checkpoint, planned, backend=Cpu())
    assert [layer.name for layer in comparison.layers] == ["b.weight"]
    (kept,) = comparison.kept
    assert (kept.name, kept.reason) == ("a.weight", "kept: last dimension 40 is not a multiple of 32 (mxfp8_e4m3)")


@pytest.mark.parametrize("axis", ["row", "column"])
def test_transforms_and_draws_have_the_numbers_of_single_arrays(source: Path, axis: str) -> None:
    """The tensor scale of a fused set follows from what is transformed along that axis."""
    checkpoint = open_checkpoint(source)
    roundings, transforms = ["nearest-even", "stochastic"], ["none", "16"]
    combinations = combine(["nvfp4"], ["te"], roundings, transforms, axes=(axis,), rules=Rules(seed=5))
    comparison = make_comparison(
        "x", checkpoint, plan_comparison(checkpoint, combinations, options()), backend=Cpu(2)
    )  # fmt: skip
    layers = {layer.name: layer for layer in comparison.layers}
    prefix = "model.layers.1.mlp"
    names = [f"{prefix}.{part}_proj.weight" for part in ("gate", "up")]
    arrays = {name: read(checkpoint, checkpoint.tensors[name]) for name in names}
    turned = {name: np.ascontiguousarray(x.T) if axis == "column" else x for name, x in arrays.items()}
    dtype = checkpoint.tensors[names[0]].dtype
    for at, recipe in enumerate(combinations.schemes):
        amax = max(cpu.amax(x, dtype, hadamard=recipe.hadamard).value for x in turned.values())
        for name, x in turned.items():
            q = cpu.quantize(x, dtype, recipe, tensor_amax=amax, stream=stream_of(name))
            assert q.stats is not None
            assert dict(layers[name].metrics[at]) == measured(q.stats, recipe.format, x.shape, metrics=NUMBERS)


def test_groups_add_up(source: Path) -> None:
    whole = compared(source, ["mxfp8", "nvfp4"])
    for by, groups in (("layer", 2), ("kind", 7), ("role", 1)):
        comparison = compared(source, ["mxfp8", "nvfp4"], by=by)
        assert len(comparison.groups) == groups
        assert comparison.sums == whole.sums
        for at, total in enumerate(comparison.sums):
            for key in ("tensors", "elements", "blocks", "saturated", "underflowed"):
                assert total[key] == sum(group[at][key] for group in comparison.groups.values())  # type: ignore[misc]
    kinds = compared(source, ["mxfp8", "nvfp4"], by="kind").groups
    assert next(iter(kinds)) == "self_attn.q_proj"
    assert {group[0]["tensors"] for group in kinds.values()} == {2}


def test_a_total_is_not_an_average_of_decibels(tmp_path: Path) -> None:
    loud, quiet = np.full((1, 32), 100.7, np.float32), np.full((1, 32), 0.01007, np.float32)
    save_file({"loud.weight": loud, "quiet.weight": quiet}, tmp_path / "x.safetensors")
    comparison = compared(tmp_path / "x.safetensors", ["mxfp8", "mxfp4"])
    for at, total in enumerate(comparison.sums):
        noise_sum = sum(layer.metrics[at]["mse"] * 32 for layer in comparison.layers)  # type: ignore[operator]
        signal = 32 * (float(loud[0, 0]) ** 2 + float(quiet[0, 0]) ** 2)
        assert total["sqnr_db"] == pytest.approx(10 * math.log10(signal / noise_sum))


@pytest.mark.parametrize(
    ("standings", "winner"),
    [
        ([(20.0, 8.25), (21.0, 8.25)], 1),
        ([(21.0, 8.25), (20.0, 4.25)], 0),
        ([(20.0, 8.25), (20.0, 4.25), (20.0, 4.25)], 1),
        ([(20.0, 8.25), (20.0, 8.25)], 0),
        ([(20.0, 8.25), (20.009, 8.25)], 0),
        ([(20.0, 8.25), (20.011, 8.25)], 1),
        ([(20.009, 8.25), (20.0, 4.25)], 1),
        ([(30.0, 8.25), (math.inf, 8.25)], 1),
        ([(math.inf, 8.25), (math.inf, 4.25)], 1),
        ([(None, 4.25), (-3.0, 8.25)], 1),
        ([(None, 4.25), (None, 8.25)], None),
        ([], None),
    ],
)
def test_which_is_best(standings: list[tuple[float | None, float]], winner: int | None) -> None:
    assert best(standings) == winner


def test_best_of_metrics() -> None:
    noisy, exact = {"sqnr_db": 20.0, "mse": 1.0, "bits_per_element": 4.25}, {"mse": 0.0, "bits_per_element": 8.25}
    nothing = {"sqnr_db": None, "mse": None, "bits_per_element": 4.0}
    assert best_of([noisy, exact]) == 1
    assert best_of([nothing, noisy]) == 1
    assert best_of([nothing]) is None


def test_only_what_every_format_quantizes_is_compared(tmp_path: Path) -> None:
    """48 columns are whole blocks of 16 and not of 32."""
    source = write_model(tmp_path / "m", {"a.weight": noise(8, 48), "b.weight": noise(8, 64), "norm.weight": noise(64)})
    checkpoint, combinations = open_checkpoint(source), combine(["nvfp4", "mxfp4", "mxfp8"])

    def planned(policy: str) -> Comparison:
        asked = Options("mxfp8", Rules(nonfinite="saturate"), on_indivisible=policy, analysis=True)
        return make_comparison("x", checkpoint, plan_comparison(checkpoint, combinations, asked), backend=Cpu())

    kept = planned("keep")
    assert [layer.name for layer in kept.layers] == ["b.weight"]
    reasons = {layer.name: (layer.decision, layer.reason) for layer in kept.kept}
    assert reasons["a.weight"] == ("kept", "kept: last dimension 48 is not a multiple of 32 (mxfp4_e2m1)")
    assert kept.counts == {"quantized": 1, "padded": 0, "kept": 2, "tied": 0}
    assert [total["elements"] for total in kept.sums] == [512] * 3
    padded = planned("pad")
    assert [(layer.name, layer.decision) for layer in padded.layers] == [
        ("a.weight", "padded"),
        ("b.weight", "quantized"),
    ]
    assert "padded, as last dimension 48" in padded.layers[0].reason
    with pytest.raises(RefusedError) as refused:
        planned("error")
    assert len(refused.value.reasons) == 2
    assert "(mxfp4_e2m1)" in refused.value.reasons[0]
    assert "(mxfp8_e4m3)" in refused.value.reasons[1]


def test_nothing_to_compare(tmp_path: Path) -> None:
    source = write_model(tmp_path / "m", {"a.weight": noise(16, 48), "b.weight": noise(8, 64)})
    checkpoint = open_checkpoint(source)
    asked = Options("mxfp8", on_indivisible="keep", analysis=True)
    with pytest.raises(RefusedError, match="no tensor is quantized under all of the formats"):
        plan_comparison(checkpoint, combine(["mxfp8", "nvfp4_2d"]), asked)
    quantized = Options("mxfp8", selection=(Rule(False, "*"),), analysis=True)
    with pytest.raises(RefusedError, match="nothing to quantize among 2 tensors"):
        plan_comparison(checkpoint, combine(["mxfp8", "mxfp4"]), quantized)


def test_values_that_are_not_finite_are_refused_once(tmp_path: Path) -> None:
    x = np.ones((4, 32), np.float32)
    x[2, 7] = np.nan
    save_file({"a.weight": x, "b.weight": x}, tmp_path / "x.safetensors")
    checkpoint = open_checkpoint(tmp_path / "x.safetensors")
    rules = Rules(nonfinite="error")
    planned = plan_comparison(checkpoint, combine(["mxfp8"], rules=rules), Options("mxfp8", rules, analysis=True))
    with pytest.raises(RefusedError) as refused:
        make_comparison("x", checkpoint, planned, backend=Cpu())
    assert [reason.partition(".")[0] for reason in refused.value.reasons] == ["a", "b"]
    assert "1 of 128 values are NaN or infinite, the first at [2, 7]" in refused.value.reasons[0]


@pytest.mark.parametrize("formats", [["mxfp8"], ["mxfp8", "nvfp4"]])
def test_an_interruption_leaves_what_was_done(source: Path, formats: list[str]) -> None:
    checkpoint = open_checkpoint(source)
    planned = plan_comparison(checkpoint, combine(formats), options())
    seen: list[str] = []

    def stop_at_third(layer: Compared) -> None:
        seen.append(layer.name)
        if len(seen) == 3:
            raise KeyboardInterrupt

    comparison = make_comparison("x", checkpoint, planned, backend=Cpu(), by="kind", on_layer=stop_at_third)
    assert [layer.name for layer in comparison.layers] == seen
    assert comparison.unfinished == 11
    assert {total["tensors"] for total in comparison.sums} == {3}


def test_tensors_that_share_a_scale_need_memory_together(source: Path) -> None:
    checkpoint = open_checkpoint(source)
    alone = memory_to_measure(*plan_comparison(checkpoint, combine(["mxfp8", "mxfp4"]), options()).plans)
    assert alone == Need(PROGRAM_BYTES + 14 * RESULT_BYTES + 2 * 128 * 64, "model.layers.0.mlp.gate_proj.weight")
    shared = memory_to_measure(*plan_comparison(checkpoint, combine(["mxfp8", "nvfp4"]), options()).plans)
    assert shared == Need(PROGRAM_BYTES + 8 * RESULT_BYTES + 2 * 2 * 128 * 64, "model.layers.0.mlp.gate_proj.weight")


def test_a_plan_knows_what_would_be_stored(source: Path) -> None:
    planned = plan_comparison(open_checkpoint(source), combine(["mxfp8", "mxfp4", "nvfp4", "fp8_e4m3"]), options())
    elements = sum(steps[0].tensor.elements for steps in planned.compared)
    tensors = len(planned.compared)
    assert planned.quantized_bytes == [
        elements + elements // 32,
        elements // 2 + elements // 32,
        elements // 2 + elements // 16 + 4 * tensors,
        elements + 4 * tensors,
    ]
    assert "4 fused sets" in planned.notes[0]
