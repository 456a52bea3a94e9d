"""torchao's configurations on whole models in transformers: its files are ours, byte for byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lazy import Lazy, needs
from originals import differing, llama, ours, theirs

pytestmark = [pytest.mark.slow, needs("accelerate", "torch", "torchao", "transformers")]
torch: Any = Lazy("torch")
torchao: Any = Lazy("torchao.quantization")
formats: Any = Lazy("torchao.prototype.mx_formats")
transformers: Any = Lazy("transformers")


def produced(source: Path, output: Path, config: Any) -> Path:
    """What transformers saves of a model that torchao quantized."""
    settings = transformers.TorchAoConfig(config)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source, dtype="auto", device_map="cpu", quantization_config=settings
    )
    model.save_pretrained(output)
    return output


def mx(dtype: str, mode: str = "RCEIL", **more: Any) -> Any:
    """The configuration of MX weights and inputs."""
    modes: Any = Lazy("torchao.prototype.mx_formats.mx_tensor")
    kernels: Any = Lazy("torchao.quantization.quantize_.common.kernel_preference")
    element = getattr(torch, dtype)
    return formats.MXDynamicActivationMXWeightConfig(
        activation_dtype=element, weight_dtype=element, kernel_preference=kernels.KernelPreference.EMULATED,
        scaling_mode=getattr(modes.ScaleCalculationMode, mode), **more,
    )  # fmt: skip
