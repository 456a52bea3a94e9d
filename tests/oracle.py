"""The second implementation of the numerics: slow, obvious, and independent of the kernels.

Every element format is the sorted list of its values and every rounding a comparison with the exact
midpoint of two neighbours. Scaling by a power of two is done in float64, where it is exact for every
float32; all other operations are single float32 operations in the order that a recipe prescribes.

Tensors are numpy arrays of float32, bfloat16 or float16. Blocks tile the last two dimensions, leading
dimensions are a batch, a 1-D tensor is one row, and ragged edges are completed with +0.
"""

import functools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
U8 = npt.NDArray[np.uint8]
I64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Block = tuple[int | None, int | None]

ONE = np.float32(1)
NAN = np.float32(np.nan)
FLT_MAX = np.finfo(np.float32).max
MIN_NORMAL = 2.0**-126
TE_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


# --- Elements ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Element:
    """One element format: the value of every code, and its finite magnitudes in ascending order."""

    name: str
    bits: int
    mantissa_bits: int
    values: F64
    magnitudes: F64
    odd: Mask  # per magnitude: is its integer significand odd
    min_normal: float
    nan_code: int
    sign_bit: int  # 0 for two's complement

    @property
    def max(self) -> float:
        """Largest finite magnitude that is ever produced."""
        return float(self.magnitudes[-1])

    @property
    def emax(self) -> int:
        """Exponent of the largest magnitude."""
        return math.frexp(self.max)[1] - 1


@functools.cache
def element_format(name: str) -> Element:
    """The format called ``name``: e4m3 and e5m2 as OCP FP8, any other eXmY all finite, int8, int6 and int4."""
    if integer := re.fullmatch(r"int([468])", name):
        bits = int(integer[1])
        counts = np.arange(2 ** (bits - 1))
        signed = np.concatenate([counts, counts - 2 ** (bits - 1)])
        step = 2.0 ** (2 - bits)
        return Element(name, bits, bits - 2, signed * step, counts * step, counts % 2 == 1, step, 0, 0)
    fields = re.fullmatch(r"e([1-7])m([0-6])", name)
    if not fields or (bits := 1 + int(fields[1]) + int(fields[2])) > 8:
        raise ValueError(f"unknown element format {name!r}")
    exponent_bits, mantissa_bits = int(fields[1]), int(fields[2])
    positive = np.array([float(value) for value in _magnitudes(exponent_bits, mantissa_bits)])
    finite = positive[: {"e4m3": 0x7F, "e5m2": 0x7C}.get(name)].copy()
    if name == "e4m3":
        positive[0x7F] = math.nan
    if name == "e5m2":
        positive[0x7C:] = [math.inf, math.nan, math.nan, math.nan]
    codes = np.arange(len(finite))
    odd = (codes % 2 == 1) if mantissa_bits else (codes > 0)
    return Element(
        name=name,
        bits=bits,
        mantissa_bits=mantissa_bits,
        values=np.concatenate([positive, -positive]),
        magnitudes=finite,
        odd=odd,
        min_normal=float(finite[2**mantissa_bits]),
        nan_code=0x7F if name in ("e4m3", "e5m2") else 0,
        sign_bit=2 ** (bits - 1),
    )


def _magnitudes(exponent_bits: int, mantissa_bits: int) -> Iterator[Fraction]:
    """Values of the codes without sign bit, in code order: fraction field, hidden one, biased exponent."""
    bias = 2 ** (exponent_bits - 1) - 1
    for biased_exponent in range(2**exponent_bits):
        for mantissa in range(2**mantissa_bits):
            significand = Fraction(mantissa, 2**mantissa_bits) + (biased_exponent > 0)
            yield significand * Fraction(2) ** (max(biased_exponent, 1) - bias)


def encode(values: npt.ArrayLike, fmt: Element, rounding: str = "nearest-even", drawn: F64 | None = None) -> U8:
    """Code of each real in ``values`` (exact as float64); saturates, keeps the sign, NaN gives ``nan_code``.

    ``nearest-even`` resolves a tie to the even significand, and upwards where both neighbours are odd
    (formats without mantissa bits, IEEE 754-2019 section 4.3.1). ``stochastic`` goes up where the way from the lower
    neighbour is above the share of the step that was ``drawn`` for the real.
    """
    reals = np.asarray(values, dtype=np.float64)
    magnitude, grid = np.abs(reals), fmt.magnitudes
    middle = (grid[:-1] + grid[1:]) / 2
    lower = np.searchsorted(middle, magnitude, side="left")  # a tie counts as below the midpoint
    upper = np.searchsorted(middle, magnitude, side="right")  # a tie counts as above it
    match rounding:
        case "nearest-even":
            index = np.where(fmt.odd[lower], upper, lower)
        case "half-away":
            index = upper
        case "half-toward-zero":
            index = lower
        case "toward-zero":
            index = np.searchsorted(grid, magnitude, side="right") - 1
        case "stochastic":
            assert drawn is not None
            index = np.minimum(np.searchsorted(grid, magnitude, side="right") - 1, len(grid) - 2)
            low, high = grid[index], grid[index + 1]
            index = index + (np.minimum(magnitude, fmt.max) - low > drawn * (high - low))
        case _:
            raise ValueError(f"unknown rounding {rounding!r}")
    negative = np.signbit(reals)
    if fmt.sign_bit:
        codes = np.where(negative, index + fmt.sign_bit, index)
    else:
        codes = np.where(negative, -index, index) % 2**fmt.bits
    return np.where(np.isnan(reals), fmt.nan_code, codes).astype(np.uint8)


