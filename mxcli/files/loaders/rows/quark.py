"""The loader rules of Quark's checkpoints."""

from __future__ import annotations

from mxcli.files.loaders.conditions import EXPERTS
from mxcli.files.loaders.rows.row import AS_CT, CHANNEL, MXFP4, MXFP6, MXFP6_E3M2, QUARK, TENSOR, VLLM_RUN, row
from mxcli.files.loaders.rule import LOADS, NOT_KNOWN, REFUSES, WRONGLY

RULES = (
    row("vllm", QUARK, [MXFP6, MXFP6_E3M2], LOADS, evidence=VLLM_RUN),
    row("vllm", QUARK, [MXFP4, TENSOR, CHANNEL], LOADS),
    row(
        "vllm", QUARK, [MXFP6, MXFP6_E3M2], REFUSES, "it reads MXFP6 experts only with quantized inputs",
        "Use --format mxfp4.", when=EXPERTS, evidence=VLLM_RUN,
    ),
    row(
        "vllm", QUARK, [TENSOR], REFUSES, "it does not combine one scale of an expert with a scale per token",
        f"Use --format {CHANNEL}.", when=EXPERTS, evidence=VLLM_RUN,
    ),
    row("transformers", QUARK, [MXFP4, MXFP6, MXFP6_E3M2, TENSOR, CHANNEL], LOADS, "with amd-quark installed"),
    row("sglang", QUARK, [TENSOR, CHANNEL], LOADS),
    row(
        "sglang", QUARK, [MXFP4, MXFP6, MXFP6_E3M2], REFUSES,
        "of MX formats it reads MXFP4 with quantized inputs only", "Use vLLM.",
    ),
    row(
        "transformers", QUARK, [MXFP4, MXFP6, MXFP6_E3M2], REFUSES, "it does not stack experts of this layout",
        AS_CT, when=EXPERTS,
    ),
    row(
        "transformers", QUARK, [TENSOR], WRONGLY, "it drops the scales of experts, without an error",
        AS_CT, when=EXPERTS,
    ),
    row(
        "transformers", QUARK, [CHANNEL], NOT_KNOWN, "experts of this layout and format were not run",
        AS_CT, when=EXPERTS,
    ),
)  # fmt: skip
