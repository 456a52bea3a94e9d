"""Sets of layers that engines join, by model."""

from __future__ import annotations

import pytest

from mxcli.errors import UsageError
from mxcli.files.models.fused import fused_sets, named_sets


def _among(config: dict[str, object] | None, *modules: str, more: tuple[tuple[str, ...], ...] = ()) -> list[str]:
    """Return the sets among layers, each `path` or `path:columns`, 64 columns by default."""
    parts = [module.partition(":") for module in modules]
    columns = {f"{path}.weight": int(width or 64) for path, _, width in parts}
    return list(fused_sets(config, more).among(columns))


QKV = ("m.self_attn.q_proj", "m.self_attn.k_proj", "m.self_attn.v_proj")
CROSS = ("m.encoder_attn.q_proj", "m.encoder_attn.k_proj", "m.encoder_attn.v_proj")
MLA = ("m.self_attn.q_a_proj", "m.self_attn.kv_a_proj_with_mqa")
DELTA = tuple(f"m.self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj", "g_a_proj"))


@pytest.mark.parametrize(
    ("model", "layers", "expected"),
    [
        ("llama", QKV, ["m.self_attn.q_proj+k_proj+v_proj"]),
        ("llama", ("m.mlp.gate_proj", "m.mlp.up_proj", "m.mlp.down_proj"), ["m.mlp.gate_proj+up_proj"]),
        ("mixtral", ("m.experts.3.w1", "m.experts.3.w2", "m.experts.3.w3"), ["m.experts.3.w1+w3"]),
        ("exaone", ("m.mlp.c_fc_0", "m.mlp.c_fc_1", "m.mlp.c_proj"), ["m.mlp.c_fc_0+c_fc_1"]),
        ("qwen", ("m.mlp.w1", "m.mlp.w2", "m.mlp.c_proj"), ["m.mlp.w2+w1"]),
        ("mixtral", ("m.mlp.w1", "m.mlp.w2"), []),
        ("deepseek_v3", MLA, ["m.self_attn.q_a_proj+kv_a_proj_with_mqa"]),
        ("minicpm3", MLA, []),
        ("sarvam_mla", MLA, []),
        ("kimi_k3", (*MLA, "m.self_attn.g_proj"), ["m.self_attn.q_a_proj+kv_a_proj_with_mqa+g_proj"]),
        ("deepseek_v3", (*MLA, "m.self_attn.g_proj"), ["m.self_attn.q_a_proj+kv_a_proj_with_mqa"]),
        ("kimi_linear", DELTA, ["m.self_attn.q_proj+k_proj+v_proj+b_proj+f_a_proj+g_a_proj+g_proj+f_proj"]),
        ("kimi_linear", ("m.self_attn.f_b_proj", "m.self_attn.g_b_proj"), ["m.self_attn.f_b_proj+g_b_proj"]),
        ("qwen4_exp", ("m.hyper_connection.input_mix_weight_down", "m.hyper_connection.block_inject_weight"),
         ["m.hyper_connection.input_mix_weight_down+block_inject_weight"]),
        ("qwen4_exp", ("m.ple.key_proj", "m.ple.value_proj"), ["m.ple.key_proj+value_proj"]),
        ("llama", DELTA, ["m.self_attn.q_proj+k_proj+v_proj"]),
        ("olmo_hybrid", tuple(f"m.linear_attn.{each}_proj" for each in "qkvg"),
         ["m.linear_attn.q_proj+k_proj+v_proj+g_proj"]),
        ("olmo_hybrid", (*QKV, "m.self_attn.g_proj"), ["m.self_attn.q_proj+k_proj+v_proj"]),
        ("qwen3_5_moe", ("m.linear_attn.in_proj_qkv", "m.linear_attn.in_proj_z", "m.linear_attn.in_proj_a",
                         "m.linear_attn.in_proj_b"),
         ["m.linear_attn.in_proj_qkv+in_proj_z", "m.linear_attn.in_proj_b+in_proj_a"]),
        ("deepseek_v4", ("m.attn.wq_a", "m.attn.wkv", "m.attn.compressor.wkv", "m.attn.compressor.wgate"),
         ["m.attn.wq_a+wkv", "m.attn.compressor.wkv+wgate"]),
        ("minimax_m3_vl", (*QKV, "m.self_attn.index_q_proj", "m.self_attn.index_k_proj"),
         ["m.self_attn.q_proj+k_proj+v_proj+index_q_proj+index_k_proj"]),
        ("inkling_mm_model", ("m.attn.wq_du", "m.attn.wk_dv", "m.attn.wv_dv", "m.attn.wr_du"),
         ["m.attn.wq_du+wk_dv+wv_dv+wr_du"]),
        ("dots_ocr", ("v.mlp.fc1", "v.mlp.fc2", "v.mlp.fc3"), ["v.mlp.fc1+fc3"]),
        ("clip", ("v.mlp.fc1", "v.mlp.fc2", "v.mlp.fc3"), []),
        ("glm4v", ("v.linear_proj.gate_proj", "v.linear_proj.dense_h_to_4h"),
         ["v.linear_proj.gate_proj+dense_h_to_4h"]),
        ("internlm2", ("m.attention.wqkv", "m.feed_forward.w1", "m.feed_forward.w3"), ["m.feed_forward.w1+w3"]),
        ("phi3", ("m.self_attn.qkv_proj", "m.mlp.gate_up_proj"), []),
        ("chatglm", ("m.self_attention.query_key_value", "m.mlp.dense_h_to_4h"), []),
        ("whisper", CROSS, ["m.encoder_attn.k_proj+v_proj"]),
        ("whisper", QKV, ["m.self_attn.q_proj+k_proj+v_proj"]),
        ("bert", ("l.attention.self.query", "l.attention.self.key", "l.attention.self.value"),
         ["l.attention.self.query+key+value"]),
        ("bert", ("l.crossattention.self.query", "l.crossattention.self.key", "l.crossattention.self.value"),
         ["l.crossattention.self.key+value"]),
        ("blip-2", ("qformer.attention.attention.query", "qformer.attention.attention.key"), []),
        ("t5", ("l.EncDecAttention.q", "l.EncDecAttention.k", "l.EncDecAttention.v"), ["l.EncDecAttention.k+v"]),
        ("t5", ("l.SelfAttention.q", "l.SelfAttention.k", "l.SelfAttention.v"), ["l.SelfAttention.q+k+v"]),
        ("molmo2", ("image_pooling_2d.wq", "image_pooling_2d.wk", "image_pooling_2d.wv"), ["image_pooling_2d.wk+wv"]),
        ("gemma3n", ("m.self_attn.q_proj",), []),
    ],
)  # fmt: skip
def test_sets_by_model_type(model: str, layers: tuple[str, ...], expected: list[str]) -> None:
    assert _among({"model_type": model}, *layers) == expected


