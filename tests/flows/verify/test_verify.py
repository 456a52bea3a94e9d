from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from planted import GATE, SHARD, UP, Tensors, changed, found, quantized, source, untouched, values, verified
from tiny_models import LLAMA, bf16, layer, llama, noise, write_model

from mxcli.backends.cpu import Cpu
from mxcli.errors import InputError, RefusedError, UsageError
from mxcli.files.checkpoint import open_checkpoint
from mxcli.files.layouts import LAYOUTS, layout_of_dialect
from mxcli.files.model_files import RECORD
from mxcli.flows.measure.report import make_report
from mxcli.flows.plan.overrides import Override
from mxcli.flows.plan.plan import Options, make_plan
from mxcli.flows.verify.checks.check import PROBLEM, SEVERITIES
from mxcli.flows.verify.checks.table import CHECKS
from mxcli.numerics.formats import FORMATS
from mxcli.numerics.hadamard import Hadamard, find_hadamard
from mxcli.numerics.scheme import Rules
from mxcli.output.verification import conclusion

SAMPLES = Path(__file__).parents[2] / "data" / "layouts"
SIGNS = find_hadamard(16)
FOLDERS = sorted(folder.name for folder in SAMPLES.iterdir() if folder.is_dir() and folder.name != "llama64-original")
SOURCES = {
    "ct-fp8-block": "ct-block.safetensors",
    "ct-": "toy.safetensors",
    "modelopt-": "toy.safetensors",
    "torchao-": "toy.safetensors",
    "fp8-": "fp8-block.safetensors",
    "gptoss-": "gptoss.safetensors",
    "llama64-": "llama64-original",
}


def sample(folder: str) -> Path:
    """The checkpoint of a folder; skips those that no layout reads back."""
    path = SAMPLES / folder / "model.gguf"
    path = path if path.exists() else SAMPLES / folder
    dialect = open_checkpoint(path).dialect
    if layout_of_dialect(dialect) is None:
        pytest.skip(f"layout {dialect} is not read back: {', '.join(LAYOUTS)} are")
    return path


def sample_source(folder: str) -> Path | None:
    return next((SAMPLES / name for beginning, name in SOURCES.items() if folder.startswith(beginning)), None)


@pytest.mark.parametrize("folder", FOLDERS)
def test_what_the_packages_wrote_is_sound(folder: str) -> None:
    path = sample(folder)
    result = verified(path, None if path.suffix == ".gguf" else sample_source(folder))
    assert found(result).keys() & {each.name for each in CHECKS if each.severity == PROBLEM} == set()
    assert result.is_sound
    assert result.weights


# What made the bytes: scale rule, dialect, and whether all weights have them.
MADE_BY = {
    "ct-fp8-block": ("amax-bf16", "compressed-tensors-bf16"),
    "ct-fp8-dynamic": ("amax-bf16", "compressed-tensors-bf16"),
    "ct-mxfp4": ("even", "compressed-tensors"),
    "ct-mxfp6a16": ("even", "compressed-tensors"),
    "ct-mxfp8": ("ct-even1", "compressed-tensors"),
    "ct-nvfp4a16": ("ct-bf16", "compressed-tensors-bf16"),
    "llama64-ct-nvfp4a16": ("ct-bf16", "compressed-tensors-bf16"),
    "llama64-modelopt-mxfp8": ("rceil", "modelopt"),
    "llama64-modelopt-nvfp4": ("modelopt", "modelopt"),
    "llama64-quark-mxfp4wo": ("even", "quark"),
    "llama64-quark-mxfp6e2m3": ("even", "quark"),
    "modelopt-fp8": ("amax-bf16-quotient", "modelopt-bf16"),
    "modelopt-mxfp4": ("rceil", "modelopt"),
    "modelopt-mxfp8": ("rceil", "modelopt"),
    "modelopt-nvfp4": ("modelopt", "modelopt"),
    "torchao-mxfp4-plain-floor": ("floor", "ocp"),
    "torchao-nvfp4-plain": ("torchao", "torchao"),
    "torchao-nvfp4-weightonly": ("torchao", "torchao"),
}


@pytest.mark.parametrize("folder", MADE_BY)
def test_the_rule_that_made_the_bytes_is_found(folder: str) -> None:
    result = verified(sample(folder), sample_source(folder))
    found_schemes = [weight.provenance for weight in result.weights]
    assert {(each.scheme.scale_rule.name, each.scheme.dialect.name, each.exact) for each in found_schemes if each} == {
        (*MADE_BY[folder], True)
    }


# A scale of one source's statistics, blocks of another's: no rule has all of it, and 12 of 384 blocks differ.
def test_bytes_of_no_rule_report_the_nearest() -> None:
    first = verified(sample("ct-nvfp4"), sample_source("ct-nvfp4")).weights[0].provenance
    assert first is not None
    assert (first.scheme.scale_rule.name, first.exact, first.equal_blocks, first.blocks) == ("ct", False, 372, 384)


