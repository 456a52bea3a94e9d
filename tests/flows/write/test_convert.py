"""Conversion of codes and scales between layouts: the same bytes back, or a refusal before the first byte."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from conversions import MOE, converted, moe, patched, raw, refusals
from planted import found, verified
from tiny_models import LLAMA, Raw, Tensor, bf16, llama, tree, write_model

from mxcli.backends.cpu import Cpu
from mxcli.errors import UsageError
from mxcli.files.checkpoint import open_checkpoint
from mxcli.files.layouts import find_layout
from mxcli.files.record import read_record
from mxcli.flows.plan.overrides import Override
from mxcli.flows.plan.plan import Options, make_plan
from mxcli.flows.write.convert import convert_checkpoint, plan_conversion
from mxcli.flows.write.dequantize import dequantize_checkpoint
from mxcli.flows.write.pipeline import WriteOptions
from mxcli.flows.write.quantize import quantize_checkpoint
from mxcli.numerics.scheme import Rules

DATA = Path(__file__).parents[2] / "data" / "layouts"
SHARD = "model.safetensors"
DOWN = "model.layers.0.mlp.down_proj.weight"


def with_amax(tensors: dict[str, Tensor], amax: float) -> dict[str, Tensor]:
    """The tensors with this largest magnitude in each matrix, so that tensor scales are known."""
    found = {}
    for name, (dtype, values) in tensors.items():
        if values.ndim > 1:
            values = values.copy()
            values.reshape(-1)[3] = int(bf16([amax])[1][0])
        found[name] = (dtype, values)
    return found


MODELS = {"dense": (llama, LLAMA), "experts": (moe, MOE)}


def quantized(folder: Path, options: Options, model: str = "dense", amax: float = 2688.0) -> Path:
    """A model in a layout; its tensor scales are 1, unless `amax` makes them others."""
    tensors, config = MODELS[model]
    checkpoint = open_checkpoint(
        write_model(folder.with_name(f"{folder.name}-plain"), with_amax(tensors(), amax), config)
    )
    quantize_checkpoint(checkpoint, make_plan(checkpoint, options), folder, backend=Cpu())
    return folder


def chain(source: Path, folder: Path, *layouts: str) -> Path:
    """A checkpoint converted to one layout after another."""
    for number, layout in enumerate(layouts):
        target = folder / f"{number}-{layout}"
        converted(source, target, layout)
        source = target
    return source


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("format", ["mxfp4", "mxfp8", "nvfp4"])
def test_modelopt_and_mlx_return_every_byte(tmp_path: Path, format: str, model: str) -> None:
    first = quantized(tmp_path / "q", Options(format, layout="ct"), model)
    last = chain(first, tmp_path, "modelopt", "mlx", "ct")
    assert (last / SHARD).read_bytes() == (first / SHARD).read_bytes()
    assert json.loads((last / "config.json").read_text()) == json.loads((first / "config.json").read_text())
    assert not (last / "hf_quant_config.json").exists()


@pytest.mark.parametrize("layouts", [("torchao", "quark"), ("torchao-plain", "quark"), ("quark", "mxcli", "torchao")])
def test_torchao_and_quark_return_every_byte_of_mxfp4(tmp_path: Path, layouts: tuple[str, ...]) -> None:
    first = quantized(tmp_path / "q", Options("mxfp4", layout="ct"))
    last = chain(first, tmp_path, *layouts, "ct")
    assert (last / SHARD).read_bytes() == (first / SHARD).read_bytes()
    assert json.loads((last / "config.json").read_text()) == json.loads((first / "config.json").read_text())


@pytest.mark.parametrize(
    ("format", "layouts"),
    [
        ("mxfp8", ("torchao", "comfy", "fp8")),
        ("nvfp4", ("torchao", "comfy", "modelopt")),
        ("nvfp4", ("mxcli", "torchao-plain", "comfy", "mlx")),
        ("fp8_e4m3_channel", ("modelopt", "quark", "torchao")),
        ("fp8_e4m3_128x128", ("modelopt", "fp8", "mxcli")),
        ("mxfp6_e2m3", ("torchao", "quark", "mxcli")),
    ],
)
def test_other_ways_around_return_every_byte(tmp_path: Path, format: str, layouts: tuple[str, ...]) -> None:
    first = quantized(tmp_path / "q", Options(format, layout="ct"))
    last = chain(first, tmp_path, *layouts, "ct")
    assert raw(last) == raw(first)


def test_formats_of_single_layers_are_carried(tmp_path: Path) -> None:
    options = Options("mxfp4", overrides=(Override("*.down_proj.weight", "mxfp8"),), layout="ct")
    first = quantized(tmp_path / "q", options)
    last = chain(first, tmp_path, "modelopt", "mlx", "ct")
    assert raw(last) == raw(first)
    assert json.loads((last / "config.json").read_text()) == json.loads((first / "config.json").read_text())


def test_a_tensor_scale_is_stored_as_its_exact_reciprocal(tmp_path: Path) -> None:
    first = quantized(tmp_path / "q", Options("nvfp4", layout="ct"), amax=42.0)
    assert raw(first)[f"{DOWN}_global_scale"] == ("F32", [1], np.float32(64).tobytes())
    converted(first, tmp_path / "m", "modelopt")
    assert raw(tmp_path / "m")[f"{DOWN}_scale_2"] == ("F32", [], np.float32(1 / 64).tobytes())
    converted(tmp_path / "m", tmp_path / "back", "ct")
    assert raw(tmp_path / "back") == raw(first)


def test_a_tensor_scale_without_an_exact_reciprocal_is_refused_by_name_and_number(tmp_path: Path) -> None:
    first = quantized(tmp_path / "q", Options("nvfp4", layout="ct"), amax=64.0)
    numbers = {f"{DOWN}_global_scale": np.float32(7), f"{DOWN.replace('down', 'up')}_global_scale": np.float32(13)}
    patched(first, numbers)
    (reason,) = refusals(first, "modelopt")
    assert reason == (
        "model.layers.0.mlp.up_proj.weight and 1 more: the layout modelopt stores tensor scales as reciprocals of "
        "those of compressed-tensors, and for 2 of 7 weights 1 / (1 / x) is not x in binary32: that of "
        "model.layers.0.mlp.up_proj.weight is 13, and 1 / (1 / 13) is 12.999999. --round-tensor-scales stores the "
        "nearest number, which changes the last bit of such a scale."
    )
    converted(first, tmp_path / "m", "modelopt", rounds_scales=True)
    scale = raw(tmp_path / "m")[f"{DOWN}_scale_2"][2]
    assert scale == (np.float32(1) / np.float32(7)).tobytes()
    assert converted(first, tmp_path / "own", "mxcli").outcome.complete, "it holds the number itself too"
    assert raw(tmp_path / "own")[f"{DOWN}_global_scale"][2] == np.float32(7).tobytes()
    assert len(refusals(tmp_path / "own", "modelopt")) == 1


def test_rounded_tensor_scales_are_restored_on_the_way_back(tmp_path: Path) -> None:
    first = quantized(tmp_path / "q", Options("nvfp4", layout="ct"), amax=64.0)
    up = DOWN.replace("down", "up")
    patched(first, {f"{DOWN}_global_scale": np.float32(7), f"{up}_global_scale": np.float32(13)})
    converted(first, tmp_path / "m", "modelopt", rounds_scales=True)
    converted(tmp_path / "m", tmp_path / "t", "torchao")
    converted(tmp_path / "t", tmp_path / "back", "ct")
    assert raw(tmp_path / "back") == raw(first)
    record = read_record(tmp_path / "t")
    assert record is not None
    assert record.content["rounded_tensor_scales"] == {DOWN: 7.0, up: 13.0}
    record = read_record(tmp_path / "back")
    assert record is not None
    assert record.content["rounded_tensor_scales"] == {}
    # Without the record the number is not known, and the one in the file is refused or kept as it is.
    (tmp_path / "t" / "mxcli.json").unlink()
    converted(tmp_path / "t", tmp_path / "other", "ct", rounds_scales=True)
    assert raw(tmp_path / "other")[f"{DOWN}_global_scale"][2] != np.float32(7).tobytes()


@pytest.mark.parametrize(
    ("format", "layout", "reason"),
    [
        ("mxfp6_e2m3", "modelopt", "the layout modelopt has no mxfp6_e2m3; it holds nvfp4, mxfp8_e4m3, mxfp4_e2m1, "),
        ("nvfp4", "quark", "the layout quark has no nvfp4; it holds mxfp4_e2m1, mxfp6_e2m3, "),
        ("nvfp4", "mlx", "nvfp4 of the layout mlx has no tensor scale, and that of the source is not 1. "),
        ("mxfp4", "gpt-oss", "the layout gpt-oss cannot hold it: it holds the stacks of experts only "),
        ("mxfp8", "gguf", "the layout gguf has no mxfp8_e4m3; it holds mxfp4_e2m1, nvfp4. "),
        ("fp8_e4m3", "modelopt", "loaders of the layout modelopt take a stored scale of the inputs of each fp8_e4m3 "),
    ],
)
def test_what_a_layout_cannot_hold_is_refused_by_name(tmp_path: Path, format: str, layout: str, reason: str) -> None:
    source = quantized(tmp_path / "q", Options(format, layout="ct"), amax=42.0)
    before = tree(tmp_path)
    (found,) = refusals(source, layout)
    assert found.startswith(f"model.layers.0.self_attn.q_proj.weight and 6 more: {reason}")
    assert tree(tmp_path) == before


def test_experts_are_refused_where_loaders_cannot_stack_them(tmp_path: Path) -> None:
    source = quantized(tmp_path / "q", Options("mxfp4", layout="ct"), "experts")
    (found,) = refusals(source, "torchao")
    assert found.startswith(
        "model.layers.0.mlp.experts.0.gate_proj.weight and 5 more: the layout torchao cannot hold it: transformers "
        "stacks experts, and cannot stack them when torchao has quantized each."
    )


def test_a_transform_is_refused(tmp_path: Path) -> None:
    from mxcli.numerics.hadamard import find_hadamard

    options = Options("nvfp4", Rules(hadamard=find_hadamard(16)), layout="mxcli")
    (found,) = refusals(quantized(tmp_path / "q", options), "modelopt")
    assert "its loaders do not support the hadamard-16 transform" in found


def values(folder: Path, output: Path) -> dict[str, Raw]:
    """The values of a checkpoint, as mxcli decodes them."""
    dequantize_checkpoint(open_checkpoint(folder), output, backend=Cpu(), dtype="BF16")
    return raw(output)


@pytest.mark.parametrize(
    ("folder", "layouts"),
    [
        ("ct-mxfp4", ("modelopt", "quark", "mlx", "torchao", "mxcli")),
        ("ct-mxfp8", ("modelopt", "fp8", "mlx", "comfy", "torchao")),
        ("modelopt-mxfp4", ("ct", "quark")),
        ("modelopt-mxfp8", ("torchao", "ct")),
        ("torchao-mxfp4", ("ct", "mlx")),
        ("torchao-mxfp8", ("modelopt", "fp8")),
        ("torchao-mxfp6-e3m2-plain-floor", ("quark", "mxcli")),
        ("modelopt-nvfp4", ("torchao", "comfy", "modelopt")),
        ("torchao-nvfp4-plain", ("modelopt", "comfy")),
        ("torchao-nvfp4-plain-onelevel", ("ct", "mlx", "modelopt")),
        ("fp8-mxfp8-1x32-ue8m0", ("mlx", "ct")),
    ],
)
def test_producers_files_keep_their_values_through_layouts(
    tmp_path: Path, folder: str, layouts: tuple[str, ...]
) -> None:
    last = chain(DATA / folder, tmp_path, *layouts)
    assert values(last, tmp_path / "ours") == values(DATA / folder, tmp_path / "theirs")


@pytest.mark.parametrize("folder", ["ct-nvfp4", "llama64-ct-nvfp4a16", "torchao-nvfp4-plain"])
def test_nvfp4_of_producers_has_scales_without_exact_reciprocals(tmp_path: Path, folder: str) -> None:
    target = "modelopt" if folder.startswith(("ct", "llama")) else "ct"
    (reason,) = refusals(DATA / folder, target)
    assert "weights 1 / (1 / x) is not x in binary32" in reason
    result = converted(DATA / folder, tmp_path / "m", target, rounds_scales=True)
    (note,) = [each for each in result.conversion.arrangement.notes if "without an exact reciprocal" in each]
    assert note.endswith(
        f"{target.replace('ct', 'compressed-tensors')} stores the nearest number, one unit in the last place off."
    )


def test_scales_of_inputs_are_carried_where_the_layout_holds_them(tmp_path: Path) -> None:
    source = quantized(tmp_path / "q", Options("nvfp4", layout="modelopt"))
    with_inputs(source, 0.25)
    converted(source, tmp_path / "ct", "ct")
    group = json.loads((tmp_path / "ct" / "config.json").read_text())["quantization_config"]["config_groups"]["group_0"]
    assert group["input_activations"]["dynamic"] == "local"
    assert raw(tmp_path / "ct")["model.layers.0.mlp.down_proj.input_global_scale"][2] == np.float32(4).tobytes()
    converted(tmp_path / "ct", tmp_path / "back", "modelopt")
    assert raw(tmp_path / "back") == raw(source)
    settings = json.loads((tmp_path / "back" / "config.json").read_text())["quantization_config"]
    assert settings["quant_algo"] == "NVFP4"


def with_inputs(folder: Path, scale: float, *, without: str = "none") -> None:
    """Add a scale of inputs to every layer of a checkpoint in ModelOpt's layout."""
    kinds = {"F32": np.float32, "BF16": np.uint16}
    tensors = {
        name: (dtype, np.frombuffer(data, kinds.get(dtype, np.uint8)).reshape(shape))
        for name, (dtype, shape, data) in raw(folder).items()
    }
    for name in list(tensors):
        module = name.removesuffix(".weight_scale")
        if module != name and without not in module:
            tensors[f"{module}.input_scale"] = ("F32", np.float32(scale).reshape(()))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= {"quant_algo": "NVFP4"}
    producer = json.loads((folder / "hf_quant_config.json").read_text())
    producer["quantization"]["quant_algo"] = "NVFP4"
    for path in folder.iterdir():
        path.unlink()
    write_model(folder, tensors, config)
    (folder / "hf_quant_config.json").write_text(json.dumps(producer))


