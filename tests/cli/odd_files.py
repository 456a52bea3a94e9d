"""Small checkpoints with everything that reports must survive."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

HOSTILE = "evil\x1b[31m.weight"


def odd_checkpoint(folder: Path) -> Path:
    """A file with zeros, NaN and infinity, subnormals, a length that blocks do not divide, and odd names."""
    noise = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    noise[1, 3], noise[2, 5] = np.nan, np.inf
    path = folder / "odd.safetensors"
    save_file(
        {
            "zero.weight": np.zeros((4, 64), np.float32),
            "nan.weight": noise,
            "all_nan.weight": np.full((1, 32), np.nan, np.float32),
            "tiny.weight": np.full((2, 32), 1e-42, np.float32),
            "ragged.weight": np.ones((4, 100), np.float32),
            "empty.weight": np.zeros((0, 32), np.float32),
            "norm.weight": np.ones(64, np.float32),
            "kö.层.weight": np.ones((4, 32), np.float32),
            HOSTILE: np.ones((4, 32), np.float32),
        },
        path,
    )
    return path


def one_tensor(folder: Path, *values: float, columns: int = 32) -> Path:
    """A file with one weight of one row: the values, then zeros."""
    x = np.zeros((1, columns), np.float32)
    x[0, : len(values)] = values
    path = folder / "one.safetensors"
    save_file({"layer.weight": x}, path)
    return path


def many_tensors(folder: Path, count: int) -> Path:
    """A file with many small weights."""
    path = folder / "many.safetensors"
    x = np.ones((1, 32), np.float32)
    save_file({f"model.layers.{at}.mlp.up_proj.weight": x for at in range(count)}, path)
    return path
