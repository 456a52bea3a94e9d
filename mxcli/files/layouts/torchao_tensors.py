"""torchao's tensor classes as rows: how a header describes a weight, and the configuration that makes it.

MX layers are marked EMULATED, which every device runs; their inputs are quantized under the rule of the weights, since
torchao has no MX product with plain inputs. NVFP4 and FP8 layers quantize their weights alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mxcli.files.layouts.layout import DTYPES, Weight
from mxcli.numerics.formats import BlockFormat, find_format

SWIZZLED, PLAIN = "swizzled", "plain"
"""The two orders of scales: 128x4 tiles of block-scaled matrix products, and that of the grid of blocks."""

MX, NVFP4, FLOAT8 = "MXTensor", "NVFP4Tensor", "Float8Tensor"
OTHER_TENSORS = frozenset(
    {
        *("AffineQuantizedTensor", "IntxUnpackedToInt8Tensor", "Int8Tensor", "UIntxBitPackedTensor"),
        *("Int4Tensor", "Int4PreshuffledTensor", "Int4MarlinSparseTensor", "Int4OpaqueTensor", "Int4PlainInt32Tensor"),
        *("Int4TilePackedTo4dTensor", "IntxOpaqueTensor", "CodebookQuantizedTensor", "Sparse2x4CUTLASSFloat8Tensor"),
        *("CodebookQuantizedPackedTensor", "Float8OpaqueTensor", "Int8LutTensor", "NF4Tensor", "UintxTensor"),
        *("Float8Sparse2x4_1DData1DMetadataTensor", "Float8Sparse2x4_2DData2DMetadataTensor", "BlockSparseTensor"),
    }
)
"""Other classes of torchao, whose formats are not among ours."""
TENSOR_SCALE, ACTIVATIONS = "per_tensor_scale", "act_per_tensor_scale"
"""Optional parts; the second one does not belong to the weight."""

JsonObject = dict[str, object]
_TORCH_NAMES = {name: torch_name for torch_name, name in DTYPES.items()}
_SCALING_MODES = {"floor": "FLOOR", "ceil": "CEIL", "rceil": "RCEIL", "even": "EVEN"}
_OTHER_MODE = "RCEIL"
"""The mode of activations under rules that torchao lacks: its own default."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A tensor class of torchao for one of our formats.

    `element` is its dtype as a header spells it, `attributes(kind, weight, swizzled)` the header's description of a
    weight, `config(kind, weight)` the configuration that makes it, `parts` the tensors it is stored as.
    """

    block_format: str
    tensor: str
    element: object
    attributes: Callable[[Kind, Weight, bool], JsonObject]
    config: Callable[[Kind, Weight], JsonObject]
    parts: tuple[str, ...] = ("qdata", "scale")

    @property
    def format(self) -> BlockFormat:
        """Return the block format."""
        return find_format(self.block_format)

    @property
    def has_variants(self) -> bool:
        """Return whether its scales may be swizzled."""
        return self.format.scale.bits == 8

    def header(self, weight: Weight, swizzled: bool) -> JsonObject:
        """Return the header's description of a weight."""
        described = self.attributes(self, weight, swizzled)
        return {"_type": self.tensor, "_data": described, "_tensor_data_names": list(self.parts)}

    def made_by(self, weight: Weight) -> JsonObject:
        """Return the torchao configuration that makes such a weight."""
        return self.config(self, weight)

    def matches(self, header: Mapping[str, object], attributes: Mapping[str, object]) -> bool:
        """Return whether a header states this class with this element and these parts, scales of activations left
        aside.

        For Float8Tensor, dtypes and shapes of codes and scales decide the rest.
        """
        names = header.get("_tensor_data_names")
        return (
            header.get("_type") == self.tensor
            and isinstance(names, list)
            and set(names) - {ACTIVATIONS} == set(self.parts)
            and attributes.get("elem_dtype", self.element) == self.element
            and (not self.has_variants or attributes.get("block_size") == self.format.block[1])
        )


def _named(type: str, value: object) -> JsonObject:
    return {"_type": type, "_data": value}


def _dtype(name: str) -> JsonObject:
    return _named("torch.dtype", name)


def _config(type: str, version: int, **fields: object) -> JsonObject:
    return {"_type": type, "_version": version, "_data": fields}


_EMULATED, _AUTO = _named("KernelPreference", "EMULATED"), _named("KernelPreference", "AUTO")


def _scaling_mode(weight: Weight) -> JsonObject:
    return _named("ScaleCalculationMode", _SCALING_MODES.get(weight.scheme.scale_rule.name, _OTHER_MODE))


def _mx_described(kind: Kind, weight: Weight, swizzled: bool) -> JsonObject:
    common = {"elem_dtype": kind.element, "block_size": kind.format.block[1]}
    activations = {
        **common,
        "scaling_mode": _scaling_mode(weight),
        "kernel_preference": _EMULATED,
        "is_swizzled_scales": swizzled,
    }
    return {
        **common,
        "orig_dtype": _dtype(_TORCH_NAMES[weight.dtype]),
        "kernel_preference": _EMULATED,
        "act_quant_kwargs": _named("QuantizeTensorToMXKwargs", activations),
        "is_swizzled_scales": swizzled,
    }


def _mx_made_by(kind: Kind, weight: Weight) -> JsonObject:
    return _config(
        "MXDynamicActivationMXWeightConfig",
        1,
        block_size=kind.format.block[1],
        activation_dtype=kind.element,
        weight_dtype=kind.element,
        kernel_preference=_EMULATED,
        scaling_mode=_scaling_mode(weight),
    )


def _nvfp4_described(kind: Kind, weight: Weight, swizzled: bool) -> JsonObject:
    return {
        "is_swizzled_scales": swizzled,
        "use_triton_kernel": False,
        "act_quant_kwargs": None,
        "block_size": kind.format.block[1],
        "orig_dtype": _dtype(_TORCH_NAMES[weight.dtype]),
    }


def _nvfp4_made_by(kind: Kind, weight: Weight) -> JsonObject:
    return _config("NVFP4WeightOnlyConfig", 1, use_dynamic_per_tensor_scale=TENSOR_SCALE in kind.parts)


def _float8_described(kind: Kind, weight: Weight, swizzled: bool) -> JsonObject:
    lengths = zip(kind.format.block, weight.shape, strict=True)
    return {
        "block_size": [length if block is None else block for block, length in lengths],
        "mm_config": None,
        "act_quant_kwargs": None,
        "kernel_preference": _AUTO,
        "dtype": _dtype(_TORCH_NAMES[weight.dtype]),
    }


def _float8_made_by(kind: Kind, weight: Weight) -> JsonObject:
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
    row.block_format: row
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
"""The classes by our format names. FP8 of one shape may fit several blocks (a row of 128): they are then equivalent."""
