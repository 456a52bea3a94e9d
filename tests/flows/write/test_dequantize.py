from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from clean_outputs import assert_clean
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_models import LLAMA, bf16, floats, llama, noise, read_raw, tree, write_model

from mxcli.backends import cpu
from mxcli.backends.cpu import Cpu
from mxcli.errors import InputError, RefusedError, UsageError
from mxcli.files.checkpoint import open_checkpoint
from mxcli.files.layouts import LAYOUTS, Weight
from mxcli.flows.plan.overrides import Override
from mxcli.flows.plan.plan import Options, make_plan
from mxcli.flows.write.dequantize import dequantize_checkpoint
from mxcli.flows.write.quantize import Written, quantize_checkpoint
from mxcli.flows.write.restore import open_floats
from mxcli.numerics.dialects import DIALECTS
from mxcli.numerics.formats import FORMATS
from mxcli.numerics.scheme import Rules, resolve


def quantized(source: Path, output: Path, options: Options) -> Written:
    checkpoint = open_checkpoint(source)
    written = quantize_checkpoint(checkpoint, make_plan(checkpoint, options), output, backend=Cpu())
    assert_clean(output)
    return written


def restored(source: Path, output: Path, **more: Any) -> dict[str, tuple[str, list[int], bytes]]:
    dequantize_checkpoint(open_checkpoint(source), output, backend=Cpu(), **more)
    assert_clean(output)
    return read_raw(output / "model.safetensors")


def expected(array: np.ndarray, dtype: str, options: Options, out: str) -> bytes:
    """What the backend alone makes of a tensor."""
    recipe = resolve(options.format, options.rules)
    return cpu.dequantize(cpu.quantize(array, dtype, recipe), out).tobytes()


def holding(*formats: str) -> list[str]:
    """The layouts that hold matrices of modules in all of the formats."""
    weights = [Weight("a.weight", (128, 128), resolve(format), "BF16") for format in formats]
    return [name for name, row in LAYOUTS.items() if all(row.refusal(weight) is None for weight in weights)]


SPELLED = ("e3m2:e8m0:1x16", "int4:fp32:channel", "e3m4:e5m2:1x16", "e2m1:e4m3:8x16:fp32")


@pytest.mark.parametrize("format", [*FORMATS, *SPELLED])
def test_our_own_layout_brings_every_format_back_bit_for_bit(tmp_path: Path, format: str) -> None:
    tensors = {
        "a.weight": noise(128, 256),
        "f.weight": ("F32", np.random.default_rng(1).standard_normal((16, 128)).astype(np.float32)),
        "experts.w": noise(3, 16, 128, seed=2),
        "norm.weight": noise(256, seed=3),
    }
    options = Options(format, layout="mxcli")
    quantized(write_model(tmp_path / "m", tensors), tmp_path / "q", options)
    raw = restored(tmp_path / "q", tmp_path / "d")
    assert raw.pop("norm.weight") == ("BF16", [256], tensors.pop("norm.weight")[1].tobytes())
    assert raw == {
        name: (dtype, list(array.shape), expected(array, dtype, options, dtype))
        for name, (dtype, array) in tensors.items()
    }
    wide = restored(tmp_path / "q", tmp_path / "wide", dtype="F32")
    assert wide["a.weight"] == ("F32", [128, 256], expected(tensors["a.weight"][1], "BF16", options, "F32"))


@pytest.mark.parametrize("dialect", [name for name, row in DIALECTS.items() if row.choice("narrow", "e2m1")])
def test_our_own_layout_keeps_the_order_of_operations_of_every_dialect(tmp_path: Path, dialect: str) -> None:
    tensors = {"a.weight": noise(64, 256, scale=0.003)}
    options = Options("nvfp4", Rules(dialect=dialect, nonfinite="error"), layout="mxcli")
    quantized(write_model(tmp_path / "m", tensors), tmp_path / "q", options)
    raw = restored(tmp_path / "q", tmp_path / "d", dtype="F32")
    assert raw["a.weight"][2] == expected(tensors["a.weight"][1], "BF16", options, "F32")


@pytest.mark.parametrize("columns", [100, 101, 102, 103])
@pytest.mark.parametrize("format", ["mxfp4", "mxfp6", "mxint8", "nvfp4"])
def test_padding_is_not_stored(tmp_path: Path, format: str, columns: int) -> None:
    tensors = {"a.weight": noise(3, columns)}
    options = Options(format, on_indivisible="pad")
    quantized(write_model(tmp_path / "m", tensors), tmp_path / "q", options)
    raw = restored(tmp_path / "q", tmp_path / "d")
    assert raw["a.weight"] == ("BF16", [3, columns], expected(tensors["a.weight"][1], "BF16", options, "BF16"))


