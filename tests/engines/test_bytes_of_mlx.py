"""What mlx_lm.convert writes of a whole model on a CPU is ours in every layer, byte for byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lazy import Lazy, needs

from engines.originals import differing, llama, ours, theirs

pytestmark = [pytest.mark.slow, needs("mlx", "mlx_lm")]
mx: Any = Lazy("mlx.core")
lm: Any = Lazy("mlx_lm.utils")


def produced(source: Path, output: Path, mode: str) -> Path:
    """What mlx-lm saves of a model that it quantized in one of its modes."""
    mx.set_default_device(mx.cpu)
    model, config = lm.load_model(source)
    model, config = lm.quantize_model(model, config, None, None, mode)
    output.mkdir()
    lm.save_model(output, model)
    return output


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
@pytest.mark.parametrize(
    ("mode", "format", "without"),
    [
        ("mxfp4", "mxfp4", ("zeros", "negative zeros", "tiny")),
        ("mxfp8", "mxfp8", ("zeros", "negative zeros", "tiny")),
        ("nvfp4", "e2m1:e4m3:1x16", ("zeros", "negative zeros", "tiny", "binades")),
    ],
)
def test_every_byte(tmp_path: Path, mode: str, format: str, without: tuple[str, ...], dtype: str) -> None:
    source = llama(tmp_path / "m", dtype, without=without, spread=0.2)  # Its NVFP4 is zero in blocks below 0.006.
    written = theirs(produced(source, tmp_path / "theirs", mode))
    # It quantizes embeddings and output heads too.
    expected = {name: raw for name, raw in written.items() if ".layers." in name}
    stored = ours(source, tmp_path / "ours", format, "mlx", "mlx-cpu")
    found = {name: raw for name, raw in stored.items() if ".layers." in name}
    assert differing(expected, found) == {}
