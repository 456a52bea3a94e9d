"""Checkpoints converted to another layout, and refusals."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clean_outputs import assert_clean
from tiny_models import LLAMA, Raw, Tensor, llama, noise, read_header, read_raw

from mxcli.errors import RefusedError
from mxcli.files.checkpoint import open_checkpoint
from mxcli.files.layouts import find_layout
from mxcli.flows.verify.written import check_written
from mxcli.flows.write.convert import Converted, convert_checkpoint, plan_conversion
from mxcli.flows.write.pipeline import WriteOptions

SHARD = "model.safetensors"
MOE = {**LLAMA, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 2}


def moe() -> dict[str, Tensor]:
    """A model with two experts in its one layer."""
    tensors = {name: each for name, each in llama().items() if ".mlp." not in name}
    tensors["model.layers.0.mlp.gate.weight"] = noise(2, 64, seed=70)
    for expert in range(2):
        for seed, (part, shape) in enumerate(
            {"gate_proj": (128, 64), "up_proj": (128, 64), "down_proj": (64, 128)}.items()
        ):
            name = f"model.layers.0.mlp.experts.{expert}.{part}.weight"
            tensors[name] = noise(*shape, seed=80 + 10 * expert + seed)
    return tensors


def converted(source: Path, output: Path, layout: str, **more: Any) -> Converted:
    """A checkpoint converted, checked like the program does, and clean."""
    checkpoint = open_checkpoint(source)
    conversion = plan_conversion(checkpoint, find_layout(layout), **more)
    options = WriteOptions(check=lambda folder: check_written(folder, output))
    result = convert_checkpoint(checkpoint, conversion, output, options=options)
    assert_clean(output)
    return result


def raw(folder: Path) -> dict[str, Raw]:
    return {name: each for file in open_checkpoint(folder).files for name, each in read_raw(file).items()}


def refusals(source: Path, layout: str, **more: Any) -> tuple[str, ...]:
    with pytest.raises(RefusedError) as refused:
        plan_conversion(open_checkpoint(source), find_layout(layout), **more)
    return tuple(refused.value.reasons)


def patched(folder: Path, numbers: Mapping[str, Any]) -> None:
    """Overwrite tensors of a checkpoint, whose record then is of other bytes and goes."""
    path = folder / SHARD
    content, header = bytearray(path.read_bytes()), read_header(path)
    start = 8 + int.from_bytes(content[:8], "little")
    for name, number in numbers.items():
        begin, end = header[name]["data_offsets"]
        content[start + begin : start + end] = np.asarray(number).tobytes()
    path.write_bytes(content)
    (folder / "mxcli.json").unlink()