def test_layers_stored_in_out_come_back_as_they_were(tmp_path: Path) -> None:
    tensors = {"h.0.attn.c_attn.weight": noise(32, 96), "h.0.mlp.c_fc.weight": noise(32, 100)}
    source = write_model(tmp_path / "m", tensors, {"model_type": "gpt2"})
    options = Options("mxfp4", layout="mxcli")
    quantized(source, tmp_path / "q", options)
    assert read_raw(tmp_path / "q" / "model.safetensors")["h.0.attn.c_attn.weight_packed"][1] == [96, 16]
    raw = restored(tmp_path / "q", tmp_path / "d", dtype="F32")
    transposed = np.ascontiguousarray(tensors["h.0.attn.c_attn.weight"][1].T)
    values = np.frombuffer(expected(transposed, "BF16", options, "F32"), np.float32).reshape(96, 32)
    np.testing.assert_array_equal(floats(raw["h.0.attn.c_attn.weight"]), values.T)


@pytest.mark.parametrize("format", LAYOUTS["compressed-tensors"].formats)
def test_compressed_tensors_comes_back_as_its_readers_decode_it(tmp_path: Path, format: str) -> None:
    library = pytest.importorskip("compressed_tensors.compressors.base")
    torch = pytest.importorskip("torch")
    from compressed_tensors.quantization import QuantizationScheme
    from safetensors.torch import load_file

    quantized(write_model(tmp_path / "m", llama(), LLAMA), tmp_path / "q", Options(format))
    raw = restored(tmp_path / "q", tmp_path / "d")
    group = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]["config_groups"]["group_0"]
    compressor = library.BaseCompressor.get_value_from_registry(group["format"])
    module = "model.layers.0.mlp.up_proj."
    state = {
        name.removeprefix(module): tensor
        for name, tensor in load_file(tmp_path / "q" / "model.safetensors").items()
        if name.startswith(module)
    }
    weight = compressor.decompress(state, QuantizationScheme(**group))["weight"]
    assert raw[module + "weight"][2] == weight.to(torch.bfloat16).view(torch.int16).numpy().tobytes()


# The tensor scale is a divisor in compressed-tensors and a factor in ModelOpt; mistaken, it is off by its square.
@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_either_convention_of_the_tensor_scale_gives_the_same_tensor(tmp_path: Path, dtype: str) -> None:
    tensors = {"a.weight": ("F32", np.linspace(-0.7, 0.7528, 64, dtype=np.float32).reshape(4, 16))}
    source = write_model(tmp_path / "m", tensors)
    raws = {}
    for layout in ("compressed-tensors", "mxcli", "modelopt"):
        quantized(source, tmp_path / layout, Options("nvfp4", Rules(dialect="ct", nonfinite="error"), layout=layout))
        raws[layout] = restored(tmp_path / layout, tmp_path / f"{layout} restored", dtype=dtype)
    assert raws["compressed-tensors"] == raws["mxcli"]
    if dtype == "BF16":  # binary32 may differ in the last bit: the factor is not the exact inverse of the divisor
        assert raws["modelopt"] == raws["mxcli"]


def test_names_configuration_and_side_files_are_those_of_the_source(tmp_path: Path) -> None:
    source = write_model(tmp_path / "m", llama(), LLAMA, {"tokenizer.json": "{}"})
    for layout in holding("mxfp4"):
        quantized(source, tmp_path / layout, Options("mxfp4", layout=layout))
        folder = tmp_path / f"{layout} restored"
        raw = restored(tmp_path / layout, folder)
        before = read_raw(source / "model.safetensors")
        assert {name: each[:2] for name, each in raw.items()} == {name: each[:2] for name, each in before.items()}
        assert json.loads((folder / "config.json").read_text()) == LLAMA
        assert set(tree(folder)) == {"model.safetensors", "config.json", "tokenizer.json", "mxcli.json"}


def test_a_source_without_configuration_gets_none_back(tmp_path: Path) -> None:
    quantized(write_model(tmp_path / "m", {"a.weight": noise(4, 32)}), tmp_path / "q", Options("mxint8"))
    assert json.loads((tmp_path / "q" / "config.json").read_text()).keys() == {"quantization_config"}
    restored(tmp_path / "q", tmp_path / "d")
    assert set(tree(tmp_path / "d")) == {"model.safetensors", "mxcli.json"}


