"""The loader rules of GGUF files."""

from __future__ import annotations

from mxcli.files.loaders.conditions import BIASED_MLP, OTHER_WIDTH, QWEN2_MLP
from mxcli.files.loaders.rows.row import GGUF, MLP_AS_MXFP4, MXFP4, NVFP4, row
from mxcli.files.loaders.rule import LOADS, REFUSES, WRONGLY

RULES = (
    row("llama.cpp", GGUF, [MXFP4, NVFP4], LOADS),
    row(
        "llama.cpp", GGUF, [NVFP4], WRONGLY, "it leaves out the tensor scales of this model's MLP, without an error",
        MLP_AS_MXFP4, when=QWEN2_MLP,
    ),
    row(
        "llama.cpp", GGUF, [NVFP4], REFUSES, "it aborts at MLP layers with a tensor scale and a bias", MLP_AS_MXFP4,
        when=BIASED_MLP,
    ),
    row("transformers", GGUF, [MXFP4], LOADS),
    row(
        "transformers", GGUF, [], REFUSES, "it does not read the width of experts in the header, and takes 768",
        "Use mxcli dequantize, or llama.cpp.", when=OTHER_WIDTH,
    ),
    row("transformers", GGUF, [NVFP4], REFUSES, "it fails on the tensor scales, x.scale", "Use --format mxfp4."),
)  # fmt: skip
