"""kernels/numerics.h as every compiler that reads it sees it, and the structures of the C interface."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from mxcli.backends import abi as library
from mxcli.backends import nvrtc
from mxcli.errors import EnvironmentFailure

KERNELS = Path(__file__).parents[2] / "kernels"
HEADER = (KERNELS / "numerics.h").read_text(encoding="utf-8")
STRICT = [
    "-std=c++17",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wno-psabi",
    "-Wno-unused-function",
    "-fsyntax-only",
    "-x",
    "c++",
    "-",
]

# Uses what kernels use: a template that nothing instantiates is hardly read.
EVERY_FUNCTION = """
struct Everything { unsigned stored; float value; float decode; };
MX_FN Everything mx_everything(float x, MxTensorScale t, MxScheme r) {
  Everything e;
  auto scale = mx_choose_scale(mx_bits(x) & 0x7FFFFFFFu, t, r);
  float scaled = mx_round_to_bf16(mx_zero_input(x, r.clear_zero_input, r.set_zero_input)) * scale.factor;
  auto nearest = mx_encode_nearest_even(scaled, r.element.mantissa_bits, r.element.emin, r.element.max);
  auto other = mx_encode(scaled, r.element.mantissa_bits, r.element.emin, r.element.max, r.rounding);
  e.stored = scale.stored + scale.is_nan + scale.is_lost +
             mx_signed_code(nearest.code + other.code, mx_bits(x) >> 31, r.element.bits, r.element.twos_complement);
  e.value = mx_decode(e.stored, r.element) + nearest.value + other.value;
  e.decode = mx_decode_factor(e.stored, mx_tensor_scale(x, r), r) + mx_power_of_two(3) + (float)mx_round_to_f16(x);
  return e;
}
"""


def compile_with(compiler: str, arguments: list[str], text: str) -> None:
    done = subprocess.run([compiler, *arguments], input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("compiler", ["g++", "clang++"])
@pytest.mark.parametrize("wide", [[], ["-mavx2", "-mfma"], ["-mavx512f"]], ids=["baseline", "avx2", "avx512"])
def test_the_header_needs_nothing(compiler: str, wide: list[str]) -> None:
    """Freestanding, without a single include, for every width of its lanes."""
    if not shutil.which(compiler):
        pytest.skip(f"{compiler} is not installed")
    if wide and "x86_64" not in target_of(compiler):
        pytest.skip(f"{compiler} does not compile for x86-64")
    lanes = "MX_FN MxLanes mx_lanes(MxLanes x) { return mx_encode_nearest_even(x, 3, -6, 448.0f).value; }\n"
    use = "float mx_use(float x, MxTensorScale t, MxScheme r) { return mx_everything(x, t, r).value; }\n"
    use += "float mx_use_lanes(float x) { return mx_lanes(MxLanes{} + x)[0]; }\n"
    compile_with(compiler, ["-ffreestanding", "-nostdlib", *wide, *STRICT], HEADER + EVERY_FUNCTION + lanes + use)


def target_of(compiler: str) -> str:
    return subprocess.run([compiler, "-dumpmachine"], capture_output=True, text=True, check=True).stdout


def test_the_header_includes_nothing() -> None:
    assert "#include" not in HEADER


# --- The C interface ---------------------------------------------------------------------------------------

STRUCTURES: dict[str, type[ctypes.Structure]] = {
    "MxFloat": library.Float,
    "MxRounding": library.Rounding,
    "MxScheme": library.KernelScheme,
    "MxTensor": library.Tensor,
    "MxWorst": library.Worst,
    "MxStats": library.KernelStats,
    "MxPerBlock": library.KernelPerBlock,
    "MxResult": library.Result,
}


def test_structures_are_in_memory_as_python_declares_them() -> None:
    """Size, and place and size of every field."""
    if not shutil.which("g++"):
        pytest.skip("g++ is not installed")
    lines = ['#include "quantize.h"']
    for name, structure in STRUCTURES.items():
        lines.append(f"static_assert(sizeof({name}) == {ctypes.sizeof(structure)}, {name!r});".replace("'", '"'))
        for field, *_ in structure._fields_:
            place = getattr(structure, field)
            lines.append(f'static_assert(__builtin_offsetof({name}, {field}) == {place.offset}, "{name}.{field}");')
            lines.append(f'static_assert(sizeof({name}::{field}) == {place.size}, "{name}.{field}");')
    compile_with("g++", [f"-I{KERNELS}", *STRICT], "\n".join(lines))


def test_the_loaded_library_has_the_same_sizes() -> None:
    sizes = (ctypes.c_int64 * len(library._MIRRORED))()
    library.load().mx_sizes(sizes)
    assert list(sizes) == [ctypes.sizeof(structure) for structure in library._MIRRORED]


# --- NVRTC -------------------------------------------------------------------------------------------------

KERNEL = """
extern "C" __global__ void mx_use(const float* x, MxTensorScale t, MxScheme r, Everything* out) {
  out[threadIdx.x] = mx_everything(x[threadIdx.x], t, r);
}
"""


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100a", "sm_120a"])
def test_the_header_compiles_for_gpus(architecture: str) -> None:
    """Without a remark of the compiler; it needs no GPU."""
    try:
        nvrtc.library()
    except EnvironmentFailure as error:
        pytest.skip(str(error))
    built = nvrtc.build("numerics.cu", HEADER + EVERY_FUNCTION + KERNEL, {}, architecture)
    assert built.log == ""
    assert built.cubin
