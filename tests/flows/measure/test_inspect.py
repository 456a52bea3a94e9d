from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from mxcli.files.checkpoint import open_checkpoint
from mxcli.flows.measure.inspect import Captured, Total, inspect_checkpoint


def test_totals_by_dtype_and_role_add_up(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    tensors = {
        "a.weight": np.zeros((4, 8), np.float16),
        "b.weight": np.zeros((2, 8), np.float32),
        "norm.weight": np.zeros(3, np.float32),
    }
    save_file(tensors, path)
    found = inspect_checkpoint("x", open_checkpoint(path))
    assert found.source == "x"
    assert found.total == Total(3, 32 + 16 + 3, 64 + 64 + 12)
    assert found.by_dtype == {"F32": Total(2, 19, 76), "F16": Total(1, 32, 64)}
    assert list(found.by_dtype) == ["F32", "F16"], "most bytes first"
    assert found.by_role == {"weight": Total(2, 48, 128), "norm": Total(1, 3, 12)}
    assert found.files == {path: path.stat().st_size}
    assert found.captured is None


def test_captures_are_summed_up(tmp_path: Path) -> None:
    roles = {"a.x": "activation", "a.dy": "gradient", "b.x": "activation"}
    for step in (20, 3):
        records = {name: {"role": role, "step": step, "rank": 1} for name, role in roles.items()}
        entry = {"mxcli.capture": json.dumps({"version": 1, "tensors": records})}
        save_file({name: np.zeros((2, 4), np.float32) for name in roles}, tmp_path / f"{step}.safetensors", entry)
    found = inspect_checkpoint("x", open_checkpoint(tmp_path))
    assert found.captured == Captured(2, (3, 20), (1,), {"activation": 4, "gradient": 2})
