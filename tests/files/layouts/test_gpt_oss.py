from __future__ import annotations

from pathlib import Path

import pytest

from mxcli.errors import InputError
from mxcli.files.layouts import COLUMN, LAYOUTS, ROW, OnDisk, Weight, layout_of_dialect
from mxcli.files.tensors import TensorInfo
from mxcli.numerics.scheme import resolve

GPT_OSS = LAYOUTS["gpt-oss"]
UP = "model.layers.0.mlp.experts.gate_up_proj"
Described = dict[str, tuple[str, tuple[int, ...]]]


def stack(name: str = UP, shape: tuple[int, ...] = (4, 64, 96), axis: str = COLUMN, format: str = "mxfp4") -> Weight:
    return Weight(name, shape, resolve(format), "BF16", axis)


def on_disk(tensors: Described) -> OnDisk:
    infos = {name: TensorInfo(name, dtype, shape, "codes", Path("m"), 0, 0) for name, (dtype, shape) in tensors.items()}
    return OnDisk(infos, {"dtype": "bfloat16"})


def test_what_is_stored() -> None:
    entries = [each.entry for each in GPT_OSS.contents(stack())]
    assert [(entry.name, entry.dtype, entry.shape) for entry in entries] == [
        (f"{UP}_blocks", "U8", (4, 64, 3, 16)),
        (f"{UP}_scales", "U8", (4, 64, 3)),
    ]


@pytest.mark.parametrize(
    ("weight", "why"),
    [
        (stack(), None),
        (stack(UP.replace("gate_up", "down")), None),
        (stack(format="mxfp8"), "it has no mxfp8_e4m3"),
        (stack(axis=ROW), "it holds experts stored [expert, in, out] only, with gate and up alternating"),
        (stack(shape=(4, 64, 80)), "it stores no padding, and 80 is not a multiple of 32"),
        (
            stack("model.layers.0.self_attn.q_proj.weight", (64, 96), ROW),
            "it holds the stacks of experts only (MODULE.mlp.experts.gate_up_proj and down_proj)",
        ),
        (
            stack("model.layers.0.feed_forward.experts.gate_up_proj"),
            "it holds the stacks of experts only (MODULE.mlp.experts.gate_up_proj and down_proj)",
        ),
    ],
)
def test_what_it_can_hold(weight: Weight, why: str | None) -> None:
    assert GPT_OSS.refusal(weight) == why


def test_modules_are_listed_as_gpt_oss_lists_them() -> None:
    layers = [
        f"model.layers.{layer}.{module}"
        for layer in range(12)
        for module in ("self_attn.q_proj", "self_attn.o_proj", "mlp.router")
    ]
    settings = GPT_OSS.settings(
        [stack(), stack(UP.replace(".0.", ".1."))], [*layers, "model.layers.11.mlp.experts", "lm_head"]
    )
    assert settings == {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "lm_head",
            "model.layers.*.mlp.router",
            "model.layers.*.self_attn",
            "model.layers.11.mlp.experts",
        ],
    }


def test_stacks_are_found_again() -> None:
    tensors: Described = {
        "model.norm.weight": ("BF16", (64,)),
        f"{UP}_bias": ("BF16", (4, 64)),
        f"{UP}_blocks": ("U8", (4, 64, 3, 16)),
        f"{UP}_scales": ("U8", (4, 64, 3)),
    }
    assert GPT_OSS.weights(on_disk(tensors)) == [stack()]
    assert GPT_OSS.weights(on_disk({**tensors, f"{UP}_scales": ("F8_E8M0", (4, 64, 3))})) == [stack()]


@pytest.mark.parametrize(
    ("tensors", "fault"),
    [
        ({f"{UP}_blocks": ("U8", (4, 64, 3, 16))}, f"{UP}: {UP}_scales is missing (mxfp4)."),
        ({f"{UP}_scales": ("U8", (4, 64, 3))}, f"{UP}: has _scales, but its _blocks are missing (mxfp4)."),
        (
            {f"{UP}_blocks": ("U8", (4, 64, 48)), f"{UP}_scales": ("U8", (4, 64, 3))},
            f"{UP}: its _blocks are [4, 64, 48]; mxfp4 needs [experts, rows, blocks, 16].",
        ),
        (
            {f"{UP}_blocks": ("U8", (4, 64, 3, 16)), f"{UP}_scales": ("U8", (4, 64, 2))},
            f"{UP}: {UP}_scales is U8 [4, 64, 2]; mxfp4 needs U8 [4, 64, 3].",
        ),
        (
            {f"{UP}_blocks": ("BF16", (4, 64, 3, 16)), f"{UP}_scales": ("U8", (4, 64, 3))},
            f"{UP}: {UP}_blocks is BF16 [4, 64, 3, 16]; mxfp4 needs U8 [4, 64, 3, 16].",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_reported_in_a_sentence(tensors: Described, fault: str) -> None:
    with pytest.raises(InputError) as refused:
        GPT_OSS.weights(on_disk(tensors))
    assert fault in (*refused.value.details, str(refused.value))


def test_its_dialect() -> None:
    assert layout_of_dialect("gpt-oss") is GPT_OSS
