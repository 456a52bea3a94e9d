"""NVRTC compiles CUDA sources with IEEE arithmetic, and the cache compiles each once."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import mxcli
from mxcli.backends import nvrtc
from mxcli.errors import EnvironmentFailure, MxcliError

try:
    nvrtc.library()
    MISSING = ""
except EnvironmentFailure as failure:
    MISSING = str(failure)
needs_nvrtc = pytest.mark.skipif(bool(MISSING), reason=MISSING)

HEADERS = {"twice.h": "__device__ inline float twice(float x) { return 2 * x; }\n"}
SOURCE = """
#include "twice.h"
extern "C" __global__ void mx_use(float* x) { x[threadIdx.x] = twice(x[threadIdx.x]); }
"""
ELF = b"\x7fELF"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the test an empty cache."""
    monkeypatch.setenv("MXCLI_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "cubins"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the names of the sources compiled so far."""
    names: list[str] = []
    compile = nvrtc.compile

    def counted(name: str, *others: object) -> bytes:
        names.append(name)
        return compile(name, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(nvrtc, "compile", counted)
    return names


def start(code: str) -> subprocess.Popen[str]:
    """Start Python code in a new process, with the mxcli under test and the kernel above."""
    text = f"from mxcli.backends import nvrtc\n{HEADERS = }\n{SOURCE = }\n" + textwrap.dedent(code)
    environment = {**os.environ, "PYTHONPATH": str(Path(mxcli.__file__).parents[1])}
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-P", "-c", text], stdin=pipe, stdout=pipe, env=environment, text=True)


def run(code: str) -> str:
    process = start(code)
    printed, _ = process.communicate()
    assert process.returncode == 0
    return printed


def entry(cache: Path) -> Path:
    (file,) = cache.iterdir()
    return file


# --- Compiling ---------------------------------------------------------------------------------------------


@needs_nvrtc
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_90a", "sm_100a", "sm_120a"])
def test_a_kernel_with_a_header_compiles(architecture: str) -> None:
    assert nvrtc.compile("use.cu", SOURCE, HEADERS, architecture).startswith(ELF)


@needs_nvrtc
def test_given_header_takes_precedence_over_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "twice.h").write_text("#error a file was read\n")
    monkeypatch.chdir(tmp_path)
    assert nvrtc.compile("use.cu", SOURCE, HEADERS, "sm_90").startswith(ELF)


@needs_nvrtc
def test_definitions() -> None:
    source = 'extern "C" __global__ void NAME(int* x) { *x = VALUE; }'
    ptx = nvrtc.build("use.cu", source, {}, "sm_90", {"VALUE": "12345", "NAME": "mx_named"}).ptx
    assert "mx_named" in ptx
    assert "12345" in ptx


@needs_nvrtc
def test_no_contraction_flushing_or_approximation_in_ptx() -> None:
    source = """
    extern "C" __global__ void mx_add(float* r, float x, float y, float z) { *r = x * y + z; }
    extern "C" __global__ void mx_divide(float* r, float x, float y) { *r = x / y; }
    extern "C" __global__ void mx_root(float* r, float x) { *r = sqrtf(x); }
    """
    ptx = nvrtc.build("sums.cu", source, {}, "sm_90").ptx
    assert [name for name in ("mul.rn.f32", "add.rn.f32", "div.rn.f32", "sqrt.rn.f32") if name not in ptx] == []
    assert [name for name in ("fma", ".ftz", ".approx", ".full") if name in ptx] == []


@needs_nvrtc
def test_no_contraction_in_machine_code() -> None:
    """sm_90 instructions have 16 bytes with the opcode in the low 12 bits: FADD 0x221, FFMA 0x223."""

    def opcodes(result: str) -> set[int]:
        source = 'extern "C" __global__ void mx(float* r, float* x) { *r = ' + result + "; }"
        code = nvrtc.compile("sums.cu", source, {}, "sm_90")
        found = {int.from_bytes(code[at : at + 2], "little") & 0xFFF for at in range(0, len(code), 16)}
        return found & {0x221, 0x223}

    assert opcodes("x[0] * x[1] + x[2]") == {0x221}
    assert opcodes("fmaf(x[0], x[1], x[2])") == {0x223}


@needs_nvrtc
def test_compile_errors_are_internal_errors_with_the_log() -> None:
    with pytest.raises(MxcliError) as raised:
        nvrtc.compile("broken.cu", '#include "twice.h"\nint f() { return nowhere; }', HEADERS, "sm_90")
    assert type(raised.value) is MxcliError
    assert raised.value.exit_code == 1
    assert "broken.cu for sm_90" in raised.value.message
    assert 'broken.cu(2): error: identifier "nowhere" is undefined' in str(raised.value)


@needs_nvrtc
def test_only_given_headers_are_included(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "twice.h").write_text(HEADERS["twice.h"])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MxcliError, match=r'could not open source file "twice\.h"'):
        nvrtc.compile("use.cu", SOURCE, {}, "sm_90")


