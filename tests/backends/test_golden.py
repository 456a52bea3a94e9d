"""Golden vectors through the CPU and GPU kernels: by scale rule, and through all dialects with the same variant."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from kernel_oracle import Array, assert_same_bits, scheme_of
from safetensors import safe_open
from safetensors.numpy import load_file
from same_results import GPU, needs_cxx, quantize

from mxcli.backends import cpu
from mxcli.backends.backend import Backend
from mxcli.errors import UsageError
from mxcli.files.packing import swizzle
from mxcli.numerics.blocks import Quantized
from mxcli.numerics.dialects import DIALECTS, find_dialect
from mxcli.numerics.floats import ELEMENTS, FloatFormat
from mxcli.numerics.formats import find_format
from mxcli.numerics.hadamard import Hadamard, find_hadamard
from mxcli.numerics.scheme import Scheme, scale_kind

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
FILES = sorted(path.stem for path in GOLDEN.glob("*.safetensors"))
ADAPTIVE = [stem for stem in FILES if stem.startswith("nvfp4_adaptive__")]
QUANTIZED = [stem for stem in FILES if "__" in stem and stem not in ADAPTIVE]
NOT_COMPUTED = {"MANIFEST.json": "no vectors"}
HADAMARD = "hadamard."
"""Prefix of the names of transform tensors in layout.safetensors."""
ROUNDED_TO_NEAREST_EVEN = 0.5, 1, 0
REGIONS = {"tensor": "", "channel": "_channel", "1x128": "_1x128", "128x128": "_128x128"}

CPU = cpu.Cpu()
on_every_backend = pytest.mark.parametrize(
    "backend", [pytest.param(CPU, id="cpu"), pytest.param(GPU, id="gpu kernels", marks=needs_cxx)]
)


@functools.cache
def golden(stem: str) -> tuple[dict[str, Array], list[str]]:
    """Return a file's tensors and the names of its cases."""
    path = GOLDEN / f"{stem}.safetensors"
    with safe_open(path, "numpy") as file:
        metadata = file.metadata()
    return load_file(path), list(json.loads(metadata["json"])["cases"])


def format_and_rule(stem: str) -> tuple[str, str]:
    """Return the format and scale rule of a file name."""
    name, rule = stem.split("__")
    kind, *parts = name.split("_")
    if kind == "mx":
        return "_".join(parts), rule
    if kind == "fp8":
        return name + REGIONS[rule], "amax"
    return {"nvfp4": "nvfp4", "nvfp4_2d16": "nvfp4_2d", "nvfp4_noglobal": "e2m1:e4m3:1x16"}[name], rule


@functools.cache
def tensors_by_case(stem: str) -> dict[str, dict[str, Array]]:
    """Return a file's tensors by case and name."""
    tensors, cases = golden(stem)
    found: dict[str, dict[str, Array]] = {case: {} for case in cases}
    for name, tensor in tensors.items():
        case, _, part = name.rpartition(".")
        found[case][part] = tensor
    return found


def case_tensors(stem: str, case: str) -> dict[str, Array]:
    """Return a case's tensors by name."""
    return dict(tensors_by_case(stem)[case])


# --- By scale rule -----------------------------------------------------------------------------------------


def compare(
    q: Quantized, wanted: dict[str, Array], suffix: str = "", where: Array | None = None, *, backend: Backend = CPU
) -> set[str]:
    """Compare a case, or the blocks selected by `where`; return the names of the compared tensors.

    Codes of blocks with a NaN power-of-two scale are not compared: producers leave arbitrary codes there.
    """
    compared = np.ones(q.shape, bool) if where is None else spread(where, q)
    codes_matter = compared & ~spread(q.scales == 255, q) if scale_kind(q.format) == "e8m0" else compared
    grid = np.ones(q.scales.shape, bool) if where is None else where
    assert_same_bits(q.scales[grid], wanted["scales"][grid], "scales")
    np.testing.assert_array_equal(cpu.unpack(q)[codes_matter], wanted[f"codes{suffix}"][codes_matter])
    assert_same_bits(backend.dequantize(q)[compared], wanted[f"deq{suffix}"][compared], "dequantized")
    names = {"scales", f"codes{suffix}", f"deq{suffix}"}
    for name, scale in (("global_encode", q.tensor_encode), ("global_decode", q.tensor_scale)):
        if name in wanted:
            assert wanted[name].tolist() == [scale], name
            names.add(name)
    return names


