"""What producers made of one small matrix, kept in tests/data: the kernels make the same bytes of it.

`producers.safetensors` has the matrix `x`, and codes and scales by dialect and format. `te`: the PyTorch references in
Transformer Engine 2.20's sources; `transformers`: 5.24, FineGrainedFP8; `nncf`: 3.4 with OpenVINO 2026.4; `gguf`: 0.19
and llama.cpp b11549, which agree. All ran on a CPU with torch 2.13. Whole models are compared in
tests/engines/test_bytes_of_*.py.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tiny_models import Raw, read_raw

from mxcli.backends import cpu
from mxcli.numerics.dialects import DIALECTS
from mxcli.numerics.scheme import Rules, resolve

DATA: dict[str, Raw] = read_raw(Path(__file__).parents[1] / "data" / "producers.safetensors")
CASES = sorted({name.rpartition(".")[0] for name in DATA if name != "x"})


def test_what_there_is_data_of() -> None:
    assert CASES == [
        "gguf.mxfp4", "nncf.mxfp4", "nncf.nvfp4", "te.fp8_e4m3", "te.fp8_e4m3_1x128", "te.nvfp4", "te.nvfp4_2d",
        "transformers.fp8_e4m3", "transformers.fp8_e4m3_channel", "transformers.mxfp8",
    ]  # fmt: skip
    assert {case.partition(".")[0] for case in CASES} <= DIALECTS.keys()
    assert DATA["x"][:2] == ("BF16", [16, 128])


@pytest.mark.parametrize("case", CASES)
def test_every_byte(case: str) -> None:
    dialect, _, format = case.partition(".")
    _, shape, content = DATA["x"]
    matrix = np.frombuffer(content, np.uint16).reshape(shape)
    found = cpu.quantize(matrix, "BF16", resolve(format, Rules(dialect=dialect)))
    assert found.packed.tobytes() == DATA[f"{case}.codes"][2]
    assert found.scales.tobytes() == DATA[f"{case}.scales"][2]