# A weight in one shard, its scale in another.
def test_codes_and_scales_may_be_in_different_shards(tmp_path: Path) -> None:
    quantized(write_model(tmp_path / "m", {"a.weight": noise(4, 64)}), tmp_path / "q", Options("nvfp4"))
    together = restored(tmp_path / "q", tmp_path / "d")
    parts = read_raw(tmp_path / "q" / "model.safetensors")
    arrays = {
        name: (dtype, np.frombuffer(data, np.uint8).reshape(shape))
        for name, (dtype, shape, data) in parts.items()
        if dtype != "F32"
    }
    arrays |= {
        name: (dtype, np.frombuffer(data, np.float32)) for name, (dtype, _, data) in parts.items() if dtype == "F32"
    }
    shards = {f"model-0000{n}-of-00003.safetensors": {name: arrays[name]} for n, name in enumerate(arrays, 1)}
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    split = open_checkpoint(write_model(tmp_path / "split", shards, config))
    dequantize_checkpoint(split, tmp_path / "again", backend=Cpu())
    found = [read_raw(path) for path in (tmp_path / "again").glob("*.safetensors")]
    assert found == [together]


def test_mixed_formats_come_back(tmp_path: Path) -> None:
    overrides = (Override("*.down_proj.weight", "fp8_e4m3_channel"), Override("*.self_attn.*", "mxfp8"))
    for layout in holding("mxfp4", "fp8_e4m3_channel", "mxfp8"):
        options = Options("mxfp4", Rules(scale_rounding=None, nonfinite="error"), overrides=overrides, layout=layout)
        written = quantized(write_model(tmp_path / "m", llama(), LLAMA), tmp_path / layout, options)
        raw = restored(tmp_path / layout, tmp_path / f"{layout} restored")
        for step, stats in written.layers:
            if step.scheme is not None and stats is not None:
                array = llama()[step.tensor.name][1]
                values = cpu.dequantize(cpu.quantize(array, "BF16", step.scheme), "BF16").tobytes()
                assert raw[step.tensor.name] == ("BF16", list(step.tensor.shape), values)


def test_weights_come_back_in_the_dtype_they_had(tmp_path: Path) -> None:
    tensors = {"a.weight": ("F32", np.ones((32, 32), np.float32)), "b.weight": noise(32, 32)}
    for layout in holding("mxfp8"):
        quantized(write_model(tmp_path / "m", tensors), tmp_path / layout, Options("mxfp8", layout=layout))
        raw = restored(tmp_path / layout, tmp_path / f"{layout} restored")
        assert [raw["a.weight"][0], raw["b.weight"][0]] == ["F32", "BF16"]


@pytest.mark.parametrize(("dtype", "storage"), [("F16", np.float16), ("F64", np.float64)])
def test_weights_come_back_in_the_type_they_had(tmp_path: Path, dtype: str, storage: type) -> None:
    tensors = {"a.weight": (dtype, np.ones((4, 32), storage))}
    quantized(write_model(tmp_path / "m", tensors), tmp_path / "q", Options("mxint8"))
    raw = restored(tmp_path / "q", tmp_path / "d")
    assert raw["a.weight"] == (dtype, [4, 32], np.ones((4, 32), storage).tobytes())


def test_what_is_not_quantized_or_not_known_is_refused(tmp_path: Path) -> None:
    plain = write_model(tmp_path / "plain", {"a.weight": bf16(np.ones((4, 32)))})
    with pytest.raises(RefusedError, match="not quantized; there is nothing to dequantize"):
        restored(plain, tmp_path / "d")
    with pytest.raises(UsageError, match="BF16, F16, F32, F64 can be written"):
        restored(plain, tmp_path / "d", dtype="I8")
    codes = {
        "a.weight": ("U8", np.zeros((128, 128), np.uint8)),
        "a.weight.absmax": ("F32", np.ones((256,), np.float32)),
    }
    with pytest.raises(RefusedError, match=r"quantized by bitsandbytes; only compressed-tensors, .*mxcli are read"):
        restored(write_model(tmp_path / "int8", codes), tmp_path / "d")
    assert not (tmp_path / "d").exists()


def test_a_missing_scale_is_an_input_error_before_anything_is_written(tmp_path: Path) -> None:
    quantized(write_model(tmp_path / "m", {"a.weight": noise(4, 32)}), tmp_path / "q", Options("nvfp4"))
    raw = read_raw(tmp_path / "q" / "model.safetensors")
    kept = {
        name: (dtype, np.frombuffer(data, np.uint8).reshape(shape))
        for name, (dtype, shape, data) in raw.items()
        if dtype != "F32"
    }
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    with pytest.raises(InputError, match=r"a\.weight_global_scale is missing"):
        restored(write_model(tmp_path / "cut", kept, config), tmp_path / "d")
    assert not (tmp_path / "d").exists()