ATTN = ("b.attn1.to_q", "b.attn1.to_k", "b.attn1.to_v", "b.attn2.to_q", "b.attn2.to_k:96", "b.attn2.to_v:96")


@pytest.mark.parametrize(
    ("name", "layers", "expected"),
    [
        ("UNet2DConditionModel", ATTN, ["b.attn1.to_q+to_k+to_v", "b.attn2.to_k+to_v"]),
        ("WanTransformer3DModel", ("b.attn2.to_q", "b.attn2.to_k", "b.attn2.to_v"), ["b.attn2.to_k+to_v"]),
        ("WanTransformer3DModel", ("b.attn2.add_k_proj", "b.attn2.add_v_proj"), ["b.attn2.add_k_proj+add_v_proj"]),
        ("SD3Transformer2DModel", ("b.attn2.to_q", "b.attn2.to_k", "b.attn2.to_v"), ["b.attn2.to_q+to_k+to_v"]),
        ("FluxTransformer2DModel", ("b.attn.add_q_proj", "b.attn.add_k_proj", "b.attn.add_v_proj"),
         ["b.attn.add_q_proj+add_k_proj+add_v_proj"]),
    ],
)  # fmt: skip
def test_sets_of_diffusers(name: str, layers: tuple[str, ...], expected: list[str]) -> None:
    sets = fused_sets({"_class_name": name})
    assert (sets.known, sets.source, sets.note) == (True, "diffusers 0.42", None)
    assert _among({"_class_name": name}, *layers) == expected


