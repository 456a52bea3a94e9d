from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from planted import SHARD, Tensors, changed, found, quantized, source, untouched, values, verified
from tiny_models import LLAMA, llama, noise, read_header, read_raw, write_model

from mxcli.backends.cpu import Cpu
from mxcli.errors import InputError, RefusedError
from mxcli.files.checkpoint import open_checkpoint
from mxcli.flows.plan.plan import Options
from mxcli.flows.verify.sides import side_of
from mxcli.flows.write.dequantize import dequantize_checkpoint
from mxcli.flows.write.restore import open_floats

ROWS = {"q_proj": 64, "k_proj": 32, "v_proj": 32, "o_proj": 64, "gate_proj": 128, "up_proj": 128, "down_proj": 64}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes a tiny Llama in a format and layout, without its record, once."""
    known: dict[tuple[str, str], Path] = {}

    def make(format: str, layout: str) -> Path:
        if (format, layout) not in known:
            folder = tmp_path_factory.mktemp(layout)
            made = quantized(source(folder / "m"), folder / "q", Options(format, layout=layout))
            (made / "mxcli.json").unlink()
            known[format, layout] = made
        return known[format, layout]

    return make


def restored(folder: Path, output: Path) -> Mapping[str, Any]:
    """The tensors of a checkpoint that is dequantized."""
    dequantize_checkpoint(open_checkpoint(folder), output, dtype="F32", backend=Cpu())
    return {
        name: np.frombuffer(data, np.float32).reshape(shape)
        for name, (dtype, shape, data) in read_raw(output / SHARD).items()
        if dtype == "F32"
    }


def in_halves(tensors: Tensors) -> None:
    """Stores the scales of weights as F16, as producers do for F16 models."""
    for name, (dtype, array) in tensors.items():
        if "weight_scale" in name and dtype in ("F32", "BF16"):
            wide = array if dtype == "F32" else (array.astype(np.uint32) << 16).view(np.float32)
            tensors[name] = ("F16", wide.astype(np.float16))


@pytest.mark.parametrize(
    ("format", "layout", "ending"),
    [
        ("fp8_e4m3", "compressed-tensors", "weight_scale"),
        ("fp8_e4m3_channel", "compressed-tensors", "weight_scale"),
        ("fp8_e4m3_128x128", "compressed-tensors", "weight_scale"),
        ("fp8_e4m3", "quark", "weight_scale"),
        ("fp8_e4m3_channel", "quark", "weight_scale"),
        ("fp8_e4m3_128x128", "fp8", "weight_scale_inv"),
    ],
)
def test_fp8_scales_of_f16_models_are_read(
    tmp_path: Path, made: Callable[..., Path], format: str, layout: str, ending: str
) -> None:
    folder = changed(made(format, layout), tmp_path / "q", in_halves)
    # No engine quantizes 64 inputs in groups of 128; transformers dequantizes those of the layout fp8.
    by_blocks = {"compressed-tensors": "no_loader", "fp8": "some_loader"}.get(layout, "")
    assert set(found(verified(folder))) == ({by_blocks} if format == "fp8_e4m3_128x128" else set())
    raw = read_raw(folder / SHARD)
    at = "model.layers.0.mlp.up_proj"
    scales = np.frombuffer(raw[f"{at}.{ending}"][2], np.float16).astype(np.float32).reshape(-1, 1)
    assert raw[f"{at}.{ending}"][0] == "F16"
    codes = np.frombuffer(raw[f"{at}.weight"][2], np.uint8).reshape(128, 64)
    zero = (codes & 127) == 0x38  # 1.0 in E4M3
    expected = np.where(codes & 128, -1.0, 1.0) * np.broadcast_to(scales, (128, 64))
    assert np.array_equal(restored(folder, tmp_path / "d")[f"{at}.weight"][zero], expected[zero].astype(np.float32))


@pytest.mark.parametrize("column", [False, True])
def test_quark_s_fp8_with_a_scale_per_row_is_read(tmp_path: Path, made: Callable[..., Path], column: bool) -> None:
    def shaped(tensors: Tensors) -> None:
        for name, (dtype, array) in tensors.items():
            if name.endswith("weight_scale") and column:
                tensors[name] = (dtype, array.reshape(-1, 1))

    original = made("fp8_e4m3_channel", "quark")
    folder = changed(original, tmp_path / "q", shaped)
    result = verified(folder)
    assert found(result) == {}
    assert {weight.format for weight in result.weights} == {"fp8_e4m3_channel"}
    one, other = restored(original, tmp_path / "a"), restored(folder, tmp_path / "b")
    assert all(np.array_equal(one[name], other[name]) for name in one)
    assert read_header(folder / SHARD)["model.layers.0.mlp.up_proj.weight_scale"]["shape"] == [128, 1][: 1 + column]


def test_quark_s_fp8_with_a_scale_per_column_is_not_read(tmp_path: Path, made: Callable[..., Path]) -> None:
    folder = changed(made("fp8_e4m3_channel", "quark"), tmp_path / "q", untouched)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["global_quant_config"]["weight"]["ch_axis"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    result = verified(folder)
    assert (found(result), result.coverage.is_empty) == ({}, True)


@pytest.mark.parametrize("squeezed", [("k_proj",), ("q_proj", "up_proj"), tuple(ROWS)])
def test_the_scale_of_one_block_may_have_no_dimensions(
    tmp_path: Path, made: Callable[..., Path], squeezed: tuple[str, ...]
) -> None:
    def without_dimensions(tensors: Tensors) -> None:
        for part in squeezed:
            name = next(name for name in tensors if name.endswith(f"{part}.weight_scale"))
            tensors[name] = ("F32", tensors[name][1].reshape(()))

    original = made("fp8_e4m3_128x128", "modelopt")
    folder = changed(original, tmp_path / "q", without_dimensions)
    result = verified(folder)
    assert found(result) == found(verified(original))
    assert {weight.format for weight in result.weights} == {"fp8_e4m3_128x128"}
    one, other = restored(original, tmp_path / "a"), restored(folder, tmp_path / "b")
    assert all(np.array_equal(one[name], other[name]) for name in one)


def described(type: str, *parts: str) -> str:
    return json.dumps({"_type": type, "_data": {"block_size": [1, 64]}, "_tensor_data_names": list(parts)})


@pytest.mark.parametrize("type", ["Int8Tensor", "IntxUnpackedToInt8Tensor", "Int4Tensor"])
def test_other_tensors_of_torchao_are_not_faults_of_the_file(tmp_path: Path, type: str) -> None:
    tensors: dict[str, Any] = {"lm_head.weight": noise(32, 64)}
    header = {"format": "pt"}
    for part, rows in ROWS.items():
        name = f"model.layers.0.x.{part}"
        tensors[f"{name}._weight_qdata"] = ("I8", np.ones((rows, 64), np.int8))
        tensors[f"{name}._weight_scale"] = ("F32", np.ones((rows, 1), np.float32))
        tensors[f"{name}._weight_zero_point"] = ("I8", np.zeros((rows, 1), np.int8))
        header[f"{name}.weight"] = described(type, "qdata", "scale", "zero_point")
    config = {**LLAMA, "quantization_config": {"quant_method": "torchao", "quant_type": {}}}
    folder = write_model(tmp_path / "q", tensors, config, metadata=header)
    result = verified(folder)
    assert result.counts == {}
    assert (result.is_sound, result.coverage.unchecked) == (False, 7)
    assert result.coverage.unread is not None
    assert f"torchao's {type}, which mxcli does not read" in result.coverage.unread
    with pytest.raises(InputError, match=type):
        dequantize_checkpoint(open_checkpoint(folder), tmp_path / "d", backend=Cpu())


@pytest.mark.parametrize(
    ("algorithm", "codes", "scales"),
    [
        ("W8A8_SQ_PER_CHANNEL", ("I8", 1, 64), ("F32", 1)),
        ("W4A16_AWQ", ("U8", 2, 64), ("F32", 1)),
        ("W5A16_NEW", ("U8", 2, 64), ("F32", 1)),
        ("W4A8_NVFP4_FP8", ("U8", 1, 32), ("F8_E4M3", 2)),
    ],
)
def test_other_algorithms_of_modelopt_are_not_faults_of_the_file(
    tmp_path: Path, algorithm: str, codes: tuple[str, int, int], scales: tuple[str, int]
) -> None:
    dtype, packed, columns = codes
    tensors: dict[str, Any] = {"lm_head.weight": noise(32, 64)}
    for part, rows in ROWS.items():
        name = f"model.layers.0.x.{part}.weight"
        tensors[name] = (dtype, np.ones((rows // packed, columns), np.uint8))
        shape = (rows, scales[1]) if scales[1] > 1 else (rows,)
        tensors[f"{name}_scale"] = (scales[0], np.ones(shape, np.float32 if scales[0] == "F32" else np.uint8))
        if algorithm == "W4A8_NVFP4_FP8":
            tensors[f"{name}_scale_2"] = ("F32", np.ones((), np.float32))
    settings = {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"]}
    result = verified(write_model(tmp_path / "q", tensors, {**LLAMA, "quantization_config": settings}))
    assert result.counts == {}
    assert (result.coverage.is_empty, result.coverage.unchecked) == (True, 7)
    assert result.coverage.unread is not None
    assert f"quant_algo is {algorithm}, which mxcli does not read" in result.coverage.unread


@pytest.mark.parametrize("stated", ["sparse-24-bitmask", "sparse-bitmask"])
def test_other_compressions_of_compressed_tensors_are_not_faults_of_the_file(
    tmp_path: Path, made: Callable[..., Path], stated: str
) -> None:
    def sparse(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith("proj.weight")]:
            tensors[f"{name}_bitmask"] = tensors.pop(name)

    original = made("fp8_e4m3_channel", "compressed-tensors")
    folder = changed(original, tmp_path / "q", sparse, sparsity_config={"format": stated})
    result = verified(folder)
    assert (found(result), result.coverage.is_empty) == ({}, True)
    assert result.coverage.unread == f"config.json: its sparsity_config states {stated}, which mxcli does not read."
    dense = changed(original, tmp_path / "d", untouched, sparsity_config={"format": "dense"})
    assert verified(dense).coverage.by_values == 7


def test_an_order_of_columns_is_not_dropped(tmp_path: Path, made: Callable[..., Path]) -> None:
    def ordered(tensors: Tensors) -> None:
        tensors["model.layers.0.mlp.down_proj.weight_g_idx"] = ("I32", np.arange(128, dtype=np.int32))

    folder = changed(made("nvfp4", "compressed-tensors"), tmp_path / "q", ordered)
    result = verified(folder)
    assert (found(result), result.coverage.by_values, result.coverage.unchecked) == ({}, 6, 1)
    with pytest.raises(InputError, match=r"order of columns in .*_g_idx"):
        dequantize_checkpoint(open_checkpoint(folder), tmp_path / "d", backend=Cpu())


def test_what_is_read_is_checked_beside_what_is_not(tmp_path: Path, made: Callable[..., Path]) -> None:
    name = "model.layers.0.mlp.down_proj"

    def mixed(tensors: Tensors) -> None:
        tensors[f"{name}.weight"] = ("U8", np.ones((32, 128), np.uint8))
        tensors[f"{name}.weight_scale"] = ("F32", np.ones((64, 1), np.float32))

    folder = changed(made("mxfp8", "modelopt"), tmp_path / "q", mixed)
    config = json.loads((folder / "config.json").read_text())
    settings = config["quantization_config"]
    modules = [f"model.layers.0.{block}.{part}" for block in ("self_attn", "mlp") for part in ROWS]
    layers = {module: {"quant_algo": "MXFP8"} for module in modules} | {name: {"quant_algo": "W4A16_AWQ"}}
    settings |= {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))
    result = verified(folder)
    assert found(result) == {}
    assert (result.coverage.by_values, result.coverage.unchecked) == (6, 1)


def test_torchao_s_tensor_scales_need_not_be_shared_for_transformers(tmp_path: Path, made: Callable[..., Path]) -> None:
    def doubled(tensors: Tensors) -> None:
        tensors["model.layers.0.self_attn.q_proj._weight_per_tensor_scale"][1][...] *= 2

    folder = changed(made("nvfp4", "torchao"), tmp_path / "q", doubled)
    header = read_header(made("nvfp4", "torchao") / SHARD)["__metadata__"]
    write_model(tmp_path / "q", _tensors(folder), json.loads((folder / "config.json").read_text()), metadata=header)
    result = verified(folder)
    assert list(found(result)) == ["some_fused_tensor_scale"]
    (check,) = (each for each in result.results if each.findings)
    assert (check.severity, result.is_sound) == ("warning", True)
    assert "vLLM" in check.findings[0].need
    assert "transformers keeps the layers apart" in check.findings[0].need


def _tensors(folder: Path) -> Tensors:
    kept: Tensors = {}
    changed(folder, folder.parent / "unused", kept.update)
    return kept


ONLINE = {
    "u": {"type": "random-hadamard", "apply": [{"location": "weight_output"}, {"location": "output"}]},
    "v": {"type": "random-hadamard", "apply": [{"location": "input"}, {"location": "weight_input"}]},
}
OFFLINE = {
    "R1": {"type": "hadamard", "apply": [{"location": "weight_output"}, {"location": "weight_input"}]},
    "R2": {"type": "hadamard", "apply": [{"location": "weight_output"}, {"location": "weight_input"}]},
}


@pytest.fixture
def rotated(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """NVFP4 of two layers with transforms of activations, whose matrices the first layer holds for both."""
    folder = tmp_path_factory.mktemp("quip")
    original = quantized(source(folder / "m", llama(2)), folder / "q", Options("nvfp4"))
    (original / "mxcli.json").unlink()

    def with_matrices(tensors: Tensors) -> None:
        for module in ("self_attn.q_proj.u_output", "self_attn.q_proj.v_input", "mlp.down_proj.v_input"):
            tensors[f"model.layers.0.{module}.weight"] = ("F64", np.eye(64))

    return changed(original, tmp_path / "q", with_matrices, transform_config={"config_groups": ONLINE})


def test_matrices_of_stated_transforms_are_no_layers(rotated: Path) -> None:
    result = verified(rotated)
    assert (found(result), result.coverage.by_values) == ({}, 14)
    assert any("transform_config states transforms (u, v)" in note for note in result.notes)


@pytest.mark.parametrize(
    "transforms",
    [
        {"config_groups": ONLINE},
        {"config_groups": OFFLINE | {"R3": {"type": "hadamard", "apply": [{"location": "q_attn"}]}}},
        {"config_groups": {"R4": {"type": "hadamard", "apply": [{"location": "input"}]}}},
        {"config_groups": {"R5": {"type": "hadamard"}}},
        {"groups": {}},
        ["R1"],
    ],
)
def test_weights_under_transforms_of_activations_are_not_dequantized(
    tmp_path: Path, made: Callable[..., Path], transforms: object
) -> None:
    folder = changed(made("nvfp4", "compressed-tensors"), tmp_path / "q", untouched, transform_config=transforms)
    with pytest.raises(RefusedError, match="transform_config"):
        dequantize_checkpoint(open_checkpoint(folder), tmp_path / "d", backend=Cpu())
    with pytest.raises(RefusedError, match="transform_config"):
        open_floats(folder, requantize=True)
    with pytest.raises(RefusedError, match="transform_config"):
        side_of("a", open_checkpoint(folder))
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize("transforms", [None, {}, {"config_groups": OFFLINE}])
def test_transforms_within_weights_stay_in_the_values(
    tmp_path: Path, made: Callable[..., Path], transforms: object
) -> None:
    original = made("nvfp4", "compressed-tensors")
    folder = changed(original, tmp_path / "q", untouched, transform_config=transforms)
    one, other = restored(original, tmp_path / "a"), restored(folder, tmp_path / "b")
    assert all(np.array_equal(one[name], other[name]) for name in one)
    notes = json.loads((tmp_path / "b" / "mxcli.json").read_text())["notes"]
    assert [note for note in notes if "(R1, R2)" in note] == (notes if transforms else [])


@pytest.mark.parametrize("key", ["r3", "r4", "online_r1_rotation"])
def test_rotations_of_activations_of_quark_are_not_dropped(tmp_path: Path, made: Callable[..., Path], key: str) -> None:
    algorithm = {"name": "rotation", "r1": True, "r2": True, "r3": False, "r4": False}
    original = made("mxfp4", "quark")
    assert restored(changed(original, tmp_path / "s", untouched, algo_config=[algorithm]), tmp_path / "d")
    folder = changed(original, tmp_path / "q", untouched, algo_config=[algorithm | {key: True}])
    with pytest.raises(RefusedError, match="algo_config states rotations"):
        open_floats(folder, requantize=True)


def test_experts_that_quark_leaves_plain_are_a_warning_for_vllm(tmp_path: Path, made: Callable[..., Path]) -> None:
    def with_experts(tensors: Tensors) -> None:
        tensors["model.layers.0.mlp.experts.down_proj"] = noise(4, 64, 64)
        tensors["model.layers.0.mlp.gate.weight"] = noise(4, 64)

    result = verified(changed(made("mxfp4", "quark"), tmp_path / "q", with_experts))
    assert found(result) == {"not_listed": ["model.layers.0.mlp.experts", "model.layers.0.mlp.gate"]}
    (check,) = (each for each in result.results if each.findings)
    assert (check.severity, result.is_sound) == ("warning", True)
    assert "vLLM looks for its codes" in check.findings[0].need


@pytest.mark.parametrize(
    ("format", "layout"),
    [("fp8_e4m3_128x128", "fp8"), ("mxfp8", "fp8"), ("mxfp8", "torchao"), ("nvfp4", "torchao")],
)
def test_heads_and_routers_need_no_entry_where_loaders_skip_them(
    tmp_path: Path, made: Callable[..., Path], format: str, layout: str
) -> None:
    config = json.loads((made(format, layout) / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = None
    metadata = read_header(made(format, layout) / SHARD)["__metadata__"]
    tensors = _tensors(changed(made(format, layout), tmp_path / "c", untouched))
    tensors["model.layers.0.mlp.gate.weight"] = noise(4, 64)
    folder = write_model(tmp_path / "q", tensors, config, metadata=metadata)
    assert set(found(verified(folder))) == ({"some_loader"} if format == "fp8_e4m3_128x128" else set())


def test_the_head_of_gpt_neox_may_be_listed_as_transformers_calls_it(tmp_path: Path) -> None:
    tensors = {
        "gpt_neox.embed_in.weight": noise(32, 64, seed=1),
        "embed_out.weight": noise(32, 64, seed=2),
        "gpt_neox.layers.0.attention.dense.weight": noise(64, 64, seed=3),
        "gpt_neox.final_layer_norm.weight": noise(64, seed=4),
    }
    config = {"model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"], "dtype": "bfloat16", "hidden_size": 64}
    original = quantized(source(tmp_path / "m", tensors, config), tmp_path / "o", Options("mxfp8"))
    (original / "mxcli.json").unlink()
    groups = json.loads((original / "config.json").read_text())["quantization_config"]["config_groups"]
    by_class = {name: group | {"targets": ["Linear"]} for name, group in groups.items()}
    for place, (ignored, expected) in enumerate(
        [(["embed_out"], {}), (["lm_head"], {}), (["re:lm_.*"], {}), ([], {"not_ignored": ["embed_out"]})]
    ):
        folder = changed(original, tmp_path / f"q{place}", untouched, ignore=ignored, config_groups=by_class)
        assert found(verified(folder)) == expected
    assert found(verified(changed(original, tmp_path / "named", untouched, ignore=[]))) == {}


@pytest.mark.parametrize("parts", [("q_proj",), ("k_proj", "v_proj"), tuple(ROWS)])
def test_weights_that_were_passed_through_beside_scales_are_found(
    tmp_path: Path, made: Callable[..., Path], parts: tuple[str, ...]
) -> None:
    passed: list[str] = []

    def plain(tensors: Tensors) -> None:
        for name, (_, array) in list(tensors.items()):
            if name.endswith(tuple(f"{part}.weight" for part in parts)):
                tensors[name] = noise(*array.shape)
                passed.append(name)

    folder = changed(made("fp8_e4m3_128x128", "fp8"), tmp_path / "q", plain)
    result = verified(folder)
    assert set(passed) <= set(found(result)["misfit"])
    assert all("not quantized: the scale was never computed" in each for each in values(result, "misfit")[: len(parts)])
    with pytest.raises(InputError, match="not quantized"):
        dequantize_checkpoint(open_checkpoint(folder), tmp_path / "d", backend=Cpu())


@pytest.mark.parametrize("layout", ["compressed-tensors", "mxcli"])
def test_statistics_of_the_record_are_compared_without_hashes(tmp_path: Path, layout: str) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    original = quantized(source(tmp_path / "m"), tmp_path / "o", Options("mxfp8", layout=layout))
    record = json.loads((original / "mxcli.json").read_text())
    for key in ("stored", "sha256", "headers", "source_hashes", "verified"):
        del record[key]
    record["schema"] = "mxcli.quantized/1"
    for key, check in (("amax", "its largest value is"), ("scale_exponent_histogram", "scales from 2^")):
        folder = changed(original, tmp_path / key, untouched)
        stated = json.loads(json.dumps(record))
        assert write_record(folder, stated) == {}
        statistics = stated["tensors"][name]["statistics"]
        if key == "amax":
            statistics[key] *= 3
        else:
            first, second = sorted(statistics[key])[:2]
            statistics[key][first] += 1
            statistics[key][second] -= 1
        assert list(write_record(folder, stated)) == ["recorded_statistics"]
        assert check in values(verified(folder), "recorded_statistics")[0]

    def flipped(tensors: Tensors) -> None:
        codes = next(array for each, (_, array) in tensors.items() if each.startswith(name) and array.ndim == 2)
        codes[5, 7] ^= 0b1000000

    folder = changed(original, tmp_path / "codes", flipped)
    assert write_record(folder, record) == {"recorded_statistics": [name]}


def write_record(folder: Path, record: Mapping[str, Any]) -> dict[str, list[str]]:
    (folder / "mxcli.json").write_text(json.dumps(record))
    return found(verified(folder))


def test_a_row_of_one_block_is_a_channel_for_the_record(tmp_path: Path) -> None:
    tensors = {"model.layers.0.mlp.up_proj.weight": noise(64, 128)}
    model = source(tmp_path / "m", tensors, {**LLAMA, "hidden_size": 128})
    output = quantized(model, tmp_path / "q", Options("fp8_e4m3_1x128", layout="torchao"))
    assert found(verified(output)) == {}