@needs_nvrtc
@pytest.mark.parametrize(
    ("architecture", "way_out"),
    [
        ("sm_35", "too old, use --device cpu"),
        ("sm_999", "nvidia-cuda-nvrtc-cu12>=12.8"),
        ("sm_999a", "nvidia-cuda-nvrtc-cu12>=12.8"),
        ("sm_80a", "--device cpu"),
        ("nonsense", "--device cpu"),
    ],
)
def test_unknown_architectures(architecture: str, way_out: str) -> None:
    with pytest.raises(EnvironmentFailure) as raised:
        nvrtc.compile("use.cu", SOURCE, HEADERS, architecture)
    major, minor = nvrtc.version()
    assert f"NVRTC {major}.{minor} makes no code for {architecture}," in str(raised.value)
    assert way_out in str(raised.value)


@needs_nvrtc
@pytest.mark.parametrize(("known", "way_out"), [([80, 90], ">=12.8'"), ([100, 120], "too old")])
def test_architectures_of_other_nvrtc_versions(known: list[int], way_out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "_known_architectures", lambda: known)
    architecture = "sm_90a" if 100 in known else "sm_120a"
    with pytest.raises(EnvironmentFailure, match=way_out):
        nvrtc.compile("use.cu", SOURCE, HEADERS, architecture)


# --- Finding the library -----------------------------------------------------------------------------------


def test_missing_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "_candidates", lambda: iter(["libnvrtc-nowhere.so.13", "libnvrtc-nowhere.so.12"]))
    with pytest.raises(EnvironmentFailure) as raised:
        nvrtc.library.__wrapped__()
    assert "is not installed: pip install 'nvidia-cuda-nvrtc-cu12>=12.8' for a driver of CUDA 12" in str(raised.value)
    assert raised.value.details == ()


def test_library_that_does_not_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "libnvrtc.so.13"
    broken.write_bytes(b"")
    monkeypatch.setattr(nvrtc, "_candidates", lambda: iter([str(broken), "libnvrtc-nowhere.so.12"]))
    with pytest.raises(EnvironmentFailure) as raised:
        nvrtc.library.__wrapped__()
    assert "cannot be loaded" in raised.value.message
    assert raised.value.details == (f"{broken}: file too short",)


@needs_nvrtc
def test_broken_library_does_not_hide_an_intact_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lib64").mkdir()
    (tmp_path / "lib64" / "libnvrtc.so.13").write_bytes(b"")
    monkeypatch.setenv("CUDA_PATH", str(tmp_path))
    assert str(tmp_path / "lib64" / "libnvrtc.so.13") in nvrtc._candidates()
    assert nvrtc.library.__wrapped__()._name == nvrtc.library()._name


@needs_nvrtc
def test_newest_library_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """In any order; the C library poses as a second NVRTC."""
    found = nvrtc.library()._name
    versions = {found: (12, 8), "libc.so.6": (12, 4)}
    monkeypatch.setattr(nvrtc, "_version", lambda library: versions[library._name])
    monkeypatch.setattr(nvrtc, "_candidates", lambda: iter(["libc.so.6", found]))
    assert nvrtc.library.__wrapped__()._name == found
    versions["libc.so.6"] = (12, 8)
    monkeypatch.setattr(nvrtc, "_candidates", lambda: iter([found, "libc.so.6"]))
    assert nvrtc.library.__wrapped__()._name == found, "ties go to the first found"


