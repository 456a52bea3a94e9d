"""The table of loader rules: every outcome is one that an engine was seen or read to have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from mxcli.errors import UsageError
from mxcli.files.layouts import LAYOUTS, Weight
from mxcli.files.loaders.engine import ENGINES, engines_of, listed_engines
from mxcli.files.loaders.rule import OUTCOMES, READ, RUN, Loading
from mxcli.files.loaders.rules import RULES
from mxcli.files.loaders.tensor_parallel import not_known, uncut
from mxcli.files.loaders.verdict import Verdict, verdicts
from mxcli.numerics.scheme import resolve

Q, K, V = (f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv")
O = "model.layers.0.self_attn.o_proj.weight"
GATE, UP = (f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up"))
EXPERT = "model.layers.0.mlp.experts.3.down_proj.weight"
LATENT = ("model.layers.0.self_attn.q_a_proj.weight", "model.layers.0.self_attn.kv_a_proj_with_mqa.weight")


def weight(name: str, format: str, shape: tuple[int, ...] = (256, 256)) -> Weight:
    return Weight(name, shape, resolve(format), "BF16")


def loading(
    layout: str, *weights: Weight, fused: Sequence[Sequence[str]] = (), devices: int | None = None, **config: object
) -> Loading:
    sets = {"+".join(members): tuple(members) for members in fused}
    return Loading(layout, weights, config, sets, devices=devices)


def by_engine(given: Loading) -> Mapping[str, Verdict]:
    return {each.engine.name: each for each in verdicts(given)}


def outcomes(given: Loading) -> dict[str, str]:
    """The outcomes with engines that load the layout."""
    return {name: each.outcome for name, each in by_engine(given).items() if each.usual}


def test_rules_name_what_there_is() -> None:
    layouts = {layout for rule in RULES for layout in rule.layouts}
    assert layouts == set(LAYOUTS)
    assert {rule.engine for rule in RULES} <= set(ENGINES)
    assert {rule.outcome for rule in RULES} <= set(OUTCOMES)
    for rule in RULES:
        held = {name for layout in rule.layouts for name in LAYOUTS[layout].formats}
        assert set(rule.formats) <= held | {"fp8_e4m3", "fp8_e4m3_128x128", "e4m3:e8m0:128x128"}, rule
        assert rule.evidence.kind in (RUN, READ)
        assert (rule.evidence.kind == RUN) == bool(rule.evidence.date)
        assert rule.why or rule.outcome == "loads", rule


def test_an_engine_has_one_unconditional_rule_for_a_format() -> None:
    for layout in LAYOUTS.values():
        for engine in ENGINES:
            own = [rule for rule in RULES if rule.engine == engine and layout.name in rule.layouts and not rule.when]
            for name in layout.formats:
                assert sum(rule.covers(name) for rule in own) <= 1, (layout.name, engine, name)


@pytest.mark.parametrize(
    ("layout", "format", "expected"),
    [
        ("compressed-tensors", "mxfp8", {"vllm": "loads", "sglang": "refuses", "transformers": "loads"}),
        ("compressed-tensors", "mxfp6", {"vllm": "refuses", "sglang": "refuses", "transformers": "loads"}),
        ("compressed-tensors", "mxfp4", {"vllm": "loads", "sglang": "refuses", "transformers": "loads"}),
        ("compressed-tensors", "nvfp4", {"vllm": "loads", "sglang": "loads", "transformers": "loads"}),
        ("compressed-tensors", "fp8_e4m3_128x128", {"vllm": "loads", "sglang": "loads", "transformers": "loads"}),
        ("modelopt", "mxfp8", {"vllm": "loads", "sglang": "refuses", "tensorrt-llm": "not known"}),
        ("modelopt", "nvfp4", {"vllm": "loads", "sglang": "loads", "tensorrt-llm": "not known"}),
        ("modelopt", "mxfp4", {"vllm": "refuses", "sglang": "refuses", "tensorrt-llm": "not known"}),
        ("fp8", "mxfp8", {"vllm": "refuses", "sglang": "loads", "transformers": "loads"}),
        ("fp8", "fp8_e4m3", {"vllm": "refuses", "sglang": "refuses", "transformers": "loads"}),
        ("quark", "mxfp6_e3m2", {"vllm": "loads", "sglang": "refuses", "transformers": "loads"}),
        ("torchao", "nvfp4", {"vllm": "loads", "transformers": "loads", "torchao": "loads"}),
        ("torchao-plain", "mxfp6", {"vllm": "not known", "transformers": "loads", "torchao": "loads"}),
        ("auto-round", "mxfp4", {"transformers": "loads", "vllm": "loads"}),
        ("auto-round", "nvfp4", {"transformers": "loads", "vllm": "refuses"}),
        ("auto-round", "fp8_e4m3_128x128", {"transformers": "refuses", "vllm": "loads"}),
        ("gguf", "mxfp4", {"transformers": "loads", "llama.cpp": "loads"}),
        ("gguf", "nvfp4", {"transformers": "refuses", "llama.cpp": "loads"}),
        ("mxcli", "mxint8", {}),
    ],
)
def test_formats_of_a_dense_layer(layout: str, format: str, expected: dict[str, str]) -> None:
    assert outcomes(loading(layout, weight(O, format))) == expected


@pytest.mark.parametrize(
    ("layout", "format", "shape", "expected"),
    [
        (
            "compressed-tensors",
            "nvfp4",
            (64, 64),
            {"vllm": "loads", "sglang": "loads", "transformers": "loads wrongly"},
        ),
        ("compressed-tensors", "mxfp8", (64, 64), {"vllm": "loads", "sglang": "refuses", "transformers": "refuses"}),
        ("compressed-tensors", "mxfp6", (64, 64), {"vllm": "refuses", "sglang": "refuses", "transformers": "loads"}),
        ("compressed-tensors", "mxfp4", (64, 64), {"vllm": "loads", "sglang": "not known", "transformers": "loads"}),
        (
            *("compressed-tensors", "fp8_e4m3_128x128", (128, 128)),
            {"vllm": "loads", "sglang": "loads", "transformers": "loads"},
        ),
        (
            *("compressed-tensors", "fp8_e4m3_128x128", (128, 256)),
            {"vllm": "loads", "sglang": "loads", "transformers": "refuses"},
        ),
        ("fp8", "mxfp8", (64, 64), {"vllm": "refuses", "sglang": "loads", "transformers": "loads"}),
        (
            "modelopt",
            "fp8_e4m3_channel",
            (64, 64),
            {"vllm": "refuses", "sglang": "refuses", "tensorrt-llm": "not known"},
        ),
        ("quark", "mxfp6", (64, 64), {"vllm": "refuses", "sglang": "refuses", "transformers": "refuses"}),
        ("quark", "fp8_e4m3", (64, 64), {"vllm": "refuses", "sglang": "loads", "transformers": "loads wrongly"}),
    ],
)
def test_experts(layout: str, format: str, shape: tuple[int, int], expected: dict[str, str]) -> None:
    assert outcomes(loading(layout, weight(EXPERT, format, shape))) == expected


@pytest.mark.parametrize(
    ("layout", "shape", "expected"),
    [
        ("compressed-tensors", (576, 576), {"vllm": "refuses", "sglang": "refuses", "transformers": "refuses"}),
        ("compressed-tensors", (256, 2880), {"vllm": "refuses", "sglang": "refuses", "transformers": "refuses"}),
        ("compressed-tensors", (256, 64), {"vllm": "refuses", "sglang": "refuses", "transformers": "refuses"}),
        ("compressed-tensors", (192, 256), {"vllm": "loads", "sglang": "loads", "transformers": "loads"}),
        ("fp8", (576, 128), {"vllm": "loads", "sglang": "loads", "transformers": "refuses"}),
        ("fp8", (192, 256), {"vllm": "loads", "sglang": "loads", "transformers": "loads wrongly"}),
        ("fp8", (96, 256), {"vllm": "loads", "sglang": "loads", "transformers": "loads"}),
        ("fp8", (256, 64), {"vllm": "refuses", "sglang": "refuses", "transformers": "loads"}),
        ("modelopt", (256, 576), {"vllm": "refuses", "sglang": "refuses", "tensorrt-llm": "not known"}),
        ("modelopt", (192, 256), {"vllm": "refuses", "sglang": "refuses", "tensorrt-llm": "not known"}),
    ],
)
def test_partial_blocks_of_128x128(layout: str, shape: tuple[int, int], expected: dict[str, str]) -> None:
    assert outcomes(loading(layout, weight(O, "fp8_e4m3_128x128", shape))) == expected


def test_powers_of_two_as_scales_have_the_same_blocks() -> None:
    given = loading("fp8", weight(O, "e4m3:e8m0:128x128", (192, 256)))
    assert outcomes(given) == {"vllm": "loads", "sglang": "loads", "transformers": "loads wrongly"}


@pytest.mark.parametrize(
    ("layout", "rows", "expected"),
    [
        ("compressed-tensors", (128, 64, 128), {"vllm": "refuses", "sglang": "refuses", "transformers": "loads"}),
        ("compressed-tensors", (128, 128, 64), {"vllm": "loads", "sglang": "loads", "transformers": "loads"}),
        ("fp8", (128, 128, 64), {"vllm": "loads", "sglang": "refuses", "transformers": "loads"}),
        ("fp8", (256, 128, 128), {"vllm": "loads", "sglang": "loads", "transformers": "loads"}),
    ],
)
def test_partial_rows_within_a_fused_layer(layout: str, rows: tuple[int, ...], expected: dict[str, str]) -> None:
    weights = [weight(name, "fp8_e4m3_128x128", (count, 256)) for name, count in zip((Q, K, V), rows, strict=True)]
    assert outcomes(loading(layout, *weights, fused=[(Q, K, V)])) == expected


def test_the_latent_projection_of_deepseek_may_end_within_a_block() -> None:
    weights = [weight(LATENT[0], "fp8_e4m3_128x128", (1536, 7168)), weight(LATENT[1], "fp8_e4m3_128x128", (576, 7168))]
    found = outcomes(loading("fp8", *weights, fused=[LATENT]))
    assert (found["vllm"], found["sglang"], found["transformers"]) == ("loads", "loads", "refuses")


def test_members_of_a_fused_layer_in_different_formats() -> None:
    weights = [weight(GATE, "mxfp8"), weight(UP, "mxfp4")]
    found = by_engine(loading("compressed-tensors", *weights, fused=[(GATE, UP)]))
    assert (found["vllm"].outcome, found["transformers"].outcome) == ("refuses", "loads")
    assert "gate_proj mxfp8_e4m3, up_proj mxfp4_e2m1" in found["vllm"].reason
    plain = by_engine(loading("compressed-tensors", weights[0], fused=[(GATE, UP)]))
    assert "gate_proj mxfp8_e4m3, up_proj plain" in plain["vllm"].reason


def test_scales_that_differ_within_a_fused_layer() -> None:
    given = Loading("compressed-tensors", [weight(Q, "fp8_e4m3")], {}, {}, unshared=["layers.0.q+k+v"])
    assert outcomes(given) == {"vllm": "loads at a loss", "sglang": "loads at a loss", "transformers": "loads"}
    torchao = Loading("torchao", [weight(Q, "fp8_e4m3")], {}, {}, unshared=["layers.0.q+k+v"])
    assert outcomes(torchao) == {"vllm": "loads wrongly", "transformers": "loads", "torchao": "loads"}
    codes = Loading("compressed-tensors", [weight(Q, "nvfp4")], {}, {}, unshared=["layers.0.q+k+v"])
    assert outcomes(codes) == {"vllm": "loads wrongly", "sglang": "loads wrongly", "transformers": "loads"}


def test_only_gpt_oss_is_loaded_from_its_layout() -> None:
    stack = weight("model.layers.0.mlp.experts.down_proj", "mxfp4", (4, 64, 64))
    assert set(outcomes(loading("gpt-oss", stack, model_type="gpt_oss")).values()) == {"loads"}
    found = by_engine(loading("gpt-oss", stack, model_type="qwen3_moe"))
    assert {found[name].outcome for name in ("vllm", "sglang", "transformers", "mlx")} == {"refuses"}
    assert "('config.json': model_type is qwen3_moe)" in found["vllm"].reason


def test_a_verdict_says_its_reason_and_how_it_is_known() -> None:
    partial = [weight(f"model.layers.{n}.self_attn.o_proj.weight", "fp8_e4m3_128x128", (64, 576)) for n in range(3)]
    found = by_engine(loading("compressed-tensors", *partial))
    assert found["transformers"].sentence == (
        "transformers 5.24.0 refuses this (run 2026-11): compressed-tensors quantizes a layer's inputs in groups of "
        "128 ('model.layers.0.self_attn.o_proj.weight': 576 inputs in groups of 128, and 2 more)"
    )
    assert found["transformers"].way_out == "Use --format fp8_e4m3_channel or mxfp8, or --exclude those layers."
    assert found["llama.cpp"].sentence.startswith("llama.cpp refuses this (read, not run): ")
    (unknown,) = verdicts(loading("gguf", weight(O, "mxfp4")), ["vllm"], only_named=True)
    assert (unknown.outcome, unknown.evidence, unknown.version) == ("not known", None, "0.33.0")
    assert unknown.reason == "mxfp4_e2m1: no rule is known"


def test_the_worst_of_several_formats_counts() -> None:
    mixed = loading("compressed-tensors", weight(O, "mxfp6"), weight(GATE, "mxfp8"))
    assert outcomes(mixed) == {"vllm": "refuses", "sglang": "refuses", "transformers": "loads"}
    assert by_engine(mixed)["vllm"].reason == "mxfp6_e2m3: it has no scheme for mxfp6-pack-quantized"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "llama"}, {"vllm": "loads", "sglang": "loads", "transformers": "loads"}),
        ({"model_type": "moshi"}, {"vllm": "not known", "sglang": "not known", "transformers": "loads"}),
        ({"model_type": "odd", "architectures": ["ArcticForCausalLM"]}, {"vllm": "loads", "sglang": "loads",
                                                                         "transformers": "loads"}),
        ({"model_type": "t5"}, {"vllm": "not known", "sglang": "not known", "transformers": "refuses"}),
        ({"model_type": "dinov2"}, {"vllm": "not known", "sglang": "not known", "transformers": "refuses"}),
        ({"_class_name": "FluxTransformer2DModel"}, {"vllm": "not known", "sglang": "not known"}),
    ],
)  # fmt: skip
def test_models_that_engines_have_trouble_with(config: dict[str, object], expected: dict[str, str]) -> None:
    assert outcomes(loading("compressed-tensors", weight(O, "nvfp4"), **config)) == expected


@pytest.mark.parametrize(("width", "outcome"), [(768, "loads"), (1536, "refuses"), (None, "refuses")])
def test_transformers_takes_one_width_of_experts_from_gguf_files(width: int | None, outcome: str) -> None:
    stack = weight("blk.0.ffn_up_exps.weight", "mxfp4", (4, 256, 256))
    found = outcomes(loading("gguf", stack, model_type="qwen3_moe", moe_intermediate_size=width))
    assert (found["transformers"], found["llama.cpp"]) == (outcome, "loads")
    assert outcomes(loading("gguf", stack, model_type="qwen3", moe_intermediate_size=width))["transformers"] == "loads"


def test_models_that_llama_cpp_has_trouble_with() -> None:
    ffn = weight("blk.0.ffn_gate.weight", "nvfp4")
    assert outcomes(loading("gguf", ffn, model_type="llama"))["llama.cpp"] == "loads"
    assert outcomes(loading("gguf", ffn, model_type="qwen2"))["llama.cpp"] == "loads wrongly"
    assert outcomes(loading("gguf", ffn, model_type="llama", mlp_bias=True))["llama.cpp"] == "refuses"
    assert outcomes(loading("gguf", weight("blk.0.attn_q.weight", "nvfp4"), model_type="qwen2"))["llama.cpp"] == "loads"
    mxfp4 = weight("blk.0.ffn_gate.weight", "mxfp4")
    assert outcomes(loading("gguf", mxfp4, model_type="qwen2"))["llama.cpp"] == "loads"


def test_models_of_diffusers() -> None:
    flux = {"_class_name": "FluxTransformer2DModel"}
    assert outcomes(loading("torchao", weight(O, "nvfp4"), **flux)) == {
        "vllm": "not known",
        "torchao": "loads",
        "diffusers": "loads",
    }
    assert by_engine(loading("torchao", weight(O, "nvfp4"), **flux))["transformers"].outcome == "refuses"
    assert by_engine(loading("compressed-tensors", weight(O, "nvfp4"), **flux))["diffusers"].outcome == "refuses"
    assert by_engine(loading("torchao", weight(O, "nvfp4"), model_type="llama"))["diffusers"].outcome == "refuses"


def test_plain_experts_of_packed_checkpoints() -> None:
    plain = Loading("compressed-tensors", [weight(O, "nvfp4")], {}, {}, plain=[EXPERT])
    assert outcomes(plain) == {"vllm": "loads", "sglang": "loads", "transformers": "refuses"}
    plain = Loading("compressed-tensors", [weight(O, "fp8_e4m3")], {}, {}, plain=[EXPERT])
    assert outcomes(plain)["transformers"] == "loads"


def test_what_an_engine_loads_elsewhere_is_no_certain_fault() -> None:
    found = by_engine(loading("compressed-tensors", weight(O, "fp8_e4m3_128x128", (64, 64))))
    assert (found["vllm"].is_fault, found["vllm"].is_certain_fault) == (True, False)
    assert (found["transformers"].is_fault, found["transformers"].is_certain_fault) == (True, True)
    assert found["vllm"].reason.startswith(
        "its kernels quantize a layer's inputs in groups of 128, unless it runs on a CPU ("
    )


def test_engines_are_found_by_name_and_alias() -> None:
    assert engines_of("vllm, transformers,HF") == ("vllm", "transformers")
    assert engines_of(None) == ()
    assert listed_engines(["vllm", "sglang", "llama.cpp"]) == "vLLM, SGLang and llama.cpp"
    with pytest.raises(UsageError, match=r"unknown engine 'vlm': known are vllm, .* Did you mean vllm\?"):
        engines_of("vlm")
    with pytest.raises(UsageError, match="unknown engine ''"):
        engines_of("vllm,")


def test_what_cannot_be_cut_over_devices() -> None:
    config = {"num_attention_heads": 4, "num_key_value_heads": 2}
    weights = [weight(O, "mxfp8", (128, 160)), weight(GATE, "fp8_e4m3_128x128", (384, 128)), weight(K, "mxfp8")]
    assert list(uncut(weights, config, 1)) == []
    assert [(each.where, each.value, each.need) for each in uncut(weights, config, 2)] == [
        (O, "160 columns over 2 devices are 80 each", "whole blocks of 32 of columns for each device"),
        (GATE, "384 rows over 2 devices are 192 each", "whole blocks of 128 of rows for each device"),
    ]
    assert [each.where for each in uncut(weights, config, 3)] == ["config.json", "config.json", O]
    assert not_known([*weights, weight("transformer.h.0.mixer.odd.weight", "mxfp8")]) == [
        "transformer.h.0.mixer.odd.weight"
    ]
    found = by_engine(loading("compressed-tensors", *weights[:1], devices=2, **config))
    assert (found["vllm"].outcome, found["transformers"].outcome) == ("refuses", "loads")


@pytest.mark.parametrize(
    ("layout", "format", "name", "model", "expected"),
    [
        ("torchao", "mxfp8", O, "falcon", "refuses"),
        ("torchao", "mxfp8", O, "rwkv", "refuses"),
        ("torchao", "nvfp4", O, "falcon_mamba", "loads"),
        ("torchao", "mxfp8", "vit.encoder.layer.0.output.dense.weight", "vit", "refuses"),
        ("torchao", "mxfp8", "language_model.model.layers.0.mlp.up_proj.weight", "llava", "refuses"),
        ("torchao", "mxfp8", "model.language_model.layers.0.mlp.up_proj.weight", "llava", "loads"),
        ("fp8", "mxfp8", "vit.encoder.layer.0.output.dense.weight", "vit", "loads"),
        ("fp8", "mxfp8", "encoder.layer.0.mlp.fc1.weight", "dinov2", "refuses"),
        ("torchao", "nvfp4", "encoder.layer.0.mlp.fc1.weight", "dinov2", "refuses"),
        ("fp8", "mxfp8", EXPERT, "llama4_text", "loads wrongly"),
        ("fp8", "mxfp8", EXPERT, "qwen3_vl_moe", "loads wrongly"),
        ("fp8", "mxfp8", EXPERT, "qwen3_moe", "loads"),
        ("compressed-tensors", "nvfp4", O, "unispeech", "refuses"),
        ("compressed-tensors", "nvfp4", O, "semantic", "refuses"),
        ("compressed-tensors", "mxfp8", O, "unispeech", "loads"),
        ("compressed-tensors", "nvfp4", O, "pegasus_x", "loads"),
        ("compressed-tensors", "nvfp4", O, "nomic_bert", "loads wrongly"),
        ("compressed-tensors", "mxfp8", O, "nomic_bert", "loads"),
        ("compressed-tensors", "mxfp8", O, "rt_detr", "loads wrongly"),
        ("compressed-tensors", "nvfp4", O, "bailing_hybrid", "refuses"),
        ("compressed-tensors", "mxfp4", O, "olmo_hybrid", "refuses"),
    ],
)
def test_layers_of_models_that_transformers_has_trouble_with(
    layout: str, format: str, name: str, model: str, expected: str
) -> None:
    assert by_engine(loading(layout, weight(name, format), model_type=model))["transformers"].outcome == expected
