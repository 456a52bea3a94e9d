"""The kernels that named formats launch, and their compilation by NVRTC."""

from __future__ import annotations

import functools
import hashlib
import multiprocessing
import os
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from kernel_oracle import scheme_of

from mxcli.backends import nvrtc
from mxcli.backends.device import Kernel
from mxcli.backends.launches import Addresses, KernelJob, amax_of
from mxcli.backends.nvrtc import Compiler
from mxcli.errors import MxcliError
from mxcli.numerics.formats import FORMATS
from mxcli.numerics.hadamard import find_hadamard
from mxcli.numerics.scheme import scale_rules

SHAPE = (4096, 4096)
NOWHERE = Addresses(0)
ONE_OF_EACH_KIND = (
    *("mxfp8_e4m3", "mxfp6_e2m3", "mxfp4_e2m1", "nvfp4", "nvfp4_2d"),
    *("fp8_e4m3", "fp8_e4m3_1x128", "fp8_e4m3_128x128"),
)
"""Formats whose kernels differ in more than constants."""


def codes(name: str, rule: str | None, capability: tuple[int, int]) -> Kernel:
    """Return the kernel for codes and scales of a bfloat16 matrix."""
    job = KernelJob(SHAPE, "BF16", scheme_of(name, rule))
    return job.quantize(job.piece(0, job.cut.units), NOWHERE, Compiler(capability).conversions).kernel


def statistics(name: str, rule: str | None, capability: tuple[int, int], *, with_codes: bool) -> list[Kernel]:
    """Return the kernels for statistics of a bfloat16 matrix."""
    job, conversions = KernelJob(SHAPE, "BF16", scheme_of(name, rule)), Compiler(capability).conversions
    piece = job.piece(0, job.cut.units)
    launches = [job.measure(piece, NOWHERE, 132, conversions=conversions, codes=with_codes)]
    if job.has_shares:
        launches.append(job.measure_whole(NOWHERE, conversions, codes=with_codes))
    return [launch.kernel for launch in launches]


def values(name: str, dtype: str) -> Kernel:
    """Return the kernel that dequantizes a matrix."""
    job = KernelJob(SHAPE, dtype, scheme_of(name))
    return job.dequantize(job.piece(0, job.cut.units), NOWHERE, 1.0, 1.0).kernel


def one_pass(name: str, dtype: str, to: str, size: int | None = None) -> Kernel:
    """Return the kernel that quantizes and dequantizes a matrix, with a transform of a size or none."""
    job = KernelJob(SHAPE, dtype, scheme_of(name, hadamard=size and find_hadamard(size)))
    return job.quantize_dequantize(job.piece(0, job.cut.units), NOWHERE, to).kernel


def reductions(dtype: str) -> list[Kernel]:
    """Return the kernels for amax and the noisiest blocks."""
    job = KernelJob(SHAPE, dtype, scheme_of("mxfp8"))
    return [amax_of(dtype, 0, 1, 0, 0, 132).kernel, job.worst(0, 1, 0, 0).kernel]


def training_kernels(capability: tuple[int, int]) -> dict[str, Kernel]:
    """Return kernels with stochastic rounding, transforms and both axes by description; statistics only for 9.0."""
    conversions, found = Compiler(capability).conversions, dict[str, Kernel]()
    for name in ("mxfp8", "nvfp4", "nvfp4_2d", "fp8_e4m3", "fp8_e4m3_1x128"):
        for size in (None, 16, 128) if name == "nvfp4" else (None, 16):
            hadamard = None if size is None else find_hadamard(size)
            scheme = scheme_of(name, rounding="stochastic", hadamard=hadamard)
            job = KernelJob(SHAPE, "BF16", scheme)
            piece = job.piece(0, job.cut.units)
            what = f"{name}, stochastic, {hadamard.name if hadamard else 'no transform'}"
            found[f"codes of {what}"] = job.quantize(piece, NOWHERE, conversions).kernel
            if capability == (9, 0) and size == 16 and name in ("nvfp4", "nvfp4_2d"):
                found[f"statistics of {what}"] = job.measure(
                    piece, NOWHERE, 132, conversions=conversions, codes=False
                ).kernel
            if hadamard is not None:
                found[f"values of {what}"] = job.dequantize(piece, NOWHERE, 1.0, 1.0).kernel
                found[f"amax of {what}"] = amax_of("BF16", 0, 1, 0, 0, 132, hadamard).kernel
            if job.has_both:
                found[f"both axes of {what}"] = job.quantize_both(NOWHERE, NOWHERE, 132, conversions).kernel
    return found


