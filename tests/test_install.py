"""What is installed: the contents of the sdist and the wheel, where the kernel is found, and a missing compiler."""

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import mxcli
from mxcli.backends import abi as library
from mxcli.backends.nvrtc import FILES, HEADERS
from mxcli.errors import EnvironmentFailure
from mxcli.output.documents import DOCUMENTS
from mxcli.output.schema import RECORDS, schema

ROOT = Path(__file__).parents[1]
BUILT = {"__pycache__", "kernels", "schemas"}
MODULES = {
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "mxcli").rglob("*")
    if path.is_file() and not BUILT & set(path.parts[len(ROOT.parts) :])
}
"""The modules, and the data files next to them."""
KERNEL = "libmxcli_cpu.dylib" if sys.platform == "darwin" else "libmxcli_cpu.so"
MANYLINUX = "manylinux_2_27_x86_64"
COMPILERS = (os.environ.get("CXX", "c++"), "c++", "g++", "clang++")


def absent() -> list[str]:
    """What this environment lacks for building a wheel."""
    needed = {
        "scikit-build-core": importlib.util.find_spec("scikit_build_core"),
        "pip": importlib.util.find_spec("pip"),
        "cmake": shutil.which("cmake") or importlib.util.find_spec("cmake"),
        "ninja or make": shutil.which("ninja") or shutil.which("make") or importlib.util.find_spec("ninja"),
        "a C++ compiler": any(map(shutil.which, COMPILERS)),
    }
    return [name for name, found in needed.items() if not found]


needs_build = pytest.mark.skipif(bool(absent()), reason=f"needs {', '.join(absent())}")