def spread(grid: Array, q: Quantized) -> npt.NDArray[np.bool_]:
    """Expand one value per block to its elements."""
    rows, columns = q.format.block
    tall = grid.repeat(rows or q.shape[-2], -2)
    return tall.repeat(columns or q.shape[-1], -1)[: q.shape[-2], : q.shape[-1]]


@pytest.mark.parametrize(
    ("backend", "stats"),
    [
        pytest.param(cpu.Cpu(threads=1), True, id="1 thread"),
        pytest.param(cpu.Cpu(threads=2), True, id="2 threads"),
        pytest.param(GPU, False, id="gpu kernels", marks=needs_cxx),
        pytest.param(GPU, True, id="gpu kernels with statistics", marks=[needs_cxx, pytest.mark.slow]),
    ],
)
@pytest.mark.parametrize("stem", QUANTIZED)
def test_quantized_files(stem: str, backend: Backend, stats: bool) -> None:
    """Compare every tensor of every case."""
    name, rule = format_and_rule(stem)
    _, cases = golden(stem)
    count = 0
    for case in cases:
        wanted = case_tensors(stem, case)
        x = wanted.pop("x")
        compared = compare(quantize(backend, x, scheme_of(name, rule), stats=stats), wanted, backend=backend)
        if "codes_torchao" in wanted:
            q = quantize(backend, x, scheme_of(name, rule, dialect="torchao"), stats=stats)
            compared |= compare(q, wanted, "_torchao", backend=backend)
        assert compared == wanted.keys(), case
        count += len(compared)
    assert count == len(golden(stem)[0]) - len(cases)
    print(f"{stem}: {len(cases)} cases, {count} tensors on {backend.name}")


@pytest.mark.parametrize(
    ("backend", "stats"),
    [
        pytest.param(CPU, True, id="cpu"),
        pytest.param(GPU, False, id="gpu kernels", marks=needs_cxx),
        pytest.param(GPU, True, id="gpu kernels with statistics", marks=[needs_cxx, pytest.mark.slow]),
    ],
)
@pytest.mark.parametrize(("stem", "blocks"), list(zip(ADAPTIVE, (411, 401, 347, 433, 432), strict=True)))
def test_adaptive_files(stem: str, blocks: int, backend: Backend, stats: bool) -> None:
    """Compare the blocks that the reference decides, except for the sign of zero codes."""
    scheme, compared = scheme_of("nvfp4", stem.split("__")[1]), 0
    for case in golden(stem)[1]:
        wanted = case_tensors(stem, case)
        q, where = quantize(backend, wanted["x"], scheme, stats=stats), wanted["compare"]
        assert wanted["tensor_scale"].tolist() == [q.tensor_scale], case
        assert_same_bits(q.scales[where], wanted["scales"][where], case)
        codes = [np.where(each == 8, 0, each)[spread(where, q)] for each in (cpu.unpack(q), wanted["codes"])]
        np.testing.assert_array_equal(*codes, err_msg=case)
        compared += int(where.sum())
    assert compared == blocks


# --- By dialect --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Same:
    """Part of a file that a dialect with the file's rule reproduces: the suffix of its tensors, and the blocks."""

    suffix: str
    where: Callable[[Array, Array], Array]  # amax and scales of the blocks


