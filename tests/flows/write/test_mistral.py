"""Mistral's own checkpoints, consolidated.safetensors with params.json, under the names of Hugging Face."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clean_outputs import assert_clean
from conversions import converted, raw, refusals
from tiny_models import Tensor, bf16, floats, noise, safetensors_bytes

from mxcli.backends.cpu import Cpu
from mxcli.errors import InputError
from mxcli.files.checkpoint import open_checkpoint
from mxcli.files.layouts import OnDisk, layout_of_dialect
from mxcli.files.layouts.layout import Misfits, Unread
from mxcli.files.layouts.mistral import MISTRAL
from mxcli.files.mistral_names import config_of_params
from mxcli.files.tensors import TensorInfo
from mxcli.flows.write.dequantize import Restored, dequantize_checkpoint

PARAMS: dict[str, Any] = {
    "dim": 64,
    "n_layers": 1,
    "head_dim": 32,
    "hidden_dim": 128,
    "n_heads": 2,
    "n_kv_heads": 1,
    "norm_eps": 1e-5,
    "vocab_size": 32,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 256,
    "quantization": {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"},
}
SHAPES = {
    "attention.wq": (64, 64),
    "attention.wk": (32, 64),
    "attention.wv": (32, 64),
    "attention.wo": (64, 64),
    "feed_forward.w1": (128, 64),
    "feed_forward.w2": (64, 128),
    "feed_forward.w3": (128, 64),
}
HF = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}
SCALE = 0.25
# Codes of E4M3: sign, 4 bits of exponent with bias 7, 3 of mantissa; those below 0x78 are finite and normal or small.
VALUES = np.array([
    (-1.0 if code & 0x80 else 1.0) * (
        (1 + (code & 7) / 8) * 2.0 ** (((code >> 3) & 15) - 7) if code & 0x78 else (code & 7) * 2.0**-9
    ) for code in range(256)
])  # fmt: skip


def f32(*values: float, shape: tuple[int, ...] = ()) -> Tensor:
    return "F32", np.array(values, np.float32).reshape(shape)


def codes(shape: tuple[int, int], seed: int) -> Tensor:
    found = np.random.default_rng(seed).integers(0, 0x70, shape).astype(np.uint8)
    return "F8_E4M3", found | (np.random.default_rng(seed + 50).integers(0, 2, shape).astype(np.uint8) << 7)


def native(per_row: bool = False) -> dict[str, Tensor]:
    tensors = {"tok_embeddings.weight": noise(32, 64, seed=1), "output.weight": noise(32, 64, seed=2)}
    for seed, (module, shape) in enumerate(SHAPES.items()):
        name = f"layers.0.{module}"
        scales = f32(*(SCALE * 2.0 ** (row % 4) for row in range(shape[0])), shape=(shape[0],))
        tensors[f"{name}.weight"] = codes(shape, seed)
        tensors[f"{name}.qscale_weight"] = scales if per_row else f32(SCALE)
        tensors[f"{name}.qscale_act"] = f32(0.5)
    tensors["layers.0.attention_norm.weight"] = noise(64, seed=3)
    tensors["layers.0.ffn_norm.weight"] = noise(64, seed=4)
    return tensors | {"norm.weight": noise(64, seed=5)}


def written(folder: Path, tensors: dict[str, Tensor], params: dict[str, Any] | None = PARAMS) -> Path:
    folder.mkdir()
    (folder / "consolidated.safetensors").write_bytes(safetensors_bytes(tensors))
    if params is not None:
        (folder / "params.json").write_text(json.dumps(params))
    return folder


def dequantized(source: Path, output: Path) -> Restored:
    result = dequantize_checkpoint(open_checkpoint(source), output, backend=Cpu(), dtype="F32")
    assert_clean(output)
    return result


def in_halves(matrix: np.ndarray, heads: int) -> np.ndarray:
    """The rows of heads in Hugging Face's order: first the even ones of a head, then the odd ones."""
    size = len(matrix) // heads
    order = [head * size + row for head in range(heads) for row in (*range(0, size, 2), *range(1, size, 2))]
    return matrix[order]