@pytest.mark.parametrize("layout", [None, "mxcli", "modelopt"])
@pytest.mark.parametrize(
    ("format", "rule"), [("nvfp4", "te"), ("mxfp4", "rceil"), ("mxfp8", "rceil"), ("fp8_e4m3_channel", "amax")]
)
def test_our_own_output_is_sound_and_its_errors_are_those_of_the_report(
    tmp_path: Path, format: str, rule: str, layout: str | None
) -> None:
    model = source(tmp_path / "m")
    result = verified(
        quantized(model, tmp_path / "q", Options(format, Rules(dialect="mxcli", nonfinite="error"), layout=layout)),
        model,
        2,
    )
    assert found(result) == {}
    checkpoint = open_checkpoint(model)
    report = make_report(
        "m",
        checkpoint,
        make_plan(checkpoint, Options(format, Rules(dialect="mxcli", nonfinite="error"))),
        backend=Cpu(),
    )
    expected = {each.name: each.metrics for each in report.layers}
    assert {each.name for each in result.weights} == expected.keys()
    for each in result.weights:
        assert each.distance is not None
        assert each.provenance is not None
        assert each.distance.sqnr_db == pytest.approx(expected[each.name]["sqnr_db"], abs=1e-6)
        assert each.distance.relative_error == pytest.approx(expected[each.name]["relative_error"], rel=1e-6)
        assert each.distance.max_abs_error == pytest.approx(expected[each.name]["max_abs_error"], rel=1e-6)
        assert (each.provenance.exact, each.provenance.scheme.scale_rule.name) == (True, rule)


@pytest.mark.parametrize("format", FORMATS)
def test_the_rule_of_every_format_is_found(tmp_path: Path, format: str) -> None:
    model = write_model(tmp_path / "m", {UP: noise(32, 256, seed=4)}, LLAMA)
    folder = quantized(model, tmp_path / "q", Options(format, layout="mxcli", on_indivisible="pad"))
    (weight,) = verified(folder, model).weights
    assert weight.provenance is not None
    assert (weight.provenance.exact, weight.provenance.scheme.rounding.name) == (True, "nearest-even")
    (folder / RECORD).unlink()
    assert verified(folder, model).weights[0].provenance == weight.provenance


@pytest.mark.parametrize(
    ("options", "scheme"),
    [
        (Options("mxfp4", Rules(rounding="stochastic", seed=3, nonfinite="error")), ("rceil", "stochastic", 3, None)),
        (
            Options("nvfp4", Rules(rounding="stochastic", seed=3, nonfinite="error"), layout="mxcli"),
            ("te", "stochastic", 3, None),
        ),
        (
            Options("mxfp8", Rules(rounding="half-away", nonfinite="error"), layout="modelopt"),
            ("rceil", "half-away", 0, None),
        ),
        (
            Options("nvfp4", Rules(hadamard=SIGNS, nonfinite="error"), axis="column", layout="mxcli"),
            ("te", "nearest-even", 0, SIGNS),
        ),
        (
            Options("mxfp8", Rules(hadamard=SIGNS, rounding="stochastic", nonfinite="error"), layout="mxcli"),
            ("rceil", "stochastic", 0, SIGNS),
        ),
    ],
)
def test_what_the_record_says_of_the_rule_is_tried(
    tmp_path: Path, options: Options, scheme: tuple[str, str, int, Hadamard | None]
) -> None:
    model = source(tmp_path / "m")
    result = verified(quantized(model, tmp_path / "q", options), model)
    assert found(result) == {}
    made = [each.provenance.scheme for each in result.weights if each.provenance is not None and each.provenance.exact]
    assert [(each.scale_rule.name, each.rounding.name, each.seed, each.hadamard) for each in made] == [scheme] * 7


def test_a_transform_is_known_without_the_record_and_draws_are_not(tmp_path: Path) -> None:
    model = source(tmp_path / "m")
    folder = quantized(
        model, tmp_path / "h", Options("nvfp4", Rules(hadamard=SIGNS, nonfinite="error"), layout="mxcli")
    )
    (folder / RECORD).unlink()
    result = verified(folder, model)
    assert conclusion(result)[0] == (
        "Bytes: all 7 weights match scale rounding te, element rounding nearest-even after hadamard-16, as "
        "mxcli (nvfp4)."
    )
    folder = quantized(
        model, tmp_path / "s", Options("mxfp8", Rules(rounding="stochastic", seed=3, nonfinite="error"), layout="mxcli")
    )
    assert conclusion(verified(folder, model))[0] == (
        "Bytes: all 7 weights match scale rounding rceil, element rounding stochastic (seed 3), as mxcli (mxfp8_e4m3)."
    )
    (folder / RECORD).unlink()
    assert conclusion(verified(folder, model))[0] == (
        "Bytes: 7 of 7 weights are recorded as stochastic rounding without a seed, so the draws are not known."
    )