def scheme_for(stem: str, dialect: str, case: str) -> tuple[Scheme, Same] | None:
    """Return the dialect's scheme under the file's rule and the part it reproduces; None if it reproduces nothing.

    The rule is given only if it is not the dialect's default.
    """
    name, rule = format_and_rule(stem)
    row = find_format(name)
    own = find_dialect(dialect).choice(scale_kind(row), row.element.name, row.block_name)
    try:
        scheme = scheme_of(name, None if own and own.rule == rule else rule, dialect=dialect)
    except UsageError:
        return None
    choice, rounding = scheme.choice, scheme.rounding
    steps = rounding.above, rounding.half_if, rounding.half_always
    signs = choice.clear_zero_code, choice.clear_zero_input, choice.set_zero_input
    if own is None or steps != ROUNDED_TO_NEAREST_EVEN or any(signs):
        return None
    by_torchao = choice.byte0_exponent.get(rule, -127) != -127
    low_clamp = "codes_torchao" in case_tensors(stem, case)

    def where(amax: Array, scales: Array) -> Array:
        same = np.ones(scales.shape, bool)
        if choice.infinity_is_nan:
            same &= ~np.isinf(amax)
        if choice.flush_subnormals:  # next to larger elements too, where these are still small
            same &= (amax == 0) | (amax > 2.0**-100)
        if choice.flush_subnormal_blocks:
            same &= ~((amax > 0) & (amax < 2.0**-126))
        if choice.min_exponent > -127:
            same &= scales > choice.min_exponent + 127
        if by_torchao and not low_clamp:
            same &= (scales != 0) | (amax == 0)
        return same

    return scheme, Same("_torchao" if by_torchao and low_clamp else "", where)


def files_of(dialect: str) -> list[str]:
    """Return the golden files that a dialect reproduces in part."""
    return [stem for stem in QUANTIZED if scheme_for(stem, dialect, golden(stem)[1][0])]


@functools.cache
def block_amax(stem: str, case: str) -> Array:
    """Return the amax of each block of a case."""
    x = case_tensors(stem, case)["x"]
    per_block = quantize(CPU, x, scheme_of(*format_and_rule(stem)), per_block=True).per_block
    assert per_block is not None
    return per_block.amax


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    "backend", [pytest.param(CPU, id="cpu"), pytest.param(GPU, id="gpu kernels", marks=[needs_cxx, pytest.mark.slow])]
)
def test_dialects(dialect: str, backend: Backend) -> None:
    """Compare every case that the dialect reproduces, in the blocks that it reproduces."""
    blocks, files = 0, files_of(dialect)
    for stem in files:
        for case in golden(stem)[1]:
            found = scheme_for(stem, dialect, case)
            assert found is not None
            scheme, same = found
            wanted = case_tensors(stem, case)
            where = same.where(block_amax(stem, case), wanted["scales"])
            q = quantize(backend, wanted["x"], scheme, stats=False)
            compare(q, wanted, same.suffix, where, backend=backend)
            blocks += int(where.sum())
    print(f"{dialect}: {len(files)} files, {blocks} blocks")
    assert (blocks > 0) == bool(files)


