"""Matrix products as rows: D[m, n] = A[m, k] @ B[n, k]^T by one library path each, what it needs, and its operands.

The library is PyTorch's `torch.nn.functional.scaled_mm`; shapes and strides of scales are those that its checks of
arguments demand (torch 2.11 to 2.13). Emulated products quantize, scale back to BF16 and multiply there, as the MXFP8
paper did on GPUs without MX hardware (Recipes for Pre-training LLMs with MXFP8, section 3.3).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from mxcli.errors import UsageError, did_you_mean, printable
from mxcli.flows.bench.gemm_operands import Engine, Operand
from mxcli.numerics.reencodings import REENCODINGS
from mxcli.numerics.scheme import Scheme, resolve

if TYPE_CHECKING:
    from torch import Tensor

BASELINE = "bf16"
ADA, HOPPER, BLACKWELL = (8, 9), (9, 0), (10, 0)


@dataclass(frozen=True, slots=True)
class Product:
    """A product ready to be computed: `call` gives D in BF16, `quantize` quantizes operand A again, as a layer does for
    each new activation (None: nothing to quantize), `values` are both operands in binary32, and `inexact` counts the
    elements of both that re-encoding rounded (None: nothing was re-encoded)."""

    call: Callable[[], Tensor]
    quantize: Callable[[], object] | None
    values: Callable[[], tuple[Tensor, Tensor]]
    inexact: int | None = None


@dataclass(frozen=True, slots=True)
class GemmKernel:
    """A way to compute a product. `formats` of A and B (None: BF16); `arithmetic` is what is multiplied; m, n and k
    must be of `multiples`; `capability` is what a GPU must have at least (None: a CPU will do); `reencoding` names what
    the codes become first."""

    name: str
    formats: tuple[str, str] | None
    meaning: str
    prepare: Callable[[GemmKernel, Engine, Tensor, Tensor], Product]
    arithmetic: str = "bf16"
    multiples: tuple[int, int, int] = (1, 1, 1)
    capability: tuple[int, int] | None = None
    reencoding: str | None = None

    def unmet(self, engine: Engine) -> str | None:
        """Return the requirement that the device does not meet, or None."""
        if self.capability is None:
            return None
        needed = f"needs a GPU of compute capability {'.'.join(map(str, self.capability))} or later"
        if engine.capability is None:
            return f"{needed}; this is the CPU"
        if engine.capability < self.capability:
            return f"{needed}; {engine.device} has {'.'.join(map(str, engine.capability))}"
        return None

    def misfit(self, shape: tuple[int, int, int]) -> str | None:
        """Return the length of (m, n, k) that is not a multiple of what it must be, or None."""
        for name, length, multiple in zip("mnk", shape, self.multiples, strict=True):
            if length % multiple:
                return f"{name} {length} is not a multiple of {multiple}"
        return None


def _bf16(kernel: GemmKernel, engine: Engine, a: Tensor, b: Tensor) -> Product:
    import torch

    return Product(lambda: torch.matmul(a, b.t()), None, lambda: (a.float(), b.float()))


def _emulated(kernel: GemmKernel, engine: Engine, a: Tensor, b: Tensor) -> Product:
    """Return codes scaled back to BF16, whose product is computed."""
    import torch

    schemes = _recipes(kernel)
    backs = [engine.values(engine.quantize(x, r)).to(torch.bfloat16) for x, r in zip((a, b), schemes, strict=True)]
    back_a, back_b = backs

    def make() -> Tensor:
        return engine.values(engine.quantize(a, schemes[0])).to(torch.bfloat16)

    return Product(lambda: torch.matmul(back_a, back_b.t()), make, lambda: (back_a.float(), back_b.float()))


@dataclass(frozen=True, slots=True)
class _Scaling:
    """The arguments of `scaled_mm` for the scales of one operand: members of ScalingType, and scales by recipe."""

    types: tuple[str, ...]
    scales: Callable[[Engine, Operand], list[Tensor]]
    swizzled: bool = False


def _scaled(scaling_a: _Scaling, scaling_b: _Scaling) -> Callable[[GemmKernel, Engine, Tensor, Tensor], Product]:
    def prepare(kernel: GemmKernel, engine: Engine, a: Tensor, b: Tensor) -> Product:
        recipe_a, recipe_b = _recipes(kernel)
        made_a = engine.quantize(a, recipe_a, swizzled=scaling_a.swizzled)
        made_b = engine.quantize(b, recipe_b, swizzled=scaling_b.swizzled)
        if kernel.reencoding is None:

            def make() -> object:
                return engine.quantize(a, recipe_a, swizzled=scaling_a.swizzled)

            return Product(
                _product(engine, (made_a, scaling_a), (made_b, scaling_b)),
                make,
                lambda: _plain_values(engine, kernel, a, b),
            )
        target = REENCODINGS[kernel.reencoding].scheme
        again_a, again_b = engine.reencode(made_a, target), engine.reencode(made_b, target)

        def make_again() -> object:
            return engine.reencode(engine.quantize(a, recipe_a), target)

        return Product(
            _product(engine, (again_a, scaling_a), (again_b, scaling_b)),
            make_again,
            lambda: (engine.values(again_a), engine.values(again_b)),
            again_a.inexact + again_b.inexact,
        )

    return prepare


def _plain_values(engine: Engine, kernel: GemmKernel, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return both operands in binary32, through codes whose scales are stored row by row."""
    recipe_a, recipe_b = _recipes(kernel)
    return engine.values(engine.quantize(a, recipe_a)), engine.values(engine.quantize(b, recipe_b))


