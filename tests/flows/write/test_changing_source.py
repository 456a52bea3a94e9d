"""A source that changes while an output is written of it: no output, and one sentence."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from mxcli.backends.cpu import Cpu
from mxcli.errors import InputError
from mxcli.files.checkpoint import open_checkpoint
from mxcli.flows.plan.plan import Options, make_plan
from mxcli.flows.write.pipeline import WriteOptions
from mxcli.flows.write.quantize import quantize_checkpoint


def _cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _zeroed(path: Path) -> None:
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(-(1 << 16), os.SEEK_END)
        file.write(bytes(1 << 16))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def _replaced(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    os.replace(other, path)


@pytest.mark.parametrize("change", [_cut_short, _zeroed, _replaced])
@pytest.mark.parametrize("after", [1, 7, 8])
def test_nothing_is_published(change: Callable[[Path], None], after: int, tmp_path: Path) -> None:
    """After the first of eight tensors, the last but one, and the last."""
    (tmp_path / "source").mkdir()
    path = tmp_path / "source" / "model.safetensors"
    noise = np.random.default_rng(0)
    save_file({f"layers.{at}.weight": noise.standard_normal((256, 256), np.float32) for at in range(8)}, path)
    time.sleep(0.02)
    done: list[str] = []

    def changing(bytes_done: int, total: int, name: str) -> None:
        done.append(name)
        if len(done) == after:
            change(path)

    checkpoint = open_checkpoint(tmp_path / "source")
    plan = make_plan(checkpoint, Options("nvfp4"))
    with pytest.raises(InputError, match=r"model\.safetensors: changed while in use: .*; run again once"):
        quantize_checkpoint(
            checkpoint, plan, tmp_path / "out", backend=Cpu(1), options=WriteOptions(on_progress=changing)
        )
    assert len(done) == after
    assert not (tmp_path / "out" / "model.safetensors").exists()
    assert not (tmp_path / "out" / "mxcli.json").exists()
