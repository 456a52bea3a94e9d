"""The table of loader rules: what each engine does with each layout and format.

A rule that was run has the version and month of the run. The others were read in the source or the documents of the
engine's version. What has no rule is not known.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mxcli.files.loaders.conditions import (
    ADJUSTED,
    ANY_PARTIAL,
    ANY_PARTIAL_ROWS,
    BIASED_MLP,
    DENSE,
    DIFFUSION,
    EXPERTS,
    LARGE_EXPERTS,
    NO_DIFFUSION,
    OTHER_MODEL,
    PARTIAL_BLOCKS,
    PARTIAL_INPUTS,
    PARTIAL_ROWS,
    PLAIN_EXPERTS,
    QWEN2_MLP,
    RENAMED,
    SPLIT_STACKS,
    TORN,
    UNCUT,
    UNEVEN_BLOCKS,
    UNSERVED,
    UNSHARED,
    WEIGHT_ONLY,
    both,
    of_models,
    of_other_models,
)
from mxcli.files.loaders.engine import ENGINES
from mxcli.files.loaders.model_types import INITIALIZED, MULTIPLIED, REFUSED_BY_MLX, RUN_IN_MLX, UNSPELLED
from mxcli.files.loaders.rule import (
    AT_A_LOSS,
    LOADS,
    NOT_KNOWN,
    READ,
    REFUSES,
    RUN,
    WRONGLY,
    Condition,
    Evidence,
    LoaderRule,
)

CT, MODELOPT, FP8, GPT_OSS, QUARK, GGUF, MXCLI = (
    "compressed-tensors", "modelopt", "fp8", "gpt-oss", "quark", "gguf", "mxcli",
)  # fmt: skip
TORCHAO = ("torchao", "torchao-plain")
COMFY, MLX = "comfy", "mlx"
LAYOUTS = (CT, MODELOPT, FP8, GPT_OSS, QUARK, *TORCHAO, COMFY, GGUF, MLX, MXCLI)
OTHERS_OF_MLX = (CT, MODELOPT, FP8, QUARK, *TORCHAO, MXCLI)

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
_VLLM_RUN = Evidence(RUN, "0.32.0", "2026-11")
"""vLLM on a CPU, with the kernels that it has there or its own emulation: each layer computed what the weights are."""

_MLX_RUN = Evidence(RUN, "0.32.2", "2026-11")
_MLP_AS_MXFP4 = "Use --format mxfp4, or a recipe with mxfp4 for '*.mlp.*'."
_AS_CT, _AS_TORCHAO = "Use --layout compressed-tensors.", "Use --layout torchao."
_VIA_VALUES = "Use mxcli dequantize, and quantize its output."
_REGROUP = f"Use --format {CHANNEL} or mxfp8, or --exclude those layers."


def _row(
    engine: str, layouts: str | Sequence[str], formats: Sequence[str], outcome: str, why: str = "", way_out: str = "",
    when: Condition | None = None, checked_by: str = "", evidence: Evidence | None = None, unless: str = "",
) -> LoaderRule:  # fmt: skip
    stated = evidence or _RUNS.get(engine) or Evidence(READ, ENGINES[engine].version)
    named = (layouts,) if isinstance(layouts, str) else tuple(layouts)
    return LoaderRule(engine, named, tuple(formats), outcome, stated, why, way_out, when, checked_by, unless)


def _of_servers(engine: str, layouts: Sequence[str]) -> Iterator[LoaderRule]:
    """Yield the rules that vLLM and SGLang have in common, for the layouts they load."""
    fp8 = tuple(layout for layout in layouts if layout != GPT_OSS)
    yield _row(
        engine, fp8, BLOCKS, REFUSES, "its kernels quantize a layer's inputs in groups of 128", _REGROUP,
        when=PARTIAL_INPUTS, unless="" if engine == "sglang" else "it runs on a CPU",
    )  # fmt: skip
    every = engine == "sglang"
    yield _row(
        engine, [FP8] if every else fp8, BLOCKS, REFUSES,
        "it joins fused layers, whose blocks of 128 rows must be whole" + ("" if every else " in all but the last"),
        _REGROUP, when=ANY_PARTIAL_ROWS if every else PARTIAL_ROWS, evidence=None if every else _VLLM_RUN,
    )  # fmt: skip
    if every:
        yield _row(
            engine, [CT], BLOCKS, REFUSES, "it joins fused layers, whose blocks of 128 rows must be whole in all but "
            "the last", _REGROUP, when=PARTIAL_ROWS,
        )  # fmt: skip
    yield _row(
        engine, fp8, [TENSOR], AT_A_LOSS,
        "it has one scale for a fused layer, and quantizes its members again to the largest of theirs",
        "Requantize with a shared scale, which is the default, or use a scale per row.",
        when=UNSHARED, checked_by="fused_scale",
    )  # fmt: skip
    yield _row(
        engine, fp8, [], REFUSES, "it joins fused layers, which must have one format",
        "Quantize the set to one format.", when=TORN, checked_by="fused_in_part",
    )  # fmt: skip
    yield _row(
        engine, [*layouts, *(TORCHAO if engine == "vllm" else ())], [], NOT_KNOWN,
        "it has no class of its own for the model", when=UNSERVED,
    )  # fmt: skip
    yield _row(
        engine, layouts, [], REFUSES, "every device needs whole blocks and heads",
        "Use fewer devices, or a format with smaller blocks.", when=UNCUT, checked_by="tensor_parallel",
    )  # fmt: skip


_DEQUANTIZE = "Load it with quantization_config=CompressedTensorsConfig(dequantize=True)."
_WITH_DEQUANTIZE = "it is loaded with dequantize=True"
_NO_SCHEME = "it has no scheme for this format"
_COMPRESSED_TENSORS = (
    _row("vllm", CT, [NVFP4, MXFP8, CHANNEL, BLOCK], LOADS, evidence=_VLLM_RUN),
    _row("vllm", CT, [MXFP4, TENSOR], LOADS),
    _row(
        "vllm", CT, [MXFP6], REFUSES, "it has no scheme for mxfp6-pack-quantized",
        "Use --layout quark, which vLLM reads MXFP6 from.", evidence=_VLLM_RUN,
    ),
    _row("sglang", CT, [NVFP4, TENSOR, CHANNEL, BLOCK], LOADS),
    _row("sglang", CT, [MXFP8], REFUSES, _NO_SCHEME, "Use --layout fp8, which SGLang reads MXFP8 from."),
    _row("sglang", CT, [MXFP6], REFUSES, _NO_SCHEME),
    _row("sglang", CT, [MXFP4], NOT_KNOWN, "its kernels for MXFP4 experts are for some devices only"),
    _row("sglang", CT, [MXFP4], REFUSES, "it has no scheme for MXFP4 outside experts", when=DENSE),
    _row("transformers", CT, [NVFP4, MXFP4, MXFP6, MXFP8, TENSOR, CHANNEL, BLOCK], LOADS),
    _row(
        "transformers", CT, [BLOCK], REFUSES, "compressed-tensors quantizes a layer's inputs in groups of 128",
        _REGROUP, when=PARTIAL_INPUTS,
    ),
    _row(
        "transformers", CT, [NVFP4], WRONGLY, "it stacks experts and drops their tensor scales, without an error",
        "Use --format mxfp4, or vLLM or SGLang for NVFP4 experts; --layout torchao leaves experts plain.",
        when=EXPERTS,
    ),
    _row(
        "transformers", CT, [MXFP8], REFUSES, "it fails to stack experts with their block scales",
        "Use --layout fp8, --format mxfp4, or --exclude '*.experts.*'.", when=EXPERTS,
    ),
    _row(
        "transformers", CT, [BLOCK], REFUSES, "it fails to stack experts with their block scales",
        "Use --layout fp8, --format fp8_e4m3_channel, or --exclude '*.experts.*'.", when=LARGE_EXPERTS,
    ),
    _row(
        "transformers", CT, [TENSOR, CHANNEL], AT_A_LOSS, "it rounds the scales of experts to BF16",
        _DEQUANTIZE, when=EXPERTS, unless=_WITH_DEQUANTIZE,
    ),
    _row(
        "transformers", CT, [NVFP4, MXFP4, MXFP6], REFUSES,
        "it cannot stack plain experts in a checkpoint of packed codes", "Quantize the experts too, or use --layout "
        "torchao.", when=PLAIN_EXPERTS,
    ),
    _row(
        "transformers", CT, [NVFP4, MXFP4, MXFP6], REFUSES,
        "it initializes weights of this model that packed layers do not have yet", _DEQUANTIZE,
        when=of_models(*INITIALIZED), unless=_WITH_DEQUANTIZE,
    ),
    _row(
        "transformers", CT, [], REFUSES, "its forward mixes types of this model", _DEQUANTIZE, when=of_models("ctrl"),
        unless=_WITH_DEQUANTIZE,
    ),
    _row(
        "transformers", [CT, FP8, *TORCHAO], [], REFUSES, "it fails to split a layer of this model",
        when=of_models("dinov2"),
    ),
    _row(
        "transformers", CT, [NVFP4], WRONGLY, "it divides a layer of this model and gives one part its tensor scale, "
        "without an error", "Use --format mxfp8 or mxfp4.", when=of_models("nomic_bert"),
    ),
    _row(
        "transformers", CT, [NVFP4, MXFP4, MXFP6], REFUSES, "it fails to join packed layers of this model",
        "Use --format mxfp8.", when=of_models("olmo_hybrid", "bailing_hybrid"),
    ),
    _row(
        "transformers", CT, [], WRONGLY, "it does not find quantized layers of this model by their names in files, "
        "without an error", when=of_models(*UNSPELLED), evidence=Evidence(READ, ENGINES["transformers"].version),
    ),
    *_of_servers("vllm", [CT, MODELOPT, FP8, QUARK, GPT_OSS]),
    *_of_servers("sglang", [CT, MODELOPT, FP8, QUARK, GPT_OSS]),
)  # fmt: skip
_MODELOPT = (
    _row("vllm", MODELOPT, [NVFP4, MXFP8, CHANNEL, BLOCK], LOADS, evidence=_VLLM_RUN),
    _row("vllm", MODELOPT, [TENSOR], LOADS),
    _row(
        "vllm", MODELOPT, [BLOCK], REFUSES, "it needs lengths that are multiples of 128 in this layout",
        _AS_CT, when=ANY_PARTIAL, evidence=_VLLM_RUN,
    ),
    _row(
        "vllm", MODELOPT, [CHANNEL, BLOCK], REFUSES, "its experts have one scale each in this layout",
        _AS_CT, when=EXPERTS, evidence=_VLLM_RUN,
    ),
    _row("vllm", MODELOPT, [MXFP4], REFUSES, "it does not know the quant_algo mxfp4", _AS_CT),
    _row("vllm", MODELOPT, [], REFUSES, "it does not know the quant_algo", _VIA_VALUES, when=ADJUSTED),
    _row("sglang", MODELOPT, [NVFP4, TENSOR], LOADS),
    _row(
        "sglang", MODELOPT, [MXFP8, CHANNEL, BLOCK, MXFP4], REFUSES,
        "of ModelOpt's algorithms it reads FP8 and NVFP4, and others only within MIXED_PRECISION",
        "Use --layout compressed-tensors or fp8.",
    ),
    _row("tensorrt-llm", MODELOPT, [NVFP4, TENSOR], LOADS),
    _row(
        "tensorrt-llm", MODELOPT, [NVFP4], NOT_KNOWN, "W4A16_NVFP4, weights alone, was not looked up in it",
        "Give captured inputs with --captures.", when=WEIGHT_ONLY,
    ),
    _row(
        "transformers", MODELOPT, [MXFP8, TENSOR, CHANNEL, BLOCK], WRONGLY,
        "it does not know ModelOpt's checkpoints and takes codes as values, without an error",
        _AS_CT,
    ),
    _row(
        "transformers", MODELOPT, [NVFP4, MXFP4], REFUSES,
        "it does not know ModelOpt's checkpoints, and packed codes have other shapes than weights",
        _AS_CT,
    ),
)  # fmt: skip
_NATIVE = "a GPU multiplies FP8 blocks as they are (compute capability 8.9 or later)"
_FP8 = (
    _row("transformers", FP8, [BLOCK, E8M0_BLOCK, MXFP8, TENSOR], LOADS),
    _row(
        "transformers", FP8, BLOCKS, REFUSES,
        "it dequantizes as if all blocks were equally long",
        f"Use --format {CHANNEL} with --layout compressed-tensors, or --exclude those layers.", when=PARTIAL_BLOCKS,
        unless=_NATIVE,
    ),
    _row(
        "transformers", FP8, BLOCKS, WRONGLY,
        "it dequantizes as if all blocks were equally long, and scales some values by the scale of another block, "
        "without an error",
        f"Use --format {CHANNEL} with --layout compressed-tensors, or --exclude those layers.", when=UNEVEN_BLOCKS,
        unless=_NATIVE,
    ),
    _row("vllm", FP8, [BLOCK], LOADS, evidence=_VLLM_RUN),
    _row("vllm", FP8, [E8M0_BLOCK], LOADS),
    _row(
        "vllm", FP8, [MXFP8], REFUSES, "it takes the quant_method mxfp8 for ModelOpt's, whose scales have other names",
        "Use --layout modelopt or compressed-tensors.", evidence=_VLLM_RUN,
    ),
    _row(
        "vllm", FP8, [TENSOR], REFUSES, "it looks for weight_scale where there is one scale per tensor",
        _AS_CT, evidence=_VLLM_RUN,
    ),
    _row("sglang", FP8, [BLOCK, E8M0_BLOCK, MXFP8], LOADS),
    _row("sglang", FP8, [TENSOR], REFUSES, "it looks for weight_scale where there is one scale per tensor", _AS_CT),
)  # fmt: skip
_OTHERS = (
    _row("transformers", GPT_OSS, [MXFP4], LOADS),
    _row("vllm", GPT_OSS, [MXFP4], LOADS),
    _row("sglang", GPT_OSS, [MXFP4], LOADS),
    _row("mlx", GPT_OSS, [MXFP4], LOADS),
    *(
        _row(
            engine, GPT_OSS, [MXFP4], REFUSES, "it reads this layout of gpt-oss models only (model_type gpt_oss)",
            _AS_CT, when=OTHER_MODEL, evidence=Evidence(READ, ENGINES[engine].version),
        )
        for engine in ("transformers", "vllm", "sglang", "mlx")
    ),
    _row("transformers", TORCHAO, [], LOADS),
    _row(
        "transformers", TORCHAO, [], REFUSES, "it cannot split a quantized layer of this model",
        _AS_CT, when=of_models("nomic_bert"),
    ),
    _row(
        "transformers", TORCHAO, [], REFUSES, "it looks layers up by their names in memory, which differ from those in "
        "files", _AS_CT, when=RENAMED,
    ),
    _row(
        "transformers", TORCHAO, [], REFUSES, "it multiplies weights of this model outside of their layers",
        _AS_CT, when=of_models(*MULTIPLIED),
    ),
    _row(
        "transformers", FP8, [], WRONGLY, "it does not join single experts of this model, without an error",
        "Use --exclude '*.experts.*'.", when=SPLIT_STACKS,
    ),
    _row(
        "transformers", TORCHAO, [], REFUSES, "it fails to stack the plain experts of this model",
        "Use --layout fp8.", when=of_models("nemotron_h"),
    ),
    _row(
        "transformers", FP8, [], WRONGLY, "it splits a quantized layer of this model and drops its scale",
        _AS_CT, when=of_models("nomic_bert"),
    ),
    _row("diffusers", TORCHAO, [], LOADS),
    _row("diffusers", [CT, FP8, QUARK, GPT_OSS, MXCLI], [], REFUSES, "it does not know the quant_method", _AS_TORCHAO),
    _row(
        "diffusers", MODELOPT, [], REFUSES, "it reads ModelOpt's own saved state, not its exported checkpoints",
        _AS_TORCHAO,
    ),
    _row(
        "diffusers", TORCHAO, [], REFUSES, "it loads diffusion models only", "Use transformers.", when=NO_DIFFUSION,
        evidence=Evidence(READ, ENGINES["diffusers"].version),
    ),
    _row(
        "transformers", [layout for layout in LAYOUTS if layout != MXCLI], [], REFUSES,
        "it loads no models of diffusers", "Use diffusers.", when=DIFFUSION,
        evidence=Evidence(READ, ENGINES["transformers"].version),
    ),
    _row("torchao", TORCHAO, [], LOADS),
    _row("vllm", TORCHAO, [NVFP4, MXFP4, MXFP8, CHANNEL], LOADS, evidence=_VLLM_RUN),
    _row("vllm", TORCHAO, [TENSOR], LOADS),
    _row(
        "vllm", TORCHAO, [TENSOR], WRONGLY,
        "it takes the scale of one member for the whole fused layer, without an error",
        "Requantize with a shared scale, which is the default.", when=UNSHARED, checked_by="fused_scale",
        evidence=_VLLM_RUN,
    ),
    _row("vllm", QUARK, [MXFP6, MXFP6_E3M2], LOADS, evidence=_VLLM_RUN),
    _row("vllm", QUARK, [MXFP4, TENSOR, CHANNEL], LOADS),
    _row(
        "vllm", QUARK, [MXFP6, MXFP6_E3M2], REFUSES, "it reads MXFP6 experts only with quantized inputs",
        "Use --format mxfp4.", when=EXPERTS, evidence=_VLLM_RUN,
    ),
    _row(
        "vllm", QUARK, [TENSOR], REFUSES, "it does not combine one scale of an expert with a scale per token",
        f"Use --format {CHANNEL}.", when=EXPERTS, evidence=_VLLM_RUN,
    ),
    _row("transformers", QUARK, [MXFP4, MXFP6, MXFP6_E3M2, TENSOR, CHANNEL], LOADS, "with amd-quark installed"),
    _row("sglang", QUARK, [TENSOR, CHANNEL], LOADS),
    _row(
        "sglang", QUARK, [MXFP4, MXFP6, MXFP6_E3M2], REFUSES,
        "of MX formats it reads MXFP4 with quantized inputs only", "Use vLLM.",
    ),
    _row("comfyui", COMFY, [], LOADS),
    _row("mlx", MLX, [], LOADS, evidence=_MLX_RUN),
    _row(
        "mlx", MLX, [], NOT_KNOWN, "it was not run with models of this type, whose layers it may split or rename",
        when=of_other_models(*RUN_IN_MLX, *REFUSED_BY_MLX),
    ),
    _row(
        "mlx", MLX, [], REFUSES, "it stacks the experts of this model without their scales, and loads strictly",
        "Use --exclude '*.experts.*', or mlx_lm.convert on the plain model.",
        when=both(EXPERTS, of_models("qwen3_moe", "ernie4_5_moe")), evidence=_MLX_RUN,
    ),
    _row(
        "mlx", MLX, [], REFUSES, "it splits kv_b_proj of this model, and needs biases for it",
        "Use mlx_lm.convert on the plain model.", when=of_models("deepseek_v3"), evidence=_MLX_RUN,
    ),
    _row("transformers", MLX, [], REFUSES, "its settings name no quant_method", _AS_CT),
    _row("llama.cpp", GGUF, [MXFP4, NVFP4], LOADS),
    _row(
        "llama.cpp", GGUF, [NVFP4], WRONGLY, "it leaves out the tensor scales of this model's MLP, without an error",
        _MLP_AS_MXFP4, when=QWEN2_MLP,
    ),
    _row(
        "llama.cpp", GGUF, [NVFP4], REFUSES, "it aborts at MLP layers with a tensor scale and a bias", _MLP_AS_MXFP4,
        when=BIASED_MLP,
    ),
    _row(
        "transformers", QUARK, [MXFP4, MXFP6, MXFP6_E3M2], REFUSES, "it does not stack experts of this layout",
        _AS_CT, when=EXPERTS,
    ),
    _row(
        "transformers", QUARK, [TENSOR], WRONGLY, "it drops the scales of experts, without an error",
        _AS_CT, when=EXPERTS,
    ),
    _row(
        "transformers", QUARK, [CHANNEL], NOT_KNOWN, "experts of this layout and format were not run",
        _AS_CT, when=EXPERTS,
    ),
    _row("transformers", GGUF, [MXFP4], LOADS),
    _row("transformers", GGUF, [NVFP4], REFUSES, "it fails on the tensor scales, x.scale", "Use --format mxfp4."),
    _row(
        "llama.cpp", [layout for layout in LAYOUTS if layout != GGUF], [], REFUSES, "it reads GGUF files only",
        "Use --layout gguf.", evidence=Evidence(READ),
    ),
    _row(
        "transformers", MXCLI, [], WRONGLY,
        "it does not know this layout, and takes codes as values or draws weights at random, without an error",
        "Use mxcli dequantize.",
    ),
    *(
        _row(engine, MXCLI, [], REFUSES, "it does not know the quant_method mxcli", "Use mxcli dequantize.")
        for engine in ("vllm", "sglang")
    ),
    _row(
        "mlx", OTHERS_OF_MLX, [], REFUSES, "its layers have other tensor names (weight, scales), and it loads strictly",
        "Use --layout mlx.",
    ),
)  # fmt: skip
RULES: tuple[LoaderRule, ...] = (*_COMPRESSED_TENSORS, *_MODELOPT, *_FP8, *_OTHERS)
