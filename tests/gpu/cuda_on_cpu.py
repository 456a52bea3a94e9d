"""CUDA on the CPU: an unchanged .cu, compiled by g++ and run thread by thread. cuda_on_cpu.h states the limits."""

import ctypes
import hashlib
import os
import re
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import numpy as np

HEADER = Path(__file__).with_name("cuda_on_cpu.h")
CXX = "g++"
# The CPU kernel's arithmetic. Device code accesses bytes through vector pointers, which NVRTC allows. -Og compiles in
# half the time of -O1, and most kernels run on few elements.
FLAGS = (
    *("-std=c++17", "-Og", "-fPIC", "-shared", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno"),
    *("-fno-strict-aliasing", "-Wno-psabi", "-Wno-attributes", "-Wno-unknown-pragmas"),
)
SANITIZE = ("-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
KERNEL = re.compile(
    r'extern\s*"C"\s*__global__\s*(?:__launch_bounds__\s*\([^)]*\)\s*)?void\s*'
    r"(?:__launch_bounds__\s*\([^)]*\)\s*)?(\w+)\s*\("
)
MOST_PARAMETERS = 256
CONSTANT_BYTES = 512
# Launches are serialized: a library has one machine that runs threads, even if it is loaded several times.
LAUNCHING = threading.Lock()
STACKS: list[int] = []


def stacks(library: ctypes.CDLL) -> int:
    """Return the stacks of a block's threads: one set for all libraries, mapped by the first."""
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

    def set_constant(self, data: bytes, at: int = 0) -> None:
        """Set the bytes of `cuda_on_cpu_constant` from `at` on."""
        (ctypes.c_char * CONSTANT_BYTES).in_dll(self._loaded, "cuda_on_cpu_constant")[at : at + len(data)] = data

    def parameter_bytes(self, kernel: str) -> tuple[int, ...]:
        """Return the size of each parameter."""
        if kernel not in self.kernels:
            raise RuntimeError(f"no kernel {kernel} in the source; it has {', '.join(self.kernels) or 'none'}")
        sizes = (ctypes.c_int * MOST_PARAMETERS)()
        return tuple(sizes[: self._loaded[f"cuda_on_cpu_sizes_{kernel}"](sizes)])

    def launch(self, kernel: str, grid: int, block: int, args: Sequence[np.generic], order: str = "ascending") -> None:
        """Run `grid` blocks of `block` threads with `args` by value (a pointer: np.uint64). `order` of threads and
        blocks: ascending, descending, or shuffle:SEED. Raises RuntimeError if the launch is invalid or stopped."""
        if not (1 <= grid < 2**31 and 1 <= block <= 1024):
            raise RuntimeError(f"{kernel}: {grid} blocks of {block} threads; at least 1 each, at most 1024 threads")
        sizes, given = self.parameter_bytes(kernel), tuple(arg.nbytes for arg in args)
        if sizes != given:
            raise RuntimeError(f"{kernel}: the parameters have {sizes} bytes, the arguments {given}")
        kind, _, seed = order.partition(":")
        if kind not in ("ascending", "descending", "shuffle"):
            raise RuntimeError(f"order {order!r} is not ascending, descending or shuffle:SEED")
        # Python's allocator aligns to 16 bytes; numpy scalars may be less aligned.
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
    """Compile a .cu as NVRTC would with these definitions and this folder of headers. All processes of a user share the
    builds: each distinct one is compiled once.

    Raises FileNotFoundError without g++, RuntimeError with its messages if it fails. With `sanitize`, memory errors end
    the process, which must have been started in `sanitized_environment()`; shared memory is watched then, but not
    poisoned.
    """
    flags = [*FLAGS, *(SANITIZE if sanitize else ())]
    # Not as -D: the definitions must not affect the header.
    defines = "".join(f"#define {name} {value}\n" for name, value in definitions.items())
    texts = [path.read_text(encoding="utf-8") for path in (HEADER, source, *sorted(include.glob("*.h")))]
    stem = cache_folder() / f"{source.stem}-{digest(compiler_version(CXX), *flags, defines, *texts)}"
    library, names = stem.with_suffix(".so"), stem.with_suffix(".kernels")

    def compile_library() -> None:
        given = [f"-D{name}={value}" for name, value in definitions.items()]
        text = run([CXX, "-std=c++17", "-E", "-P", "-x", "c++", "-I", str(include), *given, str(source)])
        kernels = tuple(dict.fromkeys(KERNEL.findall(text)))
        exports = "".join(f"CUDA_ON_CPU_EXPORT({kernel})\n" for kernel in kernels)
        unit = stem.with_suffix(".cpp")
        unit.write_text(f'{defines}#include "{source.absolute()}"\n{exports}', encoding="utf-8")
        run([CXX, *flags, "-include", str(precompiled(flags)), "-I", str(include), str(unit), "-o", str(library)])
        names.with_suffix(".new").write_text(" ".join(kernels), encoding="utf-8")
        unit.unlink()

    once(names, compile_library)
    return Program(library, tuple(names.read_text(encoding="utf-8").split()))


def precompiled(flags: Sequence[str]) -> Path:
    """Return a copy of the header that is precompiled for these flags, which takes half the time of a small build."""
    text = HEADER.read_text(encoding="utf-8")
    folder = cache_folder() / f"header-{digest(compiler_version(CXX), *flags, text)}"
    folder.mkdir(exist_ok=True)
    header, compiled = folder / HEADER.name, folder / f"{HEADER.name}.gch"

    def compile_header() -> None:
        header.write_text(text, encoding="utf-8")
        run([CXX, *flags, "-x", "c++-header", str(header), "-o", str(compiled.with_suffix(".new"))])

    once(compiled, compile_header)
    return header


def cache_folder() -> Path:
    """Return the folder of builds, which all processes of a user share."""
    folder = Path(tempfile.gettempdir()) / f"mxcli-cuda-on-cpu-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def digest(*texts: str) -> str:
    """Return a file name for texts."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:32]


def once(result: Path, make: Callable[[], None]) -> None:
    """Make a file unless it exists: one process does, others wait. `make` writes it with the suffix .new."""
    import fcntl  # not on Windows, where modules that import this one are still collected

    if result.exists():
        return
    with result.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not result.exists():
            make()
            result.with_suffix(".new").replace(result)


def sanitized_environment() -> dict[str, str]:
    """Return the environment of a Python process that may load what `build(..., sanitize=True)` built."""
    libraries = [run([CXX, f"-print-file-name={name}"]).strip() for name in ("libasan.so", "libstdc++.so.6")]
    # Leaks are Python's; the sanitizer's fake stacks do not support fibers.
    options = "detect_leaks=0:detect_stack_use_after_return=0"
    return {**os.environ, "LD_PRELOAD": " ".join(libraries), "ASAN_OPTIONS": options}


@cache
def compiler_version(compiler: str) -> str:
    """Return a compiler's version text."""
    return run([compiler, "--version"])


def run(command: Sequence[str]) -> str:
    """Return a command's output; raises RuntimeError with its errors if it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
    return done.stdout
