"""The loader rules that vLLM and SGLang have in common."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mxcli.files.loaders.conditions import (
    ANY_PARTIAL_ROWS,
    PARTIAL_INPUTS,
    PARTIAL_ROWS,
    TORN,
    UNCUT,
    UNSERVED,
    UNSHARED,
)
from mxcli.files.loaders.rows.row import BLOCKS, CT, FP8, GPT_OSS, NVFP4, REGROUP, TENSOR, TORCHAO, VLLM_RUN, row
from mxcli.files.loaders.rule import AT_A_LOSS, NOT_KNOWN, REFUSES, WRONGLY, LoaderRule


def of_servers(engine: str, layouts: Sequence[str]) -> Iterator[LoaderRule]:
    """Yield the rules that vLLM and SGLang have in common, for the layouts they load."""
    fp8 = tuple(layout for layout in layouts if layout != GPT_OSS)
    yield row(
        engine, fp8, BLOCKS, REFUSES, "its kernels quantize a layer's inputs in groups of 128", REGROUP,
        when=PARTIAL_INPUTS, unless="" if engine == "sglang" else "it runs on a CPU",
    )  # fmt: skip
    every = engine == "sglang"
    yield row(
        engine, [FP8] if every else fp8, BLOCKS, REFUSES,
        "it joins fused layers, whose blocks of 128 rows must be whole" + ("" if every else " in all but the last"),
        REGROUP, when=ANY_PARTIAL_ROWS if every else PARTIAL_ROWS, evidence=None if every else VLLM_RUN,
    )  # fmt: skip
    if every:
        yield row(
            engine, [CT], BLOCKS, REFUSES, "it joins fused layers, whose blocks of 128 rows must be whole in all but "
            "the last", REGROUP, when=PARTIAL_ROWS,
        )  # fmt: skip
    yield row(
        engine, fp8, [TENSOR], AT_A_LOSS,
        "it has one scale for a fused layer, and quantizes its members again to the largest of theirs",
        "Requantize with a shared scale, which is the default, or use a scale per row.",
        when=UNSHARED, checked_by="fused_scale",
    )  # fmt: skip
    yield row(
        engine, fp8, [NVFP4], WRONGLY,
        "it has one tensor scale for a fused layer, and takes one of its members' for all, without an error",
        "Requantize with a shared tensor scale, which is the default.",
        when=UNSHARED, checked_by="fused_tensor_scale",
    )  # fmt: skip
    yield row(
        engine, fp8, [], REFUSES, "it joins fused layers, which must have one format",
        "Quantize the set to one format.", when=TORN, checked_by="fused_in_part",
    )  # fmt: skip
    yield row(
        engine, [*layouts, *(TORCHAO if engine == "vllm" else ())], [], NOT_KNOWN,
        "it has no class of its own for the model", when=UNSERVED,
    )  # fmt: skip
    yield row(
        engine, layouts, [], REFUSES, "every device needs whole blocks and heads",
        "Use fewer devices, or a format with smaller blocks.", when=UNCUT, checked_by="tensor_parallel",
    )  # fmt: skip