@pytest.mark.parametrize(
    ("dialect", "stem"),
    [
        ("mxcli", "mx_mxfp8_e4m3__rceil"),
        ("mxcli", "nvfp4__te"),
        ("mxcli", "fp8_e4m3__tensor"),
        ("ocp", "mx_mxfp4_e2m1__floor"),
        ("te", "mx_mxfp8_e5m2__rceil"),
        ("te", "nvfp4_2d16__te"),
        ("paper", "nvfp4__paper"),
        ("paper", "nvfp4_noglobal__paper"),
        ("torchao-casts", "mx_mxfp8_e4m3__floor"),
        ("mx-paper", "mx_mxfp8_e4m3__floor"),
        ("torchao", "mx_mxfp8_e4m3__rceil"),
        ("torchao", "nvfp4__torchao"),
        ("torchao", "nvfp4_noglobal__torchao"),
        ("modelopt", "mx_mxfp8_e4m3__rceil"),
        ("modelopt", "nvfp4__modelopt"),
        ("modelopt", "nvfp4_noglobal__modelopt"),
        ("compressed-tensors", "nvfp4__ct"),
        ("compressed-tensors", "mx_mxfp8_e4m3__ct-even1"),
        ("compressed-tensors", "mx_mxfp6_e2m3__even"),
        ("modelopt", "fp8_e4m3__channel"),
        ("torchao-casts", "fp8_e4m3__channel"),
        ("microxcaling", "mx_mxfp6_e3m2__floor"),
    ],
)
def test_default_rule_of_dialects(dialect: str, stem: str) -> None:
    """No rule is given."""
    name, rule = format_and_rule(stem)
    assert scheme_of(name, dialect=dialect).scale_rule.name == rule
    assert stem in files_of(dialect)


# --- Elements and layout -----------------------------------------------------------------------------------


def of_codes(codes: Array, element: FloatFormat) -> Quantized:
    """Return one row of codes with scale 1."""
    q = quantize(CPU, np.zeros((1, codes.size), np.float32), scheme_of(f"{element.name}:fp32:tensor"))
    shifts = np.arange(codes.size) * element.stored_bits
    bits = np.zeros(codes.size * element.stored_bits, np.uint8)
    for bit in range(element.stored_bits):
        bits[shifts + bit] = codes >> bit & 1
    q.packed[0, :] = np.packbits(bits, bitorder="little")
    return q


def under_scale_1(x: Array, element: FloatFormat, backend: Backend) -> Array:
    """Encode numbers of any magnitude with scale 1: no block's amax is below the given tensor amax, so all block scales
    saturate at 448, and 448 * fl(1 / 448) is 1."""
    anchored = np.full((x.size, 2), element.max, np.float32)
    anchored[:, 0] = x
    scheme = scheme_of(f"{element.name}:e4m3:1x16:fp32", "paper")
    q = quantize(backend, anchored, scheme, tensor_amax=element.max, stats=False)
    assert (q.scales == 0x7E).all()
    assert (cpu.unpack(q)[:, 1] == element.max_code).all()
    return cpu.unpack(q)[:, 0]


@on_every_backend
def test_elements(backend: Backend) -> None:
    tensors = dict(golden("elements")[0])
    assert np.float32(448) * (np.float32(1) / np.float32(448)) == 1
    for name in ("e4m3", "e5m2", "e2m3", "e3m2", "e2m1", "int8"):
        element = ELEMENTS[name]
        codes = np.arange(2**element.bits)
        assert_same_bits(backend.dequantize(of_codes(codes, element))[0], tensors.pop(f"decode.{name}"), name)
        x, code = tensors.pop(f"round.{name}.x"), tensors.pop(f"round.{name}.code")
        numbers = ~np.isnan(x)
        np.testing.assert_array_equal(under_scale_1(x[numbers], element, backend), code[numbers])
        assert (code[~numbers] == (element.nan_code or 0)).all()
        print(f"elements: {name}, {codes.size} codes decoded, {x.size} numbers rounded")
    assert not tensors


@on_every_backend
def test_layout(backend: Backend) -> None:
    tensors = {n: t for n, t in golden("layout")[0].items() if not n.startswith(HADAMARD)}
    for kind, name in (("fp4", "e2m1"), ("fp6", "e2m3")):
        element = ELEMENTS[name]
        codes, packed = tensors.pop(f"{kind}.codes"), tensors.pop(f"{kind}.packed")
        values = np.array([element.value(code) for code in range(2**element.bits)], np.float32)
        x = np.concatenate([values[codes], np.full((len(codes), 64), element.max, np.float32)], axis=1)
        q = quantize(backend, x, scheme_of(f"{name}:e8m0:channel", "floor"), stats=False)
        assert (q.scales == 127).all()
        assert_same_bits(np.ascontiguousarray(q.packed[:, : packed.shape[1]]), packed, kind)
        np.testing.assert_array_equal(cpu.unpack(q)[:, :64], codes)
    for name in sorted({name.rsplit(".", 1)[0] for name in tensors}):
        assert_same_bits(swizzle(tensors.pop(f"{name}.in")), tensors.pop(f"{name}.out"), name)
    assert not tensors


