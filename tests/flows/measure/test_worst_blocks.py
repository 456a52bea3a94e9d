"""The worst blocks, read and quantized again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from mxcli.backends.cpu import Cpu
from mxcli.files.checkpoint import open_checkpoint
from mxcli.files.selection import Rule
from mxcli.flows.measure.compare import make_comparison, plan_comparison
from mxcli.flows.measure.report import LayerReport, make_report
from mxcli.flows.measure.worst_blocks import COMPARED, ELEMENTS, WorstBlock, worst_blocks, worst_blocks_compared
from mxcli.flows.plan.plan import Options, make_plan
from mxcli.numerics.combinations import combine
from mxcli.numerics.hadamard import find_hadamard
from mxcli.numerics.scheme import Rules

SAMPLES = Path(__file__).parents[3] / "samples"


def found(
    source: Path, format: str, rules: Rules = Rules(), **options: Any
) -> tuple[tuple[WorstBlock, ...], dict[str, LayerReport]]:
    checkpoint = open_checkpoint(str(source))
    plan = make_plan(checkpoint, Options(format, rules, on_indivisible="pad", analysis=True, **options))
    layers = make_report(str(source), checkpoint, plan, backend=Cpu(1)).layers
    return worst_blocks(checkpoint, [plan], layers), {layer.name: layer for layer in layers}


def noise(block: WorstBlock) -> float:
    return sum((each.quantized - each.value) ** 2 for each in block.elements)


def place(block: WorstBlock, layers: dict[str, LayerReport]) -> dict[str, Any]:
    places = layers[block.tensor].metrics["worst_blocks"]
    assert isinstance(places, list)
    return places[0]


@pytest.mark.parametrize("format", ["mxfp4", "mxfp8_e4m3", "mxint8", "nvfp4"])
@pytest.mark.parametrize("source", ["tiny-llama", "tiny-llama-captures.safetensors"])
def test_they_have_the_noise_that_was_measured(source: str, format: str) -> None:
    blocks, layers = found(SAMPLES / source, format)
    ranked = sorted(layers.values(), key=lambda layer: float(str(layer.metrics["sqnr_db"])))
    assert [block.tensor for block in blocks] == [layer.name for layer in ranked[:6]]
    for block in blocks:
        expected = place(block, layers)
        assert noise(block) == pytest.approx(expected["noise"], rel=1e-6)
        assert (block.row, block.column, block.index) == (expected["row"], expected["column"], expected["index"])
        assert len(block.elements) == block.size == block.scheme.format.block[1]
        for each in block.elements:
            assert block.scheme.format.element.value(each.code) * block.scale == pytest.approx(each.quantized, rel=1e-6)


def test_of_large_blocks_the_elements_with_most_error_are_listed() -> None:
    blocks, layers = found(SAMPLES / "tiny-llama", "nvfp4_2d")
    for block in blocks:
        assert (block.size, len(block.elements)) == (256, ELEMENTS)
        assert ELEMENTS / 256 * place(block, layers)["noise"] < noise(block) < place(block, layers)["noise"]


def test_a_tensor_that_is_one_block_has_no_worst() -> None:
    assert found(SAMPLES / "tiny-llama", "fp8_e4m3")[0] == ()


def test_batches_columns_and_edges(tmp_path: Path) -> None:
    x = np.zeros((2, 3, 5, 40), np.float32)
    x[1, 2, 4, 35:] = [957.0, 1.0, -2.0, 3.0, 0.3]
    save_file({"model.layers.0.experts.w": x, "v": x[1, 2, 4]}, tmp_path / "x.safetensors")
    blocks, _ = found(
        tmp_path / "x.safetensors", "mxfp8_e4m3", rules=Rules(scale_rounding="floor"), selection=(Rule(True, "@other"),)
    )
    stack = next(block for block in blocks if block.tensor.startswith("model"))
    assert (stack.index, stack.row, stack.column, stack.size) == (5, 4, 32, 8)
    assert [each.value for each in stack.elements][3:] == pytest.approx([957.0, 1.0, -2.0, 3.0, 0.3])
    assert stack.elements[3].quantized == 896.0
    assert stack.saturated == 1


def test_blocks_down_the_columns(tmp_path: Path) -> None:
    x = np.ones((64, 3), np.float32)
    x[40, 2] = 957.0
    save_file({"h.0.mlp.weight": x}, tmp_path / "x.safetensors")
    (block,), _ = found(tmp_path / "x.safetensors", "mxfp8_e4m3", rules=Rules(scale_rounding="floor"), axis="column")
    assert (block.row, block.column) == (2, 32)
    assert block.elements[8].value == 957.0


def test_what_an_interruption_left_out_takes_its_group_along() -> None:
    checkpoint = open_checkpoint(str(SAMPLES / "tiny-llama"))
    plan = make_plan(checkpoint, Options("nvfp4", Rules(nonfinite="saturate"), on_indivisible="pad", analysis=True))
    layers = make_report("", checkpoint, plan, backend=Cpu(1)).layers
    kept = [layer for layer in layers if ".q_proj." not in layer.name]
    blocks = worst_blocks(checkpoint, [plan], kept, tensors=100)
    assert {block.tensor.split(".")[-2] for block in blocks} == {"o_proj", "gate_proj", "up_proj", "down_proj"}
    assert {step.tensor.name for step in plan.quantized if step.group and "self_attn" in step.group}


@pytest.mark.parametrize("source", ["tiny-llama", "tiny-llama-captures.safetensors"])
def test_of_a_comparison_they_are_those_of_each_report(source: str) -> None:
    """Fused sets share their tensor scale here too."""
    checkpoint = open_checkpoint(str(SAMPLES / source))
    asked = Options("mxfp8", Rules(nonfinite="saturate"), on_indivisible="pad", analysis=True)
    planned = plan_comparison(checkpoint, combine(["mxfp4", "nvfp4", "fp8_e4m3"]), asked)
    layers = make_comparison("", checkpoint, planned, backend=Cpu(1)).layers
    measured = [{layer.name: layer.metrics[at] for layer in layers} for at in range(3)]
    blocks = worst_blocks_compared(checkpoint, planned.plans, measured)
    assert [block.under for block in blocks] == [0, 0, 1, 1], "a tensor that is one block has no worst"
    for under, format in enumerate(("mxfp4", "nvfp4")):
        alone = found(SAMPLES / source, format)[0][:2]
        assert [replace(block, under=0) for block in blocks if block.under == under] == list(alone)


def test_of_many_plans_the_first_have_a_block_each() -> None:
    checkpoint = open_checkpoint(str(SAMPLES / "tiny-llama"))
    asked = Options(
        "mxfp8", Rules(nonfinite="saturate"), on_indivisible="pad", analysis=True, selection=(Rule(True, "*.o_proj"),)
    )
    planned = plan_comparison(
        checkpoint, combine(["mxfp8", "mxfp4", "mxfp6"], ["floor", "ceil", "rceil", "even"]), asked
    )
    layers = make_comparison("", checkpoint, planned, backend=Cpu(1)).layers
    measured = [{layer.name: layer.metrics[at] for layer in layers} for at in range(12)]
    blocks = worst_blocks_compared(checkpoint, planned.plans, measured)
    assert [block.under for block in blocks] == list(range(COMPARED))
    assert [block.scheme for block in blocks] == list(planned.combinations.schemes[:COMPARED])


@pytest.mark.parametrize("rules", [Rules(rounding="stochastic"), Rules(hadamard=find_hadamard(16))])
def test_none_of_what_its_own_elements_do_not_decide(rules: Rules) -> None:
    """A draw hangs on the place in the tensor, a transform on neighbours: alone, a block would be another one."""
    blocks, layers = found(SAMPLES / "tiny-llama", "nvfp4", rules)
    assert blocks == ()
    assert len(layers) == 28
