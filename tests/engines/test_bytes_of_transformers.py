"""transformers' own FP8, quantized while a whole model is loaded: its files are ours, byte for byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lazy import Lazy, needs

from engines.originals import differing, llama, ours, theirs

pytestmark = [pytest.mark.slow, needs("accelerate", "torch", "transformers")]
transformers: Any = Lazy("transformers")
finegrained: Any = Lazy("transformers.quantizers.quantizer_finegrained_fp8")


def produced(source: Path, output: Path, **settings: Any) -> Path:
    """What transformers saves of a model that it quantized; its check for a GPU is left out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finegrained.FineGrainedFP8HfQuantizer, "validate_environment", lambda self, *args, **more: None)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            source, dtype="auto", device_map="cpu", quantization_config=transformers.FineGrainedFP8Config(**settings)
        )
        model.save_pretrained(output)
    return output


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
@pytest.mark.parametrize(
    ("format", "settings"),
    [
        ("fp8_e4m3_128x128", {}),
        ("e4m3:e8m0:128x128", {"scale_fmt": "ue8m0"}),
        ("fp8_e4m3", {"weight_block_size": None}),
        ("mxfp8", {"scale_fmt": "ue8m0", "weight_block_size": (1, 32)}),
    ],
)
def test_every_byte(tmp_path: Path, format: str, settings: dict[str, Any], dtype: str) -> None:
    source = llama(tmp_path / "m", dtype, without=("zeros", "negative zeros", "tiny"), equal_amax=True)
    expected = theirs(produced(source, tmp_path / "theirs", **settings))
    found = ours(source, tmp_path / "ours", format, "fp8", "transformers")
    # The dtype and the shape of the scales are the layout's, which more loaders read.
    stored = {name: (raw[0], raw[1]) for name, raw in found.items()}
    assert differing({name: (*stored[name], raw[2]) for name, raw in expected.items()}, found) == {}