def pip_wheel(source: Path, target: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Builds a wheel as `pip install` would, with this environment's build backend and no look at an index."""
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir"]
    # Debug: what is in the wheel does not depend on how long the compiler optimizes.
    environment = {**os.environ, "SKBUILD_CMAKE_BUILD_TYPE": "Debug", **environment}
    return subprocess.run([*command, target, source], env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    code = "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, folder], cwd=ROOT, check=True, capture_output=True)
    return next(folder.glob("*.tar.gz"))


@pytest.fixture(scope="module")
def unpacked_sdist(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist in a folder whose name has spaces."""
    folder = tmp_path_factory.mktemp("an sdist in a folder")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    return next(folder.iterdir())


@pytest.fixture(scope="module")
def wheel(unpacked_sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    done = pip_wheel(unpacked_sdist, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(folder.glob("*.whl"))


@needs_build
def test_sdist_holds_the_sources_and_nothing_built(unpacked_sdist: Path) -> None:
    files = {path.relative_to(unpacked_sdist).as_posix() for path in unpacked_sdist.rglob("*") if path.is_file()}
    assert {path.relative_to(ROOT).as_posix() for path in (ROOT / "kernels").iterdir()} <= files
    assert {path for path in files if path.startswith("mxcli/")} == MODULES
    assert {"LICENSE", "README.md", "constraints.txt", "pyproject.toml", "samples/tiny-llama/config.json"} <= files
    assert not [path for path in files if path.endswith((".so", ".dylib", ".o", ".pyc"))]


@needs_build
@pytest.mark.slow
def test_wheel_holds_one_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        files = {name for name in archive.namelist() if not name.endswith("/")}
    info = f"mxcli-{mxcli.__version__}.dist-info"
    assert {name.split("/")[0] for name in files} == {"mxcli", info}
    gpu = {f"mxcli/kernels/{name}" for name in (*FILES, *HEADERS)}
    built = gpu | {f"mxcli/kernels/{KERNEL}"} | {f"mxcli/output/schemas/{verb}.json" for verb in (*RECORDS, *DOCUMENTS)}
    assert {name for name in files if name.startswith("mxcli/")} == MODULES | built
    assert {name.removeprefix(f"{info}/") for name in files if name.startswith(info)} == {
        "METADATA",
        "RECORD",
        "WHEEL",
        "entry_points.txt",
        "licenses/LICENSE",
    }


@needs_build
@pytest.mark.slow
def test_wheel_holds_the_schemas_of_what_is_printed(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        found = {verb: json.loads(archive.read(f"mxcli/output/schemas/{verb}.json")) for verb in (*RECORDS, *DOCUMENTS)}
    assert found == {verb: schema(verb) for verb in (*RECORDS, *DOCUMENTS)}


@needs_build
@pytest.mark.slow
def test_wheel_serves_every_python_3(wheel: Path) -> None:
    assert wheel.name.startswith(f"mxcli-{mxcli.__version__}-py3-none-")


@needs_build
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux" or platform.machine() != "x86_64", reason="the tag is of Linux on x86-64")
def test_wheel_is_portable(wheel: Path) -> None:
    """auditwheel finds no newer symbols than the tag allows."""
    assert wheel.name == f"mxcli-{mxcli.__version__}-py3-none-{MANYLINUX}.whl"
    pytest.importorskip("auditwheel")
    done = subprocess.run(
        [sys.executable, "-m", "auditwheel", "show", wheel], capture_output=True, text=True, check=True
    )
    assert f'platform tag: "{MANYLINUX}"' in " ".join(done.stdout.split())


@needs_build
@pytest.mark.slow
def test_unpacked_wheel_runs(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    # -S: without the .pth files of an editable installation, which would come before PYTHONPATH.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), sysconfig.get_path("purelib")])}
    code = "from mxcli.backends import abi as library; library.load(); print(library.kernel_folder())"
    for command, printed in (
        (["-c", code], str(tmp_path / "mxcli" / "kernels")),
        (["-m", "mxcli", "--version"], f"mxcli {mxcli.__version__}"),
    ):
        done = subprocess.run(
            [sys.executable, "-P", "-S", *command], env=environment, cwd=tmp_path, capture_output=True, text=True
        )
        assert (done.stdout.strip(), done.returncode) == (printed, 0), done.stderr


@needs_build
@pytest.mark.parametrize("content", [None, "#!/bin/sh\nexit 1\n"], ids=["absent", "broken"])
def test_without_a_compiler_the_build_ends_with_one_sentence(content: str | None, tmp_path: Path) -> None:
    compiler = tmp_path / "c++"
    if content is not None:
        compiler.write_text(content)
        compiler.chmod(0o755)
    done = pip_wheel(ROOT, tmp_path, CXX=str(compiler))
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines()]
    assert done.returncode != 0
    assert lines[lines.index("[end of output]") - 1] == (
        "mxcli was not built. Its CPU kernel needs a working C++17 compiler: install g++ or clang++ "
        "(Debian, Ubuntu: apt-get install g++), name one in the environment variable CXX, or install a wheel that "
        "`pip wheel .` made on a similar machine (such as mxcli-VERSION-py3-none-manylinux_2_27_x86_64.whl)."
    )


class TestKernelFolder:
    @pytest.fixture
    def checkout(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """Modules in a folder where no kernel was built."""
        monkeypatch.setattr(mxcli, "__path__", [str(tmp_path / "checkout" / "mxcli")])
        return tmp_path / "checkout" / "mxcli"

    def kernel_in(self, folder: Path) -> Path:
        folder.mkdir(parents=True)
        (folder / KERNEL).touch()
        return folder

    def test_next_to_the_modules(self, checkout: Path) -> None:
        folder = self.kernel_in(checkout / "kernels")
        assert library.kernel_folder() == folder

    def test_where_pip_put_it(self, checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder = self.kernel_in(tmp_path / "site packages" / "mxcli" / "kernels")
        record = tmp_path / "site packages" / "mxcli-0.1.0.dist-info" / "RECORD"
        record.parent.mkdir()
        record.write_text(f"mxcli/__init__.py,,\nmxcli/kernels/{KERNEL},,\n")
        distribution = importlib.metadata.Distribution.at(record.parent)
        monkeypatch.setattr(importlib.metadata, "files", lambda name: distribution.files)
        assert library.kernel_folder() == folder

    @pytest.mark.parametrize("installed", [False, True])
    def test_nowhere(self, checkout: Path, installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        def files(name: str) -> None:
            if not installed:
                raise importlib.metadata.PackageNotFoundError(name)

        monkeypatch.setattr(importlib.metadata, "files", files)
        with pytest.raises(EnvironmentFailure, match=r"^the CPU kernel .* neither in .* nor installed: install mxcli "):
            library.kernel_folder()