@needs_nvrtc
def test_incomplete_nvrtc_is_an_environment_failure(tmp_path: Path) -> None:
    """The library without its libnvrtc-builtins, in a new process."""
    lone = tmp_path / "lone.so.12"
    lone.write_bytes(Path(nvrtc.library()._name).read_bytes())
    done = run(f"""
        nvrtc._candidates = lambda: iter([{str(lone)!r}])
        try:
            nvrtc.compile("use.cu", SOURCE, HEADERS, "sm_90")
        except nvrtc.EnvironmentFailure as error:
            print(error)
    """)
    assert f"{lone} is incomplete, install it again" in done
    assert "failed to open libnvrtc-builtins" in done


def test_importing_the_module_loads_nothing() -> None:
    assert run("print(nvrtc.library.cache_info().currsize)") == "0\n"


# --- The cache ---------------------------------------------------------------------------------------------


@needs_nvrtc
def test_the_second_call_does_not_compile(cache: Path, compiled: list[str]) -> None:
    first = nvrtc.cubin("use.cu", SOURCE, HEADERS, "sm_90", {"A": "1", "B": "2"})
    second = nvrtc.cubin("use.cu", SOURCE, dict(HEADERS), "sm_90", {"B": "2", "A": "1"})
    assert first == second
    assert first.startswith(ELF)
    assert compiled == ["use.cu"]
    assert cache.stat().st_mode & 0o777 == 0o700
    assert cache.parent.stat().st_mode & 0o777 == 0o700


@needs_nvrtc
@pytest.mark.parametrize(
    "changed",
    [
        {"name": "other.cu"},
        {"source": SOURCE + "\n"},
        {"headers": {"twice.h": HEADERS["twice.h"].replace("2 *", "3 *")}},
        {"headers": {**HEADERS, "more.h": ""}},
        {"architecture": "sm_90a"},
        {"definitions": {"A": "2"}},
        {"definitions": {}},
    ],
    ids=["name", "source", "header", "more headers", "architecture", "definition", "no definition"],
)
def test_cache_key_covers_all_inputs(changed: dict[str, object], cache: Path) -> None:
    arguments = {
        "name": "use.cu",
        "source": SOURCE,
        "headers": HEADERS,
        "architecture": "sm_90",
        "definitions": {"A": "1"},
    }
    keys = {nvrtc._key(**arguments), nvrtc._key(**{**arguments, **changed})}  # type: ignore[arg-type]
    assert len(keys) == 2
    assert not cache.exists()


@needs_nvrtc
def test_cache_key_covers_the_nvrtc_version(monkeypatch: pytest.MonkeyPatch) -> None:
    key = nvrtc._key("use.cu", SOURCE, HEADERS, "sm_90", {})
    monkeypatch.setattr(nvrtc, "version", lambda: (99, 0))
    assert nvrtc._key("use.cu", SOURCE, HEADERS, "sm_90", {}) != key


@needs_nvrtc
def test_an_edited_header_is_compiled_again(compiled: list[str]) -> None:
    edited = {"twice.h": HEADERS["twice.h"].replace("2 *", "3 *")}
    assert nvrtc.cubin("use.cu", SOURCE, HEADERS, "sm_90") != nvrtc.cubin("use.cu", SOURCE, edited, "sm_90")
    assert len(compiled) == 2


@needs_nvrtc
@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:10],
        lambda content: content[:-1],
        lambda content: content[:1000] + bytes([content[1000] ^ 1]) + content[1001:],
        lambda content: content[32:],
        lambda content: bytes(len(content)),
        lambda content: content + b"\0",
    ],
    ids=["empty", "in the digest", "truncated", "one bit", "a bare cubin", "zeros", "longer"],
)
def test_a_damaged_entry_is_compiled_again(damage: Callable[[bytes], bytes], cache: Path, compiled: list[str]) -> None:
    code = nvrtc.cubin("use.cu", SOURCE, HEADERS, "sm_90")
    whole = entry(cache).read_bytes()
    entry(cache).write_bytes(damage(whole))
    assert nvrtc.cubin("use.cu", SOURCE, HEADERS, "sm_90") == code
    assert entry(cache).read_bytes() == whole
    assert nvrtc.cubin("use.cu", SOURCE, HEADERS, "sm_90") == code
    assert len(compiled) == 2


