"""The memory that runs are said to need, and the refusal of one that needs more than is allowed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tiny_models import noise, write_model

from mxcli.backends.cpu import Cpu
from mxcli.errors import EnvironmentFailure
from mxcli.files.checkpoint import open_checkpoint
from mxcli.flows.measure.measure import memory_to_measure
from mxcli.flows.plan.memory import PROGRAM_BYTES, RECORD_BYTES, RESULT_BYTES, Need, check_memory, need_of
from mxcli.flows.plan.plan import Options, make_plan
from mxcli.flows.write.arrange import arrange
from mxcli.flows.write.dequantize import memory_to_dequantize
from mxcli.flows.write.quantize import quantize_checkpoint

SMALL, LARGE = 64 * 64 * 2, 128 * 256 * 2


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_model(
        tmp_path / "m", {"a.weight": noise(64, 64), "b.weight": noise(128, 256), "norm.weight": noise(8)}
    )


def test_a_need_is_that_of_the_largest() -> None:
    assert need_of([("a", 1), ("b", 3), ("c", 3)], 10) == Need(PROGRAM_BYTES + 3 * RESULT_BYTES + 13, "b")
    assert need_of([]) == Need(PROGRAM_BYTES, None)


def test_what_each_run_needs(source: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(source)
    plan = make_plan(checkpoint, Options("mxfp8"))
    packed = LARGE // 2 + LARGE // 64
    two, all_three = 2 * RESULT_BYTES, 3 * RESULT_BYTES
    recorded = all_three + 2 * RECORD_BYTES
    assert arrange(checkpoint, plan).need == Need(PROGRAM_BYTES + recorded + LARGE + 2 * packed, "b.weight")
    assert memory_to_measure(plan) == Need(PROGRAM_BYTES + two + LARGE, "b.weight")
    blocks = 24 * 128 * 256 // 32
    assert memory_to_measure(plan, per_block=True) == Need(PROGRAM_BYTES + two + LARGE + blocks, "b.weight")
    quantize_checkpoint(checkpoint, plan, tmp_path / "q", backend=Cpu())
    quantized = open_checkpoint(tmp_path / "q")
    assert memory_to_dequantize(quantized) == Need(PROGRAM_BYTES + all_three + packed + 2 * LARGE, "b.weight")
    assert memory_to_dequantize(quantized, "F32") == Need(PROGRAM_BYTES + all_three + packed + 4 * LARGE, "b.weight")


def test_a_tensor_that_is_turned_is_copied(tmp_path: Path) -> None:
    source = write_model(tmp_path / "m", {"a.weight": ("F32", np.ones((64, 64), np.float32))})
    plan = make_plan(open_checkpoint(source), Options("mxfp8", axis="column"))
    assert memory_to_measure(plan).peak_bytes == PROGRAM_BYTES + RESULT_BYTES + 2 * 64 * 64 * 4


@pytest.mark.parametrize(("limit", "device"), [(None, "cpu"), (10_000_000, "cpu"), (1, "cuda:0")])
def test_enough_memory(limit: int | None, device: str) -> None:
    check_memory(Need(10_000_000, "a"), limit, device)


def test_too_little_memory_names_the_tensor_and_what_would_do() -> None:
    with pytest.raises(EnvironmentFailure) as refused:
        check_memory(Need(10_000_000, "a.weight"), 9_999_999, "cpu")
    assert refused.value.exit_code == 6
    assert str(refused.value) == (
        "a.weight: needs about 10,000,000 bytes of memory, and --max-memory allows 9,999,999. Use --max-memory 10M or "
        "more."
    )
    with pytest.raises(EnvironmentFailure, match="this source: needs about"):
        check_memory(need_of([]), 5, "cpu")
