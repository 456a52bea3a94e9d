"""FP8 by blocks, as in DeepSeek-V3 and transformers' `fp8`: a decode scale called `weight_scale_inv` per block.

The dtype of the scales is the one that every reader of the configuration supports:

* `fp8_e4m3_128x128`: F32. vLLM and SGLang hold these scales in binary32, transformers takes any dtype. Under a rule for
  power-of-two scales they are powers of two and `scale_fmt` states it, as in DeepSeek-V3.1.
* `e4m3:e8m0:128x128`: F8_E8M0, as transformers writes it, and with `.scale` DeepSeek-V4. Readers that hold binary32
  scales convert that dtype by value. They would convert U8 as the numbers 0 to 255, so it is never written here.
* `mxfp8_e4m3`: U8 under `quant_method` mxfp8, since SGLang holds bytes and would convert F8_E8M0 by value; transformers
  takes either.
* `fp8_e4m3`: F32 of shape [], without a block size, for transformers alone.

These and other dtypes are read back (BF16 and F16; F8_E8M0 as U8 and the reverse), blocks (the stated ones, or those
that fit the shapes), names of scales (`.scale`, `weight_scale`) and FP4 experts as in DeepSeek-V4. The dtype alone
decides which scales are powers of two: DeepSeek-V3.1 states `scale_fmt` ue8m0 though not all are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from mxcli.errors import InputError, RefusedError, printable
from mxcli.files.dialect import FP8 as FP8_DTYPES
from mxcli.files.layouts.known_settings import FP8_SETTINGS
from mxcli.files.layouts.layout import WEIGHT, Content, Entry, Layout, OnDisk, Weight, matrix_refusal, weights_of
from mxcli.files.layouts.loaders import Hazard, Ignored, by_path, is_usual_layer, listed
from mxcli.files.layouts.parts import CODES, SCALES
from mxcli.files.tensors import TensorInfo
from mxcli.numerics.blocks import grid_shape, packed_columns
from mxcli.numerics.formats import BlockFormat, find_format
from mxcli.numerics.scale_rules import PowerOfTwoScaleRule
from mxcli.numerics.scheme import resolve

FORMATS = ("fp8_e4m3_128x128", "e4m3:e8m0:128x128", "mxfp8_e4m3", "fp8_e4m3")
SCALE_INV, SCALE, MODULE_SCALE = "_scale_inv", "_scale", ".scale"
"""Endings of a scale's name: after the weight's own, or (MODULE_SCALE) after its module's."""
LEFT_ALONE = "modules_to_not_convert"
POWERS = frozenset({"F8_E8M0", "U8"})
SCALES_OF_ELEMENTS = frozenset({"F32", "BF16", "F16"}) | POWERS
ELEMENTS = {"F8_E4M3": "e4m3", "F8_E5M2": "e5m2", "I8": "e2m1"}
PASSED_THROUGH = frozenset({"BF16", "F16", "F32"})
"""Dtypes of weights that transformers passes through when a block does not divide them."""
Block = tuple[int | None, int | None]
WHOLE: Block = (None, None)


def _refusal(weight: Weight) -> str | None:
    if weight.format.name not in FORMATS:
        return f"it has no {weight.format.name}"
    return matrix_refusal(weight)


def _contents(weight: Weight) -> tuple[Content, ...]:
    fmt = weight.format
    shape = (*weight.shape[:-1], packed_columns(fmt, weight.shape[-1]))
    codes = Entry(weight.name, next(dtype for dtype, name in ELEMENTS.items() if name == fmt.element.name), shape)
    grid = () if fmt.block == WHOLE else grid_shape(fmt, weight.shape)
    scales = Entry(_scale_name(weight.name, weight.variant or SCALE_INV), _scale_dtype(fmt), grid)
    return Content(codes, CODES), Content(scales, SCALES)