@needs_nvrtc
def test_an_entry_of_another_name_does_not_count(cache: Path, compiled: list[str]) -> None:
    nvrtc.cubin("use.cu", SOURCE, HEADERS, "sm_90")
    other = cache / nvrtc._key("use.cu", SOURCE, HEADERS, "sm_80", {})
    other.write_bytes(entry(cache).read_bytes())
    assert nvrtc.cubin("use.cu", SOURCE, HEADERS, "sm_80") == nvrtc.compile("use.cu", SOURCE, HEADERS, "sm_80")
    assert len(compiled) == 3


@needs_nvrtc
@pytest.mark.filterwarnings("ignore:.*Is a directory")
def test_folder_in_place_of_an_entry_is_kept(cache: Path) -> None:
    (cache / nvrtc._key("use.cu", SOURCE, HEADERS, "sm_90", {}) / "inner").mkdir(parents=True)
    assert nvrtc.cubin("use.cu", SOURCE, HEADERS, "sm_90").startswith(ELF)
    assert entry(cache).is_dir()


@needs_nvrtc
def test_uncreatable_cache_folder_only_costs_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: list[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MXCLI_CACHE_DIR", str(tmp_path / "file" / "below"))
    assert nvrtc.cubin("use.cu", SOURCE, HEADERS, "sm_90").startswith(ELF)
    assert nvrtc.cubin("use.cu", SOURCE, HEADERS, "sm_90").startswith(ELF)
    assert len(compiled) == 2


@needs_nvrtc
def test_full_disk_leaves_no_files(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    assert nvrtc.cubin("use.cu", SOURCE, HEADERS, "sm_90").startswith(ELF)
    assert list(cache.iterdir()) == []


@needs_nvrtc
def test_interrupted_write_leaves_no_files(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(source: object, target: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        nvrtc.cubin("use.cu", SOURCE, HEADERS, "sm_90")
    assert list(cache.iterdir()) == []


@needs_nvrtc
def test_home_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("MXCLI_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert nvrtc.cubin("use.cu", SOURCE, HEADERS, "sm_90").startswith(ELF)


@needs_nvrtc
def test_concurrent_threads(cache: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        codes = list(pool.map(lambda _: nvrtc.cubin("use.cu", SOURCE, HEADERS, "sm_90"), range(8)))
    assert set(codes) == {nvrtc.compile("use.cu", SOURCE, HEADERS, "sm_90")}
    assert entry(cache).stat().st_size == 32 + len(codes[0])


@needs_nvrtc
def test_concurrent_processes_leave_one_valid_entry(cache: Path, compiled: list[str]) -> None:
    code = """
        print("ready", flush=True)
        input()
        print(nvrtc.cubin("use.cu", SOURCE, HEADERS, "sm_90").hex())
    """
    processes = [start(code) for _ in range(4)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:  # all are waiting, so they start together
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    codes = {process.communicate()[0] for process in processes}
    assert [process.returncode for process in processes] == [0, 0, 0, 0]
    assert codes == {nvrtc.cubin("use.cu", SOURCE, HEADERS, "sm_90").hex() + "\n"}
    assert compiled == []
    assert entry(cache).stat().st_size > 1000


# --- Whose machine code is loaded --------------------------------------------------------------------------

FORGED = ELF + b"forged"
NOBODY = 65534


def forge(cache: Path) -> Path:
    """Write an entry with a valid digest for code that nobody compiled."""
    key = nvrtc._key("use.cu", SOURCE, HEADERS, "sm_90", {})
    cache.mkdir(mode=0o700, parents=True)
    cache.parent.chmod(0o700)
    path = cache / key
    path.write_bytes(nvrtc._digest(key, FORGED) + FORGED)
    path.chmod(0o600)
    nvrtc._note_unused.cache_clear()
    return path


def linked(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def as_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def given(path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root gives files away")
    os.chown(path, NOBODY, NOBODY)


@needs_nvrtc
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda path: given(path), f"{{path}}: belongs to user {NOBODY}"),
        (lambda path: given(path.parent), f"{{path.parent}}: belongs to user {NOBODY}"),
        (lambda path: given(path.parent.parent), f"{{path.parent.parent}}: belongs to user {NOBODY}"),
        (lambda path: path.chmod(0o666), "{path}: can be written by others (mode 666)"),
        (lambda path: path.chmod(0o620), "{path}: can be written by others (mode 620)"),
        (lambda path: path.parent.chmod(0o777), "{path.parent}: can be written by others (mode 777)"),
        (lambda path: path.parent.chmod(0o770), "{path.parent}: can be written by others (mode 770)"),
        (lambda path: path.parent.chmod(0o1777), "{path.parent}: can be written by others (mode 1777)"),
        (lambda path: path.parent.parent.chmod(0o777), "{path.parent.parent}: can be written by others (mode 777)"),
        (linked, "{path}: Too many levels of symbolic links"),
        (as_pipe, "{path}: not a regular file"),
    ],
)
def test_code_that_others_could_have_written_is_not_loaded(
    change: Callable[[Path], object], sentence: str, cache: Path, compiled: list[str]
) -> None:
    path = forge(cache)
    change(path)
    expected = f"{sentence.format(path=path)}, so machine code in it is not used and kernels are compiled again"
    with pytest.warns(UserWarning, match="is not used and kernels are compiled again") as caught:
        code = nvrtc.cubin("use.cu", SOURCE, HEADERS, "sm_90")
    assert [str(each.message).partition(";")[0] for each in caught] == [expected]
    assert code == nvrtc.compile("use.cu", SOURCE, HEADERS, "sm_90")
    assert compiled == ["use.cu", "use.cu"]


@needs_nvrtc
def test_own_code_is_loaded_from_below_a_sticky_folder_and_through_a_link(
    cache: Path, compiled: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = forge(cache)
    cache.parent.chmod(0o1777)
    assert nvrtc.cubin("use.cu", SOURCE, HEADERS, "sm_90") == FORGED
    (tmp_path / "link").symlink_to(cache.parent)
    monkeypatch.setenv("MXCLI_CACHE_DIR", str(tmp_path / "link"))
    assert nvrtc.cubin("use.cu", SOURCE, HEADERS, "sm_90") == FORGED
    path.chmod(0o400)
    assert nvrtc.cubin("use.cu", SOURCE, HEADERS, "sm_90") == FORGED
    assert compiled == []


@needs_nvrtc
def test_entries_are_for_the_user_alone_and_nothing_is_written_for_others(cache: Path, compiled: list[str]) -> None:
    nvrtc.cubin("use.cu", SOURCE, HEADERS, "sm_90")
    assert entry(cache).stat().st_mode & 0o777 == 0o600
    before = entry(cache).read_bytes()
    cache.chmod(0o777)
    with pytest.warns(UserWarning, match="can be written by others"):
        nvrtc.cubin("use.cu", SOURCE + "//", HEADERS, "sm_90")
    nvrtc.cubin("use.cu", SOURCE + "//", HEADERS, "sm_90")  # one warning
    assert entry(cache).read_bytes() == before
    assert len(compiled) == 3


# --- Cache location ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"MXCLI_CACHE_DIR": "/own", "XDG_CACHE_HOME": "/caches"}, "/own/cubins"),
        ({"XDG_CACHE_HOME": "/caches"}, "/caches/mxcli/cubins"),
        ({"MXCLI_CACHE_DIR": "", "XDG_CACHE_HOME": ""}, "/home/someone/.cache/mxcli/cubins"),
        ({"XDG_CACHE_HOME": "relative"}, "/home/someone/.cache/mxcli/cubins"),
        ({}, "/home/someone/.cache/mxcli/cubins"),
    ],
)
def test_the_cache_folder(variables: dict[str, str], folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MXCLI_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/someone", **variables}.items():
        monkeypatch.setenv(name, value)
    assert nvrtc.cache_folder() == Path(folder)
