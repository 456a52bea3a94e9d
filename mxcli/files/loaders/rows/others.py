"""The loader rules of engines with layouts that they do not know, and of layouts that one engine loads."""

from __future__ import annotations

from mxcli.files.loaders.conditions import DIFFUSION
from mxcli.files.loaders.engine import ENGINES
from mxcli.files.loaders.rows.row import (
    AS_TORCHAO,
    COMFY,
    CT,
    FP8,
    GGUF,
    GPT_OSS,
    LAYOUTS,
    MODELOPT,
    MXCLI,
    OTHERS_OF_MLX,
    QUARK,
    row,
)
from mxcli.files.loaders.rule import LOADS, READ, REFUSES, WRONGLY, Evidence

RULES = (
    row("comfyui", COMFY, [], LOADS),
    row(
        "transformers", MXCLI, [], WRONGLY,
        "it does not know this layout, and takes codes as values or draws weights at random, without an error",
        "Use mxcli dequantize.",
    ),
    *(
        row(engine, MXCLI, [], REFUSES, "it does not know the quant_method mxcli", "Use mxcli dequantize.")
        for engine in ("vllm", "sglang")
    ),
    row("diffusers", [CT, FP8, QUARK, GPT_OSS, MXCLI], [], REFUSES, "it does not know the quant_method", AS_TORCHAO),
    row(
        "diffusers", MODELOPT, [], REFUSES, "it reads ModelOpt's own saved state, not its exported checkpoints",
        AS_TORCHAO,
    ),
    row(
        "transformers", [layout for layout in LAYOUTS if layout != MXCLI], [], REFUSES,
        "it loads no models of diffusers", "Use diffusers.", when=DIFFUSION,
        evidence=Evidence(READ, ENGINES["transformers"].version),
    ),
    row(
        "llama.cpp", [layout for layout in LAYOUTS if layout != GGUF], [], REFUSES, "it reads GGUF files only",
        "Use --layout gguf.", evidence=Evidence(READ),
    ),
    row(
        "mlx", OTHERS_OF_MLX, [], REFUSES, "its layers have other tensor names (weight, scales), and it loads strictly",
        "Use --layout mlx.",
    ),
)  # fmt: skip
