"""Kernel sources: architectures, texts and definitions, and compilation by NVRTC without remarks."""

from __future__ import annotations

import pytest
from compiled_kernels import EXAMPLES, codes, compile_all, kernels_for, reductions, remarks
from kernel_oracle import scheme_of
from slow_cases import slow_except

from mxcli.backends import nvrtc
from mxcli.backends.abi import kernel_folder, kernel_scheme, literal
from mxcli.backends.device import Kernel
from mxcli.backends.nvrtc import FILES, HEADERS, Compiler, source
from mxcli.errors import EnvironmentFailure
from mxcli.numerics.formats import FORMATS

try:
    nvrtc.library()
    MISSING = ""
except EnvironmentFailure as failure:
    MISSING = str(failure)
needs_nvrtc = pytest.mark.skipif(bool(MISSING), reason=MISSING)


@pytest.mark.parametrize(
    ("capability", "architecture", "conversions"),
    [
        ((8, 0), "sm_80", 0),
        ((8, 6), "sm_86", 0),
        ((8, 9), "sm_89", 1),
        ((9, 0), "sm_90", 1),
        ((10, 0), "sm_100a", 2),
        ((10, 3), "sm_103a", 2),
        ((12, 0), "sm_120a", 2),
        ((12, 1), "sm_121a", 2),
    ],
)
def test_architectures(capability: tuple[int, int], architecture: str, conversions: int) -> None:
    assert (Compiler(capability).architecture, Compiler(capability).conversions) == (architecture, conversions)


def test_schemes_are_constants() -> None:
    """MXFP4: E2M1 up to 6, E8M0, nearest even, blocks of 1x32, 4 bits stored, the exponent of the ratio, rounded up."""
    assert literal(kernel_scheme(scheme_of("mxfp4", "rceil"))) == (
        "{{4, 1, 0, 2, 0, 0, 0x1.8000000000000p+2f}, {8, 0, -127, 127, 255, 0, 0x1.0000000000000p+127f}, "
        "{0x1.0000000000000p-1f, 1, 0, 0}, 0, 8, 1, 32, 4, 1, 0u, {0, 0, 0, 0}, 0, -127, -127, 0, 0, 0, 0, "
        "0x0.0p+0f, 0x0.0p+0f, {0.0, 0.0, 0.0, 0.0}, 0, 0, 0x0.0p+0f, 0x0.0p+0f, 0, 0, 0, 0, 0, 0, 0}"
    )


def test_text_and_definitions_of_a_kernel() -> None:
    kernel = codes("mxfp4", "rceil", (9, 0))
    text, headers, definitions = Compiler((9, 0)).text(kernel)
    assert text == (kernel_folder() / "quantize_rows.cu").read_text(encoding="utf-8")
    assert set(headers) == {"numerics.h", "device.h", "blocks.h", "measure.h"}
    assert dict(definitions) == {
        "MX_BITS": "4",
        "MX_ELEMENTS": "32",
        "MX_HARDWARE": "1",
        "MX_SOURCE": "1",
        "MX_SWIZZLED": "0",
        "MX_WIDTH": "32",
        "MX_SCHEME": "MxScheme" + literal(kernel_scheme(scheme_of("mxfp4", "rceil"))),
    }
    (amax, _) = reductions("BF16")
    assert dict(Compiler((9, 0)).text(amax)[2]) == {"MX_SOURCE": "1"}


def test_all_files_are_installed_and_used() -> None:
    for file in (*FILES, *HEADERS):
        assert source(file).startswith("// ")
    kernels = kernels_for((9, 0))
    assert {kernel.file for kernel in kernels.values()} == set(FILES)
    assert {kernels[example].file for example in EXAMPLES} == set(FILES)


# --- Compiling ---------------------------------------------------------------------------------------------


def ptx(kernel: Kernel, capability: tuple[int, int]) -> str:
    compiler = Compiler(capability)
    text, headers, definitions = compiler.text(kernel)
    return nvrtc.build(kernel.file, text, headers, compiler.architecture, definitions).ptx


@needs_nvrtc
@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_compile_without_remarks(example: str) -> None:
    assert remarks(kernels_for((9, 0))[example], (9, 0)) == ""


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0), (12, 0)], ids=lambda c: Compiler(c).architecture)
def test_every_kernel_compiles_without_remarks(capability: tuple[int, int]) -> None:
    """Named formats with their default rule and with `best`; `kernels_for` states the omissions."""
    said = compile_all(capability)
    assert {what: words for what, words in said.items() if words} == {}
    assert {f"codes of {name}" for name in FORMATS} <= said.keys()
    print(f"{len(said)} kernels for {Compiler(capability).architecture}")


CONVERSIONS = {
    "mxfp8_e4m3": ("e4m3x2", 1),
    "mxfp8_e5m2": ("e5m2x2", 1),
    "fp8_e4m3_128x128": ("e4m3x2", 1),
    "mxfp4_e2m1": ("e2m1x2", 2),
    "nvfp4": ("e2m1x2", 2),
    "mxfp6_e2m3": ("e2m3x2", 2),
    "mxfp6_e3m2": ("e3m2x2", 2),
    "mxint8": ("x2.f32", 3),
}
"""The conversion instruction of a format, and the conversion level that has it."""


@needs_nvrtc
@pytest.mark.parametrize(
    ("name", "capability"),
    slow_except(
        [
            *(("mxfp8_e4m3", (8, 0)), ("mxfp8_e4m3", (9, 0)), ("mxfp4_e2m1", (9, 0)), ("mxfp4_e2m1", (10, 0))),
            *(("mxfp6_e2m3", (10, 0)), ("mxint8", (10, 0))),
        ],
        [(name, capability) for name in CONVERSIONS for capability in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0))],
    ),
)
def test_conversion_instructions(name: str, capability: tuple[int, int]) -> None:
    """To FP8 from 8.9 on, to FP6 and FP4 from 10.0 on, to integers never; otherwise in software."""
    instruction, since = CONVERSIONS[name]
    made = ptx(codes(name, None, capability), capability)
    converts = f"cvt.rn.satfinite.{instruction}" in made
    assert converts == (Compiler(capability).conversions >= since)
    assert converts or "cvt.rn.satfinite" not in made


@needs_nvrtc
def test_other_roundings_are_converted_in_software() -> None:
    """Hardware only rounds to nearest even."""
    half_away = Kernel(
        *("quantize_rows.cu", "mx_quantize_rows", codes("mxfp8", None, (9, 0)).definitions),
        bytes(kernel_scheme(scheme_of("mxfp8", rounding="half-away"))),
    )
    assert "cvt.rn.satfinite.e4m3x2" not in ptx(half_away, (9, 0))


@needs_nvrtc
def test_machine_code_is_cached(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MXCLI_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
    (amax, worst) = reductions("BF16")
    made = Compiler((9, 0)).cubin(amax)
    assert made[:4] == b"\x7fELF"
    monkeypatch.setattr(nvrtc, "compile", None)
    assert Compiler((9, 0)).cubin(worst) == made  # another kernel of the same file
