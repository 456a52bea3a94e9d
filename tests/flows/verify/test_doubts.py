from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from planted import SHARD, UP, found, quantized, source, verified
from tiny_models import LLAMA, bf16, llama

from mxcli.flows.plan.plan import Options


@pytest.mark.parametrize(("format", "warning"), [("nvfp4", "underflowed_scale"), ("mxfp4", "magnitude")])
def test_tiny_weights_are_no_fault_of_proven_bytes(tmp_path: Path, format: str, warning: str) -> None:
    tiny = {**llama(), UP: bf16(np.full(llama()[UP][1].shape, 1e-38, np.float32))}
    model = source(tmp_path / "m", tiny, LLAMA)
    folder = quantized(model, tmp_path / "q", Options(format))
    by_record = verified(folder)
    assert by_record.is_sound
    assert warning in found(by_record)
    (folder / "mxcli.json").unlink()
    assert {"zero_scale", "scale_direction"}.isdisjoint(found(verified(folder, model)))
    assert (folder / SHARD).is_file()
