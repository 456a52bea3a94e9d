"""The loader rules of ModelOpt's checkpoints."""

from __future__ import annotations

from mxcli.files.loaders.conditions import ADJUSTED, ANY_PARTIAL, EXPERTS, WEIGHT_ONLY
from mxcli.files.loaders.rows.row import (
    AS_CT,
    BLOCK,
    CHANNEL,
    MODELOPT,
    MXFP4,
    MXFP8,
    NVFP4,
    TENSOR,
    VIA_VALUES,
    VLLM_RUN,
    row,
)
from mxcli.files.loaders.rule import LOADS, NOT_KNOWN, REFUSES, WRONGLY

RULES = (
    row("vllm", MODELOPT, [NVFP4, MXFP8, CHANNEL, BLOCK], LOADS, evidence=VLLM_RUN),
    row("vllm", MODELOPT, [TENSOR], LOADS),
    row(
        "vllm", MODELOPT, [BLOCK], REFUSES, "it needs lengths that are multiples of 128 in this layout",
        AS_CT, when=ANY_PARTIAL, evidence=VLLM_RUN,
    ),
    row(
        "vllm", MODELOPT, [CHANNEL, BLOCK], REFUSES, "its experts have one scale each in this layout",
        AS_CT, when=EXPERTS, evidence=VLLM_RUN,
    ),
    row("vllm", MODELOPT, [MXFP4], REFUSES, "it does not know the quant_algo mxfp4", AS_CT),
    row("vllm", MODELOPT, [], REFUSES, "it does not know the quant_algo", VIA_VALUES, when=ADJUSTED),
    row("sglang", MODELOPT, [NVFP4, TENSOR], LOADS),
    row(
        "sglang", MODELOPT, [MXFP8, CHANNEL, BLOCK, MXFP4], REFUSES,
        "of ModelOpt's algorithms it reads FP8 and NVFP4, and others only within MIXED_PRECISION",
        "Use --layout compressed-tensors or fp8.",
    ),
    row("tensorrt-llm", MODELOPT, [NVFP4, TENSOR], LOADS),
    row(
        "tensorrt-llm", MODELOPT, [NVFP4], NOT_KNOWN, "W4A16_NVFP4, weights alone, was not looked up in it",
        "Give captured inputs with --captures.", when=WEIGHT_ONLY,
    ),
    row(
        "transformers", MODELOPT, [MXFP8, TENSOR, CHANNEL, BLOCK], WRONGLY,
        "it does not know ModelOpt's checkpoints and takes codes as values, without an error",
        AS_CT,
    ),
    row(
        "transformers", MODELOPT, [NVFP4, MXFP4], REFUSES,
        "it does not know ModelOpt's checkpoints, and packed codes have other shapes than weights",
        AS_CT,
    ),
)  # fmt: skip