def test_static_scales_of_fp8_inputs_are_the_same_number_everywhere(tmp_path: Path) -> None:
    source = quantized(tmp_path / "q", Options("fp8_e4m3", layout="ct"))
    kinds = {"F32": np.float32, "BF16": np.uint16}
    tensors = {
        name: (dtype, np.frombuffer(data, kinds.get(dtype, np.uint8)).reshape(shape))
        for name, (dtype, shape, data) in raw(source).items()
    }
    modules = [name.removesuffix(".weight_scale") for name in tensors if name.endswith(".weight_scale")]
    tensors |= {f"{module}.input_scale": ("F32", np.full(1, 7.3, np.float32)) for module in modules}
    static = write_model(tmp_path / "static", tensors, json.loads((source / "config.json").read_text()))
    converted(static, tmp_path / "m", "modelopt")
    assert raw(tmp_path / "m")["model.layers.0.mlp.down_proj.input_scale"] == ("F32", [], np.float32(7.3).tobytes())
    settings = json.loads((tmp_path / "m" / "config.json").read_text())["quantization_config"]
    assert settings["quant_algo"] == "FP8"
    converted(tmp_path / "m", tmp_path / "back", "ct")
    assert raw(tmp_path / "back").keys() == raw(static).keys()
    inputs = {name: each for name, each in raw(tmp_path / "back").items() if name.endswith("input_scale")}
    assert inputs == {name: each for name, each in raw(static).items() if name.endswith("input_scale")}
    group = json.loads((tmp_path / "back" / "config.json").read_text())["quantization_config"]["config_groups"]
    assert group["group_0"]["input_activations"]["dynamic"] is False


