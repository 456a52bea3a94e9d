"""CUDA text to machine code with the NVRTC library, and the folder that keeps the result; needs no GPU.

Not through CuPy: it appends `-ftz=true` to the caller's options, and its cache ignores edits to headers.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import hashlib
import importlib.util
import os
import re
import stat
import warnings
from collections.abc import Iterable, Iterator, Mapping
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mxcli.atomic import whole_file
from mxcli.backends.abi import KernelScheme, kernel_folder, literal
from mxcli.backends.device import Kernel
from mxcli.errors import EnvironmentFailure, MxcliError, printable

_SONAMES = ("libnvrtc.so.13", "libnvrtc.so.12")
_PACKAGES = ("nvidia.cu13", "nvidia.cuda_nvrtc")
_INSTALL = (
    "pip install 'nvidia-cuda-nvrtc-cu12>=12.8' for a driver of CUDA 12, nvidia-cuda-nvrtc for one of CUDA 13, or use "
    "--device cpu"
)
_FIRST_WITH_OWN_CODE = 90
"""From this architecture on there is also code for one GPU alone, such as sm_90a."""
_OUT_OF_MEMORY, _COMPILATION, _BUILTINS = 1, 6, 7
_CACHE_FORMAT = 1
_DIGEST_BYTES = hashlib.sha256().digest_size
_OWN_FOLDER, _OWN_FILE = 0o700, 0o600
_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True, slots=True)
class Build:
    """The result of NVRTC for a text: machine code, the PTX it came from, and the compiler's remarks."""

    cubin: bytes
    ptx: str
    log: str


@functools.cache
def library() -> ctypes.CDLL:
    """Return the newest NVRTC that can be loaded: of the pip packages, a CUDA toolkit, or the loader's path."""
    loaded, failures = [], []
    for place in _candidates():
        try:
            loaded.append(ctypes.CDLL(place))
        except OSError as error:
            if str(error) != f"{place}: cannot open shared object file: No such file or directory":
                failures.append(str(error))
    if not loaded and failures:
        raise EnvironmentFailure(f"NVRTC, the CUDA compiler, cannot be loaded: install it again ({_INSTALL})", failures)
    if not loaded:
        raise EnvironmentFailure(f"NVRTC, the CUDA compiler ({' or '.join(_SONAMES)}), is not installed: {_INSTALL}")
    newest = max(loaded, key=_version)
    newest.nvrtcGetErrorString.restype = c_char_p
    return newest


def version() -> tuple[int, int]:
    """Return major and minor version of the NVRTC in use."""
    return _version(library())


def compile(
    name: str, source: str, headers: Mapping[str, str], architecture: str, definitions: Mapping[str, str] = {}
) -> bytes:
    """Return the machine code of the text `source`, called `name` in messages, for an architecture such as sm_90 or
    sm_100a.

    `headers` holds the text of every file that may be included, by name. A text that does not compile is an error of
    mxcli with the compiler's words; an architecture that this NVRTC does not know is an `EnvironmentFailure`.
    """
    return build(name, source, headers, architecture, definitions).cubin


def cubin(
    name: str, source: str, headers: Mapping[str, str], architecture: str, definitions: Mapping[str, str] = {}
) -> bytes:
    """Compile like `compile`, with the result kept in `cache_folder()`; a folder that cannot be read or written, or
    that other users can write to, costs time, never an error."""
    key = _key(name, source, headers, architecture, definitions)
    code = _stored(key)
    if code is None:
        code = compile(name, source, headers, architecture, definitions)
        _store(key, code)
    return code


def build(
    name: str, source: str, headers: Mapping[str, str], architecture: str, definitions: Mapping[str, str] = {}
) -> Build:
    """Compile like `compile`, with everything that NVRTC says about the text."""
    nvrtc, program = library(), c_void_p()
    _check_architecture(architecture)
    status = nvrtc.nvrtcCreateProgram(
        byref(program), source.encode(), name.encode(), len(headers), _strings(headers.values()), _strings(headers)
    )
    if status:
        raise _failure(status, name, architecture, log="")
    try:
        options = _options(architecture, definitions)
        status = nvrtc.nvrtcCompileProgram(program, len(options), _strings(options))
        log = _text(_output(program, "ProgramLog"))
        if status:
            raise _failure(status, name, architecture, log)
        return Build(_output(program, "CUBIN"), _text(_output(program, "PTX")), log)
    finally:
        nvrtc.nvrtcDestroyProgram(byref(program))


def cache_folder() -> Path:
    """Return the folder of cached machine code; it need not exist. Raises RuntimeError if no variable names it and
    there is no home."""
    if chosen := os.environ.get("MXCLI_CACHE_DIR"):
        return Path(chosen) / "cubins"
    caches = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not caches.is_absolute():  # unset or, by the XDG specification, to be ignored
        caches = Path.home() / ".cache"
    return caches / "mxcli" / "cubins"


