"""The loader rules of torchao's two layouts."""

from __future__ import annotations

from mxcli.files.loaders.conditions import NO_DIFFUSION, RENAMED, UNSHARED, of_models
from mxcli.files.loaders.engine import ENGINES
from mxcli.files.loaders.model_types import MULTIPLIED
from mxcli.files.loaders.rows.row import AS_CT, CHANNEL, MXFP4, MXFP8, NVFP4, TENSOR, TORCHAO, VLLM_RUN, row
from mxcli.files.loaders.rule import LOADS, READ, REFUSES, WRONGLY, Evidence

RULES = (
    row("transformers", TORCHAO, [], LOADS),
    row(
        "transformers", TORCHAO, [], REFUSES, "it cannot split a quantized layer of this model",
        AS_CT, when=of_models("nomic_bert"),
    ),
    row(
        "transformers", TORCHAO, [], REFUSES, "it looks layers up by their names in memory, which differ from those in "
        "files", AS_CT, when=RENAMED,
    ),
    row(
        "transformers", TORCHAO, [], REFUSES, "it multiplies weights of this model outside of their layers",
        AS_CT, when=of_models(*MULTIPLIED),
    ),
    row(
        "transformers", TORCHAO, [], REFUSES, "it fails to stack the plain experts of this model",
        "Use --layout fp8.", when=of_models("nemotron_h"),
    ),
    row("diffusers", TORCHAO, [], LOADS),
    row(
        "diffusers", TORCHAO, [], REFUSES, "it loads diffusion models only", "Use transformers.", when=NO_DIFFUSION,
        evidence=Evidence(READ, ENGINES["diffusers"].version),
    ),
    row("torchao", TORCHAO, [], LOADS),
    row("vllm", TORCHAO, [NVFP4, MXFP4, MXFP8, CHANNEL], LOADS, evidence=VLLM_RUN),
    row("vllm", TORCHAO, [TENSOR], LOADS),
    row(
        "vllm", TORCHAO, [TENSOR], WRONGLY,
        "it takes the scale of one member for the whole fused layer, without an error",
        "Requantize with a shared scale, which is the default.", when=UNSHARED, checked_by="fused_scale",
        evidence=VLLM_RUN,
    ),
)  # fmt: skip