def _scale_dtype(fmt: BlockFormat) -> str:
    if not fmt.has_power_of_two_scales:
        return "F32"
    return "U8" if fmt.block == (1, 32) else "F8_E8M0"


def _scale_name(name: str, ending: str) -> str:
    return (name.removesuffix(WEIGHT) if ending == MODULE_SCALE else name) + ending


def _settings(weights: Sequence[Weight], ignored: Sequence[str]) -> dict[str, object]:
    """Return the configuration. Raises RefusedError for formats of several blocks, since it states one for the
    model."""
    blocks = {weight.format.block: weight for weight in weights}
    if len(blocks) > 1:
        one, other = list(blocks.values())[:2]
        raise RefusedError(
            f"{printable(one.name)} is {one.format.name} and {printable(other.name)} {other.format.name}: the layout "
            "fp8 states one block for a whole model. Use one format, or --layout compressed-tensors."
        )
    (block,) = blocks
    settings: dict[str, object] = {
        "quant_method": "mxfp8" if block == (1, 32) else "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": None if block == WHOLE else list(block),
        LEFT_ALONE: sorted(ignored),
    }
    powers = all(isinstance(weight.scheme.scale_rule, PowerOfTwoScaleRule) for weight in weights)
    return settings | {"scale_fmt": "ue8m0"} if powers else settings


def _weights(disk: OnDisk) -> list[Weight]:
    stated = _stated_block(disk)
    return weights_of(_names(disk), lambda name: _weight(name, stated, disk))


def _stated_block(disk: OnDisk) -> Block | None:
    """Return the block in the configuration; None if it states none."""
    block = disk.settings.get("weight_block_size")
    if block is None:
        return None
    if isinstance(block, list) and len(block) == 2 and all(type(size) is int and 0 < size <= 65536 for size in block):
        return block[0], block[1]
    raise InputError(
        f"config.json: weight_block_size {printable(block)} of its quantization_config must be two numbers from 1 to "
        "65536, rows and columns of a block, or null."
    )


def _names(disk: OnDisk) -> Iterator[str]:
    """Yield the names of weights: every tensor of codes, and the weight that each scale refers to; each once, in
    order."""
    return iter(dict.fromkeys(chain.from_iterable(_claimed(info) for info in disk.tensors.values())))


def _claimed(info: TensorInfo) -> Iterator[str]:
    if info.dtype in FP8_DTYPES or (info.dtype == "I8" and len(info.shape) > 1):
        yield info.name
    elif info.name.endswith(WEIGHT + SCALE):
        yield info.name.removesuffix(SCALE)
    elif info.name.endswith(SCALE_INV):
        yield info.name.removesuffix(SCALE_INV)
    elif info.name.endswith(MODULE_SCALE) and info.dtype == "F8_E8M0":
        yield info.name.removesuffix(MODULE_SCALE) + WEIGHT


def _weight(name: str, stated: Block | None, disk: OnDisk) -> Weight:
    """Return the weight called `name`. Raises ValueError if its tensors are not what this layout stores."""
    endings = [ending for ending in (SCALE_INV, SCALE, MODULE_SCALE) if _scale_name(name, ending) in disk.tensors]
    found = [printable(_scale_name(name, ending)) for ending in endings]
    if len(endings) > 1:
        raise ValueError(f"has two scales, {' and '.join(found)}; it is ambiguous which one applies")
    if name not in disk.tensors:
        raise ValueError(f"has the scale {found[0]}, but is missing itself")
    codes = disk.tensors[name]
    if not endings:
        raise ValueError(f"is {codes.dtype}, but its scale {printable(name + SCALE_INV)} is missing")
    if codes.dtype in PASSED_THROUGH:
        raise ValueError(
            f"is {codes.dtype} {list(codes.shape)} with a scale, not quantized: the scale was never computed, and "
            "loaders apply it"
        )
    if codes.dtype not in ELEMENTS or len(codes.shape) < 2:
        raise ValueError(
            f"is {codes.dtype} {list(codes.shape)} with a scale; expected a matrix of {', '.join(ELEMENTS)}"
        )
    scales = disk.tensors[_scale_name(name, endings[0])]
    if scales.dtype not in SCALES_OF_ELEMENTS:
        raise ValueError(f"its scale {found[0]} is {scales.dtype}; expected {', '.join(sorted(SCALES_OF_ELEMENTS))}")
    shape = codes.shape
    if codes.dtype == "I8":
        shape, stated = (*shape[:-1], shape[-1] * 2), (1, 32)
    fmt = _format(codes, scales, shape, stated)
    return Weight(name, shape, resolve(fmt), disk.dtype, variant=endings[0] if endings[0] != SCALE_INV else "")


