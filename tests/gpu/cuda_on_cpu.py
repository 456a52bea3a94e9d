"""CUDA sources on the CPU: an unchanged .cu, compiled by g++ and run thread by thread. Its limits: cuda_on_cpu.h."""

import ctypes
import hashlib
import os
import re
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import numpy as np

HEADER = Path(__file__).with_name("cuda_on_cpu.h")
CXX = "g++"
# The CPU kernel's arithmetic. Device code looks at bytes through pointers to vectors, and NVRTC lets it.
FLAGS = (
    *("-std=c++17", "-O1", "-fPIC", "-shared", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno"),
    *("-fno-strict-aliasing", "-Wno-psabi", "-Wno-attributes", "-Wno-unknown-pragmas"),
)
SANITIZE = ("-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
KERNEL = re.compile(
    r'extern\s*"C"\s*__global__\s*(?:__launch_bounds__\s*\([^)]*\)\s*)?void\s*'
    r"(?:__launch_bounds__\s*\([^)]*\)\s*)?(\w+)\s*\("
)
MOST_PARAMETERS = 256
# A library has one machine that runs threads, however often it was built and loaded.
LAUNCHING = threading.Lock()
STACKS: list[int] = []


def stacks(library: ctypes.CDLL) -> int:
    """The stacks of a block's threads: one set for all libraries, made by the first."""
    if not STACKS:
        library.cuda_on_cpu_stacks.restype = ctypes.c_void_p
        address = library.cuda_on_cpu_stacks()
        if not address:
            raise MemoryError("no memory for the stacks of a block's threads")
        STACKS.append(address)
    return STACKS[0]


@dataclass
class Program:
    """A compiled .cu: its library and the names of its kernels."""

    library: Path
    kernels: tuple[str, ...]

    @cached_property
    def _loaded(self) -> ctypes.CDLL:
        return ctypes.CDLL(str(self.library))

    def set_constant(self, data: bytes) -> None:
        """What `cuda_on_cpu_constant` holds from now on."""
        (ctypes.c_char * 512).in_dll(self._loaded, "cuda_on_cpu_constant")[: len(data)] = data

    def parameter_bytes(self, kernel: str) -> tuple[int, ...]:
        """The size of each parameter."""
        if kernel not in self.kernels:
            raise RuntimeError(f"no kernel {kernel} in the source; it has {', '.join(self.kernels) or 'none'}")
        sizes = (ctypes.c_int * MOST_PARAMETERS)()
        return tuple(sizes[: self._loaded[f"cuda_on_cpu_sizes_{kernel}"](sizes)])

    def launch(self, kernel: str, grid: int, block: int, args: Sequence[np.generic], order: str = "ascending") -> None:
        """Runs `grid` blocks of `block` threads; `args` go by value (a pointer: np.uint64). `order` of threads and
        blocks: ascending, descending, or shuffle:SEED. RuntimeError says why a launch was refused or stopped."""
        if not (1 <= grid < 2**31 and 1 <= block <= 1024):
            raise RuntimeError(f"{kernel}: {grid} blocks of {block} threads; at least 1 each, at most 1024 threads")
        sizes, given = self.parameter_bytes(kernel), tuple(arg.nbytes for arg in args)
        if sizes != given:
            raise RuntimeError(f"{kernel}: the parameters have {sizes} bytes, the arguments {given}")
        kind, _, seed = order.partition(":")
        if kind not in ("ascending", "descending", "shuffle"):
            raise RuntimeError(f"order {order!r} is none of ascending, descending, shuffle:SEED")
        # Python's allocator aligns to 16 bytes, numpy's scalars need not.
        values = [np.frombuffer(arg.tobytes() + bytes(-arg.nbytes % 16), np.uint8).copy() for arg in args]
        pointers = (ctypes.c_void_p * max(len(values), 1))(*[value.ctypes.data for value in values])
        function = self._loaded[f"cuda_on_cpu_launch_{kernel}"]
        function.restype = ctypes.c_char_p
        function.argtypes = (
            *(ctypes.c_uint, ctypes.c_uint, ctypes.c_void_p),
            *(ctypes.c_int, ctypes.c_ulonglong, ctypes.c_void_p),
        )
        number = ("ascending", "descending", "shuffle").index(kind)
        with LAUNCHING:
            message = function(grid, block, pointers, number, int(seed or 0), stacks(self._loaded))
        if message:
            raise RuntimeError(message.decode())


def build(source: Path, definitions: Mapping[str, str], include: Path, sanitize: bool = False) -> Program:
    """Compiles a .cu as NVRTC would with these definitions and this folder of headers, or takes what an earlier call
    compiled from the same texts. FileNotFoundError without g++, RuntimeError with its words. With `sanitize`, memory
    errors end the process, which must have been started in `sanitized_environment()`; shared memory is watched then,
    but not poisoned."""
    given = [f"-D{name}={value}" for name, value in definitions.items()]
    text = run([CXX, "-std=c++17", "-E", "-P", "-x", "c++", "-I", str(include), *given, str(source)])
    kernels = tuple(dict.fromkeys(KERNEL.findall(text)))
    flags = [*FLAGS, *(SANITIZE if sanitize else ()), "-include", str(HEADER)]
    # Not as -D: the shim's own names are none of the definitions' business.
    defines = "".join(f"#define {name} {value}\n" for name, value in definitions.items())
    exports = "".join(f"CUDA_ON_CPU_EXPORT({kernel})\n" for kernel in kernels)
    key = "\0".join([compiler_version(CXX), *flags, defines, text, HEADER.read_text(encoding="utf-8")])
    folder = Path(tempfile.gettempdir()) / f"mxcli-cuda-on-cpu-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    library = folder / f"{source.stem}-{hashlib.sha256(key.encode()).hexdigest()[:32]}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            unit, built = Path(scratch) / "unit.cpp", Path(scratch) / "built.so"
            unit.write_text(f'{defines}#include "{source.absolute()}"\n{exports}', encoding="utf-8")
            run([CXX, *flags, "-I", str(include), str(unit), "-o", str(built)])
            built.replace(library)  # another process may have done the same meanwhile
    return Program(library, kernels)


def sanitized_environment() -> dict[str, str]:
    """The environment of a Python process that may load what `build(..., sanitize=True)` made."""
    libraries = [run([CXX, f"-print-file-name={name}"]).strip() for name in ("libasan.so", "libstdc++.so.6")]
    # Leaks are Python's own; fake stacks do not know of fibers.
    options = "detect_leaks=0:detect_stack_use_after_return=0"
    return {**os.environ, "LD_PRELOAD": " ".join(libraries), "ASAN_OPTIONS": options}


@cache
def compiler_version(compiler: str) -> str:
    return run([compiler, "--version"])


def run(command: Sequence[str]) -> str:
    """Its output; RuntimeError with what it complained of."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
    return done.stdout
