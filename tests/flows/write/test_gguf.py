"""GGUF in and out: the package's own files, other readers of ours, and the model that transformers makes of one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from raw_gguf import F32, MXFP4, NVFP4, gguf_bytes
from safetensors.numpy import load_file
from tiny_models import LLAMA, llama, tree, write_model

from mxcli.backends import cpu
from mxcli.backends.cpu import Cpu
from mxcli.errors import InputError, RefusedError, UsageError
from mxcli.files.checkpoint import open_checkpoint, read
from mxcli.files.layouts import LAYOUTS, Weight
from mxcli.flows.plan.overrides import Override
from mxcli.flows.plan.plan import Options, make_plan
from mxcli.flows.verify.diff import diff_sides
from mxcli.flows.verify.sides import sides_of
from mxcli.flows.verify.subject import subject_of
from mxcli.flows.verify.verify import checked_originals
from mxcli.flows.write.arrange import arrange
from mxcli.flows.write.dequantize import dequantize_checkpoint
from mxcli.flows.write.pipeline import WriteOptions
from mxcli.flows.write.quantize import Written, quantize_checkpoint
from mxcli.flows.write.restore import open_floats, plain_view
from mxcli.numerics.scheme import Rules, resolve
from mxcli.output.difference import failure_sentence

gguf = pytest.importorskip("gguf")

DATA = Path(__file__).parents[2] / "data" / "layouts"
SIZES = {
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 32,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}


def quantized(source: Path, output: Path, format: str, rules: Rules = Rules(nonfinite="error"), **more: Any) -> Written:
    checkpoint = open_checkpoint(source)
    plan = make_plan(checkpoint, Options(format, rules, layout="gguf", **more))
    return quantize_checkpoint(checkpoint, plan, output, backend=Cpu())


def values(source: Path, dtype: str = "F32") -> dict[str, np.ndarray]:
    plain = plain_view(open_checkpoint(source), dtype).checkpoint(Cpu())
    return {name: read(plain, info) for name, info in plain.tensors.items()}


def test_the_packages_mxfp4_decodes_bit_for_bit(tmp_path: Path) -> None:
    dequantize_checkpoint(open_checkpoint(DATA / "gguf-mxfp4" / "model.gguf"), tmp_path / "d", backend=Cpu())
    ours = load_file(tmp_path / "d" / "model.safetensors")
    theirs = load_file(DATA / "gguf-mxfp4" / "dequantized.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(ours[name].tobytes() == theirs[name].tobytes() for name in theirs)


def test_that_names_are_not_matched_is_said(tmp_path: Path) -> None:
    content = load_file(DATA / "gguf-nvfp4" / "model.safetensors")["fc2.weight"].tobytes()
    (tmp_path / "a.gguf").write_bytes(gguf_bytes([("blk.0.ffn_up.weight", (128, 64), NVFP4, content)]))
    plain = open_checkpoint(write_model(tmp_path / "m", llama(), LLAMA))
    quantize_checkpoint(plain, make_plan(plain, Options("mxfp4")), tmp_path / "q", backend=Cpu())
    made = open_checkpoint(tmp_path / "q")
    names = "Names of GGUF files, which are llama.cpp's, are matched with those of Hugging Face for Llama, Mistral, "
    hint = f"{names}Qwen2 and Qwen3 models only, experts not included."
    with pytest.raises(UsageError) as refused:
        checked_originals(open_floats(tmp_path / "a.gguf", requantize=True), subject_of(made))
    assert str(refused.value).endswith(f"give the checkpoint that it was made from. {hint}")
    sides = sides_of(("a", open_checkpoint(tmp_path / "a.gguf")), ("q", made))
    result = diff_sides(*sides, backend=Cpu())
    assert failure_sentence(result) == f"{hint} a and q differ in 13 of 13 tensors: only in A 1, only in B 12"


def test_nvfp4_decodes_bit_for_bit_with_and_without_its_tensor_scale(tmp_path: Path) -> None:
    stored = load_file(DATA / "gguf-nvfp4" / "model.safetensors")
    blocks = ("fc2.weight", (128, 64), NVFP4, stored["fc2.weight"].tobytes())
    alone = load_file(DATA / "gguf-nvfp4" / "dequantized_without_global.safetensors")["fc2.weight"]
    (tmp_path / "alone.gguf").write_bytes(gguf_bytes([blocks]))
    # The code of a negative zero is a zero without sign to the package.
    assert (values(tmp_path / "alone.gguf")["fc2.weight"] + 0.0).tobytes() == alone.tobytes()
    scale = ("fc2.scale", (1,), F32, stored["fc2.scale"].tobytes())
    (tmp_path / "scaled.gguf").write_bytes(gguf_bytes([blocks, scale]))
    scaled = values(tmp_path / "scaled.gguf")
    assert scaled.keys() == {"fc2.weight"}
    modelopt = values(DATA / "modelopt-nvfp4")["fc2.weight"]
    assert scaled["fc2.weight"].tobytes() == modelopt.tobytes()


@pytest.mark.parametrize("name", ["fc1.weight", "fc2.weight"])
def test_the_bytes_of_mxfp4_are_the_packages(name: str) -> None:
    toy = open_checkpoint(DATA / "toy.safetensors")
    info = toy.tensors[name]
    recipe = resolve("mxfp4", Rules(dialect="gguf", nonfinite="error"))
    ours = cpu.quantize(read(toy, info), "BF16", recipe)
    (content,) = LAYOUTS["gguf"].contents(Weight(name, info.shape, recipe, "BF16"))
    theirs = open_checkpoint(DATA / "gguf-mxfp4" / "model.gguf")
    assert content.of(ours).tobytes() == read(theirs, theirs.tensors[name]).tobytes()
    assert (content.entry.shape, content.entry.block_type) == (theirs.tensors[name].shape, "MXFP4")


def test_the_bytes_of_nvfp4_are_modelopts_reordered() -> None:
    toy = open_checkpoint(DATA / "toy.safetensors")
    recipe = resolve("nvfp4", Rules(dialect="modelopt", nonfinite="error"))
    ours = cpu.quantize(read(toy, toy.tensors["fc2.weight"]), "BF16", recipe)
    blocks, scale = LAYOUTS["gguf"].contents(Weight("fc2.weight", (128, 64), recipe, "BF16"))
    stored = load_file(DATA / "gguf-nvfp4" / "model.safetensors")
    assert blocks.of(ours).tobytes() == stored["fc2.weight"].tobytes()
    assert scale.of(ours).tobytes() == stored["fc2.scale"].tobytes()
    assert (scale.entry.name, scale.entry.shape) == ("fc2.scale", (1,))


@pytest.mark.parametrize(
    ("weight", "why"),
    [
        (Weight("a.weight", (4, 96), resolve("nvfp4", Rules(nonfinite="error")), "BF16"), "96 is not a multiple of 64"),
        (Weight("a.weight", (4, 32), resolve("mxfp8", Rules(nonfinite="error")), "BF16"), "it has no mxfp8_e4m3"),
        (
            Weight("a.weight", (4, 32), resolve("mxfp4", Rules(nonfinite="nan-block")), "BF16"),
            "read NaN scales as numbers",
        ),
        (Weight("a.weight", (2, 4, 32), resolve("mxfp4", Rules(nonfinite="error")), "BF16"), "holds matrices only"),
    ],
)
def test_what_it_cannot_hold(weight: Weight, why: str) -> None:
    assert why in str(LAYOUTS["gguf"].refusal(weight))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_1", "Q8_0", "Q4_K", "Q6_K", "IQ4_NL"])
def test_other_types_are_what_the_package_decodes(tmp_path: Path, kind: str) -> None:
    number = gguf.GGMLQuantizationType[kind]
    elements, nbytes = gguf.GGML_QUANT_SIZES[number]
    blocks = np.random.default_rng(0).integers(0, 64, (3, 2 * nbytes), np.uint8)
    expected = gguf.dequantize(blocks, number)
    content = gguf_bytes([("blk.0.attn_q.weight", (3, 2 * elements), int(number), blocks.tobytes())])
    (tmp_path / "m.gguf").write_bytes(content)
    assert values(tmp_path / "m.gguf")["blk.0.attn_q.weight"].tobytes() == expected.tobytes()
    assert np.array_equal(values(tmp_path / "m.gguf", "F16")["blk.0.attn_q.weight"], expected.astype(np.float16))
    rounded = gguf.quantize(expected, gguf.GGMLQuantizationType.BF16).view(np.uint16)
    assert np.array_equal(values(tmp_path / "m.gguf", "BF16")["blk.0.attn_q.weight"], rounded)
    assert values(tmp_path / "m.gguf", "F64")["blk.0.attn_q.weight"].tolist() == expected.tolist()


def test_types_that_the_package_does_not_decode_are_named(tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType.Q8_1
    (tmp_path / "m.gguf").write_bytes(gguf_bytes([("a.weight", (1, 32), int(kind), bytes(40))]))
    with pytest.raises(InputError, match=r"a\.weight: the installed package gguf does not decode Q8_1"):
        plain_view(open_checkpoint(tmp_path / "m.gguf"))


def test_a_scale_for_each_expert_is_refused(tmp_path: Path) -> None:
    experts = ("blk.0.ffn_up_exps.weight", (2, 4, 64), NVFP4, bytes(2 * 4 * 36))
    scales = ("blk.0.ffn_up_exps.scale", (2,), F32, bytes(8))
    (tmp_path / "m.gguf").write_bytes(gguf_bytes([experts, scales]))
    with pytest.raises(InputError, match=r"blk\.0\.ffn_up_exps\.scale is F32 \[2\]; NVFP4 needs F32 \[1\]"):
        plain_view(open_checkpoint(tmp_path / "m.gguf"))


def test_stacks_of_experts_are_read_whole(tmp_path: Path) -> None:
    blocks = np.random.default_rng(0).integers(0, 100, (2, 3, 34), np.uint8)
    (tmp_path / "m.gguf").write_bytes(gguf_bytes([("blk.0.ffn_up_exps.weight", (2, 3, 64), MXFP4, blocks.tobytes())]))
    seen = open_floats(tmp_path / "m.gguf", requantize=True)
    assert [(info.role, info.shape) for info in seen.tensors.values()] == [("weight", (2, 3, 64))]
    expected = gguf.dequantize(blocks, gguf.GGMLQuantizationType.MXFP4)
    assert values(tmp_path / "m.gguf")["blk.0.ffn_up_exps.weight"].tolist() == expected.tolist()


@pytest.mark.parametrize("format", ["mxfp4", "nvfp4"])
def test_the_package_opens_what_is_written_and_decodes_it_alike(tmp_path: Path, format: str) -> None:
    source = write_model(tmp_path / "m", llama(), {**LLAMA, **SIZES}, {"generation_config.json": "{}"})
    written = quantized(source, tmp_path / "q", format)
    assert sorted(tree(tmp_path / "q")) == ["config.json", "generation_config.json", "model.gguf", "mxcli.json"]
    assert json.loads((tmp_path / "q" / "config.json").read_text()) == {**LLAMA, **SIZES}
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "q" / "model.gguf").tensors}
    ours = values(tmp_path / "q")
    assert ours.keys() == {name for name in theirs if not name.endswith(".scale")}
    assert len(ours) == 12
    for name, array in ours.items():
        decoded = gguf.dequantize(theirs[name].data, theirs[name].tensor_type)
        scale = theirs.get(name.replace(".weight", ".scale"))
        if scale is not None:
            decoded = decoded * scale.data
        if name == "output.weight" or name == "token_embd.weight":
            array = (array.astype(np.uint32) << 16).view(np.float32)
        assert np.allclose(array, decoded, rtol=1e-6, atol=0), name
    assert (tmp_path / "q" / "model.gguf").stat().st_size == written.arrangement.output_bytes
    assert open_checkpoint(tmp_path / "q" / "model.gguf").dialect == "gguf"


def test_a_gguf_file_is_quantized_into_another_and_keeps_its_order(tmp_path: Path) -> None:
    source = write_model(tmp_path / "m", llama(), {**LLAMA, **SIZES})
    quantized(source, tmp_path / "q", "mxfp4")
    seen = open_floats(tmp_path / "q", requantize=True)
    plan = make_plan(seen, Options("mxfp4", Rules(dialect="gguf", nonfinite="error"), layout="gguf"))
    quantize_checkpoint(seen, plan, tmp_path / "again", backend=Cpu())
    once, twice = values(tmp_path / "q"), values(tmp_path / "again")
    assert once.keys() == twice.keys()
    assert all(np.array_equal(once[name], twice[name]) for name in once)


def test_a_model_that_it_cannot_hold_is_refused_before_any_work(tmp_path: Path) -> None:
    source = write_model(tmp_path / "m", llama(), {**LLAMA, **SIZES, "model_type": "gemma3"})
    with pytest.raises(RefusedError, match="cannot write 'gemma3' models"):
        quantized(source, tmp_path / "q", "mxfp4")
    assert not (tmp_path / "q").exists()


def test_one_file_is_as_large_as_it_is(tmp_path: Path) -> None:
    source = open_checkpoint(write_model(tmp_path / "m", llama(), {**LLAMA, **SIZES}))
    plan = make_plan(source, Options("mxfp4", Rules(nonfinite="error"), layout="gguf"))
    with pytest.raises(
        RefusedError, match=r"the layout gguf writes one file, here with .* --max-shard-size allows 1,000"
    ):
        arrange(source, plan, max_shard_bytes=1000)


def test_a_run_cut_short_ends_with_the_same_bytes(tmp_path: Path) -> None:
    source = write_model(tmp_path / "m", llama(), {**LLAMA, **SIZES})
    quantized(source, tmp_path / "whole", "nvfp4")
    checkpoint, done = open_checkpoint(source), list[str]()
    plan = make_plan(checkpoint, Options("nvfp4", Rules(nonfinite="error"), layout="gguf"))
    stopping = WriteOptions(stop=lambda: len(done) == 5, on_progress=lambda *progress: done.append(progress[2]))
    cut = quantize_checkpoint(checkpoint, plan, tmp_path / "q", backend=Cpu(), options=stopping)
    assert not cut.outcome.complete
    assert not (tmp_path / "q" / "model.gguf").exists()
    gone_on = quantize_checkpoint(checkpoint, plan, tmp_path / "q", backend=Cpu(), options=WriteOptions(resume=True))
    assert gone_on.outcome.complete
    assert gone_on.outcome.kept > 0
    assert tree(tmp_path / "q") == tree(tmp_path / "whole")


def test_shards_of_the_source_become_one_file(tmp_path: Path) -> None:
    tensors = llama()
    names = list(tensors)
    parts = {"a.safetensors": names[:4], "b.safetensors": names[4:]}
    shards = {file: {name: tensors[name] for name in held} for file, held in parts.items()}
    quantized(write_model(tmp_path / "m", shards, {**LLAMA, **SIZES}), tmp_path / "q", "mxfp4")
    assert sorted(tree(tmp_path / "q")) == ["config.json", "model.gguf", "mxcli.json"]


def test_transformers_loads_the_very_weights(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    source = DATA / "llama64-original"
    kept = "model.layers.1.self_attn.q_proj.weight"
    checkpoint = open_checkpoint(source)
    rules = Rules(dialect="gguf", nonfinite="error")
    quantized(source, tmp_path / "q", "mxfp4", rules, overrides=(Override(kept, keep=True),))
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "q", gguf_file="model.gguf", dtype=torch.float32, output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    assert len(state) == 21
    recipe = resolve("mxfp4", Rules(dialect="gguf", nonfinite="error"))
    for name, tensor in checkpoint.tensors.items():
        plain = read(checkpoint, tensor)
        if tensor.role == "weight" and name != kept:
            expected = cpu.dequantize(cpu.quantize(plain, "BF16", recipe))
        else:
            expected = (plain.astype(np.uint32) << 16).view(np.float32)
        assert np.array_equal(state[name], expected), name


def test_llama_3_factors_are_those_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = {**LLAMA, **SIZES, "head_dim": 32, "rope_parameters": rope}
    source = write_model(tmp_path / "m", llama(), config)
    quantized(source, tmp_path / "q", "mxfp4")
    written = open_checkpoint(tmp_path / "q")
    factors = read(written, written.tensors["rope_freqs.weight"])
    loaded = transformers.LlamaConfig(hidden_size=64, num_attention_heads=2, head_dim=32, rope_parameters=rope)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](loaded, "cpu")
    plain = 1 / 500000.0 ** (np.arange(0, 32, 2) / 32)
    assert np.allclose(plain / factors, scaled.numpy(), rtol=1e-5)


@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors", "fp8"])
def test_layouts_of_other_loaders_are_refused_for_a_gguf_source(layout: str) -> None:
    """They look for Hugging Face's names and rows, and would find llama.cpp's."""
    file = Path(__file__).parents[2] / "data" / "layouts" / "gguf-mxfp4" / "model.gguf"
    checkpoint = open_floats(file, requantize=True)
    plan = make_plan(checkpoint, Options("fp8_e4m3_128x128", layout=layout))
    with pytest.raises(RefusedError, match=r"a GGUF file has the tensor names and the q and k row order of llama\.cpp"):
        arrange(checkpoint, plan)
    assert arrange(checkpoint, make_plan(checkpoint, Options("mxfp8"))).layout.name == "mxcli"