def test_layers_of_other_widths_are_no_set() -> None:
    assert _among({"model_type": "x"}, "m.attn.q_proj", "m.attn.k_proj:128", "m.attn.v_proj:128") == []
    assert _among({"model_type": "x"}, "m.mlp.gate_proj", "m.mlp.up_proj:32") == []
    assert _among({"model_type": "x"}, "m.attn.q_proj:64", "m.attn.k_proj:64") == ["m.attn.q_proj+k_proj+v_proj"]


def test_members_are_in_the_order_of_the_source_and_of_one_module() -> None:
    columns = dict.fromkeys(
        [
            "b.k_proj.weight",
            "a.up_proj.weight",
            "b.q_proj.weight",
            "a.gate_proj.weight",
            "a.k_proj.weight",
            "q_proj.bias",
        ],
        64,
    )
    assert fused_sets(None).among(columns) == {
        "b.q_proj+k_proj+v_proj": ("b.k_proj.weight", "b.q_proj.weight"),
        "a.gate_proj+up_proj": ("a.up_proj.weight", "a.gate_proj.weight"),
    }
    assert fused_sets(None).keys(columns)["a.up_proj.weight"] == "a.gate_proj+up_proj"
    assert list(fused_sets(None).among({"q_proj.weight": 64, "k_proj.weight": 64})) == ["q_proj+k_proj+v_proj"]


@pytest.mark.parametrize(
    ("config", "known"),
    [
        ({"model_type": "llama"}, True),
        ({"model_type": "custom", "architectures": ["QWenLMHeadModel"]}, True),
        ({"architectures": ["InternLM2ForCausalLM"]}, True),
        ({"text_config": {"model_type": "qwen3"}}, True),
        ({"model_type": "my_model", "architectures": ["MyForCausalLM"]}, False),
        ({}, False),
        (None, False),
    ],
)
def test_an_unknown_model_is_said(config: dict[str, object] | None, known: bool) -> None:
    sets = fused_sets(config)
    assert sets.known == known
    assert sets.source == ("vLLM 0.32 and SGLang 0.5.23" if known else "")
    assert (sets.note is None) == known
    assert _among(config, *QKV) == ["m.self_attn.q_proj+k_proj+v_proj"]


def test_the_note_names_the_model() -> None:
    assert fused_sets({"model_type": "my_model"}).note == (
        "The layers that engines join in 'my_model' are not known (it is not in the tables of vLLM 0.32 and SGLang "
        "0.5.23); q, k, v and gate, up are taken as joined, by their names."
    )
    assert "a model without a model type" in str(fused_sets(None).note)


def test_sets_of_the_user_are_joined_to_those_known() -> None:
    layers = ("m.query_key", "m.value", "m.gate_proj", "m.up_proj")
    assert _among(None, *layers, more=(("query_key", "value"),)) == [
        "m.query_key+value+query+key",
        "m.gate_proj+up_proj",
    ]
    assert _among(None, *layers, more=(("gate_proj", "value"),)) == ["m.gate_proj+value+query+key+up_proj"]
    assert _among(None, *CROSS, more=(("q_proj", "k_proj", "v_proj"),)) == ["m.encoder_attn.q_proj+k_proj+v_proj"]


@pytest.mark.parametrize("text", ["q", "q+", "a.b+c", "q+k,k+v", ""])
def test_sets_that_cannot_be_named(text: str) -> None:
    with pytest.raises(UsageError, match="--fuse"):
        named_sets(text)


def test_named_sets() -> None:
    assert named_sets("q+k, gate + up") == (("q", "k"), ("gate", "up"))
