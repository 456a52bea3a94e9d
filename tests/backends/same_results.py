"""Bitwise comparison of two backends; GPU is the emulated GPU, or a real one."""

from __future__ import annotations

import os
import shutil
from dataclasses import fields
from typing import Any

import cuda_on_cpu
import numpy as np
import numpy.typing as npt
import pytest
from kernel_oracle import DTYPES
from processor_device import ProcessorDevice

from mxcli.backends import choose_backend, cpu
from mxcli.backends.backend import Backend
from mxcli.backends.cuda import Cuda
from mxcli.numerics.blocks import PerBlock, Quantized
from mxcli.numerics.scheme import Scheme
from mxcli.numerics.stats import Histogram, Stats

Array = npt.NDArray[Any]
needs_cxx = pytest.mark.skipif(shutil.which(cuda_on_cpu.CXX) is None, reason="needs g++ to run CUDA on a CPU")
WANTED_GPU = os.environ.get("MXCLI_TEST_GPU")
"""A real GPU to test, such as cuda:0."""
GPU = choose_backend(WANTED_GPU) if WANTED_GPU else Cuda(ProcessorDevice())
CPU = cpu.Cpu(threads=1)


def bits(x: Array) -> tuple[Array, str]:
    """Return a tensor and its type as backends take them, from its numpy type (bfloat16 is from ml_dtypes)."""
    dtype = next(name for name, kind in DTYPES.items() if kind == x.dtype)
    return (x.view(np.uint16) if dtype == "BF16" else x), dtype


def quantize(backend: Backend, x: Array, scheme: Scheme, **options: Any) -> Quantized:
    return backend.quantize(*bits(x), scheme, **options)


def assert_same(x: Array, scheme: Scheme, gpu: Backend = GPU, *, cpu: Backend = CPU, **options: Any) -> Quantized:
    """Quantize on both backends with the same options; return the GPU's result."""
    with np.errstate(all="ignore"):
        wanted, given = quantize(cpu, x, scheme, **options), quantize(gpu, x, scheme, **options)
    case = f"{scheme.format.name} {scheme.scale_rule.name} {scheme.rounding.name} {scheme.dialect.name}"
    found = differences(given, wanted)
    assert not found, f"{case} {x.dtype} {x.shape} {options}: {found}"
    return given


def measure_and_quantize(x: Array, scheme: Scheme, gpu: Backend = GPU) -> None:
    """Compare the kernels with statistics and those without."""
    assert_same(x, scheme, gpu, stats=False)
    assert_same(x, scheme, gpu, per_block=True)


def differences(given: Quantized, wanted: Quantized) -> list[str]:
    """Return each difference: its name and first position."""
    found = [f"{name}: {first_difference(getattr(given, name), getattr(wanted, name))}" for name in ("packed", "scales")
             if not same_bytes(getattr(given, name), getattr(wanted, name))]  # fmt: skip
    for name in ("scheme", "shape", "tensor_scale", "tensor_encode"):
        if getattr(given, name) != getattr(wanted, name):
            found.append(f"{name}: {getattr(given, name)}, not {getattr(wanted, name)}")
    if (given.stats is None) != (wanted.stats is None) or (given.per_block is None) != (wanted.per_block is None):
        return [*found, "only one result has statistics"]
    if given.stats is not None and wanted.stats is not None:
        found += stats_that_differ(given.stats, wanted.stats)
    for name in PerBlock.__slots__ if given.per_block is not None else ():
        ours, theirs = getattr(given.per_block, name), getattr(wanted.per_block, name)
        if not same_bytes(ours, theirs):
            found.append(f"{name} of blocks: {first_difference(ours, theirs)}")
    return found


def stats_that_differ(given: Stats, wanted: Stats) -> list[str]:
    return [
        f"{field.name}: {shown(ours)}, not {shown(theirs)}"
        for field in fields(Stats)
        for ours, theirs in [(getattr(given, field.name), getattr(wanted, field.name))]
        if not (ours == theirs or (isinstance(ours, float) and np.isnan(ours) and np.isnan(theirs)))
    ]


def shown(value: object) -> object:
    return dict(value.counted) if isinstance(value, Histogram) else value


def same_bytes(given: Array, wanted: Array) -> bool:
    """Return whether types, shapes and bits are equal."""
    return given.dtype == wanted.dtype and given.shape == wanted.shape and given.tobytes() == wanted.tobytes()


def first_difference(given: Array, wanted: Array) -> str:
    """Describe the first difference of two arrays."""
    if given.dtype != wanted.dtype or given.shape != wanted.shape:
        return f"{given.dtype} {given.shape}, not {wanted.dtype} {wanted.shape}"
    size = given.itemsize
    ours, theirs = (np.frombuffer(each.tobytes(), np.uint8).reshape(-1, size) for each in (given, wanted))
    differ = np.flatnonzero((ours != theirs).any(1))
    at = tuple(int(i) for i in np.unravel_index(differ[0], given.shape)) if given.shape else ()
    return f"{differ.size} of {given.size} differ, first {at}: {given[at]!r}, not {wanted[at]!r}"