def _format(codes: TensorInfo, scales: TensorInfo, shape: tuple[int, ...], stated: Block | None) -> BlockFormat:
    """Return the format whose grid of blocks has the shape of the scales: of the stated block, or else of a usual
    one."""
    kind = "e8m0" if scales.dtype in POWERS else "fp32"
    usual: list[Block] = [(128, 128), (1, 32), (1, 128), (1, None)]
    for block in ([stated] if stated else usual) + [WHOLE]:
        fmt = find_format(f"{ELEMENTS[codes.dtype]}:{kind}:{_spelled(block)}")
        if scales.shape == grid_shape(fmt, shape) or (block == WHOLE and scales.shape in ((), (1,))):
            return fmt
    expected = find_format(f"{ELEMENTS[codes.dtype]}:{kind}:{_spelled(stated or usual[0])}")
    raise ValueError(
        f"is {list(shape)}, so blocks of {expected.block_name} have {list(grid_shape(expected, shape))} scales; "
        f"{printable(scales.name)} is {list(scales.shape)}"
    )


def _spelled(block: Block) -> str:
    rows, columns = block
    if columns is None:
        return "tensor" if rows is None else "channel"
    return f"{rows}x{columns}"


def _ignored(disk: OnDisk) -> Ignored:
    """Return the list of modules left plain; loaders skip routers and output heads by themselves, and DeepSeek's own
    files list nothing."""
    entries = listed(disk.settings.get(LEFT_ALONE))
    reading = "a module, or all modules inside one, by its path"
    return Ignored(LEFT_ALONE, entries, by_path, reading, targeted=is_usual_layer, strict=False)


def _hazards(disk: OnDisk, weights: Sequence[Weight]) -> list[Hazard]:
    if disk.settings.get("quant_method") != "fp8":
        return []
    names = [_scale_name(weight.name, weight.variant or SCALE_INV) for weight in weights]
    return [
        Hazard(
            printable(name),
            "powers of two as U8",
            "F32 or F8_E8M0 for vLLM and SGLang, which read the bytes as numbers",
            "Store the same bytes as F8_E8M0.",
            certain=False,
        )
        for name in names
        if disk.tensors[name].dtype == "U8"
    ]


def _remarks(weights: Sequence[Weight]) -> list[str]:
    if all(weight.format.name != "e4m3:e8m0:128x128" for weight in weights):
        return []
    return [
        "Scales are F8_E8M0; fp8_e4m3_128x128 with --scale-rounding rceil stores the same ones as F32, which vLLM and "
        "SGLang use."
    ]


FP8 = Layout(
    name="fp8",
    meaning="DeepSeek-V3's FP8 by blocks, with weight_scale_inv",
    source="transformers 5.24 (run); DeepSeek-V3; vLLM 0.33 and SGLang 0.5.23 (read)",
    formats=FORMATS,
    refusal=_refusal,
    contents=_contents,
    settings=_settings,
    weights=_weights,
    aliases=("deepseek", "fp8-block"),
    dialects=("fp8-block", "mxfp8"),
    remarks=_remarks,
    ignored=_ignored,
    hazards=_hazards,
    known_settings=FP8_SETTINGS,
)
