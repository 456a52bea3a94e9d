from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import LLAMA, bf16, floats, llama, noise, read_header, read_raw, tree, write_model

from mxcli.backends.cpu import Cpu
from mxcli.errors import RefusedError
from mxcli.files.checkpoint import open_checkpoint
from mxcli.files.selection import Rule
from mxcli.flows.plan.overrides import Override
from mxcli.flows.plan.plan import Options, make_plan
from mxcli.flows.write.pipeline import WriteOptions
from mxcli.flows.write.quantize import Written, quantize_checkpoint
from mxcli.numerics.formats import FORMATS
from mxcli.numerics.scheme import Rules

SAMPLES = Path(__file__).parents[2] / "data" / "layouts"


def quantized(source: Path, output: Path, options: Options, /, **more: Any) -> Written:
    checkpoint = open_checkpoint(source)
    return quantize_checkpoint(checkpoint, make_plan(checkpoint, options), output, **({"backend": Cpu()} | more))


def settings_of(output: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((output / "config.json").read_text())["quantization_config"]
    return found


def record_of(output: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((output / "mxcli.json").read_text())
    return found


@pytest.mark.parametrize(
    ("sample", "source", "format"),
    [
        ("ct-nvfp4a16", "toy", "nvfp4"),
        ("ct-mxfp4", "toy", "mxfp4"),
        ("ct-mxfp6a16", "toy", "mxfp6"),
        ("ct-mxfp8", "toy", "mxfp8"),
        ("ct-fp8-tensor", "toy", "fp8_e4m3"),
        ("ct-fp8-dynamic", "toy", "fp8_e4m3_channel"),
        ("ct-fp8-block", "ct-block", "fp8_e4m3_128x128"),
    ],
)
def test_bytes_equal_those_of_compressed_tensors(tmp_path: Path, sample: str, source: str, format: str) -> None:
    options = Options(format, Rules(dialect="compressed-tensors-bf16", nonfinite="error"), layout="compressed-tensors")
    quantized(SAMPLES / f"{source}.safetensors", tmp_path / "out", options)
    assert read_raw(tmp_path / "out" / "model.safetensors") == read_raw(SAMPLES / sample / "model.safetensors")


def test_element_zero_is_in_the_low_bits(tmp_path: Path) -> None:
    row = np.zeros((1, 32))
    row[0, :4] = [0.5, 1.0, 6.0, -1.5]
    quantized(write_model(tmp_path / "m", {"a.weight": bf16(row)}), tmp_path / "out", Options("mxfp4"))
    dtype, shape, content = read_raw(tmp_path / "out" / "model.safetensors")["a.weight_packed"]
    assert (dtype, shape, content[:3]) == ("U8", [1, 16], bytes([0x21, 0xB7, 0x00]))


# Scale bytes were converted as numbers.
def test_scale_bytes_are_bytes(tmp_path: Path) -> None:
    exponents = [120, 125, 127, 130, 140]
    rows = np.concatenate([np.full((1, 32), 6 * 2.0 ** (each - 127)) for each in exponents], axis=1)
    for layout in ("compressed-tensors", "mxcli"):
        source = write_model(tmp_path / "m", {"a.weight": bf16(rows)})
        quantized(source, tmp_path / layout, Options("mxfp4", layout=layout))
        scale = read_raw(tmp_path / layout / "model.safetensors")["a.weight_scale"]
        assert scale == ("U8", [1, 5], bytes(exponents))


# The tensor scale divides in one layout and multiplies in another.
def test_tensor_scales_have_the_sense_of_their_name(tmp_path: Path) -> None:
    source = write_model(tmp_path / "m", {"a.weight": ("F32", np.full((1, 16), 2688 * 0.00028, np.float32))})
    quantized(source, tmp_path / "ct", Options("nvfp4"))
    quantized(source, tmp_path / "own", Options("nvfp4", layout="mxcli"))
    ct, own = (read_raw(tmp_path / name / "model.safetensors") for name in ("ct", "own"))
    encode = np.float32(2688) / (np.float32(2688 * 0.00028))
    assert ct["a.weight_global_scale"] == ("F32", [1], encode.tobytes())
    assert own["a.weight_global_scale"] == ct["a.weight_global_scale"]
    assert own["a.weight_scale_2"] == ("F32", [], (np.float32(1) / encode).tobytes())


# Gate and up with their own tensor scales.
def test_fused_sets_share_the_scale_of_the_largest_member(tmp_path: Path) -> None:
    shards = {
        "model-00001-of-00002.safetensors": {
            "l.gate_proj.weight": bf16(np.full((2, 16), 1.0)),
            "l.down_proj.weight": bf16(np.full((2, 16), 1.0)),
        },
        "model-00002-of-00002.safetensors": {"l.up_proj.weight": bf16(np.full((2, 16), 4.0))},
    }
    quantized(write_model(tmp_path / "m", shards), tmp_path / "out", Options("nvfp4"))
    first = read_raw(tmp_path / "out" / "model-00001-of-00002.safetensors")
    second = read_raw(tmp_path / "out" / "model-00002-of-00002.safetensors")
    assert np.frombuffer(first["l.gate_proj.weight_global_scale"][2], np.float32) == 2688 / 4
    assert second["l.up_proj.weight_global_scale"] == first["l.gate_proj.weight_global_scale"]
    assert np.frombuffer(first["l.down_proj.weight_global_scale"][2], np.float32) == 2688


# Partial edge blocks.
def test_edges_of_fp8_blocks_have_scales_of_their_own(tmp_path: Path) -> None:
    source = write_model(tmp_path / "m", {"a.weight": noise(130, 200), "b.weight": noise(576, 320)})
    quantized(source, tmp_path / "out", Options("fp8_e4m3_128x128"))
    raw = read_raw(tmp_path / "out" / "model.safetensors")
    assert {name: (dtype, shape) for name, (dtype, shape, _) in raw.items()} == {
        "a.weight": ("F8_E4M3", [130, 200]),
        "a.weight_scale": ("BF16", [2, 2]),
        "b.weight": ("F8_E4M3", [576, 320]),
        "b.weight_scale": ("BF16", [5, 3]),
    }


# A tied output head was invented, or written empty.
def test_a_tied_head_stays_tied_and_ignored(tmp_path: Path) -> None:
    tensors = llama()
    del tensors["lm_head.weight"]
    source = write_model(tmp_path / "m", tensors, LLAMA | {"tie_word_embeddings": True})
    quantized(source, tmp_path / "out", Options("mxfp4"))
    raw = read_raw(tmp_path / "out" / "model.safetensors")
    assert not any("lm_head" in name for name in raw)
    assert raw["model.embed_tokens.weight"] == read_raw(source / "model.safetensors")["model.embed_tokens.weight"]
    assert settings_of(tmp_path / "out")["ignore"] == ["lm_head"]


def test_a_tied_view_of_a_pytorch_file_is_written_once(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    shared = torch.zeros(32, 64)
    state = {"model.embed_tokens.weight": shared, "lm_head.weight": shared, "model.l.weight": torch.ones(32, 64)}
    torch.save(state, tmp_path / "pytorch_model.bin")
    quantized(tmp_path / "pytorch_model.bin", tmp_path / "out", Options("mxfp4"))
    assert set(read_raw(tmp_path / "out" / "model.safetensors")) == {
        "model.embed_tokens.weight",
        "model.l.weight_packed",
        "model.l.weight_scale",
    }
    assert record_of(tmp_path / "out")["tensors"]["lm_head.weight"]["decision"] == "tied"


# A header whose data starts at an odd place.
def test_unaligned_data_is_read_and_what_is_written_is_aligned(tmp_path: Path) -> None:
    values = np.arange(64, dtype=np.float32).reshape(2, 32)
    text = b'{"a.weight":{"dtype":"F32","shape":[2,32],"data_offsets":[3,259]},'
    text += b'"b":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}}'
    content = len(text).to_bytes(8, "little") + text + b"\1\2\3" + values.tobytes()
    (tmp_path / "odd.safetensors").write_bytes(content)
    quantized(tmp_path / "odd.safetensors", tmp_path / "out", Options("mxfp8"))
    raw = read_raw(tmp_path / "out" / "model.safetensors")
    assert raw["b"] == ("U8", [3], b"\1\2\3")
    assert raw["a.weight_scale"] == ("U8", [2, 1], bytes([124, 125]))


# After a rewrite the format was gone from the metadata, and transformers refused the file.
def test_metadata_is_kept_and_the_format_added(tmp_path: Path) -> None:
    for name, metadata in (("bare", {"author": "x"}), ("pt", {"format": "pt", "author": "x"})):
        source = write_model(tmp_path / name, {"a.weight": noise(2, 32)}, metadata=metadata)
        quantized(source, tmp_path / f"{name}-out", Options("mxfp4"))
        header = read_header(tmp_path / f"{name}-out" / "model.safetensors")
        assert header["__metadata__"] == {"format": "pt", "author": "x"}


# Empty and 0-dim tensors.
def test_empty_tensors_are_carried_through(tmp_path: Path) -> None:
    odd = {f"t{n}": bf16(np.zeros(shape)) for n, shape in enumerate([(), (0,), (0, 32), (5, 0)])}
    source = write_model(tmp_path / "m", odd | {"a.weight": noise(2, 32)})
    quantized(source, tmp_path / "out", Options("mxfp4"))
    before, after = (read_raw(folder / "model.safetensors") for folder in (source, tmp_path / "out"))
    assert {name: after[name] for name in odd} == {name: before[name] for name in odd}


# A processor file was lost, and a stale quantization config was carried along.
def test_side_files_are_copied_but_not_old_configs_and_indexes(tmp_path: Path) -> None:
    carried = {
        "preprocessor_config.json": "{}",
        "generation_config.json": '{"a": 1}',
        "chat_template.jinja": "hello",
        "added_tokens.json": "{}",
        "1_Pooling/config.json": '{"pool": true}',
    }
    stale = {"hf_quant_config.json": "{}", "other.safetensors.index.json": '{"weight_map": {}}'}
    shards = {
        "model-00001-of-00002.safetensors": {"a.weight": noise(2, 32)},
        "model-00002-of-00002.safetensors": {"b.weight": noise(2, 32)},
    }
    source = write_model(tmp_path / "m", shards, LLAMA, carried | stale)
    (source / "linked.txt").symlink_to("added_tokens.json")
    (source / "elsewhere.txt").symlink_to(tmp_path / "target.txt")
    (tmp_path / "target.txt").write_text("not of the source")
    quantized(source, tmp_path / "out", Options("mxfp4"))
    files = tree(tmp_path / "out")
    assert set(files) == {*carried, *shards, "linked.txt", "config.json", "model.safetensors.index.json", "mxcli.json"}
    assert {name: files[name].decode() for name in carried} == carried
    assert not (tmp_path / "out" / "linked.txt").is_symlink()
    assert files["linked.txt"] == b"{}"
    left_out = open_checkpoint(source).left_out
    assert left_out["links out of the source"] == [f"elsewhere.txt -> {tmp_path}/target.txt"]


# Tensors that a model class does not know were dropped.
def test_every_tensor_is_accounted_for(tmp_path: Path) -> None:
    tensors = llama() | {"mtp.0.weight": noise(4, 64), "surprise": noise(3)}
    source = write_model(tmp_path / "m", tensors, LLAMA)
    quantized(source, tmp_path / "out", Options("mxfp4"))
    before, after = (read_raw(folder / "model.safetensors") for folder in (source, tmp_path / "out"))
    assert after["mtp.0.weight"] == before["mtp.0.weight"]
    assert after["surprise"] == before["surprise"]
    assert set(record_of(tmp_path / "out")["tensors"]) == set(tensors)
    assert "mtp.0" in settings_of(tmp_path / "out")["ignore"]


# A router was kept but not listed.
def test_routers_and_all_kept_linear_layers_are_ignored_by_name(tmp_path: Path) -> None:
    tensors = llama() | {"model.layers.0.mlp.gate.weight": noise(8, 64)}
    rules = (Rule(False, "*.q_proj.weight"),)
    quantized(write_model(tmp_path / "m", tensors, LLAMA), tmp_path / "out", Options("mxfp4", selection=rules))
    assert settings_of(tmp_path / "out")["ignore"] == [
        "lm_head",
        "model.layers.0.mlp.gate",
        "model.layers.0.self_attn.q_proj",
    ]
    assert "model.layers.0.mlp.gate.weight" in read_raw(tmp_path / "out" / "model.safetensors")


# Stacks of experts were skipped in silence, or written under names that no loader maps.
@pytest.mark.parametrize("transposed", [False, True])
def test_stacks_of_experts_are_quantized_per_expert(tmp_path: Path, transposed: bool) -> None:
    experts, hidden, wide = 4, 64, 48
    up, down = noise(experts, 2 * wide, hidden), noise(experts, hidden, wide, seed=1)
    if transposed:
        up, down = (("BF16", np.ascontiguousarray(part[1].swapaxes(1, 2))) for part in (up, down))
    prefix = "model.layers.0.mlp.experts"
    stacks = {f"{prefix}.gate_up_proj": up, f"{prefix}.down_proj": down}
    source = write_model(tmp_path / "m", stacks, {"hidden_size": hidden, "model_type": "qwen3_moe"})
    written = quantized(source, tmp_path / "out", Options("nvfp4"))
    assert written.arrangement.layout.name == "compressed-tensors"

    plain = {f"{prefix}.{i}.gate_proj.weight": ("BF16", noise(4, 96, 64)[1][i, :48]) for i in range(4)}
    plain |= {f"{prefix}.{i}.up_proj.weight": ("BF16", noise(4, 96, 64)[1][i, 48:]) for i in range(4)}
    plain |= {f"{prefix}.{i}.down_proj.weight": ("BF16", noise(4, 64, 48, seed=1)[1][i]) for i in range(4)}
    quantized(write_model(tmp_path / "plain", plain), tmp_path / "plain-out", Options("nvfp4"))
    one, other = (read_raw(tmp_path / name / "model.safetensors") for name in ("out", "plain-out"))
    assert one == other
    assert settings_of(tmp_path / "out")["ignore"] == []


def test_stacks_of_a_module_are_split_together_or_not_at_all(tmp_path: Path) -> None:
    """Half of a module's experts as codes would contradict the ignore list, which can name the module only."""
    stacks = {
        "model.layers.0.mlp.experts.gate_up_proj": noise(4, 64, 32),
        "model.layers.0.mlp.experts.down_proj": noise(4, 32, 32),
        "model.layers.0.self_attn.q_proj.weight": noise(96, 96),
    }
    source = write_model(tmp_path / "m", stacks, {"model_type": "qwen3_moe", "hidden_size": 32})
    one = (Rule(False, "*.down_proj"),)
    quantized(source, tmp_path / "out", Options("mxfp4", layout="compressed-tensors", selection=one))
    raw = read_raw(tmp_path / "out" / "model.safetensors")
    assert {name for name in raw if "experts" in name} == {name for name in stacks if "experts" in name}
    assert "model.layers.0.mlp.experts" in settings_of(tmp_path / "out")["ignore"]
    quantized(source, tmp_path / "both", Options("mxfp4", layout="compressed-tensors"))
    raw = read_raw(tmp_path / "both" / "model.safetensors")
    assert "model.layers.0.mlp.experts.3.down_proj.weight_packed" in raw
    assert not raw.keys() & {name for name in stacks if "experts" in name}


def test_a_stack_of_unknown_orientation_is_loudly_kept(tmp_path: Path) -> None:
    stacks = {"model.layers.0.mlp.experts.gate_up_proj": noise(4, 64, 32)}
    source = write_model(tmp_path / "m", llama() | stacks, LLAMA | {"hidden_size": 16})
    written = quantized(source, tmp_path / "out", Options("mxfp4"))
    assert any(
        "8,192 parameters (16.6 % of the model, 1 tensors) are not quantized" in n for n in written.arrangement.notes
    )
    assert "model.layers.0.mlp.experts" in settings_of(tmp_path / "out")["ignore"]
    own = quantized(source, tmp_path / "own", Options("mxfp4", layout="mxcli"))
    order, note = own.arrangement.notes
    assert order.startswith("1 stack of layers ('model.layers.0.mlp.experts.gate_up_proj'): orientation not known")
    assert note.startswith(
        "transformers 5.24.0 loads this wrongly (run 2026-11): mxfp4_e2m1: it does not know this layout"
    )
    assert "model.layers.0.mlp.experts.gate_up_proj_packed" in read_raw(tmp_path / "own" / "model.safetensors")


def test_a_source_made_of_stacks_is_refused_with_the_layout_that_holds_them(tmp_path: Path) -> None:
    source = write_model(tmp_path / "m", {"l.experts.gate_up_proj": noise(4, 64, 32)})
    with pytest.raises(
        RefusedError, match=r"nothing to quantize among 1 tensors .* Use another --layout, such as mxcli"
    ):
        quantized(source, tmp_path / "out", Options("mxfp4"))
    written = quantized(source, tmp_path / "own", Options("mxfp4", layout="mxcli"))
    assert written.arrangement.notes[-1].startswith("transformers 5.24.0 loads this wrongly")


def test_models_of_diffusers_are_written_as_it_loads_them(tmp_path: Path) -> None:
    tensors = {f"transformer_blocks.0.attn.to_{part}.weight": noise(64, 64) for part in "qkv"}
    source = write_model(tmp_path / "m", tensors, {"_class_name": "FluxTransformer2DModel"})
    written = quantized(source, tmp_path / "out", Options("mxfp8"))
    assert written.arrangement.layout.name == "torchao"
    assert (
        "Written in the layout torchao, since diffusers does not load compressed-tensors." in written.arrangement.notes
    )
    assert quantized(source, tmp_path / "block", Options("mxint8")).arrangement.layout.name == "mxcli"


def test_a_layout_refuses_what_it_cannot_hold_by_name(tmp_path: Path) -> None:
    source = write_model(tmp_path / "m", llama(), LLAMA)
    with pytest.raises(RefusedError) as refused:
        quantized(source, tmp_path / "out", Options("mxint8", layout="compressed-tensors"))
    assert str(refused.value) == (
        "mxint8: the layout compressed-tensors cannot hold it; it holds nvfp4, mxfp4_e2m1, mxfp6_e2m3, mxfp8_e4m3, "
        "fp8_e4m3, fp8_e4m3_channel, fp8_e4m3_128x128. Use --layout mxcli for any format."
    )
    assert not (tmp_path / "out").exists()


def test_padding_is_refused_by_a_layout_that_stores_none(tmp_path: Path) -> None:
    source = write_model(tmp_path / "m", {"a.weight": noise(4, 100)})
    with pytest.raises(RefusedError, match=r"a.weight \[4, 100\]: the layout compressed-tensors stores no padding"):
        quantized(source, tmp_path / "out", Options("mxfp4", on_indivisible="pad", layout="ct"))
    written = quantized(source, tmp_path / "own", Options("mxfp4", on_indivisible="pad"))
    assert written.arrangement.layout.name == "mxcli"
    assert read_raw(tmp_path / "own" / "model.safetensors")["a.weight_packed"][1] == [4, 50]


def test_names_that_would_occur_twice_are_refused(tmp_path: Path) -> None:
    tensors = {"a.weight": noise(2, 32), "a.weight_scale": ("I64", np.zeros(3, np.int64))}
    with pytest.raises(RefusedError, match=r"'a\.weight_scale' would be written 2 times"):
        quantized(write_model(tmp_path / "m", tensors), tmp_path / "out", Options("mxfp4"))


# All offenders at once, with name and index, before anything is published.
def test_values_that_are_not_finite_are_all_named(tmp_path: Path) -> None:
    tensors = llama()
    for name, place in (
        ("model.layers.0.self_attn.k_proj.weight", (3, 7)),
        ("model.layers.0.mlp.up_proj.weight", (0, 1)),
    ):
        tensors[name][1][place] = 0x7F80 if place[0] else 0x7FC0
    tensors["lm_head.weight"][1][0, 0] = 0x7FC0
    source = write_model(tmp_path / "m", tensors, LLAMA)
    with pytest.raises(RefusedError) as refused:
        quantized(source, tmp_path / "out", Options("mxfp8"))
    assert refused.value.details == (
        "model.layers.0.self_attn.k_proj.weight: 1 of 2,048 values are NaN or infinite, the first at [3, 7]. "
        "Use --nonfinite saturate or nan-block, or --exclude 'model.layers.0.self_attn.k_proj.weight'.",
        "model.layers.0.mlp.up_proj.weight: 1 of 8,192 values are NaN or infinite, the first at [0, 1]. "
        "Use --nonfinite saturate or nan-block, or --exclude 'model.layers.0.mlp.up_proj.weight'.",
    )
    assert not (tmp_path / "out").exists()
    written = quantized(source, tmp_path / "out", Options("mxfp8", Rules(nonfinite="saturate")))
    assert sum(stats.nan + stats.infinite for _, stats in written.layers if stats) == 2


def test_the_index_states_the_true_size(tmp_path: Path) -> None:
    shards = {
        "model-00001-of-00002.safetensors": {"a.weight": noise(2, 32), "a.norm.weight": noise(5)},
        "model-00002-of-00002.safetensors": {"b.weight": noise(2, 64)},
    }
    quantized(write_model(tmp_path / "m", shards, LLAMA), tmp_path / "out", Options("mxfp4"))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index == {
        "metadata": {"total_size": 2 * 16 + 2 * 1 + 5 * 2 + 2 * 32 + 2 * 2},
        "weight_map": {
            "a.norm.weight": "model-00001-of-00002.safetensors",
            "a.weight_packed": "model-00001-of-00002.safetensors",
            "a.weight_scale": "model-00001-of-00002.safetensors",
            "b.weight_packed": "model-00002-of-00002.safetensors",
            "b.weight_scale": "model-00002-of-00002.safetensors",
        },
    }
    assert open_checkpoint(tmp_path / "out").notes == ()


def test_pytorch_shards_become_safetensors_shards(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    (tmp_path / "m").mkdir()
    for n, name in enumerate("ab", 1):
        torch.save({f"{name}.weight": torch.ones(2, 32)}, tmp_path / "m" / f"pytorch_model-0000{n}-of-00002.bin")
    quantized(tmp_path / "m", tmp_path / "out", Options("mxfp4"))
    assert sorted(path.name for path in (tmp_path / "out").glob("*.safetensors")) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]


def test_arrays_without_module_names_go_into_our_own_layout(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.ones((4, 64), np.float32))
    written = quantized(tmp_path / "x.npy", tmp_path / "out", Options("mxint8"))
    assert written.arrangement.layout.name == "mxcli"
    assert {name: raw[:2] for name, raw in read_raw(tmp_path / "out" / "model.safetensors").items()} == {
        "x": ("I8", [4, 64]),
        "x_scale": ("U8", [4, 2]),
    }


def test_the_same_work_has_the_same_bytes(tmp_path: Path) -> None:
    source = write_model(tmp_path / "m", llama(2), LLAMA, {"tokenizer.json": "{}"})
    options = Options("nvfp4", overrides=(Override("*.down_proj.weight", "mxfp8"),))
    outputs = []
    for name, threads in (("one", 1), ("again", 1), ("two", 2)):
        quantized(source, tmp_path / name, options, backend=Cpu(threads), command=("mxcli", "quantize"))
        outputs.append(tree(tmp_path / name))
    assert outputs[0] == outputs[1] == outputs[2]


def test_the_record_says_what_became_of_every_tensor(tmp_path: Path) -> None:
    source = write_model(tmp_path / "m", llama(), LLAMA)
    written = quantized(source, tmp_path / "out", Options("nvfp4"), command=("mxcli", "quantize", "m"))
    record = record_of(tmp_path / "out")
    assert record["schema"] == "mxcli.quantized/3"
    assert record["command"] == ["mxcli", "quantize", "m"]
    assert record["options"]["format"] == "nvfp4"
    assert record["input"]["model.safetensors"]["bytes"] == (source / "model.safetensors").stat().st_size
    assert record["files"] == ["config.json", "model.safetensors"]
    query = record["tensors"]["model.layers.0.self_attn.q_proj.weight"]
    assert {key: query[key] for key in ("decision", "format", "scale_rounding", "shares_tensor_scale_with")} == {
        "decision": "quantized",
        "format": "nvfp4",
        "scale_rounding": "te",
        "shares_tensor_scale_with": "model.layers.0.self_attn.q_proj+k_proj+v_proj",
    }
    assert query["statistics"]["elements"] == 64 * 64
    assert query["statistics"]["sqnr_db"] > 15
    head = record["tensors"]["lm_head.weight"]
    assert (head["decision"], "statistics" in head) == ("kept", False)
    assert [step.tensor.name for step, _ in written.layers] == list(open_checkpoint(source).tensors)
    assert sum(stats is not None for _, stats in written.layers) == 7


@pytest.mark.parametrize("format", ["mxfp8_e5m2", "mxint8", "nvfp4", "fp8_e4m3", "fp8_e5m2_channel"])
def test_the_record_is_plain_json_for_all_values(tmp_path: Path, format: str) -> None:
    extremes = np.zeros((4, 128), np.float32)
    extremes[0, ::3] = np.finfo(np.float32).max
    extremes[1, ::5] = np.finfo(np.float32).smallest_subnormal
    extremes[2, 7:9] = [np.nan, np.inf]
    source = write_model(tmp_path / "m", {"a.weight": ("F32", extremes), "b.weight": ("F32", extremes[3:])})
    quantized(source, tmp_path / "out", Options(format, Rules(nonfinite="nan-block")))

    def refuse(token: str) -> None:
        raise AssertionError(token)

    json.loads((tmp_path / "out" / "mxcli.json").read_text(), parse_constant=refuse)


def test_the_estimate_of_bytes_is_exact(tmp_path: Path) -> None:
    source = write_model(tmp_path / "m", llama(), LLAMA)
    written = quantized(source, tmp_path / "out", Options("mxfp6"))
    assert written.arrangement.output_bytes == (tmp_path / "out" / "model.safetensors").stat().st_size


def test_scales_that_a_loader_rounds_are_noted(tmp_path: Path) -> None:
    source = write_model(tmp_path / "m", llama(), LLAMA)
    usual = quantized(source, tmp_path / "usual", Options("fp8_e4m3_channel"))
    assert usual.arrangement.notes == ()
    assert read_raw(tmp_path / "usual" / "model.safetensors")["model.layers.0.mlp.up_proj.weight_scale"][0] == "BF16"
    wide = quantized(
        source, tmp_path / "wide", Options("fp8_e4m3_channel", Rules(scale_rounding="amax", nonfinite="error"))
    )
    assert ["transformers rounds them" in note for note in wide.arrangement.notes] == [True]


def test_quantizing_needs_no_torch() -> None:
    script = "import sys, mxcli.flows.write.quantize, mxcli.flows.write.dequantize; sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)


def test_progress_counts_bytes_of_the_source(tmp_path: Path) -> None:
    source = write_model(tmp_path / "m", {"a.weight": noise(2, 32), "norm.weight": noise(4)})
    seen: list[tuple[int, int, str]] = []
    quantized(
        source, tmp_path / "out", Options("mxfp4"), options=WriteOptions(on_progress=lambda *call: seen.append(call))
    )
    assert seen == [(128, 136, "a.weight"), (136, 136, "norm.weight")]


@pytest.mark.parametrize("format", FORMATS)
def test_a_zero_tensor_has_finite_scales_in_every_format(tmp_path: Path, format: str) -> None:
    """One scale of NaN or infinity, from a largest magnitude of 0, and a model answers with garbage."""
    source = write_model(tmp_path / "m", {"a.weight": bf16(np.zeros((16, 128)))})
    quantized(source, tmp_path / "out", Options(format))
    stored = read_raw(tmp_path / "out" / "model.safetensors")
    codes = stored.pop("a.weight", None) or stored.pop("a.weight_packed")
    assert set(codes[2]) == {0}
    assert "a.weight_scale" in stored
    for name, raw in stored.items():
        if raw[0] in ("F32", "BF16"):
            assert np.isfinite(floats(raw)).all(), name
        else:
            assert not set(raw[2]) & {"U8": {0xFF}, "F8_E4M3": {0x7F, 0xFF}}[raw[0]], name


@pytest.mark.parametrize("format", FORMATS)
def test_only_matrices_of_linear_layers_change(tmp_path: Path, format: str) -> None:
    """A bias of 2560 values once came out as 1280 bytes of codes, because nobody had said to leave it alone."""
    others = {
        "blocks.0.fc.bias": noise(2560),
        "blocks.0.norm.weight": noise(64),
        "blocks.0.conv1d.weight": noise(8, 32, 4),
        "embeddings.word_embeddings.weight": noise(32, 64),
        "blocks.0.counter": ("I64", np.arange(64).reshape(2, 32)),
    }
    source = write_model(tmp_path / "m", others | {"blocks.0.fc.weight": noise(32, 128)})
    quantized(source, tmp_path / "out", Options(format))
    before, after = (read_raw(folder / "model.safetensors") for folder in (source, tmp_path / "out"))
    assert {name: after[name] for name in others} == {name: before[name] for name in others}
    assert after.get("blocks.0.fc.weight") != before["blocks.0.fc.weight"]


def test_quantizing_reads_no_more_memory_than_was_said(tmp_path: Path) -> None:
    rows = noise(512, 4096)
    tensors = {f"model.layers.{n}.mlp.down_proj.weight": rows for n in range(24)}
    source = write_model(tmp_path / "m", tensors)
    checkpoint = open_checkpoint(source)
    peaks: list[int] = []

    def resident(*_: object) -> None:
        peaks.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))

    if not Path("/proc/self/statm").exists():
        pytest.skip("resident memory is read from /proc")
    resident()
    plan = make_plan(checkpoint, Options("mxfp4"))
    manner = WriteOptions(on_progress=resident)
    written = quantize_checkpoint(checkpoint, plan, tmp_path / "out", backend=Cpu(), options=manner)
    assert max(peaks) - peaks[0] < written.arrangement.need.peak_bytes
    assert max(peaks) - peaks[0] < 6 * rows[1].nbytes