def test_scales_of_inputs_that_loaders_do_not_take_are_left_out_and_accounted_for(tmp_path: Path) -> None:
    source = quantized(tmp_path / "q", Options("nvfp4", layout="modelopt"))
    with_inputs(source, 0.25)
    result = converted(source, tmp_path / "t", "torchao")
    assert (
        "torchao stores no scales of the inputs of nvfp4 layers, and its loaders need none: 7 are left out "
        "('model.layers.0.self_attn.q_proj.input_scale', …)."
    ) in result.conversion.arrangement.notes
    (part,) = result.accounting.parts
    assert (part.what, part.tensors, part.nbytes) == ("activation scales", 7, 28)


def test_scales_of_inputs_of_some_layers_only_are_refused(tmp_path: Path) -> None:
    source = quantized(tmp_path / "q", Options("nvfp4", layout="modelopt"))
    with_inputs(source, 0.25, without="down_proj")
    (found,) = refusals(source, "ct")
    assert found == (
        "model.layers.0.mlp.down_proj.weight: loaders of the layout compressed-tensors take a stored scale of the "
        "inputs of each nvfp4 layer, and the source has none. Use another --layout."
    )


def test_the_record_says_what_is_known_of_the_rules(tmp_path: Path) -> None:
    first = quantized(tmp_path / "q", Options("mxfp4", Rules(scale_rounding="floor"), layout="ct"))
    chain(first, tmp_path, "modelopt", "torchao")
    record = read_record(tmp_path / "1-torchao")
    assert record is not None
    assert (record.content["schema"], record.content["converted_from"]) == ("mxcli.converted/1", "modelopt")
    assert record.content["origin"]["options"]["scale_rounding"] == "floor"
    assert record.tensors[DOWN]["scale_rounding"] == "floor"
    config = json.loads((tmp_path / "1-torchao" / "config.json").read_text())["quantization_config"]
    assert config["quant_type"]["default"]["_data"]["scaling_mode"]["_data"] == "FLOOR"
    (first / "mxcli.json").unlink()
    converted(first, tmp_path / "unknown", "modelopt")
    record = read_record(tmp_path / "unknown")
    assert record is not None
    assert record.content["origin"] is None
    stated = record.tensors[DOWN]
    assert (stated["decision"], stated["format"], stated["scale_rounding"]) == ("quantized", "mxfp4_e2m1", None)
    assert record.tensors["lm_head.weight"]["decision"] == "kept"