def test_all_files_are_compared() -> None:
    compared = {*QUANTIZED, *ADAPTIVE, "elements", "layout", "stochastic_rounding"}
    files = {path.name for path in GOLDEN.iterdir()}
    assert {name.partition(".")[0] for name in files - NOT_COMPUTED.keys()} == compared
    assert (len(QUANTIZED), len(ADAPTIVE)) == (48, 5)
    print(f"{len(compared)} files compared; {NOT_COMPUTED}")


# --- Transforms, stochastic rounding -----------------------------------------------------------------------


@on_every_backend
@pytest.mark.parametrize("kind", ["plain", "te_sign", "rand_sign"])
def test_hadamard(backend: Backend, kind: str) -> None:
    """Quantizing with the transform equals quantizing the oracle's transformed values, bit for bit if sums are exact;
    else a group's amax is within 1e-6 of the sum of magnitudes."""
    tensors = golden("layout")[0]
    signs = tensors.get(f"{HADAMARD}{kind}.sign", np.ones(16))
    hadamard = Hadamard(16, tuple(int(sign) for sign in signs))
    assert kind != "te_sign" or hadamard == find_hadamard(16)
    for name in ("mxfp8", "nvfp4", "fp8_e4m3", "int8:e8m0:1x16"):
        x, y = tensors[f"{HADAMARD}exact.x"], tensors[f"{HADAMARD}{kind}.exact.y"]
        ours = quantize(backend, x, scheme_of(name, hadamard=hadamard), stats=False)
        theirs = quantize(backend, y, scheme_of(name), stats=False)
        assert_same_bits(ours.packed, theirs.packed, name)
        assert_same_bits(ours.scales, theirs.scales, name)
    x, y = (tensors[f"{HADAMARD}{name}"].reshape(-1, 16) for name in ("random.x", f"{kind}.random.y"))
    for group, transformed in zip(x, y, strict=True):
        amax = backend.amax(group, "F32", hadamard).value
        assert abs(amax - np.abs(transformed).max()) <= 1e-6 * np.abs(group).sum()


STOCHASTIC = json.loads((GOLDEN / "stochastic_rounding.json").read_text())["rows"]


@pytest.mark.parametrize("format", sorted({row["fmt"] for row in STOCHASTIC}))
def test_stochastic_rounding(format: str) -> None:
    """Each value 200,000 times: one of two neighbors, the mean within its tolerance, the variance within 5%."""
    scheme = scheme_of(f"{format}:fp32:tensor", rounding="stochastic", seed=1)
    for stream, row in enumerate(row for row in STOCHASTIC if row["fmt"] == format):
        low, high, largest = row["lo"], row["hi"], scheme.format.element.max
        for sign in (1.0, -1.0):
            x = np.full((1, row["N"]), sign * row["x"], np.float32)
            # The given amax makes the scale 1.
            q = CPU.quantize(x, "F32", scheme, tensor_amax=largest, stream=stream, stats=False)
            found = sign * CPU.dequantize(q, "F64")
            neighbours = {low, high} if row["p_up"] > 0 else {low}
            assert set(found.ravel()) <= (neighbours if abs(row["x"]) <= largest else {largest}), row
            if row["x"] <= largest:
                assert abs(found.mean() - row["x"]) <= row["mean_tol"], row
            if 0.1 <= row["p_up"] <= 0.9:
                assert found.var() == pytest.approx(row["var_expected"], rel=0.05), row
