"""The formats of compressed-tensors that we write, as rows: what its quantization_config says of each.

NVFP4 and MX layers state no activation scheme: their weights alone are quantized. `float-quantized` implies one,
so FP8 layers state dynamic activations, which need no calibration. With a scale of their inputs NVFP4 and FP8 layers
state that it is stored: the tensor scale of NVFP4 (block scales are made as inputs come: "local"), the one of FP8.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

_KEYS = ("num_bits", "type", "strategy", "group_size", "block_structure")


@dataclass(frozen=True, slots=True)
class Scheme:
    """What a configuration says of one of our formats: `weights`, `activations` and, where their scale is stored under
    the module's name and `input_scale`, `calibrated` are its QuantizationArgs."""

    ours: str
    format: str
    weights: Mapping[str, object]
    activations: Mapping[str, object] | None = None
    calibrated: Mapping[str, object] | None = None
    input_scale: str = ""
    scale_dtype: str = "U8"
    symbols: Mapping[str, object] = field(default_factory=lambda: {"type": "float", "symmetric": True})

    def group(self, *, calibrated: bool) -> dict[str, object]:
        """A config group, but for its targets."""
        stated = self.calibrated if calibrated else self.activations
        activations = None if stated is None else {**self.symbols, "dynamic": True, **stated}
        return {
            "format": self.format,
            "weights": {**self.symbols, **self.weights, "dynamic": False},
            "input_activations": activations,
            "output_activations": None,
        }

    def means(self, args: Mapping[str, object]) -> bool:
        """Whether QuantizationArgs of weights say this scheme."""
        own = {**self.symbols, **self.weights}
        return all(own.get(key) == args.get(key) for key in _KEYS)


def _mx(ours: str, format: str, bits: int) -> Scheme:
    group = {"num_bits": bits, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
    return Scheme(ours, format, group)


def _fp8(ours: str, strategy: str, activations: Mapping[str, object], **more: object) -> Scheme:
    weights = {"num_bits": 8, "strategy": strategy, **more}
    return Scheme(ours, "float-quantized", weights, {"num_bits": 8, **activations}, scale_dtype="F32")


_NVFP4 = {"num_bits": 4, "strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}
SCHEMES: dict[str, Scheme] = {
    row.ours: row
    for row in (
        Scheme(
            "nvfp4",
            "nvfp4-pack-quantized",
            _NVFP4,
            calibrated={**_NVFP4, "dynamic": "local"},
            input_scale="input_global_scale",
            scale_dtype="F8_E4M3",
        ),
        _mx("mxfp4_e2m1", "mxfp4-pack-quantized", 4),
        _mx("mxfp6_e2m3", "mxfp6-pack-quantized", 6),
        _mx("mxfp8_e4m3", "mxfp8-quantized", 8),
        replace(
            _fp8("fp8_e4m3", "tensor", {"strategy": "tensor"}),
            calibrated={"num_bits": 8, "strategy": "tensor", "dynamic": False},
            input_scale="input_scale",
        ),
        _fp8("fp8_e4m3_channel", "channel", {"strategy": "token"}),
        _fp8("fp8_e4m3_128x128", "block", {"strategy": "group", "group_size": 128}, block_structure=[128, 128]),
    )
}