def test_weights_that_are_not_finite_are_counted(tmp_path: Path) -> None:
    source = write_model(tmp_path / "m", {f"{name}.weight": noise(32, 64) for name in "abc"}, LLAMA)
    quantized(source, tmp_path / "q", Options("nvfp4"))
    path = tmp_path / "q" / "model.safetensors"
    tensors = load_file(path)
    for name in "ac":
        tensors[f"{name}.weight_scale"].view(torch.uint8)[0, 0] = 0x7F
    save_file(tensors, path)
    note = (
        "2 of 3 weights hold NaN or infinities, 32 values in all ('a.weight', …): `mxcli verify` finds the scales or "
        "codes responsible."
    )
    for dtype in ("BF16", "F16", "F32", "F64"):
        out = tmp_path / dtype
        found = dequantize_checkpoint(open_checkpoint(tmp_path / "q"), out, backend=Cpu(), dtype=dtype)
        assert found.notes == (note,)
        assert json.loads((out / "mxcli.json").read_text())["notes"] == [note]


def test_requantizing_what_came_back_changes_nothing(tmp_path: Path) -> None:
    for format in ("mxfp8", "mxfp6", "mxfp4"):
        options = Options(format)
        quantized(write_model(tmp_path / format / "m", llama(), LLAMA), tmp_path / format / "q", options)
        restored(tmp_path / format / "q", tmp_path / format / "d")
        quantized(tmp_path / format / "d", tmp_path / format / "again", options)
        once, twice = (read_raw(tmp_path / format / name / "model.safetensors") for name in ("q", "again"))
        assert restored(tmp_path / format / "again", tmp_path / format / "e") == read_raw(
            tmp_path / format / "d" / "model.safetensors"
        )
        assert once.keys() == twice.keys()


def test_a_quantized_source_is_dequantized_on_request(tmp_path: Path) -> None:
    source = write_model(tmp_path / "m", llama(), LLAMA)
    quantized(source, tmp_path / "q", Options("mxfp8"))
    restored(tmp_path / "q", tmp_path / "d")
    with pytest.raises(RefusedError, match=r"already quantized \(compressed-tensors\).* Use --requantize"):
        make_plan(open_floats(tmp_path / "q"), Options("nvfp4"))
    checkpoint = open_floats(tmp_path / "q", requantize=True)
    plan = make_plan(checkpoint, Options("nvfp4"))
    assert any("errors are measured against its dequantized values" in note for note in plan.notes)
    quantize_checkpoint(checkpoint, plan, tmp_path / "again", backend=Cpu())
    quantized(tmp_path / "d", tmp_path / "through floats", Options("nvfp4"))
    file = "model.safetensors"
    assert read_raw(tmp_path / "again" / file) == read_raw(tmp_path / "through floats" / file)
    assert json.loads((tmp_path / "again" / "mxcli.json").read_text())["requantized_from"] == "compressed-tensors"
    assert open_floats(source, requantize=True).restored_from is None


@pytest.mark.parametrize(
    ("layout", "format", "lost", "words"),
    [
        ("compressed-tensors", "mxfp8", "weight_scale", "holds codes, but its scales are missing"),
        ("modelopt", "nvfp4", "weight_scale", "holds codes, but its scales are missing"),
        ("mxcli", "mxfp8", "weight_scale", "holds codes, but its scales are missing"),
        (
            "mxcli",
            "nvfp4",
            "weight_packed",
            "is part of a quantized weight, but its other parts are missing",
        ),
        ("torchao", "mxfp8", "_weight_qdata", "missing"),
        ("fp8", "fp8_e4m3_128x128", "weight_scale_inv", "missing"),
    ],
)
def test_a_weight_that_lost_a_part_is_never_taken_for_numbers(
    tmp_path: Path, layout: str, format: str, lost: str, words: str
) -> None:
    """Codes without their scales came out as floats, thousands of times too large, after exit 0."""
    source = write_model(tmp_path / "m", {"a.weight": noise(128, 128), "b.weight": noise(128, 128)})
    quantized(source, tmp_path / "q", Options(format, layout=layout))
    file = tmp_path / "q" / "model.safetensors"
    with safe_open(file, "pt") as held:
        metadata = held.metadata()
    tensors = {name: tensor for name, tensor in load_file(file).items() if name != f"a.{lost}"}
    save_file(tensors, file, metadata)
    with pytest.raises(InputError, match=words):
        restored(tmp_path / "q", tmp_path / "d")
    with pytest.raises(InputError, match=words):
        open_floats(tmp_path / "q", requantize=True)
    assert not (tmp_path / "d").exists()
