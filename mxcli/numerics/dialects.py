"""Dialects: bundles of the choices in which public producers differ, so that bytes equal theirs.

Sources are the producers' own code, as run or read in the versions named in each row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mxcli.errors import UsageError, did_you_mean, printable

ANY = "any"


@dataclass(frozen=True, slots=True)
class ProducerChoice:
    """Choices of a dialect for one kind of scale (`e8m0`, `narrow`, `fp32`) and one element, or `any`.

    `byte0_exponent` maps a rule to the power of two that elements are divided by when the scale byte is 0 (2^-127).
    `clear_zero_input`: -0.0 in the input counts as +0.0; `set_zero_input`: the other way round; `clear_zero_code`: no
    zero code has a sign. `flush_subnormal_blocks`: blocks of binary32 subnormals become zero; `flush_subnormals`: every
    such element does. `bf16_transform`: values under a Hadamard transform are rounded to bfloat16. `infinity_is_nan`:
    an infinity makes its block NaN.
    """

    rule: str
    rounding: str = "nearest-even"
    byte0_exponent: Mapping[str, int] = field(default_factory=dict, hash=False)
    min_exponent: int = -127
    clear_zero_input: bool = False
    clear_zero_code: bool = False
    set_zero_input: bool = False
    flush_subnormal_blocks: bool = False
    flush_subnormals: bool = False
    bf16_transform: bool = False
    infinity_is_nan: bool = False


@dataclass(frozen=True, slots=True)
class Dialect:
    """A producer's choices: `choices[kind][element or ANY]`, or `choices[kind with block]` where the kind of scale has
    other choices for some block, as in `fp32 1x128`. `exceptions` says where its bytes are others than those."""

    name: str
    meaning: str
    source: str
    choices: Mapping[str, Mapping[str, ProducerChoice]] = field(hash=False)
    aliases: tuple[str, ...] = ()
    exceptions: tuple[str, ...] = ()

    def choice(self, scale_kind: str, element: str, block: str = "") -> ProducerChoice | None:
        """Return the choice for a kind of scale, an element and a block as formats spell it; None where the producer
        has no such format."""
        rows = self.choices.get(f"{scale_kind} {block}") or self.choices.get(scale_kind, {})
        return rows.get(element) or rows.get(ANY)


_OWN_TENSOR_SCALES = (
    "Layers that loaders fuse have a tensor scale each there, and share one here: members of lower amax differ."
)
"""The exception of producers that do not know fused layers."""
_UNSIGNED_LOST_BLOCKS = "NVFP4 blocks whose scale is 0 have codes of 0 without a sign there."
_MODELOPT_EXCEPTIONS = (
    "FP8 rows whose amax is below 2^-126 are scaled as if it were 2^-126 there.",
    "Layers that loaders fuse have an FP8 scale each there, and share one here; the tensor scale of NVFP4 is shared in "
    "both.",
)
_CT_EXCEPTIONS = ("oneshot writes a negative zero as zero in FP8 and MXFP8; model_free_ptq keeps its sign, as here.",)
_TE_BYTE0 = {"floor": -126, "ceil": -126, "even": -126, "rceil": 0}
_AMAX = {ANY: ProducerChoice("amax")}
_RCEIL = {ANY: ProducerChoice("rceil")}
_MODELOPT_MX = {
    ANY: ProducerChoice("rceil"),
    "e2m1": ProducerChoice("rceil", rounding="half-toward-zero", set_zero_input=True),
}
_CT_MX = {
    "e4m3": ProducerChoice("ct-even1"),
    "e2m1": ProducerChoice("even", clear_zero_input=True),
    "e2m3": ProducerChoice("even"),
}

DEFAULT = Dialect(
    "mxcli",
    "The default: scales rounded so that nothing saturates (rceil), NVFP4 in Transformer Engine's order of operations, "
    "and no step that turns finite data into NaN or loses a factor of two at the bottom of the range.",
    "Recipes for Pre-training LLMs with MXFP8, algorithm 1; Pretraining Large Language Models with NVFP4, appendix B",
    {"e8m0": {ANY: ProducerChoice("rceil")}, "narrow": {ANY: ProducerChoice("te")}, "fp32": _AMAX},
)

DIALECTS: dict[str, Dialect] = {
    row.name: row
    for row in (
        DEFAULT,
        Dialect(
            "ocp",
            "The letter of the OCP specification: scales rounded down (floor), so block maxima may saturate.",
            "OCP MX v1.0, section 6.3",
            {"e8m0": {ANY: ProducerChoice("floor")}, "narrow": {ANY: ProducerChoice("te")}, "fp32": _AMAX},
        ),
        Dialect(
            "te",
            "NVIDIA Transformer Engine: rceil; elements of a block whose scale byte is 0 are divided by 1, not 2^-127. "
            "FP8 multiplies by the encode scale; its block scaling (1x128, 128x128) has powers of two.",
            "Transformer Engine 2.20, its PyTorch references for NVFP4 and FP8 (run); its MXFP8 cast (read)",
            {
                "e8m0": {ANY: ProducerChoice("rceil", byte0_exponent=_TE_BYTE0)},
                "narrow": {ANY: ProducerChoice("te", bf16_transform=True)},
                "fp32": {ANY: ProducerChoice("encode")},
                "fp32 1x128": _RCEIL,
                "fp32 128x128": _RCEIL,
            },
            aliases=("nvidia",),
            exceptions=("FP8 blocks of zeros have the scale 1 there, and 2^-127 here.",),
        ),
        Dialect(
            "paper",
            "The two training papers read literally: rceil for power-of-two scales, equations 1 to 4 for NVFP4.",
            "Recipes for Pre-training LLMs with MXFP8; Pretraining Large Language Models with NVFP4",
            {"e8m0": {ANY: ProducerChoice("rceil")}, "narrow": {ANY: ProducerChoice("paper")}, "fp32": _AMAX},
        ),
        Dialect(
            "torchao",
            "torchao's configurations on bfloat16 weights: rceil, where byte 0 divides by 1; NVFP4 block scales are "
            "never subnormal; FP8 scales are rounded to bfloat16 (of binary32 weights they are `amax`).",
            "torchao 0.18, quantize_ with its weight-only and dynamic configurations (run)",
            {
                "e8m0": {ANY: ProducerChoice("rceil", byte0_exponent=_TE_BYTE0)},
                "narrow": {ANY: ProducerChoice("torchao")},
                "fp32": {ANY: ProducerChoice("amax-bf16-scale")},
            },
            exceptions=(
                "Rows of zeros in FP8 have the scale 0 there, and codes of NaN.",
                _OWN_TENSOR_SCALES,
            ),
        ),
        Dialect(
            "torchao-casts",
            "torchao's low-level casts by their defaults: floor, where byte 0 divides by 2^-126; binary32 FP8 scales.",
            "torchao 0.18, prototype.mx_formats and quant_primitives (run)",
            {
                "e8m0": {ANY: ProducerChoice("floor", byte0_exponent=_TE_BYTE0)},
                "narrow": {ANY: ProducerChoice("torchao")},
                "fp32": _AMAX,
            },
            exceptions=("Rows of zeros in FP8 have the scale 0 there, and codes of NaN.", _OWN_TENSOR_SCALES),
        ),
        Dialect(
            "modelopt",
            "NVIDIA ModelOpt: rceil; its MXFP4 rounds ties toward zero and writes a zero as the negative zero code.",
            "NVIDIA ModelOpt 0.47, export_hf_checkpoint (run)",
            {
                "e8m0": _MODELOPT_MX,
                "narrow": {ANY: ProducerChoice("modelopt")},
                "fp32": _AMAX,
            },
            exceptions=_MODELOPT_EXCEPTIONS,
        ),
        Dialect(
            "modelopt-bf16",
            "ModelOpt as it runs on bfloat16 weights: as `modelopt`, but with one FP8 scale for a tensor it rounds "
            "quotients to bfloat16.",
            "NVIDIA ModelOpt 0.47, export_hf_checkpoint of bfloat16 models (run)",
            {
                "e8m0": _MODELOPT_MX,
                "narrow": {ANY: ProducerChoice("modelopt")},
                "fp32": _AMAX,
                "fp32 tensor": {ANY: ProducerChoice("amax-bf16-quotient")},
            },
            exceptions=_MODELOPT_EXCEPTIONS,
        ),
        Dialect(
            "compressed-tensors",
            "compressed-tensors on binary32 input: `even` for FP4 and FP6, a threshold of 1.75 for MXFP8.",
            "compressed-tensors 0.20 (run)",
            {
                "e8m0": _CT_MX,
                "narrow": {ANY: ProducerChoice("ct")},
                "fp32": {ANY: ProducerChoice("amax-eps")},
            },
            aliases=("ct",),
            exceptions=_CT_EXCEPTIONS,
        ),
        Dialect(
            "compressed-tensors-bf16",
            "compressed-tensors as it runs on bfloat16 weights, whose scale arithmetic is bfloat16 too: the bytes of "
            "llm-compressor's checkpoints.",
            "compressed-tensors 0.20 through llm-compressor 0.14 on a CPU (run)",
            {
                "e8m0": _CT_MX,
                "narrow": {ANY: ProducerChoice("ct-bf16")},
                "fp32": {ANY: ProducerChoice("amax-bf16")},
            },
            aliases=("ct-bf16",),
            exceptions=_CT_EXCEPTIONS,
        ),
        Dialect(
            "vllm",
            "vLLM's reference quantizers for NVFP4 and dynamic FP8; it defines no rule for E8M0 scales.",
            "vLLM 0.32, its emulation of NVFP4 (run); 0.33, tests (read); auto-round 0.14",
            {
                "narrow": {ANY: ProducerChoice("vllm", clear_zero_input=True)},
                "fp32": {ANY: ProducerChoice("vllm-min")},
            },
            exceptions=(_UNSIGNED_LOST_BLOCKS,),
        ),
        Dialect(
            "quark",
            "AMD Quark: `even`; a zero block has byte 1 (2^-126), and negative zero is never written. FP8 on bfloat16 "
            "weights (of binary32 weights it is `amax-eps`).",
            "AMD Quark 0.13, export_safetensors (run)",
            {
                "e8m0": {ANY: ProducerChoice("even", min_exponent=-126, clear_zero_code=True, infinity_is_nan=True)},
                "fp32": {ANY: ProducerChoice("amax-bf16")},
            },
            exceptions=(
                "Blocks below 2^-124 are divided by a scale below the one that is stored there.",
                "Rows of zeros in FP8 have the scale 2^-23 there, and 2^-7 here.",
                _OWN_TENSOR_SCALES,
            ),
        ),
        Dialect(
            "microxcaling",
            "Microsoft's MX emulator: floor; blocks made only of binary32 subnormals become zero; NaN or infinity "
            "makes the whole block NaN.",
            "microxcaling 1.1 with round='even' (run); Microscaling Data Formats for Deep Learning, algorithm 1",
            {"e8m0": {ANY: ProducerChoice("floor", flush_subnormal_blocks=True, infinity_is_nan=True)}},
        ),
        Dialect(
            "mx-paper",
            "Algorithm 1 of the MX paper, literally: floor; every binary32 subnormal of the input counts as zero.",
            "Microscaling Data Formats for Deep Learning, algorithm 1, line 4",
            {"e8m0": {ANY: ProducerChoice("floor", flush_subnormals=True)}},
        ),
        Dialect(
            "transformers",
            "transformers' FineGrainedFP8: multiplies by the encode scale and stores its reciprocal; `rceil` where its "
            "scales are powers of two.",
            "transformers 5.24, FineGrainedFP8 while a model is loaded (run)",
            {"fp32": {"e4m3": ProducerChoice("encode-reciprocal")}, "e8m0": {"e4m3": ProducerChoice("rceil")}},
            exceptions=(
                "A scale of a power of two is 1 for a block of zeros there, and 2^-127 here.",
                "Blocks below 2^-117 have other scales there.",
                _OWN_TENSOR_SCALES,
            ),
        ),
        Dialect(
            "auto-round",
            "auto-round without tuning: floor for MX formats, NVFP4 in vLLM's order of operations.",
            "auto-round 0.16, quantize_and_save (run); NVFP4 by nv_fp4 and its packing (run)",
            {
                "e8m0": {ANY: ProducerChoice("floor", clear_zero_input=True, infinity_is_nan=True)},
                "narrow": {"e2m1": ProducerChoice("vllm", clear_zero_input=True)},
            },
            exceptions=(
                _UNSIGNED_LOST_BLOCKS,
                "A block of zeros has the byte 126 (E2M1) or 120 (E4M3) there, and 0 here.",
                "Its FP8 quantizes weights that were already rounded to FP8: no rule gives those codes.",
                _OWN_TENSOR_SCALES,
            ),
        ),
        Dialect(
            "auto-round-ct",
            "auto-round's NVFP4 in compressed-tensors' order on binary32 input: a scale code of 0 is kept, and no code "
            "is a negative zero.",
            "auto-round 0.14, NVFP4 (read)",
            {"narrow": {"e2m1": ProducerChoice("auto-round", clear_zero_code=True)}},
        ),
        Dialect(
            "nncf",
            "NNCF: rceil for MX formats with scales of at least 2^-23; NVFP4 codes of the block scale before its "
            "rounding.",
            "NNCF 3.4, compress_weights of OpenVINO models (run)",
            {
                "e8m0": {
                    "e2m1": ProducerChoice("rceil", min_exponent=-23),
                    "e4m3": ProducerChoice("rceil", min_exponent=-23),
                },
                "narrow": {"e2m1": ProducerChoice("nncf")},
            },
            exceptions=(
                "OpenVINO rounds to FP8 by way of float16: NVFP4 scales and MXFP8 codes close to a tie differ by one.",
                "Its logarithm is inexact: where an amax is 448 * 2^n, the MXFP8 scale may be twice ours.",
                "Without OpenVINO's kernels it writes no negative zero.",
                _OWN_TENSOR_SCALES,
            ),
        ),
        Dialect(
            "mlx",
            "MLX's kernels on a GPU: rceil; NVFP4 without a tensor scale in the order of `paper`, but blocks below "
            "0.006 have zero codes. Version 0.32.2 took the nearest power of two for scales of MX formats.",
            "mlx 0.32.4, the Metal kernels (read)",
            {
                "e8m0": {"e2m1": ProducerChoice("rceil"), "e4m3": ProducerChoice("rceil")},
                "narrow": {"e2m1": ProducerChoice("paper")},
            },
        ),
        Dialect(
            "mlx-cpu",
            "MLX on a CPU: rceil; its 4-bit codes round ties toward zero and are never negative zero. Its scale byte "
            "of a zero block is another one (127, and 0 in NVFP4), and NVFP4 blocks below 0.006 become zero.",
            "mlx 0.32.4, mx.quantize (run)",
            {
                "e8m0": {
                    "e2m1": ProducerChoice("rceil", rounding="half-toward-zero", clear_zero_code=True),
                    "e4m3": ProducerChoice("rceil"),
                },
                "narrow": {
                    "e2m1": ProducerChoice("modelopt", rounding="half-toward-zero", clear_zero_code=True),
                },
            },
        ),
        Dialect(
            "gguf",
            "GGUF's MXFP4: floor; ties toward zero, and no negative zero.",
            "gguf 0.19, llama.cpp b11549 (run)",
            {"e8m0": {"e2m1": ProducerChoice("floor", rounding="half-toward-zero", clear_zero_code=True)}},
            exceptions=(
                "Blocks below 2^-125 have a scale byte that wraps around there.",
                "llama.cpp's NVFP4 without a tensor scale has no rule here: it rounds scales half up.",
            ),
        ),
    )
}

_BY_NAME: dict[str, Dialect] = {name: row for row in DIALECTS.values() for name in (row.name, *row.aliases)}


def find_dialect(name: str | None) -> Dialect:
    """Return the dialect called `name`, or the default; raises UsageError for an unknown name."""
    if name is None:
        return DEFAULT
    row = _BY_NAME.get(name.strip().lower())
    if row is None:
        raise UsageError(
            f"unknown dialect '{printable(name)}': known are {', '.join(DIALECTS)}.{did_you_mean(name, _BY_NAME)}"
        )
    return row
