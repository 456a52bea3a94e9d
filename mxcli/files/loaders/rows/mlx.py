"""The loader rules of MLX's checkpoints."""

from __future__ import annotations

from mxcli.files.loaders.conditions import EXPERTS, KEYS_OF_HEADS, both, of_models, of_other_models
from mxcli.files.loaders.model_types import REFUSED_BY_MLX, RUN_IN_MLX
from mxcli.files.loaders.rows.row import AS_CT, MLX, MLX_RUN, row
from mxcli.files.loaders.rule import LOADS, NOT_KNOWN, REFUSES

RULES = (
    row("mlx", MLX, [], LOADS, evidence=MLX_RUN),
    row(
        "mlx", MLX, [], NOT_KNOWN, "it was not run with models of this type, whose layers it may split or rename",
        when=of_other_models(*RUN_IN_MLX, *REFUSED_BY_MLX),
    ),
    row(
        "mlx", MLX, [], REFUSES, "it stacks the experts of this model without their scales, and loads strictly",
        "Use --exclude '*.experts.*', or mlx_lm.convert on the plain model.",
        when=both(EXPERTS, of_models("qwen3_moe", "ernie4_5_moe")), evidence=MLX_RUN,
    ),
    row(
        "mlx", MLX, [], REFUSES, "it splits kv_b_proj of this model, and needs biases for it",
        "Use --exclude '*.kv_b_proj', or mlx_lm.convert on the plain model.",
        when=both(KEYS_OF_HEADS, of_models("deepseek_v3")), evidence=MLX_RUN,
    ),
    row("transformers", MLX, [], REFUSES, "its settings name no quant_method", AS_CT),
)  # fmt: skip