@functools.cache
def kernels_for(capability: tuple[int, int]) -> dict[str, Kernel]:
    """Return all kernels by description. Statistics kernels take seconds each: for GPUs other than 9.0, and without
    codes, only one format of each kind with its default rule; without codes only for 9.0."""
    found: dict[str, Kernel] = {}
    for name, row in FORMATS.items():
        for rule in (None, "best") if "best" in scale_rules(row) else (None,):
            what = f"{name} {rule or ''}".rstrip()
            found[f"codes of {what}"] = codes(name, rule, capability)
            for with_codes in (True, False):
                is_example = name in ONE_OF_EACH_KIND and rule is None
                if (with_codes or is_example) if capability == (9, 0) else (with_codes and is_example):
                    for kernel in statistics(name, rule, capability, with_codes=with_codes):
                        found[f"statistics of {what}, {'with' if with_codes else 'without'} codes, {kernel.name}"] = (
                            kernel
                        )
        found[f"values of {name}"] = values(name, "BF16")
        found[f"one pass of {name}"] = one_pass(name, "BF16", "BF16")
    for dtype in ("F32", "F16", "F64"):
        found[f"{dtype} codes of mxfp4"] = codes("mxfp4", None, capability)
        found[f"{dtype} values of mxfp6"] = values("mxfp6", dtype)
        found[f"{dtype} one pass of mxfp4"] = one_pass("mxfp4", dtype, dtype)
    for size in (16, 128):
        found[f"one pass of mxfp8, hadamard-{size}"] = one_pass("mxfp8", "BF16", "BF16", size)
    for dtype in ("F32", "BF16", "F16", "F64"):
        found |= {f"{dtype} {kernel.name}": kernel for kernel in reductions(dtype)}
    for dtype in ("F32", "BF16", "F64"):
        both = KernelJob(SHAPE, dtype, scheme_of("mxfp8")).quantize_both(
            NOWHERE, NOWHERE, 132, Compiler(capability).conversions
        )
        found[f"{dtype} both axes of mxfp8"] = both.kernel
    return found | training_kernels(capability)


EXAMPLES = (
    *("codes of mxfp8_e4m3", "codes of nvfp4", "codes of mxfp4_e2m1 best", "codes of nvfp4_2d"),
    *("one pass of nvfp4", "one pass of fp8_e4m3_128x128", "one pass of mxfp8, hadamard-16"),
    *("values of mxfp8_e4m3", "BF16 mx_amax", "F32 both axes of mxfp8", "amax of nvfp4, stochastic, hadamard-16"),
    "statistics of mxfp4_e2m1, with codes, mx_measure_rows",
    "statistics of fp8_e4m3, with codes, mx_measure_parts",
    "statistics of fp8_e4m3_128x128, with codes, mx_measure_blocks",
)
"""Kernels of all files, one of each kind; compiling them takes seconds."""


def remarks(kernel: Kernel, capability: tuple[int, int]) -> str:
    """Compile a kernel; return NVRTC's log or error, empty if there is none. Kernels without remarks are remembered."""
    compiler = Compiler(capability)
    text, headers, definitions = compiler.text(kernel)
    everything = (nvrtc.version(), compiler.architecture, kernel.name, text, headers, sorted(definitions.items()))
    folder = Path(tempfile.gettempdir()) / f"mxcli-compiled-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    silent = folder / hashlib.sha256(repr(everything).encode()).hexdigest()
    if silent.exists():
        return ""
    try:
        build = nvrtc.build(kernel.file, text, headers, compiler.architecture, definitions)
    except MxcliError as error:
        return str(error)
    if kernel.name not in build.ptx:
        return f"it has no {kernel.name}"
    if not build.log:
        silent.touch()
    return build.log


def compile_all(capability: tuple[int, int]) -> dict[str, str]:
    """Return the remarks about all kernels, compiled in several processes: NVRTC compiles one source at a time. A file
    with the same definitions is compiled once."""
    kernels = kernels_for(capability)
    distinct = {(k.file, k.definitions, k.scheme): k for k in kernels.values()}
    slow_first = sorted(distinct.items(), key=lambda item: not item[0][0].startswith("measure"))
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        started = {key: pool.submit(remarks, kernel, capability) for key, kernel in slow_first}
        return {what: started[k.file, k.definitions, k.scheme].result() for what, k in kernels.items()}
