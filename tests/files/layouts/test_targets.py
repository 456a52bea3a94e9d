from __future__ import annotations

from collections.abc import Iterable

import pytest

from mxcli.files.layouts.targets import EXPERTS, invalid_targets, read_targets, targets_of

ATTENTION = ("self_attn.q_proj", "self_attn.k_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def layers(numbers: Iterable[int], parts: Iterable[str], stack: str = "model.layers") -> list[str]:
    return [f"{stack}.{number}.{part}" for number in numbers for part in parts]


def experts(layer_numbers: Iterable[int], count: int, stack: str = "mlp.experts") -> list[str]:
    return layers(layer_numbers, [f"{stack}.{expert}.{part}" for expert in range(count) for part in ("w1", "w2")])


FOLDED: dict[str, tuple[list[str], list[str], list[str]]] = {
    "every layer": (
        layers(range(32), ATTENTION + MLP),
        ["lm_head"],
        [
            r"re:(.*\.)?layers\.\d+\.mlp\.(down_proj|gate_proj|gate_up_proj|up_proj)$",
            r"re:(.*\.)?layers\.\d+\.self_attn\.(k_proj|q_proj)$",
        ],
    ),
    "layers that engines join": (
        layers(range(2), ["attn.q_proj", "attn.k_proj", "attn.v_proj", "mlp.w1", "mlp.w3"]),
        [],
        [
            r"re:(.*\.)?layers\.\d+\.attn\.(k_proj|q_proj|qkv_proj|v_proj)$",
            r"re:(.*\.)?layers\.\d+\.mlp\.(gate_up_proj|w1|w3)$",
        ],
    ),
    "layers that engines join, some of them plain": (
        layers([1, 2], ["mlp.gate_proj", "mlp.up_proj"]),
        layers([0], ["mlp.gate_proj", "mlp.up_proj"]),
        [r"re:(.*\.)?layers\.(1|2)\.mlp\.(gate_proj|gate_up_proj|up_proj)$"],
    ),
    "layers that engines join in part": (
        layers(range(2), ["attn.q_proj", "attn.k_proj", "attn.v_proj"]) + layers([0], ["mlp.up_proj"]),
        layers([1], ["attn.qkv_proj"]),
        [
            r"re:(.*\.)?layers\.0\.attn\.qkv_proj$",
            r"re:(.*\.)?layers\.0\.mlp\.up_proj$",
            r"re:(.*\.)?layers\.\d+\.attn\.(k_proj|q_proj|v_proj)$",
        ],
    ),
    "one layer": (layers([0], ATTENTION[:1]), [], [r"re:(.*\.)?layers\.0\.self_attn\.q_proj$"]),
    "some layers": (
        layers([1, 2, 4], MLP[:1]),
        layers([0, 3, 5], MLP[:1]),
        [r"re:(.*\.)?layers\.(1|2|4)\.mlp\.gate_proj$"],
    ),
    "all but the first and the last": (
        layers([1, 2, 10], MLP[2:]),
        layers([0, 11], MLP[2:]),
        [r"re:(.*\.)?layers\.(1|2|10)\.mlp\.down_proj$"],
    ),
    "dense layers before layers of experts": (
        [*layers(range(3), MLP[:1]), *experts(range(3, 61), 256)],
        layers(range(3, 61), ["mlp.gate"]),
        [
            r"re:(.*\.)?layers\.\d+\.mlp\.experts\.\d+\.(w1|w2)$",
            r"re:(.*\.)?layers\.\d+\.mlp\.gate_proj$",
            *EXPERTS,
        ],
    ),
    "experts of some layers": (
        experts([0, 1], 4),
        experts([2], 4),
        [r"re:(.*\.)?layers\.(0|1)\.mlp\.experts\.\d+\.(w1|w2)$"],
    ),
    "some experts of some layers": (
        [*experts([0, 1], 4), *experts([2], 2)],
        [f"model.layers.2.mlp.experts.{expert}.{part}" for expert in (2, 3) for part in ("w1", "w2")],
        [
            r"re:(.*\.)?layers\.(0|1)\.mlp\.experts\.\d+\.(w1|w2)$",
            r"re:(.*\.)?layers\.2\.mlp\.experts\.(0|1)\.(w1|w2)$",
        ],
    ),
    "a vision tower with the same names": (
        layers(range(4), ATTENTION[:1], "model.language_model.layers"),
        layers(range(4), ATTENTION[:1], "model.vision_tower.encoder.layers"),
        [r"re:(?!(.*\.)?vision_tower\.)(.*\.)?layers\.\d+\.self_attn\.q_proj$"],
    ),
    "a text model of the general name": (
        layers(range(4), ATTENTION[:1]),
        layers(range(4), ATTENTION[:1], "vision_model.layers"),
        [r"re:(?!(.*\.)?vision_model\.)(.*\.)?layers\.\d+\.self_attn\.q_proj$"],
    ),
    "a tower alone": (
        layers(range(4), ATTENTION[:1], "audio_tower.layers"),
        layers(range(4), ATTENTION[:1]),
        [r"re:(.*\.)?audio_tower\.(.*\.)?layers\.(0|1|2|3)\.self_attn\.q_proj$"],
    ),
    "an encoder and a decoder": (
        layers(range(2), ["layer.0.SelfAttention.q"], "encoder.block")
        + layers(range(3), ["layer.0.SelfAttention.q", "layer.1.EncDecAttention.q"], "decoder.block"),
        ["lm_head"],
        [
            r"re:(.*\.)?block\.\d+\.layer\.0\.SelfAttention\.q$",
            r"re:(.*\.)?block\.\d+\.layer\.1\.EncDecAttention\.q$",
        ],
    ),
    "inside LoRA layers": (
        layers(range(2), ["self_attn.qkv_proj.base_layer"]),
        layers(range(2), ["self_attn.qkv_proj.lora_A.speech"]),
        [r"re:(.*\.)?layers\.\d+\.self_attn\.qkv_proj(\.base_layer)?$"],
    ),
    "outside of lists": (
        ["model.multi_modal_projector.linear_1", "proj_in"],
        ["model.multi_modal_projector.linear_2"],
        [r"re:(.*\.)?multi_modal_projector\.linear_1$", r"re:(.*\.)?proj_in$"],
    ),
    "a head that transformers calls lm_head": (["embed_out"], [], [r"re:(.*\.)?(embed_out|lm_head)$"]),
    "shared experts": (
        [*experts([0, 1], 4), *layers([0, 1], ["mlp.shared_experts.up_proj"])],
        [],
        [
            r"re:(.*\.)?layers\.\d+\.mlp\.experts\.\d+\.(w1|w2)$",
            r"re:(.*\.)?layers\.\d+\.mlp\.shared_expert[s]\.up_proj$",
            *EXPERTS,
        ],
    ),
    "layers that transformers renames": (
        layers(range(2), ["attn.attention.q_proj", "mlp.c_fc_0"], "transformer.h"),
        [],
        [
            r"re:(.*\.)?h\.\d+\.attn\.attention\.q_proj$",
            r"re:(.*\.)?h\.\d+\.mlp\.c_fc_0$",
            r"re:(.*\.)?layers\.\d+\.mlp\.gate_proj$",
            r"re:(.*\.)?layers\.\d+\.self_attn\.q_proj$",
        ],
    ),
    "a renamed layer next to a plain one of that name": (
        layers(range(2), ["mlp.linear_gate"]),
        layers(range(2), ["mlp.gate_proj"]),
        [r"re:(.*\.)?layers\.\d+\.mlp\.linear_gate$"],
    ),
    "items of a list": (["lm_heads.0", "lm_heads.1"], ["lm_heads.2"], [r"re:(.*\.)?lm_heads\.(0|1)$"]),
    "characters of expressions": (["a+b.0.c(d", "a+b.1.c(d"], [], [r"re:(.*\.)?a\+b\.\d+\.c\(d$"]),
}


@pytest.mark.parametrize("case", FOLDED)
def test_modules_are_few_expressions(case: str) -> None:
    modules, others, expected = FOLDED[case]
    assert targets_of(modules, others) == expected


@pytest.mark.parametrize("case", FOLDED)
def test_expressions_match_all_modules_and_no_others(case: str) -> None:
    modules, others, _ = FOLDED[case]
    targets = targets_of(modules, others)
    assert invalid_targets(targets) == []
    read = read_targets([(targets, True)])
    assert {module for module in modules if read.of(module)} == set(modules)
    assert [module for module in others if read.of(module)] == []


@pytest.mark.parametrize(
    ("module", "matches"),
    [
        ("model.language_model.layers.0.self_attn.q_proj", True),
        ("language_model.model.layers.3.self_attn.q_proj", True),
        ("layers.3.self_attn.q_proj", True),
        ("model.layers.0.self_attn.q_proj.lora_A", False),
        ("model.layers.0.self_attn.q_proj_norm", False),
        ("model.sublayers.0.self_attn.q_proj", False),
        ("model.layers.0.cross_attn.q_proj", False),
        ("model.embed_tokens", False),
        ("lm_head", False),
    ],
)
def test_other_prefixes_match_and_other_modules_do_not(module: str, matches: bool) -> None:
    read = read_targets([(targets_of(layers(range(4), ATTENTION), ["lm_head"]), True)])
    assert (read.of(module) is not None) is matches


LISTED: list[tuple[list[list[str]], str, int | None]] = [
    ([["Linear"], ["a.b"]], "a.b", 1),
    ([["re:a"], ["a.b"]], "a.b", 1),
    ([["Linear"], ["re:a"]], "a.b", 1),
    ([["re:b"], ["re:a"], ["re:.*b"]], "a.b", 2),
    ([["re:a"], ["re:a"]], "a.b", 0),
    ([["a"], ["Embedding"]], "a.b", None),
    ([["FusedMoE"]], "model.layers.0.mlp.down_proj", None),
    ([["FusedMoE"]], "model.layers.0.mlp.experts.7.down_proj", 0),
    ([["Linear"], ["RoutedExperts"]], "model.layers.0.mlp.experts.7.down_proj", 0),
    ([["re:("], ["Linear"]], "a.b", 1),
]


@pytest.mark.parametrize(("groups", "module", "expected"), LISTED)
def test_the_group_of_a_layer_is_the_one_that_names_it_best(
    groups: list[list[str]], module: str, expected: int | None
) -> None:
    assert read_targets(zip(groups, range(len(groups)), strict=True)).of(module) == expected


def test_invalid_targets_are_named() -> None:
    assert invalid_targets(["Linear", "a", "re:.*a"]) == []
    (fault,) = invalid_targets(["re:(", "b"])
    assert fault.startswith("the target 're:(' is not a regular expression: ")


@pytest.mark.parametrize("case", FOLDED)
def test_compressed_tensors_matches_the_same_modules(case: str) -> None:
    matching = pytest.importorskip("compressed_tensors.utils.match")
    modules, others, _ = FOLDED[case]
    modules, others = modules[:50], others[:50]
    targets = targets_of(*FOLDED[case][:2])
    named = {name for name in (*modules, *others) if any(matching.match_name(name, target) for target in targets)}
    assert named == set(modules)