def _product(engine: Engine, left: tuple[Operand, _Scaling], right: tuple[Operand, _Scaling]) -> Callable[[], Tensor]:
    import torch
    from torch.nn import functional

    (a, scaling_a), (b, scaling_b) = left, right
    codes_a, codes_b = engine.codes(a), engine.codes(b).t()
    scales_a, scales_b = scaling_a.scales(engine, a), scaling_b.scales(engine, b)
    types_a, types_b = _members(scaling_a), _members(scaling_b)
    swizzles = _swizzles(scaling_a), _swizzles(scaling_b)

    return partial(
        functional.scaled_mm,
        codes_a,
        codes_b,
        scales_a,
        types_a,
        scales_b,
        types_b,
        swizzle_a=swizzles[0],
        swizzle_b=swizzles[1],
        output_dtype=torch.bfloat16,
    )


def _members(scaling: _Scaling) -> list[Any]:
    from torch.nn.functional import ScalingType

    return [getattr(ScalingType, name) for name in scaling.types]


def _swizzles(scaling: _Scaling) -> list[Any] | None:
    if not scaling.swizzled:
        return None
    from torch.nn.functional import SwizzleType

    # One per scale: the scale of a whole tensor stays as it is.
    return [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE][: len(scaling.types)]


def _recipes(kernel: GemmKernel) -> tuple[Scheme, Scheme]:
    assert kernel.formats is not None
    return resolve(kernel.formats[0]), resolve(kernel.formats[1])


def _of_tensor(engine: Engine, operand: Operand) -> list[Tensor]:
    return [engine.scales(operand).reshape(1)]


def _of_rows(engine: Engine, operand: Operand) -> list[Tensor]:
    return [engine.scales(operand).reshape(-1, 1)]


def _of_columns(engine: Engine, operand: Operand) -> list[Tensor]:
    return [engine.scales(operand).reshape(1, -1)]


def _down_first(engine: Engine, operand: Operand) -> list[Tensor]:
    """Return scales [rows, k / 128] in column-major order."""
    return [engine.scales(operand).t().contiguous().t()]


