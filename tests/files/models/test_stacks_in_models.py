"""The order of stacks, proven by the layers of transformers: the product with one expert, as the table says it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mxcli.files.models.stacks import BEFORE_LAST, LAST, alternates, orientations, stack_row
from mxcli.files.tensors import TensorInfo

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.20")
pytestmark = pytest.mark.slow

HIDDEN, INTERMEDIATE, EXPERTS = 12, 20, 3


def _module(path: str) -> Any:
    """Return a class of transformers: `aria.AriaExperts` of models/aria/modeling_aria.py."""
    model, _, name = path.partition(".")
    return getattr(__import__(f"transformers.models.{model}.modeling_{model}", fromlist=[name]), name)


def _stored(name: str, parameter: Any) -> TensorInfo:
    return TensorInfo(name, "F32", tuple(parameter.shape), "weight", Path("m.safetensors"), 0, 0)


def _product(x: Any, matrix: Any, axis: int) -> Any:
    """Return x times a stored matrix that sums over a dimension of it."""
    return x @ (matrix.T if axis == LAST else matrix)


def _config(kind: str, **values: object) -> Any:
    config = transformers.AutoConfig.for_model(kind)
    text = config.get_text_config()
    for key, value in values.items():
        setattr(text, key, value)
    text._experts_implementation = "eager"
    return text


SIZES = {"hidden_size": HIDDEN, "num_experts": EXPERTS, "num_local_experts": EXPERTS, "moe_num_experts": EXPERTS}
ONE = {"intermediate_size": INTERMEDIATE, "moe_intermediate_size": INTERMEDIATE, "expert_dim": INTERMEDIATE}


def _experts(kind: str, path: str) -> Any:
    experts = _module(path)(_config(kind, **SIZES, **ONE, swiglu_limit=1e9, hidden_act="silu")).eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in experts.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3
        if parameter.dim() < 3:
            parameter.data.zero_()
    return experts.double()


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("aria_text", "aria.AriaExperts"),
        ("llama4_text", "llama4.Llama4TextExperts"),
        ("gpt_oss", "gpt_oss.GptOssExperts"),
        ("qwen3_5_moe_text", "qwen3_5_moe.Qwen3_5MoeExperts"),
        ("qwen3_moe", "qwen3_moe.Qwen3MoeExperts"),
        ("mixtral", "mixtral.MixtralExperts"),
        ("granitemoe", "granitemoe.GraniteMoeExperts"),
        ("phimoe", "phimoe.PhimoeExperts"),
        ("olmoe", "olmoe.OlmoeExperts"),
        ("deepseek_v2", "deepseek_v2.DeepseekV2Experts"),
        ("minimax_m2", "minimax_m2.MiniMaxM2Experts"),
    ],
)
def test_experts(kind: str, path: str) -> None:
    """Both by the rows for the model type and by the shapes of both parts."""
    experts = _experts(kind, path)
    stacks = {f"model.layers.0.mlp.experts.{part}": getattr(experts, part) for part in ("gate_up_proj", "down_proj")}
    tensors = {name: _stored(name, parameter) for name, parameter in stacks.items()}
    rows = [stack_row(name, info.shape, frozenset({kind})) for name, info in tensors.items()]
    axes = [row.axis for row in rows if row is not None]
    assert len(axes) == 2
    assert axes == [orientations(tensors, None).of(info).axis for info in tensors.values()]
    x = torch.randn((5, HIDDEN), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    up, down = (parameter[1] for parameter in stacks.values())
    gate_up = _product(x, up, axes[0])
    alternating = alternates(tensors["model.layers.0.mlp.experts.gate_up_proj"], {"model_type": kind})
    halves = (gate_up[:, ::2], gate_up[:, 1::2]) if alternating else gate_up.chunk(2, -1)
    expected = _product(_activated(kind, *halves), down, axes[1])
    torch.testing.assert_close(_of_expert(experts, kind, x), expected, rtol=1e-9, atol=1e-9)


def _activated(kind: str, gate: Any, up: Any) -> Any:
    if kind == "gpt_oss":
        return (up + 1) * gate * torch.sigmoid(1.702 * gate)
    return torch.nn.functional.silu(gate) * up


def _of_expert(experts: Any, kind: str, x: Any) -> Any:
    """Return the output of expert 1 alone."""
    if kind.startswith("llama4"):
        return experts(x.repeat(EXPERTS, 1)).reshape(EXPERTS, len(x), HIDDEN)[1]
    chosen = torch.full((len(x), 1), 1)
    return experts(x, chosen, torch.ones((len(x), 1), dtype=torch.float64))


LAYERS: list[tuple[str, str, str, Callable[[], Any], Callable[[Any, Any], Any], int]] = [
    (
        "jetmoe",
        "model.layers.0.mlp.input_linear.weight",
        "experts in turn",
        lambda: _module("jetmoe.JetMoeParallelExperts")(EXPERTS, HIDDEN, INTERMEDIATE),
        lambda layer, x: layer(x, [0, len(x), 0]),
        LAST,
    ),
    (
        "moshi",
        "depth_decoder.model.layers.0.mlp.fc1.weight",
        "one codebook",
        lambda: _module("moshi.MoshiFlexibleLinear")(HIDDEN, INTERMEDIATE, EXPERTS),
        lambda layer, x: layer(x[:, None], torch.tensor([1]))[:, 0],
        LAST,
    ),
    (
        "gpt2",
        "transformer.h.0.mlp.c_fc.weight",
        "one matrix",
        lambda: transformers.pytorch_utils.Conv1D(INTERMEDIATE, HIDDEN),
        lambda layer, x: layer(x),
        BEFORE_LAST,
    ),
    (
        "csm",
        "depth_decoder.codebooks_head.weight",
        "head of codebook 2",
        lambda: _module("csm.CsmCodebooksHead")(HIDDEN, EXPERTS + 1, INTERMEDIATE),
        lambda layer, x: torch.cat([layer(row[None, None], torch.tensor([2]))[0] for row in x]),
        BEFORE_LAST,
    ),
]


@pytest.mark.parametrize(("kind", "name", "use", "make", "apply", "axis"), LAYERS, ids=[each[0] for each in LAYERS])
def test_other_layers(
    kind: str, name: str, use: str, make: Callable[[], Any], apply: Callable[[Any, Any], Any], axis: int
) -> None:
    layer = make().double()
    layer.weight.data = torch.randn(layer.weight.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    if getattr(layer, "bias", None) is not None:
        layer.bias.data.zero_()
    found = orientations({}, {"model_type": kind}).of(_stored(name, layer.weight))
    assert (found.axis, found.known) == (axis, True), use
    x = torch.randn((5, HIDDEN), generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    matrix = layer.weight if layer.weight.dim() == 2 else layer.weight[1]
    torch.testing.assert_close(apply(layer, x), _product(x, matrix, found.axis), rtol=1e-9, atol=1e-9)


def test_dbrx_stores_its_experts_below_each_other() -> None:
    config = transformers.DbrxConfig().ffn_config
    for key, value in {"hidden_size": HIDDEN, "ffn_hidden_size": INTERMEDIATE, "moe_num_experts": EXPERTS}.items():
        setattr(config, key, value)
    layer = _module("dbrx.DbrxExpertGLU")(config)
    x = torch.randn((5, HIDDEN), generator=torch.Generator().manual_seed(5))
    parts = {}
    for part in ("w1", "v1", "w2"):
        parameter = torch.randn(getattr(layer, part).shape, generator=torch.Generator().manual_seed(len(parts)))
        info = _stored(f"transformer.blocks.0.ffn.experts.mlp.{part}", parameter)
        parts[part] = (parameter.view(EXPERTS, INTERMEDIATE, HIDDEN)[1], orientations({}, None).of(info).axis)
    gate, up = _product(x, *parts["w1"]), _product(x, *parts["v1"])
    expected = _product(torch.nn.functional.silu(gate) * up, *parts["w2"])
    torch.testing.assert_close(layer(x, *(matrix for matrix, _ in parts.values())), expected)


def test_grouped_layers_of_convbert() -> None:
    layer = _module("convbert.GroupedLinearLayer")(HIDDEN, 2 * HIDDEN, 2)
    layer.weight.data = torch.randn(layer.weight.shape, generator=torch.Generator().manual_seed(6))
    layer.bias.data.zero_()
    info = _stored("encoder.layer.0.intermediate.dense.weight", layer.weight)
    axis = orientations({}, {"model_type": "convbert"}).of(info).axis
    x = torch.randn((5, HIDDEN), generator=torch.Generator().manual_seed(7))
    groups = zip(x.chunk(2, -1), layer.weight, strict=True)
    expected = torch.cat([_product(part, matrix, axis) for part, matrix in groups], -1)
    torch.testing.assert_close(layer(x).reshape(len(x), -1), expected)
