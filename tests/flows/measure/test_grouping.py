"""What tensors are summed up by."""

from __future__ import annotations

from pathlib import Path

import pytest

from mxcli.errors import UsageError
from mxcli.files.tensors import TensorInfo
from mxcli.flows.measure.totals import check_grouping, kind_of, labels, layer_of


def info(name: str, role: str = "weight", layer: str = "") -> TensorInfo:
    return TensorInfo(name, "F32", (1, 32), role=role, file=Path("x"), offset=0, nbytes=128, layer=layer)


@pytest.mark.parametrize(
    ("name", "layer", "kind"),
    [
        ("model.layers.11.self_attn.q_proj.weight", "model.layers.11", "self_attn.q_proj"),
        ("model.layers.0.mlp.experts.7.w1.weight", "model.layers.0", "mlp.experts.*.w1"),
        ("model.layers.0.mlp.experts.gate_up_proj", "model.layers.0", "mlp.experts.gate_up_proj"),
        ("model.layers.3.mlp.down_proj.gradient", "model.layers.3", "mlp.down_proj"),
        ("bert.encoder.layer.2.attention.output.dense.weight", "bert.encoder.layer.2", "attention.output.dense"),
        ("bert.encoder.layer.2.output.dense.weight", "bert.encoder.layer.2", "output.dense"),
        ("h.0.attn.c_proj.weight", "h.0", "attn.c_proj"),
        ("0.weight", "0", "0"),
        ("lm_head.weight", "outside layers", "lm_head"),
        ("lm_head.activation", "outside layers", "lm_head"),
        ("arr_0", "outside layers", "arr_0"),
    ],
)
def test_layers_and_kinds(name: str, layer: str, kind: str) -> None:
    assert (layer_of(info(name)), kind_of(info(name))) == (layer, kind)


def test_roles_are_not_summed_into_each_other() -> None:
    weights = [info("h.0.a.weight"), info("h.1.a.weight")]
    assert labels("kind", weights) == {"h.0.a.weight": "a", "h.1.a.weight": "a"}
    captured = [info("h.0.a.activation", "activation"), info("h.0.a.gradient", "gradient")]
    assert list(labels("layer", captured).values()) == ["h.0 activation", "h.0 gradient"]
    assert list(labels("role", captured).values()) == ["activation", "gradient"]


@pytest.mark.parametrize(
    "file", ["step-000000", "step-000000-rank-1", "rank-1-iter-0", "rank_0/iter_000005", "dumps/run.7/step-3"]
)
@pytest.mark.parametrize(
    ("module", "layer", "kind"),
    [
        ("model.layers.11.mlp.down_proj", "model.layers.11", "mlp.down_proj"),
        ("lm_head", "outside layers", "lm_head"),
        ("0", "0", "0"),
    ],
)
def test_files_of_steps_and_ranks_are_not_layers(file: str, module: str, layer: str, kind: str) -> None:
    found = info(f"{file}/{module}.input", "activation", module)
    assert (layer_of(found), kind_of(found)) == (layer, kind)


def test_an_unknown_grouping() -> None:
    check_grouping("kind")
    with pytest.raises(UsageError, match=r"--by kinds: it takes layer, role, kind. Did you mean kind\?"):
        check_grouping("kinds")
