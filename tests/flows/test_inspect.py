from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from mxcli.files.checkpoint import open_checkpoint
from mxcli.flows.inspect import Total, inspect_checkpoint


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
