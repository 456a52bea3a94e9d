"""The loader rules of auto-round's own checkpoints."""

from __future__ import annotations

from mxcli.files.loaders.rows.row import AS_CT, AUTO_ROUND, BLOCK, MXFP4, MXFP8, NVFP4, row
from mxcli.files.loaders.rule import LOADS, REFUSES

RULES = (
    row("vllm", AUTO_ROUND, [MXFP4, MXFP8, BLOCK], LOADS),
    row("vllm", AUTO_ROUND, [NVFP4], REFUSES, "it does not know the data_type nv_fp", AS_CT),
    row("transformers", AUTO_ROUND, [NVFP4, MXFP4, MXFP8], LOADS, "with auto-round installed"),
    row("transformers", AUTO_ROUND, [BLOCK], REFUSES, "auto-round does not load its own FP8 by blocks", AS_CT),
)  # fmt: skip