@pytest.mark.parametrize(
    ("change", "value", "recorded"),
    [
        ({"hadamard_signs": None}, "transform none", "transform +++-+------+-+--"),
        ({"hadamard_signs": "+" * 16}, f"transform {'+' * 16}", "transform +++-+------+-+--"),
        ({"axis": "row"}, "axis row", "axis column"),
        ({"scale_rounding": "floor"}, "scale_rounding floor", "scale_rounding rceil"),
        ({"rounding": "half-away"}, "rounding half-away", "rounding nearest-even"),
        ({"format": "mxfp6_e3m2"}, "format mxfp6_e3m2", "format mxfp6_e2m3"),
    ],
)
def test_the_configuration_is_compared_with_the_record(
    tmp_path: Path, change: dict[str, object], value: str, recorded: str
) -> None:
    options = Options("mxfp6", Rules(hadamard=SIGNS, nonfinite="error"), axis="column", layout="mxcli")
    folder = quantized(write_model(tmp_path / "m", {UP: noise(64, 64)}, LLAMA), tmp_path / "q", options)
    assert found(verified(folder)) == {}
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= change
    config["quantization_config"]["tensors"] = {UP: {"axis": change.get("axis", "column")}}
    path.write_text(json.dumps(config))
    result = verified(folder)
    assert found(result) == {"recorded_rules": [UP], "recorded_file": ["config.json"]}
    assert values(result, "recorded_rules") == [value]
    (finding,) = next(each.findings for each in result.results if each.name == "recorded_rules")
    assert finding.need == f"as recorded in mxcli.json: {recorded}"


def test_a_source_that_is_quantized_stands_for_its_values(tmp_path: Path) -> None:
    folder = quantized(source(tmp_path / "m"), tmp_path / "q", Options("mxfp8"))
    result = verified(folder, folder)
    assert {each.distance.noise for each in result.weights if each.distance is not None} == {0}
    assert "The source is quantized itself" in result.notes[-1]


def test_experts_are_compared_with_the_stack_they_came_from(tmp_path: Path) -> None:
    stacks = {
        "model.layers.0.mlp.experts.gate_up_proj": noise(2, 96, 32, seed=1),
        "model.layers.0.mlp.experts.down_proj": noise(2, 32, 48, seed=2),
        "model.layers.0.mlp.gate.weight": noise(2, 32, seed=3),
    }
    config = {"model_type": "qwen3_moe", "hidden_size": 32, "moe_intermediate_size": 48}
    model = source(tmp_path / "m", stacks, config)
    result = verified(quantized(model, tmp_path / "q", Options("nvfp4", layout="ct")), model)
    assert found(result).keys() == {"some_loader"}  # transformers drops the tensor scales of experts
    assert result.is_sound
    assert [(each.name, each.provenance is not None and each.provenance.exact) for each in result.weights] == [
        (f"model.layers.0.mlp.experts.{expert}.{part}_proj.weight", True)
        for stack in (("gate", "up"), ("down",))
        for expert in (0, 1)
        for part in stack
    ]


