"""The loader rules of compressed-tensors, with those of vLLM and SGLang for every layout that they load."""

from __future__ import annotations

from mxcli.files.loaders.conditions import (
    DENSE,
    EXPERTS,
    EXPERTS_OF_STACKS,
    LARGE_EXPERTS,
    PARTIAL_INPUTS,
    PLAIN_EXPERTS,
    both,
    of_models,
    of_other_models,
)
from mxcli.files.loaders.engine import ENGINES
from mxcli.files.loaders.model_types import EXPERTS_APART, INITIALIZED, UNSPELLED
from mxcli.files.loaders.rows.row import (
    AUTO_ROUND,
    BLOCK,
    CHANNEL,
    CT,
    FP8,
    GPT_OSS,
    MODELOPT,
    MXFP4,
    MXFP6,
    MXFP8,
    NVFP4,
    QUARK,
    REGROUP,
    TENSOR,
    TORCHAO,
    VLLM_RUN,
    row,
)
from mxcli.files.loaders.rows.servers import of_servers
from mxcli.files.loaders.rule import AT_A_LOSS, LOADS, NOT_KNOWN, READ, REFUSES, WRONGLY, Evidence

_DEQUANTIZE = "Load it with quantization_config=CompressedTensorsConfig(dequantize=True)."
_WITH_DEQUANTIZE = "it is loaded with dequantize=True"
_NO_SCHEME = "it has no scheme for this format"
_JOINED = both(EXPERTS, of_other_models(*EXPERTS_APART))
_JOINED_LARGE = both(LARGE_EXPERTS, of_other_models(*EXPERTS_APART))
"""Experts that transformers joins to stacks."""
RULES = (
    row("vllm", CT, [NVFP4, MXFP8, CHANNEL, BLOCK], LOADS, evidence=VLLM_RUN),
    row("vllm", CT, [MXFP4, TENSOR], LOADS),
    row(
        "vllm", CT, [MXFP6], REFUSES, "it has no scheme for mxfp6-pack-quantized",
        "Use --layout quark, which vLLM reads MXFP6 from.", evidence=VLLM_RUN,
    ),
    row("sglang", CT, [NVFP4, TENSOR, CHANNEL, BLOCK], LOADS),
    row("sglang", CT, [MXFP8], REFUSES, _NO_SCHEME, "Use --layout fp8, which SGLang reads MXFP8 from."),
    row("sglang", CT, [MXFP6], REFUSES, _NO_SCHEME),
    row("sglang", CT, [MXFP4], NOT_KNOWN, "its kernels for MXFP4 experts are for some devices only"),
    row("sglang", CT, [MXFP4], REFUSES, "it has no scheme for MXFP4 outside experts", when=DENSE),
    row("transformers", CT, [NVFP4, MXFP4, MXFP6, MXFP8, TENSOR, CHANNEL, BLOCK], LOADS),
    row(
        "transformers", CT, [BLOCK], REFUSES, "compressed-tensors quantizes a layer's inputs in groups of 128",
        REGROUP, when=PARTIAL_INPUTS,
    ),
    row(
        "transformers", CT, [NVFP4], WRONGLY, "it stacks experts and drops their tensor scales, without an error",
        "Use --format mxfp4, or vLLM or SGLang for NVFP4 experts; --layout torchao leaves experts plain.",
        when=_JOINED,
    ),
    row(
        "transformers", CT, [MXFP8], REFUSES, "it fails to stack experts with their block scales",
        "Use --layout fp8, --format mxfp4, or --exclude '*.experts.*'.", when=_JOINED,
    ),
    row(
        "transformers", CT, [BLOCK], REFUSES, "it fails to stack experts with their block scales",
        "Use --layout fp8, --format fp8_e4m3_channel, or --exclude '*.experts.*'.", when=_JOINED_LARGE,
    ),
    row(
        "transformers", CT, [TENSOR, CHANNEL], AT_A_LOSS, "it rounds the scales of experts to BF16",
        _DEQUANTIZE, when=_JOINED, unless=_WITH_DEQUANTIZE,
    ),
    row(
        "transformers", CT, [NVFP4, MXFP4, MXFP6], REFUSES,
        "it cannot stack plain experts in a checkpoint of packed codes", "Quantize the experts too, or use --layout "
        "torchao.", when=PLAIN_EXPERTS,
    ),
    row(
        "transformers", CT, [], WRONGLY,
        "it looks for single experts of this model and draws them at random, without an error",
        "Quantize the experts too, or use --layout fp8.", when=EXPERTS_OF_STACKS,
    ),
    row(
        "transformers", CT, [NVFP4, MXFP4, MXFP6], REFUSES,
        "it initializes weights of this model that packed layers do not have yet", _DEQUANTIZE,
        when=of_models(*INITIALIZED), unless=_WITH_DEQUANTIZE,
    ),
    row(
        "transformers", CT, [], REFUSES, "its forward mixes types of this model", _DEQUANTIZE, when=of_models("ctrl"),
        unless=_WITH_DEQUANTIZE,
    ),
    row(
        "transformers", [CT, FP8, *TORCHAO], [], REFUSES, "it fails to split a layer of this model",
        when=of_models("dinov2"),
    ),
    row(
        "transformers", CT, [NVFP4], WRONGLY, "it divides a layer of this model and gives one part its tensor scale, "
        "without an error", "Use --format mxfp8 or mxfp4.", when=of_models("nomic_bert"),
    ),
    row(
        "transformers", CT, [NVFP4, MXFP4, MXFP6], REFUSES, "it fails to join packed layers of this model",
        "Use --format mxfp8.", when=of_models("olmo_hybrid", "bailing_hybrid"),
    ),
    row(
        "transformers", CT, [], WRONGLY, "it does not find quantized layers of this model by their names in files, "
        "without an error", when=of_models(*UNSPELLED), evidence=Evidence(READ, ENGINES["transformers"].version),
    ),
    *of_servers("vllm", [CT, MODELOPT, FP8, QUARK, AUTO_ROUND, GPT_OSS]),
    *of_servers("sglang", [CT, MODELOPT, FP8, QUARK, GPT_OSS]),
)  # fmt: skip
