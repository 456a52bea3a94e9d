from __future__ import annotations

from pathlib import Path

import pytest
from tiny_models import LLAMA, llama, noise, write_model

from mxcli.backends.cpu import Cpu
from mxcli.files.checkpoint import open_checkpoint
from mxcli.files.selection import Rule
from mxcli.flows.plan.plan import Options, Plan, make_plan
from mxcli.flows.write.quantize import quantize_checkpoint
from mxcli.flows.write.restore import open_floats

INDEXER = "model.layers.0.self_attn.indexer.weights_proj.weight"
DOWN, UP = "model.layers.0.mlp.down_proj.weight", "model.layers.0.mlp.up_proj.weight"
LEFT = "kept: its maker left it plain"
MAKERS = [
    ("mxfp8", "compressed-tensors"),
    ("mxfp8", "modelopt"),
    ("fp8_e4m3_128x128", "fp8"),
    ("mxfp8", "torchao"),
    ("mxfp4", "quark"),
    ("mxfp8", "mxcli"),
]


def made(folder: Path, format: str, layout: str) -> Path:
    """A checkpoint of which two layers were left plain by its maker."""
    model = write_model(folder / "m", llama() | {INDEXER: noise(64, 64, seed=9)}, LLAMA)
    rules = tuple(Rule(False, name) for name in (INDEXER, DOWN))
    checkpoint = open_checkpoint(model)
    plan = make_plan(checkpoint, Options(format, selection=rules, layout=layout, on_indivisible="keep"))
    quantize_checkpoint(checkpoint, plan, folder / "q", backend=Cpu(), layout=layout)
    return folder / "q"


def planned(folder: Path, *selection: Rule) -> Plan:
    return make_plan(open_floats(folder, requantize=True), Options("mxfp4", selection=selection))


def reasons(plan: Plan) -> dict[str, str]:
    return {each.tensor.name: each.reason for each in plan.tensors}


@pytest.mark.parametrize(("format", "layout"), MAKERS)
def test_what_the_maker_left_plain_stays_plain(tmp_path: Path, format: str, layout: str) -> None:
    plan = planned(made(tmp_path, format, layout))
    found = reasons(plan)
    assert (found[INDEXER], found[DOWN]) == (LEFT, LEFT)
    assert found[UP].startswith("quantized")
    assert found["model.norm.weight"].startswith("kept: norm")


def test_an_include_takes_what_the_maker_left_plain(tmp_path: Path) -> None:
    folder = made(tmp_path, "mxfp8", "compressed-tensors")
    found = reasons(planned(folder, Rule(True, "@weight"), Rule(False, INDEXER)))
    assert found[DOWN] == "quantized: --include @weight"
    assert found[INDEXER] == f"kept: excluded by --exclude {INDEXER}"
    assert found[UP].startswith("quantized")
    found = reasons(planned(folder, Rule(True, DOWN)))
    assert found[DOWN].startswith("quantized")
    assert not found[UP].startswith("quantized")


def test_a_plain_checkpoint_has_no_maker(tmp_path: Path) -> None:
    checkpoint = open_floats(write_model(tmp_path / "m", llama(), LLAMA), requantize=True)
    assert LEFT not in reasons(make_plan(checkpoint, Options("mxfp4"))).values()
