"""torchao's tensor classes, as rows: what the header of a file says of a weight, and which configuration makes it.

MX layers are marked EMULATED, which every device runs; their inputs are quantized under the rule of the weights, since
torchao has no MX product with plain inputs. NVFP4 and FP8 layers are quantized in their weights alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mxcli.files.layouts.layout import DTYPES, Weight
from mxcli.numerics.formats import BlockFormat, find_format

SWIZZLED, PLAIN = "swizzled", "plain"
"""The two orders of scales: 128x4 tiles of block-scaled matrix products, and that of the grid of blocks."""

MX, NVFP4, FLOAT8 = "MXTensor", "NVFP4Tensor", "Float8Tensor"
TENSOR_SCALE, ACTIVATIONS = "per_tensor_scale", "act_per_tensor_scale"
"""The parts that not all have; the latter says nothing of a weight."""

Told = dict[str, object]
_SPELLED = {ours: theirs for theirs, ours in DTYPES.items()}
_SCALING_MODES = {"floor": "FLOOR", "ceil": "CEIL", "rceil": "RCEIL", "even": "EVEN"}
_OTHER_MODE = "RCEIL"
"""The mode of activations under rules that torchao has not: its own default."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A class of tensors for one of our formats.

    `element` is its dtype as a header spells it, `attributes(kind, weight, swizzled)` what a header says of such a
    weight, `config(kind, weight)` the configuration that makes it, `parts` the tensors it is stored as.
    """

    ours: str
    tensor: str
    element: object
    attributes: Callable[[Kind, Weight, bool], Told]
    config: Callable[[Kind, Weight], Told]
    parts: tuple[str, ...] = ("qdata", "scale")

    @property
    def format(self) -> BlockFormat:
        """The block format."""
        return find_format(self.ours)

    @property
    def has_variants(self) -> bool:
        """Whether its scales may be swizzled."""
        return self.format.scale.bits == 8

    def header(self, weight: Weight, swizzled: bool) -> Told:
        """What the header of a file says of a weight."""
        said = self.attributes(self, weight, swizzled)
        return {"_type": self.tensor, "_data": said, "_tensor_data_names": list(self.parts)}

    def made_by(self, weight: Weight) -> Told:
        """The configuration of torchao that makes such a weight."""
        return self.config(self, weight)

    def is_told_by(self, header: Mapping[str, object], attributes: Mapping[str, object]) -> bool:
        """Whether a header says this class with this element and these parts, scales of activations left aside.

        Of Float8Tensor dtype and shape of codes and scales say the rest.
        """
        names = header.get("_tensor_data_names")
        return (
            header.get("_type") == self.tensor
            and isinstance(names, list)
            and set(names) - {ACTIVATIONS} == set(self.parts)
            and attributes.get("elem_dtype", self.element) == self.element
            and (not self.has_variants or attributes.get("block_size") == self.format.block[1])
        )


def _named(type: str, value: object) -> Told:
    return {"_type": type, "_data": value}


def _dtype(name: str) -> Told:
    return _named("torch.dtype", name)


def _config(type: str, version: int, **fields: object) -> Told:
    return {"_type": type, "_version": version, "_data": fields}


_EMULATED, _AUTO = _named("KernelPreference", "EMULATED"), _named("KernelPreference", "AUTO")


def _scaling_mode(weight: Weight) -> Told:
    return _named("ScaleCalculationMode", _SCALING_MODES.get(weight.scheme.scale_rule.name, _OTHER_MODE))


def _mx_described(kind: Kind, weight: Weight, swizzled: bool) -> Told:
    common = {"elem_dtype": kind.element, "block_size": kind.format.block[1]}
    activations = {
        **common,
        "scaling_mode": _scaling_mode(weight),
        "kernel_preference": _EMULATED,
        "is_swizzled_scales": swizzled,
    }
    return {
        **common,
        "orig_dtype": _dtype(_SPELLED[weight.dtype]),
        "kernel_preference": _EMULATED,
        "act_quant_kwargs": _named("QuantizeTensorToMXKwargs", activations),
        "is_swizzled_scales": swizzled,
    }


def _mx_made_by(kind: Kind, weight: Weight) -> Told:
    return _config(
        "MXDynamicActivationMXWeightConfig",
        1,
        block_size=kind.format.block[1],
        activation_dtype=kind.element,
        weight_dtype=kind.element,
        kernel_preference=_EMULATED,
        scaling_mode=_scaling_mode(weight),
    )


def _nvfp4_described(kind: Kind, weight: Weight, swizzled: bool) -> Told:
    return {
        "is_swizzled_scales": swizzled,
        "use_triton_kernel": False,
        "act_quant_kwargs": None,
        "block_size": kind.format.block[1],
        "orig_dtype": _dtype(_SPELLED[weight.dtype]),
    }


def _nvfp4_made_by(kind: Kind, weight: Weight) -> Told:
    return _config("NVFP4WeightOnlyConfig", 1, use_dynamic_per_tensor_scale=TENSOR_SCALE in kind.parts)


def _float8_described(kind: Kind, weight: Weight, swizzled: bool) -> Told:
    lengths = zip(kind.format.block, weight.shape, strict=True)
    return {
        "block_size": [length if block is None else block for block, length in lengths],
        "mm_config": None,
        "act_quant_kwargs": None,
        "kernel_preference": _AUTO,
        "dtype": _dtype(_SPELLED[weight.dtype]),
    }


def _float8_made_by(kind: Kind, weight: Weight) -> Told:
    granularity = {
        (None, None): _config("PerTensor", 1),
        (1, None): _config("PerRow", 1, dim=-1),
        (1, 128): _config("PerGroup", 1, group_size=128),
    }
    return _config(
        "Float8WeightOnlyConfig",
        2,
        weight_dtype=kind.element,
        set_inductor_config=True,
        granularity=granularity[kind.format.block],
    )


_FLOAT8 = {"e4m3": _dtype("float8_e4m3fn"), "e5m2": _dtype("float8_e5m2")}
_FP4 = _dtype("float4_e2m1fn_x2")
KINDS: dict[str, Kind] = {
    row.ours: row
    for row in (
        Kind("mxfp8_e4m3", MX, _FLOAT8["e4m3"], _mx_described, _mx_made_by),
        Kind("mxfp8_e5m2", MX, _FLOAT8["e5m2"], _mx_described, _mx_made_by),
        Kind("mxfp6_e2m3", MX, "fp6_e2m3", _mx_described, _mx_made_by),
        Kind("mxfp6_e3m2", MX, "fp6_e3m2", _mx_described, _mx_made_by),
        Kind("mxfp4_e2m1", MX, _FP4, _mx_described, _mx_made_by),
        Kind("nvfp4", NVFP4, _FP4, _nvfp4_described, _nvfp4_made_by, (TENSOR_SCALE, "qdata", "scale")),
        Kind("e2m1:e4m3:1x16", NVFP4, _FP4, _nvfp4_described, _nvfp4_made_by),
        *(
            Kind(f"fp8_{element}{block}", FLOAT8, _FLOAT8[element], _float8_described, _float8_made_by)
            for element in _FLOAT8
            for block in ("", "_channel", "_1x128")
        ),
    )
}
"""By the names of our formats. FP8 of one form may fit several blocks (a row of 128): they mean the same then."""
