"""Folders of valid files that are damaged, file by file or as a whole, and made valid again for the next case."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import socket
from pathlib import Path
from random import Random

from mutations import damaged

SUFFIXES = (
    ".safetensors",
    ".gguf",
    ".npz",
    ".npy",
    ".pt",
    ".bin",
    ".json",
    ".safetensors.index.json",
    ".partial",
    ".toml",
    "",
)
OTHERS = (
    "config.json", "hf_quant_config.json", "mxcli.json", "model.safetensors.index.json", "mxcli.progress.partial",
    "model-00002-of-00003.safetensors", "model-00001-of-00001.safetensors", "pytorch_model.bin", "a.gguf",
    "consolidated.safetensors",
    "tokenizer.json", "tokenizer_config.json", "generation_config.json", "mxcli.progress-1-of-2.partial",
    "step_00000_rank_0.safetensors",
    "recipe.yaml", "model.safetensors.partial", "adapter_config.json", "preprocessor_config.json", "modeling_x.py",
    "mxcli.json.partial",
    "mxcli.progress-00000000001-of-2.partial", "mxcli.progress-9-of-2.partial", "x" * 250 + ".json",
    "a\nb.safetensors", "\udcff.npy",
)  # fmt: skip
TARGETS = (
    "/dev/zero",
    "/dev/null",
    "/etc/passwd",
    ".",
    "..",
    "/nonexistent",
    "self",
    "/proc/self/mem",
    "/dev/tty",
    "/proc/kmsg",
)
MOST_BYTES = 3 << 30

State = dict[str, tuple[int, int, int, int]]


def listed(folder: str, prefix: str = "") -> State:
    """Kind, size, time and inode of everything in a folder, by its path below it."""
    found: State = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            status = entry.stat(follow_symlinks=False)
            is_folder = entry.is_dir(follow_symlinks=False)
            found[prefix + entry.name] = (
                status.st_mode,
                *((0, 0) if is_folder else (status.st_size, status.st_mtime_ns)),
                status.st_ino,
            )
            if is_folder:
                found |= listed(entry.path, f"{prefix}{entry.name}/")
    return found


class Tree:
    """A folder of valid files, which `reset` makes valid again; `state` is how it was left."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = {
            path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
        }
        self.folders = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_dir()}
        self.state = listed(str(folder))
        self.damaged_files: set[str] = set()
        self.late: str | None = None
        """A file that changes while it is read."""

    def reset(self) -> None:
        """Make everything valid that a case has damaged or changed."""
        now = listed(str(self.folder))
        self.late = None
        odd = {name for name in now if now[name] != self.state.get(name)} | self.damaged_files
        odd |= (self.files.keys() | self.folders) ^ now.keys()
        self.damaged_files = set()
        if not odd:
            return
        if any(name not in self.files or (self.folder / name).is_dir() for name in odd):
            shutil.rmtree(self.folder)
            self.folder.mkdir()
            for name in self.folders:
                (self.folder / name).mkdir(parents=True, exist_ok=True)
            odd = set(self.files)
        for name in odd:
            path = self.folder / name
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            path.write_bytes(self.files[name])
        self.state = listed(str(self.folder))

    def write(self, name: str, content: bytes) -> None:
        """Put other content in a file."""
        self.damaged_files.add(name)
        path = self.folder / name
        if os.path.lexists(path):
            path.unlink()
        path.write_bytes(content)

    def damage(self, wanted: list[str], random: Random) -> str:
        """Damage one of the wanted files, or several files, or what they are; return the name of the first."""
        first = random.choice(wanted)
        choice = random.random()
        if choice < 0.9:
            self.write(first, damaged(self.files[first], first, random))
            for _ in range(random.choice((0, 0, 0, 0, 0, 1, 2))):
                name = random.choice(list(self.files))
                self.write(name, damaged(self.files[name], name, random))
        if choice < 0.35 and "mxcli.json" in self.files and random.random() < 0.6:
            self._record()
        if choice > 0.86:
            with contextlib.suppress(OSError, ValueError):
                self._odd(first, random)
        self.state = listed(str(self.folder))
        return first

    def _record(self) -> None:
        """Make the record state the hashes of the damaged files."""
        try:
            record = json.loads((self.folder / "mxcli.json").read_bytes())
            for name in self.damaged_files & record["sha256"].keys():
                record["sha256"][name] = hashlib.sha256((self.folder / name).read_bytes()).hexdigest()
            self.write("mxcli.json", json.dumps(record).encode())
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return

    def _odd(self, name: str, random: Random) -> None:
        """Make a file something else: a link, a pipe, a folder, a sparse file, another name, one more file."""
        path, choice = self.folder / name, random.randrange(13)
        self.damaged_files.add(name)
        if choice == 0:
            self.late = str(path)
        elif choice == 1:
            path.unlink()
            target = random.choice((*TARGETS, *self.files))
            path.symlink_to(path if target == "self" else target)
        elif choice == 2:
            path.unlink()
            os.mkfifo(path)
        elif choice == 3:
            path.unlink()
            path.mkdir()
        elif choice == 4:
            path.unlink()
            with socket.socket(socket.AF_UNIX) as made:
                made.bind(str(path))
        elif choice == 5:
            os.truncate(path, random.choice((0, 1, 7, 8, 9, 100, path.stat().st_size * 2, MOST_BYTES)))
        elif choice == 6:
            path.rename(path.with_name((path.name.split(".")[0] or "x") + random.choice(SUFFIXES)))
        elif choice == 7:
            other = random.choice(list(self.files))
            self.write(name, self.files[other])
            self.write(other, self.files[name])
        elif choice == 8:
            other = random.choice(list(self.files))
            (self.folder / other).unlink()
        elif choice in (9, 10):
            content = random.choice((b"", b"{}", b"[]", b"\0", *self.files.values()))
            (path.parent / random.choice(OTHERS)).write_bytes(content)
        elif choice == 11:
            os.link(path, path.with_name("b" + path.name))
        else:
            path.unlink()
            inner = path.with_name("inner")
            inner.mkdir()
            (inner / path.name).write_bytes(self.files[name])
            path.symlink_to(random.choice((f"inner/{path.name}", "inner", f"inner/../inner/{path.name}")))


def change_late(path: str, random: Random) -> None:
    """Change a file while it is read: shorter, longer, other bytes, other file, or gone."""
    with contextlib.suppress(OSError):
        choice = random.randrange(5)
        if choice == 0:
            os.truncate(path, os.stat(path).st_size // 2)
        elif choice == 1:
            os.truncate(path, os.stat(path).st_size * 2)
        elif choice == 2:
            with open(path, "r+b") as file:
                file.write(bytes(9))
        elif choice == 3:
            os.unlink(path)
        else:
            os.truncate(path, 0)