def _tiles_down_first(engine: Engine, operand: Operand) -> list[Tensor]:
    """Return scales [k / 128 rounded up to a multiple of 4, rows / 128] in column-major order."""
    import torch

    scales = engine.scales(operand)
    rows, tiles = scales.shape
    padded = torch.zeros(rows, -(-tiles // 4) * 4, dtype=scales.dtype, device=scales.device)
    padded[:, :tiles] = scales
    return [padded.t()]


def _in_tiles(engine: Engine, operand: Operand) -> list[Tensor]:
    return [engine.scales(operand, swizzled=True)]


def _in_tiles_and_whole(engine: Engine, operand: Operand) -> list[Tensor]:
    import torch

    scales = engine.scales(operand, swizzled=True)
    return [scales, torch.full((1,), operand.quantized.tensor_scale or 1.0, dtype=torch.float32, device=scales.device)]


_TENSOR = _Scaling(("TensorWise",), _of_tensor)
_ROWS, _COLUMNS = _Scaling(("RowWise",), _of_rows), _Scaling(("RowWise",), _of_columns)
_1X128, _128X128 = _Scaling(("BlockWise1x128",), _down_first), _Scaling(("BlockWise128x128",), _tiles_down_first)
_1X32 = _Scaling(("BlockWise1x32",), _in_tiles, swizzled=True)
_1X16 = _Scaling(("BlockWise1x16", "TensorWise"), _in_tiles_and_whole, swizzled=True)

_FP8 = "fp8_e4m3"
_ROW_FORMATS = (f"{_FP8}_channel", f"{_FP8}_channel")


def _emulation(format: str) -> GemmKernel:
    short = format.removesuffix("_e4m3").removesuffix("_e2m1")
    return GemmKernel(
        f"{short}-emulated", (format, format), f"{format} scaled back to BF16, multiplied there", _emulated
    )


def _as_rows(format: str, name: str) -> GemmKernel:
    return GemmKernel(
        f"{name}-as-fp8-row",
        (format, format),
        f"{format} folded exactly into E4M3 under one scale per row, multiplied as FP8",
        _scaled(_ROWS, _COLUMNS),
        "fp8",
        (1, 16, 32),
        None,
        "row",
    )


GEMM_KERNELS: Mapping[str, GemmKernel] = {
    row.name: row
    for row in (
        GemmKernel(BASELINE, None, "torch.matmul", _bf16),
        GemmKernel(
            "fp8-tensor", (_FP8, _FP8), "FP8, one scale per tensor", _scaled(_TENSOR, _TENSOR), "fp8", (1, 16, 16)
        ),
        GemmKernel("fp8-row", _ROW_FORMATS, "FP8, one scale per row", _scaled(_ROWS, _COLUMNS), "fp8", (1, 16, 16)),
        GemmKernel(
            "fp8-1x128-128x128",
            (f"{_FP8}_1x128", f"{_FP8}_128x128"),
            "FP8, activations 1x128, weights 128x128",
            _scaled(_1X128, _128X128),
            "fp8",
            (1, 128, 128),
            HOPPER,
        ),
        GemmKernel(
            "fp8-1x128-1x128",
            (f"{_FP8}_1x128", f"{_FP8}_1x128"),
            "FP8, both operands 1x128",
            _scaled(_1X128, _1X128),
            "fp8",
            (1, 16, 128),
            HOPPER,
        ),
        GemmKernel("mxfp8", ("mxfp8_e4m3",) * 2, "MXFP8 1x32", _scaled(_1X32, _1X32), "fp8", (1, 16, 32), BLACKWELL),
        GemmKernel("mxfp4", ("mxfp4_e2m1",) * 2, "MXFP4 1x32", _scaled(_1X32, _1X32), "fp4", (1, 16, 32), BLACKWELL),
        GemmKernel("nvfp4", ("nvfp4",) * 2, "NVFP4 1x16", _scaled(_1X16, _1X16), "fp4", (1, 16, 32), BLACKWELL),
        _as_rows("mxfp4_e2m1", "mxfp4"),
        _as_rows("mxfp6_e2m3", "mxfp6_e2m3"),
        _as_rows("mxfp6_e3m2", "mxfp6_e3m2"),
        GemmKernel(
            "mxfp8-as-fp8-1x128",
            ("mxfp8_e4m3",) * 2,
            "MXFP8 with four blocks under one scale, multiplied as FP8 1x128",
            _scaled(_1X128, _1X128),
            "fp8",
            (1, 16, 128),
            HOPPER,
            "1x128",
        ),
        *map(_emulation, ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4_e2m1", "mxint8", "nvfp4")),
    )
}


def named_kernels(names: list[str]) -> list[GemmKernel]:
    """Return the rows of those names, or all; the baseline is always first. Raises UsageError naming every unknown
    one."""
    unknown = [name for name in names if name not in GEMM_KERNELS]
    if unknown:
        hint = did_you_mean(unknown[0], GEMM_KERNELS)
        raise UsageError(
            f"unknown product {', '.join(map(printable, unknown))}: known are {', '.join(GEMM_KERNELS)}.{hint}"
        )
    return [row for name, row in GEMM_KERNELS.items() if not names or name in names or name == BASELINE]