def decode(codes: U8, fmt: Element) -> F64:
    """Exact value of each code."""
    return fmt.values[codes]


E4M3 = element_format("e4m3")


# --- Chance ------------------------------------------------------------------------------------------------


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, ...]:
    """Ten rounds of Philox 4x32 (Salmon et al., SC 2011) in Python's unlimited integers."""
    for turn in range(10):
        left = [(k + turn * weyl) % 2**32 for k, weyl in zip(key, (0x9E3779B9, 0xBB67AE85), strict=True)]
        first, second = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = (
            second // 2**32 ^ counter[1] ^ left[0],
            second % 2**32,
            first // 2**32 ^ counter[3] ^ left[1],
            first % 2**32,
        )
    return counter


@functools.cache
def _four(quarter: int, seed: int, stream: int) -> tuple[int, ...]:
    return philox((quarter % 2**32, quarter // 2**32, 0, 0), (seed, stream))


def draws(count: int, seed: int = 0, stream: int = 0) -> F64:
    """Share of the step for elements 0..count of a tensor: the upper 24 bits of a word, four words to a counter."""
    return np.array([_four(i // 4, seed, stream)[i % 4] // 2**8 / 2**24 for i in range(count)], np.float64)


# --- Power-of-two scales -----------------------------------------------------------------------------------


def scale_exponents(amax: F32, fmt: Element, rule: str) -> I64:
    """Exponent of the power-of-two scale that ``rule`` gives each block amax, clamped to [-127, 127]."""
    return _clamp(_unclamped_exponents(amax, fmt, rule))


def _clamp(exponents: I64) -> I64:
    clamped: I64 = np.clip(exponents, -127, 127)
    return clamped


def _unclamped_exponents(amax: F32, fmt: Element, rule: str) -> I64:
    if rule in ("rceil", "nearest"):
        ratio = amax / np.float32(fmt.max)
        significand, exponent = _split_power(ratio)
        up: Mask = significand > 1 if rule == "rceil" else significand >= 1.5
        return exponent + (up & (ratio > 2.0**-127))
    significand, exponent = _split_power(amax)
    if rule == "even" and not fmt.sign_bit:
        raise ValueError(f"rule 'even' is not defined for {fmt.name}")
    threshold = {  # of the significand, from which on the exponent is raised by one
        "floor": 2.0,
        "ceil": np.nextafter(1.0, 2.0),
        "even": 2 - 2.0 ** -(fmt.mantissa_bits + 1),
        "ct-even1": 1.75,
    }
    raised: Mask = significand >= threshold[rule]
    return exponent - fmt.emax + raised


def _split_power(magnitude: F32) -> tuple[F64, I64]:
    """Significand in [1, 2) and exponent; subnormals are 1 + fraction at exponent -127, Inf is 2^128."""
    wide = np.minimum(magnitude.astype(np.float64), 2.0**128)
    fraction, power = np.frexp(wide)
    small = wide < MIN_NORMAL
    exponent = np.where(small, -127, power - 1).astype(np.int64)
    return np.where(small, 1 + wide / MIN_NORMAL, 2 * fraction), exponent


def _best_exponents(blocks: F32, amax: F32, fmt: Element, rounding: str) -> I64:
    """Of floor-1, floor, floor+1 the exponent with the least exact squared error; ties go to the larger."""
    floor = _unclamped_exponents(amax, fmt, "floor")
    best = _clamp(floor + 1)
    wide = blocks.astype(np.float64)

    def reconstruct(exponents: I64) -> F64:
        scale = np.ldexp(1.0, exponents)[..., None, None]
        return decode(encode(wide / scale, fmt, rounding), fmt) * scale

    for shift in (0, -1):
        candidate = _clamp(floor + shift)
        rival, champion = reconstruct(candidate), reconstruct(best)
        rival_error, best_error = (((wide - y) ** 2).sum((-2, -1)) for y in (rival, champion))
        better = rival_error < best_error
        close = np.abs(rival_error - best_error) <= 1e-9 * best_error  # too close for float64 sums
        for where in zip(*np.nonzero(close & (best_error > 0)), strict=True):
            x, y, z = wide[where], rival[where], champion[where]
            better[where] = _exact_error(x, y) < _exact_error(x, z)
        best = np.where(better, candidate, best)
    return best


def _exact_error(x: F64, y: F64) -> Fraction:
    pairs = zip(x.ravel().tolist(), y.ravel().tolist(), strict=True)
    return sum(((Fraction(a) - Fraction(b)) ** 2 for a, b in pairs), Fraction(0))


# --- Scales with a mantissa: NVFP4 recipes -----------------------------------------------------------------


class TensorScale(NamedTuple):
    """The per-tensor scalar in both directions, NaN for one that the recipe does not use."""

    encode: np.float32
    decode: np.float32


@dataclass(frozen=True)
class Recipe:
    """One producer's order of float32 operations, for element maximum ``peak`` and block amax ``amax``."""

    tensor: Callable[[np.float32, np.float32], TensorScale]  # tensor amax, peak * 448
    scale: Callable[[F32, np.float32, TensorScale], F32]  # amax, peak: the scale before its cast
    argument: Callable[[F32, F32, TensorScale], F32]  # x, scale: what is rounded to an element
    factor: Callable[[F32, TensorScale], F32]  # scale: what a decoded element is multiplied by
    zeros: str
    lowest: float = 0.0  # smallest scale before the cast
    zero_becomes: float = 0.0  # scale instead of zero before the cast
    zero_code_becomes: int = 0  # scale code instead of zero after the cast
    reach: Callable[[Element], float] = lambda fmt: fmt.max  # the element that a block amax becomes: `peak`
    top: Callable[[Element], float] = lambda scale: scale.max  # the scale of the block that has the tensor amax
    multiples: tuple[float, ...] = ()  # scales to try, relative to `scale`
    all_codes: bool = False  # every scale code is tried
    norm: str = "squares"  # of the errors that decide between scales
    divisor: Callable[[F32, np.float32], F32] | None = None  # of x, where it is not made of the rounded scale


def _reciprocal(v: Any) -> Any:
    """1/v with 1/0 = 0."""
    return np.where(v == 0, np.float32(0), ONE / v).astype(np.float32)


def _bfloat16(v: Any) -> Any:
    """Float32 rounded to bfloat16, nearest even, and widened back."""
    wide = np.asarray(v, dtype=np.float64)
    quantum = np.ldexp(1.0, np.maximum(np.frexp(wide)[1] - 8, -133))
    return (np.rint(wide / quantum) * quantum).astype(np.float32)


def _tensor_te(amax: np.float32, limit: np.float32) -> TensorScale:
    encode_scale = min(limit / amax, FLT_MAX) or ONE
    return TensorScale(encode_scale, ONE / encode_scale)


def _tensor_decode(amax: np.float32, limit: np.float32) -> TensorScale:
    return TensorScale(NAN, amax / limit or ONE)


def _tensor_ct(amax: np.float32, limit: np.float32) -> TensorScale:
    encode_scale = ONE / max(amax, np.float32(MIN_NORMAL)) * limit
    return TensorScale(encode_scale if np.isfinite(encode_scale) else ONE, NAN)


def _tensor_ct_bf16(amax: np.float32, limit: np.float32) -> TensorScale:
    encode_scale = np.float32(_bfloat16(np.float32(_bfloat16(ONE / amax)) * limit))
    return TensorScale(encode_scale if np.isfinite(encode_scale) else ONE, NAN)


def _tensor_vllm(amax: np.float32, limit: np.float32) -> TensorScale:
    encode_scale = np.float32(limit * _reciprocal(amax))
    return TensorScale(encode_scale, np.float32(_reciprocal(encode_scale)))


TE = Recipe(
    tensor=_tensor_te,
    scale=lambda amax, peak, g: amax * (g.encode * (ONE / peak)),
    argument=lambda x, s, g: x * np.minimum(ONE / (s * g.decode), FLT_MAX),
    factor=lambda s, g: s * g.decode,
    zeros="plus-for-zero",
)
CT = Recipe(
    tensor=_tensor_ct,
    scale=lambda amax, peak, g: amax / peak * g.encode,
    argument=lambda x, s, g: x / (s / g.encode),
    factor=lambda s, g: s / g.encode,
    zeros="plus-for-zero",
    zero_code_becomes=0x20,
)
FOUR_OVER_SIX = Recipe(
    tensor=_tensor_te,
    scale=lambda amax, peak, g: amax / peak * g.encode,
    argument=lambda x, s, g: x * np.minimum(_reciprocal(s * g.decode), FLT_MAX),
    factor=lambda s, g: s * g.decode,
    zeros="signed",
    top=lambda scale: 2.0**scale.emax,
    multiples=(1.0, 1.5),
)
NNCF_LEAST = np.float32(2.0**-23)


def _tensor_nncf(amax: np.float32, limit: np.float32) -> TensorScale:
    peak = np.float32(limit / E4M3.max)
    return TensorScale(NAN, max(max(amax / peak, NNCF_LEAST) / np.float32(E4M3.max), NNCF_LEAST))


RECIPES = {
    "te": TE,
    "paper": replace(TE, scale=lambda amax, peak, g: amax / peak * g.encode, zeros="signed"),
    "torchao": Recipe(
        tensor=_tensor_decode,
        scale=lambda amax, peak, g: amax / peak / g.decode,
        argument=lambda x, s, g: x * (ONE / g.decode / s),
        factor=lambda s, g: g.decode * s,
        zeros="signed",
        lowest=2.0**-6,
    ),
    "modelopt": Recipe(
        tensor=_tensor_decode,
        scale=lambda amax, peak, g: amax / (peak * g.decode),
        argument=lambda x, s, g: x / (s * g.decode),
        factor=lambda s, g: s * g.decode,
        zeros="plus-for-zero",
        lowest=2.0**-9,
        zero_becomes=1.0,
    ),
    "ct": CT,
    "ct-bf16": replace(CT, tensor=_tensor_ct_bf16, scale=lambda amax, peak, g: _bfloat16(amax / peak) * g.encode),
    "vllm": Recipe(
        tensor=_tensor_vllm,
        scale=lambda amax, peak, g: g.encode * (amax * (ONE / peak)),
        argument=lambda x, s, g: x * _reciprocal(s * g.decode),
        factor=lambda s, g: _reciprocal(_reciprocal(s * g.decode)),
        zeros="signed",
    ),
    "four-over-six-mse": FOUR_OVER_SIX,
    "four-over-six-mae": replace(FOUR_OVER_SIX, norm="magnitudes"),
    "four-over-six-max": replace(FOUR_OVER_SIX, norm="largest"),
    "static-4": replace(FOUR_OVER_SIX, reach=lambda fmt: 4.0, top=lambda scale: scale.max, multiples=()),
    "static-6": replace(FOUR_OVER_SIX, top=lambda scale: scale.max, multiples=()),
    "best": replace(FOUR_OVER_SIX, multiples=(), all_codes=True),
    "unbiased": replace(TE, reach=lambda fmt: fmt.max * (1 - 1 / (2 ** (E4M3.mantissa_bits + 1) + 1))),
    "auto-round": replace(
        CT,
        argument=lambda x, s, g: np.where(x == 0, x, x / (s / g.encode)),
        zero_code_becomes=0,
        zeros="signed",
    ),
    "nncf": Recipe(
        tensor=_tensor_nncf,
        scale=lambda amax, peak, g: np.maximum(amax / peak, NNCF_LEAST) / g.decode,
        argument=lambda x, s, g: x,
        factor=lambda s, g: s * g.decode,
        zeros="signed",
        zero_becomes=float(NNCF_LEAST),
        divisor=lambda amax, peak: np.maximum(amax / peak, NNCF_LEAST),
    ),
}


# --- Tensors -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class OracleResult:
    """A quantized tensor; a grid has one entry per block: leading dimensions, then rows x columns."""

    element: Element
    scale: str
    block: tuple[int, int]
    codes: U8  # shape of x
    scales: npt.NDArray[Any]  # grid; E8M0 bytes, E4M3 codes or float32
    tensor_encode: float | None  # None where the recipe does not use it
    tensor_decode: float | None
    dequantized: F32  # shape of x
    arguments: F64  # shape of x: the scaled values that were rounded to elements; NaN in NaN blocks
    scale_arguments: F32 | None  # grid: the scale before clamps and cast; None for E8M0


def quantize(
    x: npt.NDArray[Any],
    *,
    element: str,
    scale: str = "e8m0",
    block: Block = (1, 32),
    rule: str = "rceil",
    rounding: str = "nearest-even",
    variant: str = "te",
    tensor_scale: bool = True,
    tensor_amax: float | None = None,
    byte0: str = "exact",
    nonfinite: str = "saturate",
    flush_subnormal_blocks: bool = False,
    flush_subnormals: bool = False,
    zeros: str | None = None,
    seed: int = 0,
    stream: int = 0,
) -> OracleResult:
    """Quantize ``x`` to ``element`` codes with one ``scale`` (e8m0, e4m3, fp32) per ``block``.

    ``block`` is rows x columns, None for the whole dimension. ``rule`` and ``byte0`` (exact, torchao) belong
    to e8m0, ``variant``, ``tensor_scale`` and ``tensor_amax`` (default: largest finite magnitude) to e4m3; a
    ``tensor_amax`` is also that of a block that is the whole tensor, whose scale other tensors share.
    ``nonfinite``: saturate gives a NaN scale to blocks with NaN, nan-block also to blocks with Inf.
    ``zeros`` says which sign a zero code gets (default: the variant's, else signed): signed, that of the
    argument; plus-for-zero, + where x is zero; minus-for-zero, - where x is zero; unsigned, always +.
    ``seed`` and ``stream`` belong to rounding ``stochastic``, under which a scale is searched for by nearest-even.
    """
    fmt = element_format(element)
    wide = _widen(x)
    matrix = _matrix(wide)
    tile = (block[0] or max(matrix.shape[-2], 1), block[1] or max(matrix.shape[-1], 1))
    blocks = _split(matrix, tile)
    amax: F32 = np.abs(blocks).max((-2, -1))
    if flush_subnormals:
        blocks = np.where(np.abs(blocks) < MIN_NORMAL, blocks * 0, blocks)
        amax = np.abs(blocks).max((-2, -1))
    if flush_subnormal_blocks:
        tiny = amax < MIN_NORMAL
        blocks = np.where(_spread(tiny), blocks * 0, blocks)
        amax = np.where(tiny, np.float32(0), amax)
    if nonfinite == "nan-block":
        amax = np.where(np.isinf(amax), NAN, amax)
    elif nonfinite != "saturate":
        raise ValueError(f"unknown policy {nonfinite!r} for non-finite input")
    if tensor_amax is None:
        tensor_amax = _largest_finite(wide)
    elif block == (None, None):
        amax = np.full_like(amax, tensor_amax)
    with np.errstate(all="ignore"):
        match scale:
            case "e8m0":
                searching = "nearest-even" if rounding == "stochastic" else rounding
                scaled = _scale_e8m0(blocks, amax, fmt, rule, searching, byte0)
            case "e4m3":
                nearest = "nearest-even" if rounding == "stochastic" else rounding
                scaled = _scale_e4m3(blocks, amax, fmt, variant, np.float32(tensor_amax), tensor_scale, nearest)
            case "fp32":
                scaled = _scale_fp32(blocks, amax, fmt)
            case _:
                raise ValueError(f"unknown scale format {scale!r}")
        infinite = np.isinf(blocks) & ~np.isnan(_spread(scaled.factor))
        arguments = np.where(infinite, blocks, scaled.arguments).astype(np.float64)
        drawn = _split(draws(x.size, seed, stream).reshape(matrix.shape), tile) if rounding == "stochastic" else None
        codes = _sign_zeros(encode(arguments, fmt, rounding, drawn), blocks, fmt, zeros or scaled.zeros)
        dequantized = (decode(codes, fmt) * _spread(scaled.factor)).astype(np.float32)
    return OracleResult(
        element=fmt,
        scale=scale,
        block=tile,
        codes=_join(codes, matrix.shape).reshape(x.shape),
        scales=scaled.scales,
        tensor_encode=scaled.tensor_encode,
        tensor_decode=scaled.tensor_decode,
        dequantized=_join(dequantized, matrix.shape).reshape(x.shape),
        arguments=_join(arguments, matrix.shape).reshape(x.shape),
        scale_arguments=scaled.scale_arguments,
    )


class _Scaled(NamedTuple):
    scales: npt.NDArray[Any]
    factor: npt.NDArray[Any]  # grid: what a decoded element is multiplied by; NaN in NaN blocks
    arguments: npt.NDArray[Any]  # blocks
    zeros: str = "signed"
    scale_arguments: F32 | None = None
    tensor_encode: float | None = None
    tensor_decode: float | None = None


def _scale_e8m0(blocks: F32, amax: F32, fmt: Element, rule: str, rounding: str, byte0: str) -> _Scaled:
    exponents = _best_exponents(blocks, amax, fmt, rounding) if rule == "best" else scale_exponents(amax, fmt, rule)
    factor = np.where(np.isnan(amax), np.nan, np.ldexp(1.0, exponents))
    divisor = factor
    if byte0 == "torchao":
        lowest = {"floor": MIN_NORMAL, "ceil": MIN_NORMAL, "even": MIN_NORMAL, "rceil": 1.0}[rule]
        divisor = np.where(exponents == -127, lowest, factor)
    elif byte0 != "exact":
        raise ValueError(f"unknown byte0 variant {byte0!r}")
    scales = np.where(np.isnan(amax), 255, exponents + 127).astype(np.uint8)
    return _Scaled(scales, factor, blocks / _spread(divisor))


def _scale_e4m3(
    blocks: F32, amax: F32, fmt: Element, variant: str, tensor_amax: np.float32, tensor_scale: bool, rounding: str
) -> _Scaled:
    recipe = RECIPES[variant]
    peak, top = np.float32(recipe.reach(fmt)), np.float32(recipe.top(E4M3))
    g = recipe.tensor(tensor_amax, peak * top) if tensor_scale else TensorScale(ONE, ONE)
    wanted = recipe.scale(_finite(amax), peak, g)
    codes = encode(np.maximum(np.where(wanted == 0, recipe.zero_becomes, wanted), recipe.lowest), E4M3)
    codes = np.where(codes == 0, recipe.zero_code_becomes, codes).astype(np.uint8)
    if recipe.multiples or recipe.all_codes:
        searched = (amax > 0) & np.isfinite(amax)
        codes = np.where(searched, _searched_codes(blocks, wanted, fmt, recipe, g, rounding), codes).astype(np.uint8)
    scale = decode(codes, E4M3).astype(np.float32)
    stored = g if tensor_scale else TensorScale(NAN, NAN)
    return _Scaled(
        scales=codes,
        factor=recipe.factor(scale, g),
        arguments=(
            recipe.argument(blocks, _spread(scale), g)
            if recipe.divisor is None
            else blocks / _spread(recipe.divisor(_finite(amax), peak))
        ),
        zeros=recipe.zeros,
        scale_arguments=wanted,
        tensor_encode=None if np.isnan(stored.encode) else float(stored.encode),
        tensor_decode=None if np.isnan(stored.decode) else float(stored.decode),
    )


def _searched_codes(blocks: F32, wanted: F32, fmt: Element, recipe: Recipe, g: TensorScale, rounding: str) -> U8:
    """Of the scale codes that a recipe tries, the one with the least error of the block: the first of equals."""
    wide = blocks.astype(np.float64)

    def reconstruct(codes: U8) -> F64:
        scale = decode(codes, E4M3).astype(np.float32)
        elements = decode(encode(recipe.argument(blocks, _spread(scale), g), fmt, rounding), fmt).astype(np.float32)
        return (elements * _spread(recipe.factor(scale, g))).astype(np.float64)

    tried = [np.full(wanted.shape, code, np.uint8) for code in range(1, len(E4M3.magnitudes))]
    if not recipe.all_codes:
        tried = [encode(wanted * np.float32(multiple), E4M3) for multiple in recipe.multiples]
    best, best_values = tried[0], reconstruct(tried[0])
    for codes in tried[1:]:
        values = reconstruct(codes)
        error, best_error = (_block_errors(wide, y, recipe.norm) for y in (values, best_values))
        better = error < best_error
        close = np.abs(error - best_error) <= 1e-9 * best_error  # too close for float64 sums
        for where in zip(*np.nonzero(close & (best_error > 0)), strict=True):
            x, y, z = wide[where], values[where], best_values[where]
            same = np.array_equal(np.abs(y - x), np.abs(z - x))
            better[where] = not same and _exact_norm(x, y, recipe.norm) < _exact_norm(x, z, recipe.norm)
        best = np.where(better, codes, best)
        best_values = np.where(_spread(better), values, best_values)
    return best


def _block_errors(x: F64, y: F64, norm: str) -> F64:
    distance = np.abs(y - x)
    match norm:
        case "squares":
            return (distance**2).sum((-2, -1))
        case "magnitudes":
            return distance.sum((-2, -1))
        case "largest":
            return distance.max((-2, -1))
    raise ValueError(f"unknown norm {norm!r}")


def _exact_norm(x: F64, y: F64, norm: str) -> Fraction:
    distances = [abs(Fraction(a) - Fraction(b)) for a, b in zip(x.ravel().tolist(), y.ravel().tolist(), strict=True)]
    if norm == "largest":
        return max(distances)
    return sum((each**2 if norm == "squares" else each for each in distances), Fraction(0))


def _scale_fp32(blocks: F32, amax: F32, fmt: Element) -> _Scaled:
    wanted = _finite(amax) / np.float32(fmt.max)
    scale = np.where(wanted == 0, ONE, wanted)
    return _Scaled(scale, scale, blocks / _spread(scale), scale_arguments=wanted)


def _finite(amax: F32) -> F32:
    """Inf as the largest float32; NaN stays."""
    limited: F32 = np.minimum(amax, FLT_MAX)
    return limited


def _sign_zeros(codes: U8, x: F32, fmt: Element, zeros: str) -> U8:
    match zeros:
        case "signed":
            return codes
        case "plus-for-zero":
            return np.where(x == 0, np.uint8(0), codes)
        case "minus-for-zero":
            return np.where(x == 0, np.uint8(fmt.sign_bit), codes)
        case "unsigned":
            return np.where(decode(codes, fmt) == 0, np.uint8(0), codes)
    raise ValueError(f"unknown sign of zeros {zeros!r}")


def _widen(x: npt.NDArray[Any]) -> F32:
    if not np.can_cast(x.dtype, np.float32):
        raise TypeError(f"{x.dtype} does not widen exactly to float32")
    return x.astype(np.float32)


def _matrix(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """At least two dimensions; a 1-D tensor is one row."""
    return x.reshape(1, -1) if x.ndim < 2 else x


def _split(matrix: npt.NDArray[Any], tile: tuple[int, int]) -> npt.NDArray[Any]:
    """[..., H, W] as [..., block rows, block columns, *tile], the ragged edges completed with zero."""
    grid = [math.ceil(size / side) for size, side in zip(matrix.shape[-2:], tile, strict=True)]
    edges = [(0, n * side - size) for n, side, size in zip(grid, tile, matrix.shape[-2:], strict=True)]
    padded = np.pad(matrix, [(0, 0)] * (matrix.ndim - 2) + edges)
    return padded.reshape(*matrix.shape[:-2], grid[0], tile[0], grid[1], tile[1]).swapaxes(-3, -2)


def _join(blocks: npt.NDArray[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """The inverse of ``_split`` for a matrix of ``shape``."""
    rows, columns, height, width = blocks.shape[-4:]
    padded = blocks.swapaxes(-3, -2).reshape(*shape[:-2], rows * height, columns * width)
    return padded[..., : shape[-2], : shape[-1]]


def _spread(grid: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """One value per block, broadcast over the elements of the block."""
    return grid[..., None, None]


def _largest_finite(x: npt.NDArray[Any]) -> float:
    return float(np.abs(x[np.isfinite(x)]).max(initial=0))


# --- Statistics --------------------------------------------------------------------------------------------


def statistics(x: npt.NDArray[Any], result: OracleResult) -> dict[str, Any]:
    """What quantization did to ``x``, in float64 with exactly rounded sums.

    Blocks whose scale is NaN count in ``elements``, ``blocks``, ``amax``, ``nonfinite`` and ``nan_blocks``
    only. Errors compare the float32 reconstruction with the finite elements (one that overflowed to Inf
    gives infinite errors). Per-block arrays are NaN where they are undefined, the histogram of scales
    leaves out NaN and zero. Of nothing at all errors are 0, the cosine is 1 and SQNR is inf.

    ``scale_underflowed_blocks`` (0 for E8M0): blocks with amax > 0 whose stored scale is zero (FP32: would
    be, before it becomes 1) or, for E4M3, whose scale before clamp and cast exceeds 464, from where on the
    nearest value would be above 448. Inf counts as the largest float32.
    """
    fmt = result.element
    split = functools.partial(_split, tile=result.block)
    wide = _matrix(_widen(x)).astype(np.float64)
    blocks, codes = split(wide), split(_matrix(result.codes))
    scales = _scale_values(result)
    live = split(np.ones(wide.shape, dtype=bool)) & ~_spread(np.isnan(scales))
    measured = live & np.isfinite(blocks)
    signal = np.where(measured, blocks, 0)
    error = np.where(measured, split(_matrix(result.dequantized)) - blocks, 0)
    magnitudes = np.where(live, np.abs(decode(codes, fmt)), 0)
    saturated = measured & (np.abs(split(_matrix(result.arguments))) > fmt.max)
    return {
        "elements": x.size,
        "blocks": scales.size,
        "amax": _largest_finite(wide),
        "saturated": int(saturated.sum()),
        "saturated_blocks": int(saturated.any((-2, -1)).sum()),
        "underflowed": int(((signal != 0) & (magnitudes == 0)).sum()),
        "scale_underflowed_blocks": _scale_underflows(blocks, scales, result),
        "subnormal": int(((magnitudes > 0) & (magnitudes < fmt.min_normal)).sum()),
        "nonfinite": int((~np.isfinite(wide)).sum()),
        "nan_blocks": int(np.isnan(scales).sum()),
        "code_histogram": np.bincount(codes[live], minlength=2**fmt.bits),
        "scale_exponent_histogram": _exponent_histogram(scales),
        **_binades(magnitudes, fmt),
        **_errors(signal, error, int(measured.sum())),
        **_block_profile(signal, error, np.isnan(scales)),
    }


def _errors(signal: F64, error: F64, count: int) -> dict[str, float]:
    with np.errstate(invalid="ignore"):
        recovered = signal + error
        power, noise, dot = _sum(signal**2), _sum(error**2), _sum(signal * recovered)
        norms = math.sqrt(power) * math.sqrt(_sum(recovered**2))
        bias = _sum(error) / max(count, 1)
    nonzero = signal != 0
    mse = noise / max(count, 1)
    relative_error = math.sqrt(noise / power) if power else 0.0
    return {
        "mse": mse,
        "rmse": math.sqrt(mse),
        "relative_error": relative_error,
        "sqnr_db": -20 * math.log10(relative_error) if relative_error else math.inf,
        "cosine": dot / norms if norms else float(power == 0),
        "max_abs_error": float(np.abs(error).max(initial=0)),
        "max_rel_error": float(np.abs(error[nonzero] / signal[nonzero]).max(initial=0)),
        "bias": bias,
        "shrunk_percent": -100 * _sum(signal * error) / power if power else 0.0,
    }


def _sum(values: F64) -> float:
    """Exactly rounded sum where all is finite."""
    return math.fsum(values.ravel().tolist()) if np.isfinite(values).all() else float(values.sum())


def _binades(magnitudes: F64, fmt: Element) -> dict[str, float]:
    """log2 of the largest over the smallest positive magnitude: of the format, and mean over blocks."""
    smallest = fmt.magnitudes[1]
    peak = magnitudes.max((-2, -1))
    reached = np.log2(peak[peak > 0] / smallest)
    return {
        "binades_available": math.log2(fmt.max / smallest),
        "binades_used": float(reached.mean()) if reached.size else 0.0,
    }


def _block_profile(signal: F64, error: F64, nan_blocks: Mask) -> dict[str, F64]:
    """Per block: error energy, SQNR (NaN for zero blocks), log2(amax / smallest nonzero magnitude)."""
    energy, noise = (signal**2).sum((-2, -1)), (error**2).sum((-2, -1))
    least = np.where(signal != 0, np.abs(signal), np.inf).min((-2, -1))
    with np.errstate(divide="ignore", invalid="ignore"):
        sqnr_db = 10 * np.log10(energy / noise)
        dynamic_range = np.log2(np.abs(signal).max((-2, -1)) / least)
    return {
        "block_error_energy": np.where(nan_blocks, np.nan, noise),
        "block_sqnr_db": np.where(energy > 0, sqnr_db, np.nan),
        "block_dynamic_range": np.where(energy > 0, dynamic_range, np.nan),
    }


def _scale_values(result: OracleResult) -> F64:
    """Value of each stored scale, without the tensor scale."""
    match result.scale:
        case "e8m0":
            return np.where(result.scales == 255, np.nan, np.ldexp(1.0, result.scales.astype(np.int64) - 127))
        case "e4m3":
            return decode(result.scales, E4M3)
    return result.scales.astype(np.float64)


def _scale_underflows(blocks: F64, scales: F64, result: OracleResult) -> int:
    wanted = result.scale_arguments
    if wanted is None:
        return 0
    lost = (wanted > 464) | (scales == 0) if result.scale == "e4m3" else wanted == 0
    return int((lost & (np.abs(blocks).max((-2, -1)) > 0) & ~np.isnan(scales)).sum())


def _exponent_histogram(scales: F64) -> dict[int, int]:
    """The number of scales in [2^e, 2^(e+1)), by e."""
    exponents = np.frexp(scales[scales > 0])[1] - 1
    values, counts = np.unique(exponents, return_counts=True)
    return dict(zip(values.tolist(), counts.tolist(), strict=True))


# --- Layout ------------------------------------------------------------------------------------------------


def pack4(codes: U8) -> U8:
    """Two codes per byte along the last dimension, even index in the low nibble; odd ends get code 0."""
    pairs = _groups(codes, 2)
    return pairs[..., 0] + 16 * pairs[..., 1]


def pack6(codes: U8) -> U8:
    """Four codes per three bytes along the last dimension: a 24-bit little-endian word, first code lowest."""
    words = _groups(codes, 4).astype(np.int64) @ 64 ** np.arange(4)
    return (words[..., None] // 256 ** np.arange(3) % 256).astype(np.uint8).reshape(*codes.shape[:-1], -1)


def _groups(codes: U8, size: int) -> U8:
    padding = [(0, 0)] * (codes.ndim - 1) + [(0, -codes.shape[-1] % size)]
    return np.pad(codes, padding).reshape(*codes.shape[:-1], -1, size)


def swizzle(scales: U8) -> U8:
    """Scale grid [R, C] in the order of 128x4 GEMM tiles, flat, padded with zero."""
    rows, columns = scales.shape
    tiles_across = math.ceil(columns / 4)
    swizzled = np.zeros(math.ceil(rows / 128) * tiles_across * 512, dtype=np.uint8)
    for r, c in np.ndindex(rows, columns):
        tile = r // 128 * tiles_across + c // 4
        swizzled[tile * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4] = scales[r, c]
    return swizzled


def hadamard_matrix(signs: npt.ArrayLike = (1,) * 16) -> F64:
    """diag(signs) times the orthonormal Sylvester matrix of that size, a power of two."""
    diagonal = np.asarray(signs, dtype=np.float64)
    sylvester: F64 = np.ones((1, 1))
    while len(sylvester) < len(diagonal):
        sylvester = np.block([[sylvester, sylvester], [sylvester, -sylvester]])
    return diagonal[:, None] * sylvester / math.sqrt(len(diagonal))


def hadamard(x: npt.NDArray[Any], signs: npt.ArrayLike = (1,) * 16) -> F32:
    """Each group along the last dimension times ``hadamard_matrix(signs)``, in float64, rounded once."""
    matrix = hadamard_matrix(signs)
    groups = _widen(x).astype(np.float64).reshape(*x.shape[:-1], -1, len(matrix))
    return (groups @ matrix).astype(np.float32).reshape(x.shape)