def test_codes_are_verified_against_what_they_were_made_of(tmp_path: Path) -> None:
    first = quantized(tmp_path / "q", Options("mxfp4", layout="ct"))
    converted(first, tmp_path / "m", "modelopt")
    result = verified(tmp_path / "m", tmp_path / "q-plain")
    assert result.is_sound
    assert all(each.provenance is not None and each.provenance.exact for each in result.weights)
    other = write_model(tmp_path / "other", with_amax(llama(2), 7.0), LLAMA)
    assert found(verified(tmp_path / "m", other)).keys() >= {"other_source"}
    with pytest.raises(UsageError, match=r"is quantized itself, and the codes of .* were carried over"):
        verified(tmp_path / "m", first)


def test_shards_and_kept_modules_are_those_of_the_source(tmp_path: Path) -> None:
    write_model(tmp_path / "m", llama(2), LLAMA)
    checkpoint = open_checkpoint(tmp_path / "m")
    plan = make_plan(checkpoint, Options("mxfp8", layout="ct"))
    quantize_checkpoint(checkpoint, plan, tmp_path / "q", backend=Cpu(), max_shard_bytes=60_000)
    last = chain(tmp_path / "q", tmp_path, "mlx", "ct")
    ours = {name: each for name, each in tree(last).items() if name != "mxcli.json"}
    assert ours == {name: each for name, each in tree(tmp_path / "q").items() if name != "mxcli.json"}
    assert len(list(last.glob("*.safetensors"))) > 1
    converted(tmp_path / "q", tmp_path / "one", "modelopt", max_shard_bytes=10_000_000)
    assert len(list((tmp_path / "one").glob("*.safetensors"))) == 1
    producer = json.loads((tmp_path / "one" / "hf_quant_config.json").read_text())
    assert producer["quantization"]["exclude_modules"] == ["lm_head"]


