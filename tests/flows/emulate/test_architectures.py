"""Architectures of transformers: the plan of a model in memory is that of its files, and its layers are emulated."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from engines.architectures import ARCHITECTURES, Architecture
from engines.sweep import build, forward

import mxcli
from mxcli.errors import RefusedError
from mxcli.files.checkpoint import open_checkpoint
from mxcli.flows.emulate.decisions import Wanted, decide
from mxcli.flows.emulate.experts import DOWN, ExpertsState, Stack, experts_forward, first_of
from mxcli.flows.emulate.modules import exchange
from mxcli.flows.emulate.operand import Devices
from mxcli.flows.emulate.products import Quantizer
from mxcli.flows.emulate.source import source_of
from mxcli.flows.plan.plan import Options, Plan, make_plan
from mxcli.numerics.scheme import Rules

pytestmark = pytest.mark.slow
REFUSED = {
    "JetMoeForCausalLM": "how a JetMoeParallelExperts computes with it is not known",
    "LongcatFlashForCausalLM": "how a LongcatFlashExperts computes with it is not known",
    "NomicBertModel": "is put together from several parameters of the model",
    "Siglip2Model": "torch's MultiheadAttention does not call it as a module",
    "SiglipModel": "torch's MultiheadAttention does not call it as a module",
}
"""Models with layers that are not emulated, with what is said of them."""


def quantized(plan: Plan | None) -> set[tuple[object, ...]]:
    """What is quantized, how, along which axis, and in which fused set."""
    steps = () if plan is None else plan.quantized
    return {(step.tensor.name, step.tensor.shape, step.scheme, step.axis, step.group) for step in steps}


@pytest.mark.parametrize("row", ARCHITECTURES, ids=str)
def test_an_architecture(tmp_path: Path, row: Architecture) -> None:
    model = build(row)
    model.save_pretrained(tmp_path)
    try:
        stored = make_plan(open_checkpoint(tmp_path), Options("nvfp4", Rules(nonfinite="error"), "keep"))
    except RefusedError:
        with pytest.raises(RefusedError):
            mxcli.emulate(model, format="nvfp4", on_indivisible="keep")
        return
    decided = decide(source_of(model), Wanted("nvfp4", others={"on_indivisible": "keep"}))
    assert quantized(decided.plan) == quantized(stored)
    if row.name in REFUSED:
        with pytest.raises(RefusedError, match=REFUSED[row.name]):
            mxcli.emulate(model, format="nvfp4", on_indivisible="keep")
        return
    with torch.no_grad(), mxcli.emulate(model, format="nvfp4", on_indivisible="keep") as emulation:
        forward(model, row)
    assert emulation.layers


class Sizes:
    """A configuration that has every setting, by what its name says."""

    _experts_implementation = "eager"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        rows = {"act": "silu", "intermediate": 16, "hidden": 32, "limit": 7.0, "alpha": 1.7, "eps": 1e-6}
        return next((value for part, value in rows.items() if part in name and "layer" not in name), 4)


def experts_classes() -> list[Any]:
    folder = Path(transformers.__file__).parent / "models"
    paths = (
        path for path in sorted(folder.glob("*/modeling_*.py")) if "@use_experts_implementation" in path.read_text()
    )
    modules = [importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}") for path in paths]
    return [
        found
        for module in modules
        for name, found in vars(module).items()
        if inspect.isclass(found) and found.__module__ == module.__name__ and hasattr(found, "_apply_gate")
    ]


def test_experts_compute_as_those_of_every_model() -> None:
    classes = experts_classes()
    assert len(classes) > 50
    for kind in classes:
        torch.manual_seed(0)
        experts = kind(Sizes())
        for parameter in experts.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        x = torch.randn(10, experts.down_proj.shape[2 if experts.is_transposed else 1])
        index, weights = (
            torch.stack([torch.randperm(int(experts.num_experts))[:2] for _ in range(10)]),
            torch.rand(10, 2),
        )
        plain = experts(x, index, weights)
        stacks = {name: Stack(name) for name in (first_of(experts), DOWN)}
        exchange(experts, experts_forward(experts, ExpertsState(stacks, Quantizer(Devices()))))
        assert torch.allclose(experts(x, index, weights), plain, atol=1e-5), kind
