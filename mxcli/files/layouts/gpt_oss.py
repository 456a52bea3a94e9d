"""MXFP4 as in gpt-oss: stacks of experts are quantized, everything else is plain.

A stack [expert, in, out] becomes `_blocks` (U8 [expert, out, blocks, 16], each 32 values of `in`, element 0 in the low
bits) and `_scales` (U8 [expert, out, blocks], E8M0). Gate and up alternate among the rows of gate_up_proj, as in the
source, so that nothing is reordered; a stack stored [expert, out, in] has them in halves and is refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from mxcli.files.layouts.known_settings import GPT_OSS_SETTINGS
from mxcli.files.layouts.layout import Content, Entry, Layout, OnDisk, Weight, check_fit, weights_of
from mxcli.files.layouts.loaders import Ignored, by_path, listed
from mxcli.files.layouts.parts import CODES, SCALES
from mxcli.numerics.blocks import COLUMN, divides
from mxcli.numerics.formats import FORMATS
from mxcli.numerics.scheme import resolve

MXFP4 = FORMATS["mxfp4_e2m1"]
BLOCKS_ENDING, SCALES_ENDING = "_blocks", "_scales"
LEFT_ALONE = "modules_to_not_convert"
BLOCK = 32
BYTES = BLOCK // 2
_STACK = re.compile(r".+\.mlp\.experts\.(gate_up_proj|down_proj)")


def _refusal(weight: Weight) -> str | None:
    if weight.format != MXFP4:
        return f"it has no {weight.format.name}"
    if not _STACK.fullmatch(weight.name) or len(weight.shape) != 3:
        return "it holds the stacks of experts only (MODULE.mlp.experts.gate_up_proj and down_proj)"
    if weight.axis != COLUMN:
        return "it holds experts stored [expert, in, out] only, with gate and up alternating"
    if not divides(MXFP4, weight.shape):
        return f"it stores no padding, and {weight.shape[-1]} is not a multiple of {BLOCK}"
    return None


def _contents(weight: Weight) -> tuple[Content, ...]:
    experts, rows, columns = weight.shape
    grid = (experts, rows, columns // BLOCK)
    codes, scales = (
        Entry(weight.name + BLOCKS_ENDING, "U8", (*grid, BYTES)),
        Entry(weight.name + SCALES_ENDING, "U8", grid),
    )
    return Content(codes, CODES), Content(scales, SCALES)


def _settings(weights: Sequence[Weight], ignored: Sequence[str]) -> dict[str, object]:
    return {"quant_method": "mxfp4", LEFT_ALONE: sorted(_left_alone(weights, ignored))}


def _left_alone(weights: Sequence[Weight], ignored: Sequence[str]) -> set[str]:
    """Return the ignored modules as gpt-oss lists them: for all layers at once (`model.layers.*.self_attn`), by the
    shortest path without anything quantized inside; a module that is quantized in other layers by its own path."""
    quantized = {_of_all_layers(weight.name.rpartition(".")[0]) + "." for weight in weights}
    found = set()
    for module in ignored:
        parts = _of_all_layers(module).split(".")
        paths = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
        found.add(next((path for path in paths if not any(each.startswith(path + ".") for each in quantized)), module))
    return found


def _of_all_layers(module: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", module)


def _weights(disk: OnDisk) -> list[Weight]:
    endings = (BLOCKS_ENDING, SCALES_ENDING)
    cut = (name.removesuffix(ending) for name in disk.tensors for ending in endings if name.endswith(ending))
    return weights_of(dict.fromkeys(cut), lambda name: _weight(name, disk))


def _weight(name: str, disk: OnDisk) -> Weight:
    """Return the stack called `name`. Raises ValueError if its tensors are not what this layout stores."""
    blocks = disk.tensors.get(name + BLOCKS_ENDING)
    if blocks is None:
        raise ValueError(f"has {SCALES_ENDING}, but its {BLOCKS_ENDING} are missing (mxfp4)")
    if len(blocks.shape) != 4 or blocks.shape[-1] != BYTES:
        raise ValueError(f"its {BLOCKS_ENDING} are {list(blocks.shape)}; mxfp4 needs [experts, rows, blocks, {BYTES}]")
    experts, rows, across, _ = blocks.shape
    weight = Weight(name, (experts, rows, across * BLOCK), resolve(MXFP4), disk.dtype, COLUMN)
    check_fit(_contents(weight), disk.tensors, "mxfp4")
    return weight


def _ignored(disk: OnDisk) -> Ignored:
    entries = listed(disk.settings.get(LEFT_ALONE))
    reading = "a module, or all modules inside one, by its path"
    return Ignored(LEFT_ALONE, entries, by_path, reading, targeted=lambda module: module.endswith(".experts"))


GPT_OSS = Layout(
    name="gpt-oss",
    meaning="MXFP4 of gpt-oss models: stacks of experts as _blocks and _scales",
    source="transformers 5.24 (run); vLLM 0.33 (read)",
    formats=(MXFP4.name,),
    refusal=_refusal,
    contents=_contents,
    settings=_settings,
    weights=_weights,
    dialects=("gpt-oss",),
    ignored=_ignored,
    whole_stacks=True,
    known_settings=GPT_OSS_SETTINGS,
)
