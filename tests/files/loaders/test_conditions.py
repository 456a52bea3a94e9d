"""Conditions of loader rules: where in a checkpoint each holds."""

from __future__ import annotations

import pytest

from mxcli.files.layouts import Weight
from mxcli.files.loaders.conditions import EXPERTS_OF_STACKS, KEYS_OF_HEADS, UNSHARED
from mxcli.files.loaders.rule import Loading
from mxcli.numerics.scheme import resolve

AT = "model.layers.{}.feed_forward"
SHARED, EXPERT = "shared_expert.up_proj.weight", "experts.{}.up_proj.weight"


def weight(name: str, format: str = "nvfp4") -> Weight:
    return Weight(name, (64, 64), resolve(format), "BF16")


def test_fused_sets_with_different_scales_are_those_of_the_formats_of_a_rule() -> None:
    q, gate = weight("a.q_proj.weight", "nvfp4"), weight("a.gate_proj.weight", "fp8_e4m3")
    fused = {"a.q+k": (q.name, "a.k_proj.weight"), "a.gate+up": (gate.name, "a.up_proj.weight")}
    given = Loading("compressed-tensors", [q, gate], {}, fused, unshared=["a.q+k", "a.gate+up"])
    assert [place.where for place in UNSHARED.places(given, [q])] == ["a.q+k"]
    assert [place.where for place in UNSHARED.places(given, [gate])] == ["a.gate+up"]
    assert [place.where for place in UNSHARED.places(given, [q, gate])] == ["a.q+k", "a.gate+up"]


@pytest.mark.parametrize(
    ("model_type", "quantized", "plain", "expected"),
    [
        ("llama4_text", [(0, SHARED), (1, SHARED)], [], [0, 1]),
        ("llama4", [(0, SHARED), (0, EXPERT.format(0)), (1, SHARED)], [], [1]),
        ("llama4_text", [(0, SHARED), (0, EXPERT.format(0)), (0, EXPERT.format(1))], [], []),
        ("llama4_text", [(1, EXPERT.format(0))], [(0, SHARED), (1, SHARED)], [0]),
        ("llama4_text", [(0, "up_proj.weight")], [], []),
        ("qwen2_moe", [(0, SHARED)], [], []),
    ],
)
def test_plain_stacks_next_to_quantized_layers(
    model_type: str, quantized: list[tuple[int, str]], plain: list[tuple[int, str]], expected: list[int]
) -> None:
    def names(listed: list[tuple[int, str]]) -> list[str]:
        return [f"{AT.format(layer)}.{part}" for layer, part in listed]

    weights = [weight(name) for name in names(quantized)]
    given = Loading("compressed-tensors", weights, {"model_type": model_type}, plain=names(plain))
    found = [place.where for place in EXPERTS_OF_STACKS.places(given, weights)]
    assert found == [f"{AT.format(layer)}.experts" for layer in expected]


def test_keys_and_values_of_all_heads() -> None:
    names = [f"model.layers.0.self_attn.{part}.weight" for part in ("kv_b_proj", "q_b_proj", "embed_q", "unembed_out")]
    weights = [weight(name, "mxfp4") for name in names]
    given = Loading("mlx", weights, {"model_type": "deepseek_v3"})
    assert [place.where for place in KEYS_OF_HEADS.places(given, weights)] == names[:1]
    assert not KEYS_OF_HEADS.places(given, weights[1:])
