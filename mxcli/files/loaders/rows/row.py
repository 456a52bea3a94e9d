"""The names in loader rules, and a rule with the evidence that its engine usually has."""

from __future__ import annotations

from collections.abc import Sequence

from mxcli.files.loaders.engine import ENGINES
from mxcli.files.loaders.rule import READ, RUN, Condition, Evidence, LoaderRule

CT, MODELOPT, FP8, GPT_OSS, QUARK, GGUF, MXCLI = (
    "compressed-tensors", "modelopt", "fp8", "gpt-oss", "quark", "gguf", "mxcli",
)  # fmt: skip
TORCHAO = ("torchao", "torchao-plain")
COMFY, MLX, AUTO_ROUND = "comfy", "mlx", "auto-round"
LAYOUTS = (CT, MODELOPT, FP8, GPT_OSS, QUARK, AUTO_ROUND, *TORCHAO, COMFY, GGUF, MLX, MXCLI)
OTHERS_OF_MLX = (CT, MODELOPT, FP8, QUARK, AUTO_ROUND, *TORCHAO, MXCLI)

NVFP4, MXFP4, MXFP6, MXFP8 = "nvfp4", "mxfp4_e2m1", "mxfp6_e2m3", "mxfp8_e4m3"
MXFP6_E3M2, MXFP8_E5M2 = "mxfp6_e3m2", "mxfp8_e5m2"
TENSOR, CHANNEL, BLOCK, E8M0_BLOCK = "fp8_e4m3", "fp8_e4m3_channel", "fp8_e4m3_128x128", "e4m3:e8m0:128x128"
BLOCKS = (BLOCK, E8M0_BLOCK)

_RUNS = {
    "transformers": Evidence(RUN, "5.24.0", "2026-11"),
    "torchao": Evidence(RUN, "0.18.0", "2026-11"),
    "llama.cpp": Evidence(RUN, "b11549", "2026-11"),
    "diffusers": Evidence(RUN, "0.42.1", "2026-11"),
}
"""The engines that are run with every rule, with the version and month of the run; of others most rules were read."""
VLLM_RUN = Evidence(RUN, "0.32.0", "2026-11")
"""vLLM on a CPU, with the kernels that it has there or its own emulation: each layer computed what the weights are."""
MLX_RUN = Evidence(RUN, "0.32.2", "2026-11")
MLP_AS_MXFP4 = "Use --format mxfp4, or a recipe with mxfp4 for '*.mlp.*'."
AS_CT, AS_TORCHAO = "Use --layout compressed-tensors.", "Use --layout torchao."
VIA_VALUES = "Use mxcli dequantize, and quantize its output."
REGROUP = f"Use --format {CHANNEL} or mxfp8, or --exclude those layers."


def row(
    engine: str, layouts: str | Sequence[str], formats: Sequence[str], outcome: str, why: str = "", way_out: str = "",
    when: Condition | None = None, checked_by: str = "", evidence: Evidence | None = None, unless: str = "",
) -> LoaderRule:  # fmt: skip
    """Return a rule; without `evidence` that of its engine: its run, or its version as read."""
    stated = evidence or _RUNS.get(engine) or Evidence(READ, ENGINES[engine].version)
    named = (layouts,) if isinstance(layouts, str) else tuple(layouts)
    return LoaderRule(engine, named, tuple(formats), outcome, stated, why, way_out, when, checked_by, unless)
