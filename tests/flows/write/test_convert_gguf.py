"""GGUF files converted from and to checkpoints under Hugging Face's names, dequantized and compared under them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clean_outputs import assert_clean
from conversions import MOE, converted, moe, patched, raw, refusals
from planted import found, verified
from raw_gguf import F32, MXFP4, gguf_bytes, u32
from tiny_models import LLAMA, Tensor, bf16, llama, noise, read_raw, write_model

from mxcli.backends.cpu import Cpu
from mxcli.errors import InputError, RefusedError
from mxcli.files.checkpoint import open_checkpoint, read
from mxcli.flows.plan.plan import Options, make_plan
from mxcli.flows.verify.diff import diff_sides
from mxcli.flows.verify.sides import sides_of
from mxcli.flows.write.dequantize import dequantize_checkpoint
from mxcli.flows.write.quantize import quantize_checkpoint
from mxcli.numerics.scheme import Rules

pytest.importorskip("gguf")
DATA = Path(__file__).parents[2] / "data" / "layouts"
SHARD = "model.safetensors"
CONFIG: dict[str, object] = {
    **LLAMA,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 32,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
QWEN = {**CONFIG, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 32}
QUERY = "model.layers.0.self_attn.q_proj.weight"


def qwen() -> dict[str, Tensor]:
    tensors = llama(2)
    for layer in range(2):
        for name in ("q_norm", "k_norm"):
            tensors[f"model.layers.{layer}.self_attn.{name}.weight"] = noise(32, seed=200 + layer)
    return tensors


MODELS: dict[str, tuple[dict[str, Tensor], dict[str, Any]]] = {
    "llama": (llama(2), CONFIG),
    "mistral": (llama(2), {**CONFIG, "architectures": ["MistralForCausalLM"], "model_type": "mistral"}),
    "qwen3": (qwen(), QWEN),
    "tied": (
        {name: each for name, each in llama(2).items() if name != "lm_head.weight"},
        {**CONFIG, "tie_word_embeddings": True},
    ),
}


def quantized(folder: Path, format: str, model: str = "llama", layout: str = "ct") -> Path:
    """A model in a layout, with tensor scales of 1 / 64."""
    tensors, config = MODELS[model]
    known = {}
    for name, (dtype, values) in tensors.items():
        changed = values.copy()
        if values.ndim > 1:
            changed.reshape(-1)[3] = int(bf16([42.0])[1][0])
        known[name] = (dtype, changed)
    checkpoint = open_checkpoint(write_model(folder.with_name(f"{folder.name}-plain"), known, config))
    options = Options(format, Rules(nonfinite="error"), layout=layout)
    quantize_checkpoint(checkpoint, make_plan(checkpoint, options), folder, backend=Cpu())
    return folder


def alone(folder: Path, output: Path) -> Path:
    """The GGUF file of a folder by itself."""
    output.mkdir()
    shutil.copy(folder / "model.gguf", output / "some-name.gguf")
    return output / "some-name.gguf"


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("format", ["mxfp4", "nvfp4"])
def test_gguf_and_back_returns_every_byte(tmp_path: Path, format: str, model: str) -> None:
    first = quantized(tmp_path / "q", format, model)
    converted(first, tmp_path / "g", "gguf")
    converted(tmp_path / "g", tmp_path / "back", "ct")
    assert (tmp_path / "back" / SHARD).read_bytes() == (first / SHARD).read_bytes()
    ours, theirs = ((folder / "config.json").read_text() for folder in (tmp_path / "back", first))
    assert json.loads(ours) == json.loads(theirs)
    result = verified(tmp_path / "back", tmp_path / "q-plain")
    assert result.is_sound, found(result)


@pytest.mark.parametrize("format", ["mxfp4", "nvfp4"])
def test_a_converted_file_is_the_one_that_quantize_writes(tmp_path: Path, format: str) -> None:
    converted(quantized(tmp_path / "q", format), tmp_path / "g", "gguf")
    quantized(tmp_path / "direct", format, layout="gguf")
    ours, theirs = (open_checkpoint(tmp_path / name) for name in ("g", "direct"))
    assert ours.tensors.keys() == theirs.tensors.keys()
    for name, info in ours.tensors.items():
        assert read(ours, info).tobytes() == read(theirs, theirs.tensors[name]).tobytes(), name
    sizes = [(tmp_path / name / "model.gguf").stat().st_size for name in ("g", "direct")]
    assert sizes[0] == sizes[1]


def test_rows_of_queries_and_keys_are_put_in_order(tmp_path: Path) -> None:
    rows = np.repeat(np.exp2(np.arange(64) % 8)[:, None], 64, axis=1).astype(np.float32)
    tensors = {**llama(2), QUERY: bf16(rows)}
    checkpoint = open_checkpoint(write_model(tmp_path / "m", tensors, CONFIG))
    options = Options("mxfp4", Rules(nonfinite="error"), layout="gguf")
    quantize_checkpoint(checkpoint, make_plan(checkpoint, options), tmp_path / "g", backend=Cpu())
    converted(tmp_path / "g", tmp_path / "ct", "ct")
    scales = np.frombuffer(raw(tmp_path / "ct")[f"{QUERY}_scale"][2], np.uint8).reshape(64, 2)
    assert scales[:10, 0].tolist() == [125, 126, 127, 128, 129, 130, 131, 132, 125, 126]


@pytest.mark.parametrize("model", ["llama", "qwen3", "tied"])
def test_a_file_alone_gets_its_configuration_from_its_header(tmp_path: Path, model: str) -> None:
    first = quantized(tmp_path / "q", "mxfp4", model)
    converted(first, tmp_path / "g", "gguf")
    file = alone(tmp_path / "g", tmp_path / "alone")
    result = converted(file, tmp_path / "back", "ct")
    assert result.conversion.known is None
    same = {name for name, each in raw(tmp_path / "back").items() if each == raw(first)[name]}
    # Norms stay as they are in the file, in binary32.
    assert {name for name in raw(first) if name not in same} == {name for name in raw(first) if "norm" in name}
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    stated = {key: value for key, value in MODELS[model][1].items() if key != "tie_word_embeddings"}
    assert {key: config[key] for key in stated} == stated
    assert config["tie_word_embeddings"] == (model == "tied")
    assert config["rms_norm_eps"] == 1e-5


def test_a_file_in_parts_is_read_as_one(tmp_path: Path) -> None:
    first = quantized(tmp_path / "q", "mxfp4")
    converted(first, tmp_path / "g", "gguf")
    folder = in_parts(tmp_path / "g" / "model.gguf", tmp_path / "parts")
    converted(folder / "m-00001-of-00002.gguf", tmp_path / "one", "ct")
    converted(folder, tmp_path / "two", "ct")
    assert raw(tmp_path / "one") == raw(tmp_path / "two")
    codes = {name for name in raw(first) if "norm" not in name}
    assert {name: raw(tmp_path / "one")[name] for name in codes} == {name: raw(first)[name] for name in codes}
    (folder / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(InputError, match=r"m-00002-of-00002\.gguf: no such file; other shards imply it"):
        open_checkpoint(folder / "m-00001-of-00002.gguf")


def in_parts(file: Path, folder: Path) -> Path:
    """A GGUF file divided in two: the header's settings in the first part, half of the tensors in each."""
    from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter

    reader = GGUFReader(file)
    folder.mkdir()
    half = len(reader.tensors) // 2
    for number, tensors in enumerate((reader.tensors[:half], reader.tensors[half:]), 1):
        writer = GGUFWriter(folder / f"m-{number:05}-of-00002.gguf", "llama")
        for field in reader.fields.values() if number == 1 else ():
            if field.types and field.types[0] in (GGUFValueType.UINT32, GGUFValueType.FLOAT32):
                writer.add_key_value(field.name, field.contents(), field.types[0])
        for tensor in tensors:
            kind = GGMLQuantizationType(tensor.tensor_type)
            data = np.ascontiguousarray(tensor.data)
            shape = data.shape if data.dtype == np.uint8 else tensor.shape[::-1].tolist()
            writer.add_tensor(tensor.name, data, raw_shape=shape, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return folder


def test_dequantized_files_have_the_names_and_rows_of_hugging_face(tmp_path: Path) -> None:
    first = quantized(tmp_path / "q", "mxfp4")
    converted(first, tmp_path / "g", "gguf")
    dequantize_checkpoint(open_checkpoint(first), tmp_path / "a", backend=Cpu())
    restored = dequantize_checkpoint(open_checkpoint(tmp_path / "g"), tmp_path / "b", backend=Cpu())
    assert raw(tmp_path / "b") == raw(tmp_path / "a")
    assert restored.notes == ()
    ours, theirs = ((tmp_path / name / "config.json").read_text() for name in "ab")
    assert json.loads(ours) == json.loads(theirs)
    assert_clean(tmp_path / "b")


def test_names_that_are_not_known_stay_with_a_note(tmp_path: Path) -> None:
    restored = dequantize_checkpoint(open_checkpoint(DATA / "gguf-mxfp4" / "model.gguf"), tmp_path / "d", backend=Cpu())
    assert read_raw(tmp_path / "d" / SHARD).keys() == {"fc1.weight", "fc2.weight"}
    (note,) = restored.notes
    assert note == (
        "Names and order of rows stay those of llama.cpp, which transformers does not load: its header does "
        "not state llama.embedding_length, llama.feed_forward_length, llama.attention.head_count, "
        "llama.context_length, llama.attention.layer_norm_rms_epsilon, and there is no config.json next to it; it has "
        "no token_embd.weight."
    )


def file_of(path: Path, *settings: Any, **tensors: tuple[int, ...]) -> Path:
    """A GGUF file of llama's architecture with settings and a query of MXFP4."""
    text = text_setting("general.architecture", "llama")
    content = [(name.replace("__", "."), shape, F32, bytes(4 * int(np.prod(shape)))) for name, shape in tensors.items()]
    blocks = ("blk.0.attn_q.weight", (64, 64), MXFP4, bytes(64 * 34))
    path.write_bytes(gguf_bytes([blocks, *content], [text, *settings]))
    return path


def test_headers_that_do_not_state_the_model_are_refused_with_what_they_lack(tmp_path: Path) -> None:
    (first, *_) = refusals(file_of(tmp_path / "a.gguf", u32("llama.block_count", 1)), "ct")
    assert first == (
        f"{tmp_path / 'a.gguf'}: names and order of rows in Hugging Face are not known: its header does not "
        "state llama.embedding_length, llama.feed_forward_length, llama.attention.head_count, llama.context_length, "
        "llama.attention.layer_norm_rms_epsilon, and there is no config.json next to it."
    )
    sizes = [
        *(u32(f"llama.{key}", 64) for key in ("embedding_length", "feed_forward_length", "context_length")),
        *(u32(f"llama.attention.{key}", 2) for key in ("head_count", "head_count_kv")),
        u32("llama.block_count", 1),
        ("llama.attention.layer_norm_rms_epsilon", 6, np.float32(1e-5).tobytes()),
    ]
    embedding = {"token_embd__weight": (32, 64)}
    experts = file_of(tmp_path / "b.gguf", *sizes, u32("llama.expert_count", 4), **embedding)
    assert refusals(experts, "ct")[0].endswith("it has experts, and the names of experts in it are not known.")
    other = file_of(tmp_path / "c.gguf", *sizes, **embedding, blk__0__attn_sinks__weight=(64,))
    assert refusals(other, "ct")[0].endswith("blk.0.attn_sinks.weight: no tensor of this name is known.")
    factors = file_of(tmp_path / "d.gguf", *sizes, **embedding, rope_freqs__weight=(16,))
    assert "rope_freqs.weight are not the factors of a usual rope scaling of kind llama3" in refusals(factors, "ct")[0]


def test_codes_of_other_types_are_refused_by_name(tmp_path: Path) -> None:
    folder = converted(quantized(tmp_path / "q", "mxfp4"), tmp_path / "g", "gguf").folder
    other = ("blk.0.ffn_down.weight", (128, 64), 2, bytes(128 * 36))
    header = json.loads((folder / "config.json").read_text())
    file = tmp_path / "one"
    file.mkdir()
    (file / "model.gguf").write_bytes(gguf_bytes([other], [text_setting("general.architecture", "llama")]))
    (file / "config.json").write_text(json.dumps(header))
    assert refusals(file, "ct") == (
        "model.layers.0.mlp.down_proj.weight: its codes (Q4_0) are of no format that other layouts have. Use mxcli "
        "dequantize.",
    )


def text_setting(key: str, value: str) -> Any:
    return key, 8, len(value).to_bytes(8, "little") + value.encode()


def test_a_configuration_of_another_model_is_refused(tmp_path: Path) -> None:
    converted(quantized(tmp_path / "q", "mxfp4"), tmp_path / "g", "gguf")
    config = json.loads((tmp_path / "g" / "config.json").read_text())
    (tmp_path / "g" / "config.json").write_text(json.dumps(config | {"num_attention_heads": 4}))
    (reason,) = refusals(tmp_path / "g", "ct")
    assert reason.endswith("num_attention_heads is 4 in config.json, and 2 in the file.")


def test_llama_3_scaling_is_told_by_its_factors(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope["original_max_position_embeddings"] = 8192
    config = {**CONFIG, "rope_theta": 500000.0, "rope_scaling": rope}
    checkpoint = open_checkpoint(write_model(tmp_path / "m", llama(2), config))
    options = Options("mxfp4", Rules(nonfinite="error"), layout="gguf")
    quantize_checkpoint(checkpoint, make_plan(checkpoint, options), tmp_path / "g", backend=Cpu())
    result = converted(alone(tmp_path / "g", tmp_path / "alone"), tmp_path / "ct", "ct")
    made = json.loads((tmp_path / "ct" / "config.json").read_text())
    assert (made["rope_theta"], made["rope_scaling"]) == (500000.0, rope)
    assert "rope_freqs.weight" not in raw(tmp_path / "ct")
    assert [part.what for part in result.accounting.parts] == ["tables that loaders compute"]


def test_scales_that_readers_of_gguf_take_for_others_are_refused(tmp_path: Path) -> None:
    first = quantized(tmp_path / "q", "mxfp4")
    patched(first, {f"{QUERY}_scale": np.full((64, 2), 255, np.uint8)})
    (reason,) = refusals(first, "gguf")
    assert reason.startswith(
        "model.layers.0.self_attn.q_proj.weight: the layout gguf cannot hold it: it holds a NaN scale, which its "
        "readers take for another number."
    )


def test_gguf_is_compared_with_other_layouts_under_the_same_names(tmp_path: Path) -> None:
    first = quantized(tmp_path / "q", "nvfp4")
    converted(first, tmp_path / "g", "gguf")
    sides = sides_of(("g", open_checkpoint(tmp_path / "g")), ("q", open_checkpoint(first)))
    result = diff_sides(*sides, backend=Cpu())
    assert [each.name for each in result.tensors if each.shapes[0] != each.shapes[1]] == []
    assert {word for each in result.differing for word in each.differs} <= {"dtype"}
    assert {each.name.rpartition(".")[0].rpartition(".")[2] for each in result.differing} <= {
        *("norm", "input_layernorm", "post_attention_layernorm")
    }


def test_a_gguf_file_is_no_target_of_itself(tmp_path: Path) -> None:
    converted(quantized(tmp_path / "q", "mxfp4"), tmp_path / "g", "gguf")
    assert refusals(tmp_path / "g", "gguf")[0].endswith("is a GGUF file already. Use another --layout.")


def test_experts_whose_weights_are_not_normalized_have_no_place_in_gguf(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_model(tmp_path / "m", moe(), {**CONFIG, **MOE}))
    quantize_checkpoint(checkpoint, make_plan(checkpoint, Options("mxfp4")), tmp_path / "q", backend=Cpu())
    with pytest.raises(RefusedError, match="norm_topk_prob is None; qwen3moe divides the weights"):
        converted(tmp_path / "q", tmp_path / "g", "gguf")


@pytest.mark.slow
@pytest.mark.parametrize("with_config", [True, False])
@pytest.mark.parametrize("model", ["llama", "mistral", "qwen3", "tied"])
def test_transformers_loads_a_dequantized_gguf_file(tmp_path: Path, model: str, with_config: bool) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    first = quantized(tmp_path / "q", "mxfp4", model)
    converted(first, tmp_path / "g", "gguf")
    source = tmp_path / "g" if with_config else alone(tmp_path / "g", tmp_path / "alone")
    dequantize_checkpoint(open_checkpoint(source), tmp_path / "d", backend=Cpu(), dtype="F32")
    dequantize_checkpoint(open_checkpoint(first), tmp_path / "e", backend=Cpu(), dtype="F32")
    load = transformers.AutoModelForCausalLM.from_pretrained
    ours, info = load(tmp_path / "d", dtype=torch.float32, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    theirs = load(tmp_path / "e", dtype=torch.float32)
    tokens = torch.arange(8)[None]
    assert torch.equal(ours(tokens).logits, theirs(tokens).logits)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("format", "layout"),
    [
        *(("mxfp4", layout) for layout in ("modelopt", "quark", "torchao", "torchao-plain", "mlx", "gguf", "mxcli")),
        *(("mxfp8", layout) for layout in ("modelopt", "fp8", "torchao", "mlx", "comfy", "mxcli")),
        *(("nvfp4", layout) for layout in ("modelopt", "torchao", "comfy", "gguf", "mxcli")),
    ],
)
def test_transformers_loads_what_every_layout_is_dequantized_to(tmp_path: Path, format: str, layout: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    first = quantized(tmp_path / "q", format)
    converted(first, tmp_path / "other", layout)
    for source, target in ((first, "a"), (tmp_path / "other", "b")):
        dequantize_checkpoint(open_checkpoint(source), tmp_path / target, backend=Cpu(), dtype="F32")
        assert_clean(tmp_path / target)
    load = transformers.AutoModelForCausalLM.from_pretrained
    models = [load(tmp_path / name, dtype=torch.float32, output_loading_info=True) for name in "ab"]
    for _, info in models:
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    states = [model.state_dict() for model, _ in models]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