@pytest.mark.parametrize("per_row", [False, True])
def test_names_rows_and_values_are_those_of_hugging_face(tmp_path: Path, per_row: bool) -> None:
    tensors = native(per_row)
    result = dequantized(written(tmp_path / "m", tensors), tmp_path / "d")
    found = raw(tmp_path / "d")
    for module, name in HF.items():
        own = tensors[f"layers.0.{module}.weight"][1]
        scales = tensors[f"layers.0.{module}.qscale_weight"][1].reshape(-1, 1)
        expected = (VALUES[own] * scales).astype(np.float32)
        if module.endswith(("wq", "wk")):
            expected = in_halves(expected, 2 if module.endswith("wq") else 1)
        np.testing.assert_array_equal(floats(found[f"model.layers.0.{name}.weight"]), expected)
    renamed = {
        "model.embed_tokens.weight": "tok_embeddings.weight",
        "lm_head.weight": "output.weight",
        "model.norm.weight": "norm.weight",
        "model.layers.0.input_layernorm.weight": "layers.0.attention_norm.weight",
        "model.layers.0.post_attention_layernorm.weight": "layers.0.ffn_norm.weight",
    }
    assert {name: found[name][2] for name in renamed} == {
        name: tensors[own][1].tobytes() for name, own in renamed.items()
    }
    assert len(found) == len(HF) + len(renamed)
    assert any("7 activation scales ('layers.0." in note for note in result.notes)


def test_its_configuration_is_made_of_params(tmp_path: Path) -> None:
    dequantized(written(tmp_path / "m", native()), tmp_path / "d")
    config = json.loads((tmp_path / "d" / "config.json").read_text())
    assert config == {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "head_dim": 32,
        "intermediate_size": 128,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-5,
        "vocab_size": 32,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 256,
        "sliding_window": None,
        "tie_word_embeddings": False,
    }
    assert not (tmp_path / "d" / "params.json").exists(), "it states the quantization of the source"


@pytest.mark.parametrize("layout", ["modelopt", "ct", "quark", "torchao"])
def test_codes_are_carried_to_other_layouts(tmp_path: Path, layout: str) -> None:
    tensors = native()
    converted(written(tmp_path / "m", tensors), tmp_path / "c", layout)
    content = tensors["layers.0.attention.wq.weight"][1]
    assert in_halves(content, 2).tobytes() in {each[2] for each in raw(tmp_path / "c").values()}
    dequantize_checkpoint(open_checkpoint(tmp_path / "c"), tmp_path / "d", backend=Cpu(), dtype="F32")
    dequantized(tmp_path / "m", tmp_path / "direct")
    assert raw(tmp_path / "d") == raw(tmp_path / "direct")


def test_scales_of_the_cache_are_left_out(tmp_path: Path) -> None:
    cache = {f"layers.0.attention.{name}_fake_quantizer.qscale_act": f32(1.0) for name in ("kv", "q", "k", "v")}
    result = dequantized(written(tmp_path / "m", native() | cache), tmp_path / "d")
    assert any("11 activation scales" in note for note in result.notes)


@pytest.mark.parametrize(
    ("params", "more", "why"),
    [
        (None, {}, "there is no params.json next to it"),
        ({**PARAMS, "moe": {"num_experts": 8}}, {}, "params.json states moe, experts, and the names of such models"),
        ({**PARAMS, "vision_encoder": {"hidden_size": 8}}, {}, "params.json states vision_encoder, an image encoder"),
        ({**PARAMS, "n_heads": 3}, {}, "its 64 rows are not 3 heads of 32, an even number"),
        (
            {key: each for key, each in PARAMS.items() if key != "dim"},
            {},
            "params.json: dim is None; a number is needed",
        ),
        (PARAMS, {"layers.0.other.weight": noise(4, 4)}, "layers.0.other.weight: no tensor of this name is known"),
    ],
)
def test_names_that_are_not_known_stay_with_a_note(
    tmp_path: Path, params: dict[str, Any] | None, more: dict[str, Tensor], why: str
) -> None:
    source = written(tmp_path / "m", native() | more, params)
    result = dequantize_checkpoint(open_checkpoint(source), tmp_path / "d", backend=Cpu())
    (note,) = (note for note in result.notes if note.startswith("Names and order of rows stay those of Mistral"))
    assert why in note
    assert "layers.0.attention.wq.weight" in raw(tmp_path / "d")
    assert any(why in reason for reason in refusals(source, "ct"))