@pytest.fixture(scope="module")
def nvfp4(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A plain model, and it in NVFP4."""
    folder = tmp_path_factory.mktemp("nvfp4")
    model = source(folder / "m")
    return model, quantized(model, folder / "q", Options("nvfp4"))


def put(name: str, at: tuple[int, ...], value: float) -> Callable[[Tensors], object]:
    """Plants a value."""

    def plant(tensors: Tensors) -> None:
        tensors[name][1][at] = value

    return plant


def renamed(old: str, new: str) -> Callable[[Tensors], object]:
    def plant(tensors: Tensors) -> None:
        tensors[new] = tensors.pop(old)

    return plant


def swapped(tensors: Tensors) -> None:
    for name, (_, array) in tensors.items():
        if name.endswith("_packed"):
            array[:] = (array << 4) | (array >> 4)


def inverted(tensors: Tensors) -> None:
    for name, (_, array) in tensors.items():
        if name.endswith("global_scale"):
            array[:] = 1 / array


def doubled_gate(tensors: Tensors) -> None:
    tensors[f"{GATE}_global_scale"][1][:] *= 2


SCALES = f"{UP}_scale"
PLANTED: dict[str, tuple[Callable[[Tensors], object], dict[str, list[str]], str]] = {
    "a NaN scale": (
        put(SCALES, (3, 1), 0x7F),
        {"nan_scale": [SCALES]},
        "1 of 512 scales NaN or infinite (byte 0x7F), the first at [3, 1] of the grid [128, 4]",
    ),
    "a negative scale": (
        put(SCALES, (0, 0), 0xB8),
        {"negative_scale": [SCALES]},
        "1 of 512 scales negative, the first at [0, 0] of the grid [128, 4]",
    ),
    "a lost scale": (
        put(SCALES, (2, 2), 0),
        {"zero_scale": [SCALES]},
        "1 of 512 blocks with scale 0 and codes that are not 0",
    ),
    "a tensor scale of 0": (
        put(f"{UP}_global_scale", (0,), 0.0),
        {"tensor_scale": [f"{UP}_global_scale"], "fused_tensor_scale": ["model.layers.0.mlp.gate_proj+up_proj"]},
        "0",
    ),
    "an infinite tensor scale": (
        put(f"{UP}_global_scale", (0,), np.inf),
        {"tensor_scale": [f"{UP}_global_scale"], "fused_tensor_scale": ["model.layers.0.mlp.gate_proj+up_proj"]},
        "inf",
    ),
    "the codes gone": (
        lambda tensors: tensors.pop(f"{UP}_packed"),
        {"misfit": ["model.layers.0.mlp.up_proj"]},
        "has a weight_scale, but model.layers.0.mlp.up_proj.weight_packed is missing (nvfp4-pack-quantized)",
    ),
    "the scales gone": (
        lambda tensors: tensors.pop(SCALES),
        {"codes_without_scale": [f"{UP}_packed"], "scale_without_codes": [f"{UP}_global_scale"]},
        "U8 [128, 32] without a scale",
    ),
    "a tensor scale of nothing": (
        lambda tensors: tensors.update({"model.layers.7.mlp.up_proj.weight_global_scale": ("F32", np.ones(1, "f4"))}),
        {"scale_without_codes": ["model.layers.7.mlp.up_proj.weight_global_scale"]},
        "F32 [1] belongs to no quantized weight",
    ),
    "another grid": (
        lambda tensors: tensors.update({SCALES: ("F8_E4M3", tensors[SCALES][1].reshape(64, 8))}),
        {"misfit": ["model.layers.0.mlp.up_proj"]},
        "model.layers.0.mlp.up_proj.weight_scale is F8_E4M3 [64, 8]; nvfp4-pack-quantized needs F8_E4M3 [128, 4]",
    ),
    "plain next to quantized": (
        lambda tensors: tensors.update({UP: noise(128, 64)}),
        {"stored_twice": [UP]},
        f"stored plain and as {UP}_global_scale, {UP}_packed, {UP}_scale",
    ),
    "a scale of activations of 0": (
        lambda tensors: tensors.update({UP.replace("weight", "input_global_scale"): ("F32", np.zeros(1, "f4"))}),
        {"activation_scale": [UP.replace("weight", "input_global_scale")]},
        "0",
    ),
    "one code": (
        lambda tensors: tensors[f"{UP}_packed"][1].fill(0x33),
        {"one_code": [f"{UP}_packed"]},
        "every code is 3",
    ),
    "all zero": (
        lambda tensors: tensors[f"{UP}_packed"][1].fill(0x80),
        {"zero_weight": [UP], "emptied_blocks": [f"{UP}_packed"]},
        "all values are 0",
    ),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_found_and_nothing_else(tmp_path: Path, nvfp4: tuple[Path, Path], fault: str) -> None:
    change, places, value = PLANTED[fault]
    result = verified(changed(nvfp4[1], tmp_path / "q", change))
    assert found(result) == places
    assert values(result, next(iter(places))) == [value]
    severities = {each.name: each.severity for each in result.results}
    assert result.is_sound == all(severities[check] != PROBLEM for check in places)


def test_tensor_scales_must_be_one_within_a_fused_layer(tmp_path: Path, nvfp4: tuple[Path, Path]) -> None:
    result = verified(changed(nvfp4[1], tmp_path / "q", doubled_gate))
    assert found(result) == {"fused_tensor_scale": ["model.layers.0.mlp.gate_proj+up_proj"]}
    (finding,) = next(each for each in result.results if each.findings).findings
    assert finding.need.endswith("weights are wrong by up to 2 times")


def test_a_tensor_scale_the_wrong_way_round_is_found(tmp_path: Path, nvfp4: tuple[Path, Path]) -> None:
    result = verified(changed(nvfp4[1], tmp_path / "q", inverted))
    assert found(result).keys() == {"scale_direction"}
    assert len(values(result, "scale_direction")) == 7
    assert values(result, "scale_direction")[0] == (
        "its weights reach 1.86e+06 (2^20), and with the inverse scale 3.89 (2^1)"
    )


@pytest.mark.parametrize("layout", ["modelopt", "mxcli"])
def test_the_direction_is_known_of_every_layout(tmp_path: Path, nvfp4: tuple[Path, Path], layout: str) -> None:
    def inverse(tensors: Tensors) -> None:
        for name, (_, array) in tensors.items():
            if name.endswith("scale_2"):
                array[...] = 1 / array

    folder = quantized(nvfp4[0], tmp_path / "q", Options("nvfp4", layout=layout))
    assert "scale_direction" in found(verified(changed(folder, tmp_path / "turned", inverse)))


def test_fp8_scales_the_wrong_way_round_are_found(tmp_path: Path) -> None:
    folder = quantized(
        source(tmp_path / "m"), tmp_path / "q", Options("fp8_e4m3_channel", Rules(dialect="mxcli", nonfinite="error"))
    )

    def inverse(tensors: Tensors) -> None:
        for name, (_, array) in tensors.items():
            if name.endswith("_scale"):
                array[...] = 1 / array

    assert found(verified(changed(folder, tmp_path / "turned", inverse))).keys() == {"scale_direction"}


# E8M0 scales copied by value into integers.
def test_e8m0_scales_converted_as_numbers_are_found(tmp_path: Path) -> None:
    folder = quantized(source(tmp_path / "m"), tmp_path / "q", Options("mxfp8"))

    def converted(tensors: Tensors) -> None:
        for name, (_, array) in tensors.items():
            if name.endswith("_scale"):
                array[...] = np.clip(2.0 ** (array.astype(np.float64) - 127), 0, 255).astype(np.uint8)

    result = verified(changed(folder, tmp_path / "converted", converted))
    assert found(result).keys() == {"scale_direction"}
    assert "its bytes are 0 only" in values(result, "scale_direction")[0]


def test_codes_in_the_wrong_order_are_found_with_the_source(tmp_path: Path, nvfp4: tuple[Path, Path]) -> None:
    folder = changed(nvfp4[1], tmp_path / "q", swapped)
    assert verified(folder).is_sound
    result = verified(folder, nvfp4[0])
    assert found(result).keys() == {"swapped_codes"}
    assert len(found(result)["swapped_codes"]) == 7


def test_weights_of_another_model_are_far_from_the_source(tmp_path: Path, nvfp4: tuple[Path, Path]) -> None:
    tensors = llama()
    tensors[UP] = bf16(4 * noise_values(tensors[UP][1]))
    tensors["model.layers.0.mlp.down_proj.weight"] = noise(64, 128, seed=77)
    other = source(tmp_path / "other", tensors)
    result = verified(nvfp4[1], other)
    down = "model.layers.0.mlp.down_proj.weight"
    assert found(result) == {"other_source": [str(other / SHARD)]}
    assert (
        f"tensor '{UP}' does not have the hash in mxcli.json, and 1 more have not" in values(result, "other_source")[0]
    )
    folder = shutil.copytree(nvfp4[1], tmp_path / "foreign")
    (folder / RECORD).unlink()
    result = verified(folder, other)
    assert found(result) == {"other_bytes": [f"{UP}_packed", f"{down}_packed"]}
    assert "; relative error 1.4" in values(result, "other_bytes")[1]


def noise_values(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def test_tensors_are_compared_with_those_of_the_source(tmp_path: Path, nvfp4: tuple[Path, Path]) -> None:
    tensors = llama()
    tensors["model.layers.1.input_layernorm.weight"] = noise(64)
    tensors[UP] = noise(64, 64)
    tensors["model.norm.weight"] = ("F32", np.ones(64, np.float32))
    tensors["model.layers.0.input_layernorm.weight"] = noise(64, seed=5)
    del tensors["lm_head.weight"]
    other = source(tmp_path / "other", tensors)
    common = {
        "missing": ["model.layers.1.input_layernorm.weight"],
        "shape": [UP],
        "extra": ["lm_head.weight"],
        "retyped": ["model.norm.weight"],
    }
    assert found(verified(nvfp4[1], other)) == {**common, "other_source": [str(other / SHARD)]}
    folder = shutil.copytree(nvfp4[1], tmp_path / "foreign")
    (folder / RECORD).unlink()
    damaged = {"damaged": ["model.layers.0.input_layernorm.weight", "model.norm.weight"]}
    assert found(verified(folder, other)) == {**common, **damaged}


def test_a_source_of_another_model_is_refused(tmp_path: Path, nvfp4: tuple[Path, Path]) -> None:
    other = source(tmp_path / "other", {"a.weight": noise(4, 64)})
    with pytest.raises(UsageError, match=r"has none of the tensors of .*give the checkpoint that it was made from"):
        verified(nvfp4[1], other)


LISTS: dict[str, tuple[dict[str, object], dict[str, list[str]]]] = {
    "an entry missing": ({"ignore": []}, {"not_ignored": ["lm_head"]}),
    "an entry too many": (
        {"ignore": ["lm_head", "model.layers.0.mlp.up_proj"]},
        {"ignored_but_quantized": ["model.layers.0.mlp.up_proj"]},
    ),
    "a regular expression": ({"ignore": ["re:.*head$"]}, {}),
    "one that catches too much": (
        {"ignore": ["lm_head", "re:.*o_proj"]},
        {"ignored_but_quantized": ["model.layers.0.self_attn.o_proj"]},
    ),
    "a glob, which is not a pattern here": (
        {"ignore": ["*lm_head"]},
        {"not_ignored": ["lm_head"], "ignore_nothing": ["*lm_head"]},
    ),
    "a broken expression": ({"ignore": ["lm_head", "re:("]}, {"ignore_entry": ["re:("]}),
    "an entry of nothing": ({"ignore": ["lm_head", "vision"]}, {"ignore_nothing": ["vision"]}),
    "no list": ({"ignore": None}, {"not_ignored": ["lm_head"]}),
    "no status": ({"quantization_status": None}, {"silent_misreading": ["config.json"]}),
}


@pytest.mark.parametrize("case", LISTS)
def test_the_list_of_compressed_tensors_is_read_as_its_loaders_do(
    tmp_path: Path, nvfp4: tuple[Path, Path], case: str
) -> None:
    settings, expected = LISTS[case]
    groups = targeting(nvfp4[1], ["Linear"])
    folder = changed(nvfp4[1], tmp_path / "q", untouched, config_groups=groups, **settings)
    assert found(verified(folder)) == expected


def targeting(folder: Path, targets: list[str]) -> dict[str, object]:
    """The config groups of a checkpoint with other targets."""
    groups = json.loads((folder / "config.json").read_text())["quantization_config"]["config_groups"]
    return {name: group | {"targets": targets} for name, group in groups.items()}


LAYERS = r"re:(.*\.)?layers\.\d+\..*_proj$"
TARGETS: dict[str, tuple[list[str], dict[str, list[str]]]] = {
    "by pattern": ([LAYERS], {}),
    "by pattern, with the class of experts": ([LAYERS, "FusedMoE"], {}),
    "by a pattern that takes the head": (["re:.*"], {"not_ignored": ["lm_head"]}),
    "by name, with the head": ([LAYERS, "lm_head"], {"not_ignored": ["lm_head"]}),
    "by class": (["Linear"], {"not_ignored": ["lm_head"]}),
    "by a class of no linear layers": ([LAYERS, "LlamaAttention"], {}),
}


@pytest.mark.parametrize("case", TARGETS)
def test_targets_say_which_plain_layers_must_be_listed(tmp_path: Path, nvfp4: tuple[Path, Path], case: str) -> None:
    targets, expected = TARGETS[case]
    folder = changed(nvfp4[1], tmp_path / "q", untouched, config_groups=targeting(nvfp4[1], targets), ignore=[])
    assert found(verified(folder)) == expected


def test_targets_that_loaders_cannot_read_are_found(tmp_path: Path, nvfp4: tuple[Path, Path]) -> None:
    groups = targeting(nvfp4[1], [LAYERS, "re:("])
    result = verified(changed(nvfp4[1], tmp_path / "q", untouched, config_groups=groups))
    assert list(found(result)) == ["misfit"]
    assert "the target 're:(' is not a regular expression" in result.found(PROBLEM)[0].findings[0].value


def test_a_weight_that_no_target_names_is_found(tmp_path: Path, nvfp4: tuple[Path, Path]) -> None:
    groups = targeting(nvfp4[1], [r"re:(.*\.)?layers\.\d+\.(self_attn\.\w+|mlp\.gate_proj|mlp\.down_proj)$"])
    result = verified(changed(nvfp4[1], tmp_path / "q", untouched, config_groups=groups))
    findings = [each for each in result.found(PROBLEM)[0].findings if "no config group targets it" in each.value]
    assert [each.where for each in findings] == ["model.layers.0.mlp.up_proj"]


# As a part of a path, layers.1 catches layer 11 too.
def test_the_list_of_modelopt_is_read_as_its_loaders_do(tmp_path: Path) -> None:
    tensors = {**layer("model.layers.11"), **layer("model.layers.1", seed=20), "lm_head.weight": noise(32, 64)}
    model = source(tmp_path / "m", tensors)
    folder = quantized(
        model, tmp_path / "q", Options("mxfp8", layout="modelopt", overrides=(Override("*.layers.1", keep=True),))
    )
    assert found(verified(folder)) == {}
    path = folder / "hf_quant_config.json"
    content = json.loads(path.read_text())
    content["quantization"]["exclude_modules"] = ["lm_head", "model.layers.1"]
    path.write_text(json.dumps(content))
    result = verified(folder)
    assert found(result)["ignored_but_quantized"] == [
        f"model.layers.11.{part}"
        for part in (
            "self_attn.q_proj",
            "self_attn.k_proj",
            "self_attn.v_proj",
            "self_attn.o_proj",
            "mlp.gate_proj",
            "mlp.up_proj",
            "mlp.down_proj",
        )
    ]
    assert found(result)["possible_misreading"] == ["config.json and hf_quant_config.json"]


def test_a_fused_layer_quantized_in_part_is_found(tmp_path: Path) -> None:
    model = source(tmp_path / "m")
    kept = Options("mxfp8", overrides=(Override("*.k_proj", keep=True), Override("*.gate_proj", "mxfp4")))
    result = verified(quantized(model, tmp_path / "q", kept))
    assert found(result) == {
        "fused_in_part": [
            "model.layers.0.self_attn.q_proj+k_proj+v_proj",
            "model.layers.0.mlp.gate_proj+up_proj",
        ]
    }
    assert values(result, "fused_in_part")[0] == "k_proj plain, q_proj mxfp8_e4m3, v_proj mxfp8_e4m3"


def test_fused_layers_share_their_single_fp8_scale(tmp_path: Path) -> None:
    folder = quantized(source(tmp_path / "m"), tmp_path / "q", Options("fp8_e4m3"))
    assert found(verified(folder, tmp_path / "m")) == {}


def test_single_fp8_scales_may_differ_with_a_warning(tmp_path: Path) -> None:
    """Codes of other producers, with a scale per layer."""

    def halve(tensors: Tensors) -> None:
        _, scale = tensors["model.layers.0.self_attn.k_proj.weight_scale"]
        scale -= np.uint16(1 << 7)

    folder = quantized(source(tmp_path / "m"), tmp_path / "q", Options("fp8_e4m3"))
    result = verified(changed(folder, tmp_path / "apart", halve))
    assert found(result).keys() == {"fused_scale"}
    assert result.is_sound


def test_fp8_without_scales_is_a_problem_and_scales_of_1_are_a_warning(tmp_path: Path) -> None:
    codes = ("F8_E4M3", np.full((32, 64), 0x20, np.uint8))
    codes[1][0] = 0x28
    result = verified(write_model(tmp_path / "cast", {"a.weight": codes}))
    assert found(result) == {"codes_without_scale": ["a.weight"]}
    assert not result.is_sound
    assert found(verified(tmp_path / "cast", source(tmp_path / "m"))) == {"codes_without_scale": ["a.weight"]}
    settings = {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}
    scaled = {"a.weight": codes, "a.weight_scale": ("F32", np.ones(32, np.float32))}
    result = verified(write_model(tmp_path / "one", scaled, {"quantization_config": settings}))
    assert found(result) == {"unscaled": ["a.weight_scale"]}


def test_codes_that_are_nan_are_found(tmp_path: Path) -> None:
    folder = quantized(source(tmp_path / "m"), tmp_path / "q", Options("mxfp8"))
    result = verified(changed(folder, tmp_path / "nan", put(UP, (5, 7), 0x7F)))
    assert found(result) == {"nan_code": [UP]}
    assert values(result, "nan_code") == ["1 of 8192 codes NaN or infinite".replace("8192", "8,192")]


# Rules whose smallest scale is 0 leave only zeros and largest codes in a block that is tiny compared with the tensor.
def test_an_underflowed_scale_is_not_lost(tmp_path: Path) -> None:
    x = np.full((4, 64), 1e-7, np.float32)
    x[0, :16] = np.linspace(1, 100, 16)
    folder = quantized(source(tmp_path / "m", {"a.weight": ("F32", x)}), tmp_path / "q", Options("nvfp4"))
    result = verified(folder, tmp_path / "m")
    assert found(result) == {"underflowed_scale": ["a.weight_scale"]}
    assert values(result, "underflowed_scale") == ["15 of 16 blocks with scale 0: they read as 0"]


def test_weights_must_divide_over_the_devices(tmp_path: Path) -> None:
    config = {**LLAMA, "num_attention_heads": 4, "num_key_value_heads": 2}
    folder = quantized(source(tmp_path / "m", config=config), tmp_path / "q", Options("mxfp4"))
    assert found(verified(folder, tensor_parallel=2)) == {}
    result = verified(folder, tensor_parallel=4)
    assert found(result) == {"tensor_parallel": ["model.layers.0.self_attn.o_proj.weight"]}
    assert values(result, "tensor_parallel") == ["64 columns over 4 devices are 16 each"]
    result = verified(folder, tensor_parallel=3)
    assert found(result)["tensor_parallel"][:2] == ["config.json", "config.json"]
    assert found(result)["tensor_parallel"][2:] == [
        f"model.layers.0.{part}.weight"
        for part in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    ]


def test_blocks_of_rows_must_end_with_the_members_of_a_fused_layer(tmp_path: Path) -> None:
    tensors = {
        "model.layers.0.self_attn.q_proj.weight": noise(192, 128),
        "model.layers.0.self_attn.k_proj.weight": noise(128, 128),
        "model.layers.0.self_attn.v_proj.weight": noise(64, 128),
    }
    folder = quantized(source(tmp_path / "m", tensors), tmp_path / "q", Options("fp8_e4m3_128x128", layout="ct"))
    result = verified(folder)
    assert found(result) == {"some_loader": ["model.layers.0.self_attn.q_proj.weight"] * 2}
    assert values(result, "some_loader") == ["192 rows in blocks of 128"] * 2
    assert result.is_sound


def indexed(folder: Path, output: Path, **total: object) -> Path:
    """A checkpoint with an index."""
    shutil.copytree(folder, output)
    names = list(open_checkpoint(folder).tensors)
    stored = sum(info.nbytes for info in open_checkpoint(folder).tensors.values())
    index = {"metadata": {"total_size": stored, **total}, "weight_map": dict.fromkeys(names, SHARD)}
    (output / "model.safetensors.index.json").write_text(json.dumps(index))
    return output


def test_the_index_is_compared_with_the_shards(tmp_path: Path, nvfp4: tuple[Path, Path]) -> None:
    assert found(verified(indexed(nvfp4[1], tmp_path / "right"))) == {}
    result = verified(indexed(nvfp4[1], tmp_path / "wrong", total_size=1))
    assert found(result) == {"total_size": ["model.safetensors.index.json"]}
    assert values(result, "total_size") == ["states total_size 1"]
    assert result.is_sound
    folder = indexed(nvfp4[1], tmp_path / "short")
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"][SCALES]
    path.write_text(json.dumps(index))
    assert found(verified(folder)) == {"weight_map": [SCALES]}


def test_files_that_are_gone_or_changed_are_found_by_the_record(tmp_path: Path, nvfp4: tuple[Path, Path]) -> None:
    folder = shutil.copytree(nvfp4[1], tmp_path / "q")
    path = folder / "mxcli.json"
    record = json.loads(path.read_text())
    record["files"] = ["config.json", "tokenizer.json", "../outside.json"]
    record["sha256"] = {"config.json": "0" * 64}
    path.write_text(json.dumps(record))
    result = verified(folder)
    assert found(result) == {"record": ["mxcli.json"], "recorded_file": ["config.json", "tokenizer.json"]}
    assert values(result, "record") == [
        "'files' must have names of files in its folder, which '../outside.json' is not"
    ]
    assert values(result, "recorded_file") == ["other content", "missing"]


def test_a_file_that_the_safetensors_library_refuses_is_found(tmp_path: Path, nvfp4: tuple[Path, Path]) -> None:
    folder = shutil.copytree(nvfp4[1], tmp_path / "q")
    content = (folder / SHARD).read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = content[8:end].rstrip().removesuffix(b"}}") + b',"more":NaN}}'
    (folder / SHARD).write_bytes(len(header).to_bytes(8, "little") + header + content[end:])
    result = verified(folder)
    assert found(result)["safetensors_library"] == [SHARD]
    (value,) = values(result, "safetensors_library")
    assert value.startswith("refused: Error while deserializing header: invalid JSON in header: expected value")
    assert not result.is_sound


def test_a_shard_that_is_cut_off_cannot_be_read(tmp_path: Path, nvfp4: tuple[Path, Path]) -> None:
    folder = shutil.copytree(nvfp4[1], tmp_path / "q")
    (folder / SHARD).write_bytes((folder / SHARD).read_bytes()[:-5])
    with pytest.raises(InputError, match="truncated"):
        verified(folder)


def test_what_is_not_quantized_or_not_read_is_refused(tmp_path: Path, nvfp4: tuple[Path, Path]) -> None:
    with pytest.raises(RefusedError, match="not quantized; there is nothing to verify"):
        verified(nvfp4[0])
    gptq = {"a.qweight": ("I32", np.zeros((4, 8), np.int32)), "a.g_idx": ("I32", np.zeros(8, np.int32))}
    with pytest.raises(RefusedError, match=r"quantized by gptq; only compressed-tensors, .* are read back"):
        verified(write_model(tmp_path / "gptq", gptq))
    folder = shutil.copytree(nvfp4[1], tmp_path / "bare")
    (folder / "config.json").unlink()
    with pytest.raises(InputError, match=r"without a config\.json"):
        verified(folder)


@pytest.mark.parametrize("method", ["awq", "gptq", "bitnet"])
@pytest.mark.parametrize("against", [False, True])
def test_a_quant_method_that_is_not_read_is_named(
    tmp_path: Path, nvfp4: tuple[Path, Path], method: str, against: bool
) -> None:
    folder = shutil.copytree(nvfp4[1], tmp_path / "q")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["quant_method"] = method
    (folder / "config.json").write_text(json.dumps(config))
    source = nvfp4[0] if against else None
    result = verified(folder, source)
    assert found(result)["recorded_file"] == ["config.json"]
    assert result.coverage.unread is not None
    assert f"the quant_method in config.json is '{method}'" in result.coverage.unread
    assert not result.is_sound
    (folder / RECORD).unlink()
    with pytest.raises(RefusedError, match=f"the quant_method in config.json is '{method}'"):
        verified(folder, source)


def test_weights_in_another_dtype_and_without_elements_are_survived(tmp_path: Path) -> None:
    tensors = {"a.weight": ("F32", np.ones((4, 32), np.float32)), "b.weight": ("F16", np.ones((4, 32), np.float16))}
    model = source(tmp_path / "m", tensors)
    assert found(verified(quantized(model, tmp_path / "q", Options("mxfp4")), model)) == {
        "one_code": ["a.weight_packed", "b.weight_packed"]
    }
    settings = {"quant_method": "modelopt", "quant_algo": "MXFP8"}
    empty = {"a.weight": ("F8_E4M3", np.zeros((0, 32), np.uint8)), "a.weight_scale": ("U8", np.zeros((0, 1), np.uint8))}
    full = {"b.weight": ("F8_E4M3", np.zeros((1, 32), np.uint8)), "b.weight_scale": ("U8", np.zeros((1, 1), np.uint8))}
    folder = write_model(tmp_path / "empty", {**empty, **full}, {"quantization_config": settings})
    assert found(verified(folder)) == {"zero_weight": ["b.weight"]}


@pytest.mark.parametrize(
    "settings",
    [
        {"config_groups": {"g": {"targets": ["re:("], "weights": {}}}},
        {"config_groups": 7},
        {"config_groups": {"g": 3}},
    ],
)
def test_a_configuration_that_cannot_be_read_is_a_finding(
    tmp_path: Path, nvfp4: tuple[Path, Path], settings: dict[str, object]
) -> None:
    result = verified(changed(nvfp4[1], tmp_path / "q", untouched, **settings))
    assert "config.json" in found(result)["misfit"]
    assert not result.is_sound


def test_every_check_says_what_it_is() -> None:
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names) > 35
    for check in CHECKS:
        assert check.severity in SEVERITIES
        assert check.meaning.rstrip(".") == check.meaning != ""
        assert check.how.rstrip(".") == check.how != ""