# --- Finding the library -----------------------------------------------------------------------------------


def _candidates() -> Iterator[str]:
    """Yield every NVRTC that may be here, as a path or as a name for the dynamic loader."""
    toolkits = [os.environ.get("CUDA_PATH"), os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    folders = [*_package_folders(), *(Path(toolkit) / "lib64" for toolkit in toolkits if toolkit)]
    for folder in folders:
        yield from (str(folder / soname) for soname in _SONAMES if (folder / soname).is_file())
    yield from _SONAMES


def _package_folders() -> Iterator[Path]:
    for package in _PACKAGES:
        try:
            spec = importlib.util.find_spec(package)
        except ModuleNotFoundError:  # no package of NVIDIA at all
            continue
        for place in (spec.submodule_search_locations or ()) if spec else ():
            yield Path(place) / "lib"


def _version(nvrtc: ctypes.CDLL) -> tuple[int, int]:
    major, minor = c_int(), c_int()
    nvrtc.nvrtcVersion(byref(major), byref(minor))
    return major.value, minor.value


# --- Compiling ---------------------------------------------------------------------------------------------


def _options(architecture: str, definitions: Mapping[str, str]) -> list[str]:
    """Return the options that every kernel is compiled with: no contraction, no flushing, since results are compared
    bit for bit."""
    return [
        f"--gpu-architecture={architecture}",
        "--std=c++17",
        "--fmad=false",
        "--ftz=false",
        "--prec-div=true",
        "--prec-sqrt=true",
        "--diag-suppress=177",  # a function nothing uses: the header has more of them than any kernel needs
        "--no-source-include",  # a header that was not given is not taken from the working directory
        *(f"-D{name}={value}" for name, value in sorted(definitions.items())),
    ]


def _check_architecture(architecture: str) -> None:
    """Raise unless this NVRTC makes code for `architecture`: its own words for that are those of a broken text."""
    known = _known_architectures()
    parts = re.fullmatch(r"sm_([0-9]{2,4})(a?)", architecture)
    number = int(parts[1]) if parts else 0
    if parts and number in known and (not parts[2] or number >= _FIRST_WITH_OWN_CODE):
        return
    major, minor = version()
    knows = f"NVRTC {major}.{minor} makes no code for {architecture}, only for sm_{min(known)} to sm_{max(known)}"
    if parts and number < min(known):
        raise EnvironmentFailure(f"{knows}: the GPU is too old, use --device cpu")
    raise EnvironmentFailure(
        f"{knows}: install a newer one (sm_100 and sm_120 need 12.8 or newer: pip install --upgrade "
        "'nvidia-cuda-nvrtc-cu12>=12.8', or nvidia-cuda-nvrtc, as the driver allows), or use --device cpu"
    )


def _known_architectures() -> list[int]:
    count = c_int()
    library().nvrtcGetNumSupportedArchs(byref(count))
    numbers = (c_int * count.value)()
    library().nvrtcGetSupportedArchs(numbers)
    return list(numbers)


def _failure(status: int, name: str, architecture: str, log: str) -> MxcliError:
    """Return the error for NVRTC's `status`: mxcli's own unless the machine lacks something."""
    major, minor = version()
    lines = log.splitlines()
    what = f"{name} for {architecture} with NVRTC {major}.{minor}"
    if status == _OUT_OF_MEMORY:
        return EnvironmentFailure(f"not enough memory to compile {what}: free some, or use --device cpu", lines)
    if status == _BUILTINS:
        return EnvironmentFailure(f"cannot compile {what}: {library()._name} is incomplete, install it again", lines)
    said = library().nvrtcGetErrorString(status).decode()
    return MxcliError(f"a bug in mxcli: cannot compile {what} ({said}). Please report it; --device cpu works", lines)


def _strings(texts: Iterable[str]) -> ctypes.Array[c_char_p]:
    encoded = [text.encode() for text in texts]
    return (c_char_p * len(encoded))(*encoded)


def _output(program: c_void_p, kind: str) -> bytes:
    """Return the text that nvrtcGet`kind` writes."""
    size = c_size_t()
    getattr(library(), f"nvrtcGet{kind}Size")(program, byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    getattr(library(), f"nvrtcGet{kind}")(program, buffer)
    return buffer.raw


def _text(output: bytes) -> str:
    return output.rstrip(b"\0").decode(errors="replace").strip()


# --- Keeping machine code ----------------------------------------------------------------------------------


def _key(name: str, source: str, headers: Mapping[str, str], architecture: str, definitions: Mapping[str, str]) -> str:
    """Return the file name for what these arguments compile to: a digest of all that the machine code depends on."""
    options = _options(architecture, definitions)
    everything = (_CACHE_FORMAT, version(), name, source, sorted(headers.items()), options)
    return hashlib.sha256(repr(everything).encode()).hexdigest()


def _digest(key: str, code: bytes) -> bytes:
    """Return the digest stored before the code; it covers the key, so that a file copied from another name is
    invalid."""
    return hashlib.sha256(key.encode() + code).digest()


def _stored(key: str) -> bytes | None:
    """Return the machine code of a key, if the cache has a valid entry that nobody but this user and root can write."""
    try:
        folder = _open_folder(cache_folder())
    except (OSError, RuntimeError):
        return None
    try:
        content = _own_content(key, folder)
    except FileNotFoundError:
        return None
    except OSError as error:
        _note_unused(str(cache_folder() / key), error.strerror or str(error))
        return None
    finally:
        os.close(folder)
    digest, code = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    return code if digest == _digest(key, code) else None


def _store(key: str, code: bytes) -> None:
    """Write an entry; a reader or a killed process never sees half of one."""
    try:
        folder = cache_folder()
        folder.parent.mkdir(mode=_OWN_FOLDER, parents=True, exist_ok=True)
        folder.mkdir(mode=_OWN_FOLDER, exist_ok=True)
        os.close(_open_folder(folder))
        with whole_file(folder / key, replace=True, mode=_OWN_FILE) as file:
            file.write(_digest(key, code) + code)
    except (OSError, RuntimeError):
        return


def _open_folder(folder: Path) -> int:
    """Open the cache folder, links resolved. Raises PermissionError, with a note, if another user could have written
    to it or to a folder above it: machine code from there could be anybody's."""
    path = folder.resolve(strict=True)
    for parent in reversed(path.parents):
        _check_own(parent, parent.lstat(), may_be_sticky=True)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _check_own(path, os.fstat(descriptor))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _own_content(key: str, folder: int) -> bytes:
    """Return the content of an entry. Raises PermissionError unless it is a regular file that nobody but this user and
    root can write."""
    descriptor = os.open(key, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise PermissionError(errno.EPERM, "not a regular file")
        _check_own(cache_folder() / key, status)
        return file.read()


def _check_own(path: Path, status: os.stat_result, *, may_be_sticky: bool = False) -> None:
    """Raise PermissionError, with a note, unless a path belongs to this user or root and others cannot write to it;
    where it `may_be_sticky`, others may add to it, as to /tmp."""
    problem = None
    if status.st_uid not in (0, os.geteuid()):
        problem = f"belongs to user {status.st_uid}"
    elif status.st_mode & _BY_OTHERS and not (may_be_sticky and status.st_mode & stat.S_ISVTX):
        problem = f"can be written by others (mode {stat.S_IMODE(status.st_mode):o})"
    if problem is not None:
        _note_unused(str(path), problem)
        raise PermissionError(errno.EPERM, problem, str(path))


@cache
def _note_unused(path: str, problem: str) -> None:
    """Warn, once for each path, that kernels are compiled again."""
    warnings.warn(
        f"{printable(path)}: {problem}, so machine code in it is not used and kernels are compiled again; "
        "set MXCLI_CACHE_DIR to a folder of your own.",
        stacklevel=2,
    )


FILES = (
    *("quantize_rows.cu", "quantize_blocks.cu", "quantize_both.cu", "measure_rows.cu", "measure_blocks.cu"),
    *("dequantize.cu", "reduce.cu"),
)
HEADERS = ("numerics.h", "device.h", "blocks.h", "measure.h")


@cache
def source(file: str) -> str:
    """Return the text of a kernel file or header of this installation."""
    return (kernel_folder() / file).read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Compiler:
    """Kernels for GPUs of one compute capability."""

    capability: tuple[int, int]

    @property
    def architecture(self) -> str:
        """The architecture to compile for: from 10.0 on the one of this very GPU."""
        major, minor = self.capability
        return f"sm_{major}{minor}" + ("a" if major >= 10 else "")

    @property
    def conversions(self) -> int:
        """MX_HARDWARE of `kernels/device.h`."""
        if self.capability < (8, 9):
            return 0
        return 1 if self.capability < (10, 0) else 2

    def text(self, kernel: Kernel) -> tuple[str, Mapping[str, str], dict[str, str]]:
        """Return the kernel's source, the headers it may include, and its definitions."""
        definitions = dict(kernel.definitions)
        if kernel.scheme:
            definitions["MX_SCHEME"] = "MxScheme" + literal(KernelScheme.from_buffer_copy(kernel.scheme))
        return source(kernel.file), {name: source(name) for name in HEADERS}, definitions

    def cubin(self, kernel: Kernel) -> bytes:
        """Return the file of a kernel as machine code, from the cache where it has been compiled before.

        Raises EnvironmentFailure where there is no compiler for this GPU.
        """
        text, headers, definitions = self.text(kernel)
        return cubin(kernel.file, text, headers, self.architecture, definitions)
