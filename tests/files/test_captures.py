"""Capture files say which tensors are activations and gradients."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from raw_checkpoint import safetensors_bytes, zeros

from mxcli.errors import InputError
from mxcli.files.checkpoint import open_checkpoint

TENSORS = {
    "model.layers.0.mlp.up_proj.input": zeros("BF16", 4, 8),
    "model.layers.0.mlp.up_proj.grad_output": zeros("BF16", 4, 16),
    "model.layers.0.mlp.up_proj.weight": zeros("BF16", 16, 8),
}


def _capture(records: object, version: object = 1) -> bytes:
    entry = json.dumps({"version": version, "tensors": records})
    return safetensors_bytes(TENSORS, {"format": "pt", "mxcli.capture": entry})


def test_roles_come_from_the_capture(model: Callable[..., Path]) -> None:
    first, second, _ = TENSORS
    records = {
        first: {"role": "activation", "layer": "model.layers.0.mlp.up_proj", "axis": "row"},
        second: {"role": "gradient", "layer": "model.layers.0.mlp.up_proj"},
    }
    checkpoint = open_checkpoint(model({"step1.safetensors": _capture(records)}))
    assert [info.role for info in checkpoint.tensors.values()] == ["activation", "gradient", "weight"]
    assert checkpoint.captures == records


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (_capture({}, 2), "mxcli.capture has version 2; this program reads 1"),
        (_capture([]), "mxcli.capture needs a 'tensors' object"),
        (_capture({"x": {"role": "activation"}}), "describes 'x', which the file does not hold"),
        (
            _capture({next(iter(TENSORS)): {"role": "boss"}}),
            "role boss of 'model.layers.0.mlp.up_proj.input' is unknown",
        ),
        (_capture({next(iter(TENSORS)): []}), "role None of"),
        (safetensors_bytes(TENSORS, {"mxcli.capture": "{"}), "mxcli.capture is not valid JSON"),
        (safetensors_bytes(TENSORS, {"mxcli.capture": "[]"}), "has version None"),
    ],
)
def test_broken_captures(model: Callable[..., Path], content: bytes, fault: Any) -> None:
    root = model({"a.safetensors": content})
    with pytest.raises(InputError, match=re.escape(fault)):
        open_checkpoint(root)