def test_an_engine_that_does_not_load_it_refuses_it(tmp_path: Path) -> None:
    source = quantized(tmp_path / "q", Options("mxfp8", layout="ct"))
    (found,) = refusals(source, "modelopt", engines=("transformers",))
    assert found.startswith("transformers 5.24.0")


def test_a_run_cut_short_ends_with_the_same_bytes(tmp_path: Path) -> None:
    source = quantized(tmp_path / "q", Options("nvfp4", layout="ct"))
    converted(source, tmp_path / "whole", "modelopt")
    checkpoint = open_checkpoint(source)
    conversion = plan_conversion(checkpoint, find_layout("modelopt"))
    calls = iter(range(1000))
    cut = convert_checkpoint(
        checkpoint, conversion, tmp_path / "cut", options=WriteOptions(stop=lambda: next(calls) > 5)
    )
    assert (cut.outcome.complete, cut.outcome.has_progress) == (False, True)
    again = convert_checkpoint(checkpoint, conversion, tmp_path / "cut", options=WriteOptions(resume=True))
    assert again.outcome.kept == cut.outcome.done > 0
    whole, resumed = tree(tmp_path / "whole"), tree(tmp_path / "cut")
    assert {name for name in whole if whole[name] != resumed[name]} <= {"mxcli.json"}
    once_more = convert_checkpoint(checkpoint, conversion, tmp_path / "cut", options=WriteOptions(resume=True))
    assert once_more.outcome.was_complete


@pytest.mark.parametrize("between", ["mxcli", "gpt-oss"])
def test_stacks_of_gpt_oss_return_every_byte(tmp_path: Path, between: str) -> None:
    last = chain(DATA / "gptoss-mxfp4", tmp_path, between, "gpt-oss")
    assert raw(last) == raw(DATA / "gptoss-mxfp4")


@pytest.mark.parametrize("layout", ["fp8", "comfy"])
def test_codes_that_other_layouts_do_not_have_are_refused(layout: str) -> None:
    (found,) = refusals(DATA / "gptoss-mxfp4", layout)
    assert found.startswith("model.layers.0.mlp.experts.")
    assert f"the layout {layout} has no mxfp4_e2m1; it holds " in found
