"""Quantized checkpoints with faults planted in them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from clean_outputs import assert_clean
from tiny_models import LLAMA, Tensor, llama, read_raw, write_model

from mxcli.backends.cpu import Cpu
from mxcli.files.checkpoint import open_checkpoint
from mxcli.flows.plan.plan import Options, make_plan
from mxcli.flows.verify.subject import subject_of
from mxcli.flows.verify.verify import Verification, checked_originals, verify_subject
from mxcli.flows.write.quantize import quantize_checkpoint
from mxcli.flows.write.restore import open_floats

SHARD = "model.safetensors"
GATE, UP = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"
_STORED = {"F32": np.float32, "BF16": np.uint16, "U32": np.uint32}

Tensors = dict[str, Tensor]


def source(folder: Path, tensors: Mapping[str, Any] | None = None, config: Mapping[str, object] = LLAMA) -> Path:
    """A plain model."""
    return write_model(folder, llama() if tensors is None else tensors, config)


def quantized(model: Path, output: Path, options: Options) -> Path:
    """A model quantized."""
    checkpoint = open_checkpoint(model)
    quantize_checkpoint(checkpoint, make_plan(checkpoint, options), output, backend=Cpu())
    assert_clean(output)
    return output


def changed(folder: Path, output: Path, change: Callable[[Tensors], object], **config: object) -> Path:
    """A copy of a checkpoint with its tensors changed, and keys of its quantization_config."""
    tensors: Tensors = {
        name: (dtype, np.frombuffer(data, _STORED.get(dtype, np.uint8)).reshape(shape).copy())
        for name, (dtype, shape, data) in read_raw(folder / SHARD).items()
    }
    change(tensors)
    settings = json.loads((folder / "config.json").read_text())
    settings["quantization_config"] |= config
    return write_model(output, tensors, settings)


def untouched(tensors: Tensors) -> None:
    """Changes nothing."""


def verified(
    folder: Path, against: Path | None = None, tensor_parallel: int | None = None, engines: tuple[str, ...] = ()
) -> Verification:
    """A checkpoint verified."""
    subject = subject_of(open_checkpoint(folder), tensor_parallel, engines)
    originals = None if against is None else checked_originals(open_floats(against, requantize=True), subject)
    return verify_subject(
        folder.name,
        subject,
        backend=Cpu(),
        against=None if against is None else against.name,
        originals=originals,
    )


def found(result: Verification) -> dict[str, list[str]]:
    """The places that each check found something at."""
    return {each.name: [finding.where for finding in each.findings] for each in result.results if each.findings}


def values(result: Verification, check: str) -> list[str]:
    """What a check found."""
    return [finding.value for each in result.results if each.name == check for finding in each.findings]
