"""The loader rules of gpt-oss's stacks of experts."""

from __future__ import annotations

from mxcli.files.loaders.conditions import OTHER_MODEL
from mxcli.files.loaders.engine import ENGINES
from mxcli.files.loaders.rows.row import AS_CT, GPT_OSS, MXFP4, row
from mxcli.files.loaders.rule import LOADS, READ, REFUSES, Evidence

RULES = (
    row("transformers", GPT_OSS, [MXFP4], LOADS),
    row("vllm", GPT_OSS, [MXFP4], LOADS),
    row("sglang", GPT_OSS, [MXFP4], LOADS),
    row("mlx", GPT_OSS, [MXFP4], LOADS),
    *(
        row(
            engine, GPT_OSS, [MXFP4], REFUSES, "it reads this layout of gpt-oss models only (model_type gpt_oss)",
            AS_CT, when=OTHER_MODEL, evidence=Evidence(READ, ENGINES[engine].version),
        )
        for engine in ("transformers", "vllm", "sglang", "mlx")
    ),
)  # fmt: skip
