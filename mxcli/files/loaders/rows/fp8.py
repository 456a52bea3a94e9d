"""The loader rules of the layout fp8."""

from __future__ import annotations

from mxcli.files.loaders.conditions import PARTIAL_BLOCKS, SPLIT_STACKS, UNEVEN_BLOCKS, of_models
from mxcli.files.loaders.rows.row import AS_CT, BLOCK, BLOCKS, CHANNEL, E8M0_BLOCK, FP8, MXFP8, TENSOR, VLLM_RUN, row
from mxcli.files.loaders.rule import LOADS, REFUSES, WRONGLY

_NATIVE = "a GPU multiplies FP8 blocks as they are (compute capability 8.9 or later)"
RULES = (
    row("transformers", FP8, [BLOCK, E8M0_BLOCK, MXFP8, TENSOR], LOADS),
    row(
        "transformers", FP8, BLOCKS, REFUSES,
        "it dequantizes as if all blocks were equally long",
        f"Use --format {CHANNEL} with --layout compressed-tensors, or --exclude those layers.", when=PARTIAL_BLOCKS,
        unless=_NATIVE,
    ),
    row(
        "transformers", FP8, BLOCKS, WRONGLY,
        "it dequantizes as if all blocks were equally long, and scales some values by the scale of another block, "
        "without an error",
        f"Use --format {CHANNEL} with --layout compressed-tensors, or --exclude those layers.", when=UNEVEN_BLOCKS,
        unless=_NATIVE,
    ),
    row("vllm", FP8, [BLOCK], LOADS, evidence=VLLM_RUN),
    row("vllm", FP8, [E8M0_BLOCK], LOADS),
    row(
        "vllm", FP8, [MXFP8], REFUSES, "it takes the quant_method mxfp8 for ModelOpt's, whose scales have other names",
        "Use --layout modelopt or compressed-tensors.", evidence=VLLM_RUN,
    ),
    row(
        "vllm", FP8, [TENSOR], REFUSES, "it looks for weight_scale where there is one scale per tensor",
        AS_CT, evidence=VLLM_RUN,
    ),
    row("sglang", FP8, [BLOCK, E8M0_BLOCK, MXFP8], LOADS),
    row("sglang", FP8, [TENSOR], REFUSES, "it looks for weight_scale where there is one scale per tensor", AS_CT),
    row(
        "transformers", FP8, [], WRONGLY, "it does not join single experts of this model, without an error",
        "Use --exclude '*.experts.*'.", when=SPLIT_STACKS,
    ),
    row(
        "transformers", FP8, [], WRONGLY, "it splits a quantized layer of this model and drops its scale",
        AS_CT, when=of_models("nomic_bert"),
    ),
)  # fmt: skip
