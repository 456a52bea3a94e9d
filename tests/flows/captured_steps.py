"""A directory of captures of several steps."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

STEPS = (100, 1200, 2000)
ROLES = {"activation": (48, 1.0), "gradient": (32, 1e-4)}


def write_steps(folder: Path, *, layers: int = 2, rows: int = 64) -> Path:
    """A file per step; an outlier of the gradients grows from step to step."""
    folder.mkdir(exist_ok=True)
    random = np.random.default_rng(0)
    for at, step in enumerate(STEPS):
        tensors, records = {}, {}
        for layer in (f"model.layers.{number}.mlp.down_proj" for number in range(layers)):
            for role, (width, size) in ROLES.items():
                x = (size * random.standard_normal((rows, width))).astype(np.float32)
                x[0, 0] *= 30 * at + 1
                tensors[f"{layer}.{role}"] = x
                records[f"{layer}.{role}"] = {"role": role, "layer": layer, "step": step, "axis": "row", "tokens": rows}
        record = json.dumps({"version": 1, "tensors": records})
        save_file(tensors, folder / f"step-{step:06d}.safetensors", {"mxcli.capture": record})
    return folder