def disk(tensors: dict[str, tuple[str, tuple[int, ...]]]) -> OnDisk:
    infos = {name: TensorInfo(name, dtype, shape, "codes", Path("m"), 0, 0) for name, (dtype, shape) in tensors.items()}
    return OnDisk(infos, {})


@pytest.mark.parametrize(
    ("shape", "format"),
    [
        ((), "fp8_e4m3"),
        ((1,), "fp8_e4m3"),
        ((1, 1), "fp8_e4m3"),
        ((8,), "fp8_e4m3_channel"),
        ((8, 1), "fp8_e4m3_channel"),
    ],
)
@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
def test_shapes_of_scales(shape: tuple[int, ...], format: str, dtype: str) -> None:
    tensors = {"a.weight": ("F8_E4M3", (8, 16)), "a.qscale_weight": (dtype, shape)}
    (found,) = MISTRAL.weights(disk(tensors))
    assert (found.name, found.format.name, found.shape) == ("a.weight", format, (8, 16))
    assert {each.entry.name: (each.entry.dtype, each.entry.shape) for each in MISTRAL.contents(found)} == tensors


@pytest.mark.parametrize(
    ("tensors", "fault"),
    [
        ({"a.qscale_weight": ("F32", ())}, "has qscale_weight, but a.weight is missing (mistral)"),
        (
            {"a.weight": ("BF16", (8, 16)), "a.qscale_weight": ("F32", ())},
            "a.weight is BF16 [8, 16]; fp8_e4m3 needs ",
        ),
        ({"a.weight": ("F8_E4M3", (8,)), "a.qscale_weight": ("F32", ())}, "is F8_E4M3 [8] with qscale_weight F32 []"),
        ({"a.weight": ("F8_E4M3", (8, 16)), "a.qscale_weight": ("U8", ())}, "is F8_E4M3 [8, 16] with qscale_weight U8"),
        (
            {"a.weight": ("F8_E4M3", (8, 16)), "a.qscale_weight": ("F32", (4,))},
            "a.qscale_weight is F32 [4]; fp8_",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(tensors: dict[str, tuple[str, tuple[int, ...]]], fault: str) -> None:
    with pytest.raises(Misfits) as refused:
        MISTRAL.weights(disk(tensors))
    assert refused.value.faults["a"].startswith(fault)


def test_e5m2_is_named() -> None:
    with pytest.raises(Unread, match=r"^a\.weight: is F8_E5M2, which mxcli does not read of Mistral's"):
        MISTRAL.weights(disk({"a.weight": ("F8_E5M2", (8, 16)), "a.qscale_weight": ("F32", ())}))


@pytest.mark.parametrize(("key", "value"), [("dim", None), ("n_layers", "2"), ("n_heads", True), ("hidden_dim", 0)])
def test_numbers_of_params_are_needed(key: str, value: object) -> None:
    with pytest.raises(InputError, match=rf"params\.json: {key} is .*; a number is needed"):
        config_of_params({**PARAMS, key: value})


def test_it_is_recognized_by_its_tensors(tmp_path: Path) -> None:
    assert open_checkpoint(written(tmp_path / "m", native())).dialect == "mistral"
    assert layout_of_dialect("mistral") is MISTRAL
    assert MISTRAL.refusal(MISTRAL.weights(disk({"a.weight": ("F8_E4M3", (8, 16)), "a.qscale_weight": ("F32", ())}))[0])
    assert bf16([1.0])[0] == "BF16"


@pytest.mark.slow
def test_transformers_loads_it(tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers")
    dequantized(written(tmp_path / "m", native()), tmp_path / "d")
    _, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "d", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
