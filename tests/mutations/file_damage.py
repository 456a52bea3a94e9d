"""Damage to weight files: cut, extended, exchanged, lost; headers changed."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable

from mutations.kinds import FOLDER, Damage, Harm, Random, files, names_of
from mutations.outputs import Output


def some_shard(output: Output, random: Random) -> str:
    return output.shards[int(random.integers(len(output.shards)))]


# Weight files.


def _truncated(share: bool) -> Callable[[Output, Random], Harm | None]:
    def apply(output: Output, random: Random) -> Harm | None:
        shard = some_shard(output, random)
        size = (output.folder / shard).stat().st_size
        lost = int(random.integers(size // 4, size // 2)) if share else int(random.integers(1, 64))
        os.truncate(output.folder / shard, size - lost)
        return files(f"{lost:,} bytes cut", shard)

    return apply


def _emptied(output: Output, random: Random) -> Harm | None:
    shard = some_shard(output, random)
    os.truncate(output.folder / shard, 0)
    return files("emptied", shard)


def _extended(output: Output, random: Random) -> Harm | None:
    shard = some_shard(output, random)
    count = int(random.integers(1, 5000))
    with (output.folder / shard).open("ab") as file:
        file.write(random.bytes(count))
    return files(f"{count:,} bytes added", shard)


def _header_bit(output: Output, random: Random) -> Harm | None:
    """Flip a bit of the header's text: of a name, a number, a bracket."""
    shard = some_shard(output, random)
    names = [row.name for row in output.table(shard)]
    content = bytearray((output.folder / shard).read_bytes())
    length = 4096 if shard.endswith(".gguf") else struct.unpack("<Q", content[:8])[0]
    at = int(random.integers(0 if shard.endswith(".gguf") else 8, length))
    while content[at] in b" \0":
        at -= 1
    content[at] ^= 1 << int(random.integers(7))
    (output.folder / shard).write_bytes(content)
    return Harm(((shard, *names),), f"a bit of byte {at:,} of its header")


def _header_length(output: Output, random: Random) -> Harm | None:
    shard = some_shard(output, random)
    content = bytearray((output.folder / shard).read_bytes())
    content[int(random.integers(0, 6))] ^= 1 << int(random.integers(8))
    (output.folder / shard).write_bytes(content)
    return files("a bit of the length of its header, or its magic", shard)


def _padding(output: Output, random: Random) -> Harm | None:
    """Change the bytes that only fill up: after the header, or between tensors."""
    shard = some_shard(output, random)
    path = output.folder / shard
    content = bytearray(path.read_bytes())
    if shard.endswith(".gguf"):
        starts = sorted(int(cells.at.min()) for weight in output.stored for cells in weight.parts)
        at = starts[0] - 1
        if content[at] != 0:
            return None
        content[at] = 1
    else:
        (length,) = struct.unpack("<Q", content[:8])
        if content[7 + length : 8 + length] != b" ":
            return None
        content[7 + length] = ord("\n")
    path.write_bytes(content)
    return files("a byte of padding", shard)


def _metadata(output: Output, random: Random) -> Harm | None:
    """Drop the metadata of a safetensors file."""
    shard = some_shard(output, random)
    if shard.endswith(".gguf"):
        return None
    content = (output.folder / shard).read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    if header.pop("__metadata__", None) is None:
        return None
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    (output.folder / shard).write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])
    return files("metadata dropped", shard)


def _shards_exchanged(output: Output, random: Random) -> Harm | None:
    if len(output.shards) < 2:
        return None
    first, second = (output.shards[int(at)] for at in random.choice(len(output.shards), 2, replace=False))
    for one, other in ((first, "exchanged.tmp"), (second, first), ("exchanged.tmp", second)):
        (output.folder / one).rename(output.folder / other)
    return files("exchanged", first, second)


def _shard_lost(output: Output, random: Random) -> Harm | None:
    shard = some_shard(output, random)
    (output.folder / shard).unlink()
    return files("lost", shard) if output.shards else Harm(((shard, FOLDER),), "lost, the only one")


def _mixed_in(key: str, values: bool) -> Callable[[Output, Random], Harm | None]:
    """Take a shard of another run, or the only one."""

    def apply(output: Output, random: Random) -> Harm | None:
        other = output.others.get(key)
        shared = [] if other is None else [shard for shard in output.shards if (other / shard).is_file()]
        if other is None or not shared:
            return None
        shard = shared[int(random.integers(len(shared)))]
        if (other / shard).read_bytes() == (output.folder / shard).read_bytes():
            return None
        shutil.copyfile(other / shard, output.folder / shard)
        names = [row.name for row in output.table(shard)]
        plain = [name for weight in output.stored if set(weight.entries) & set(names) for name in names_of(weight)]
        return Harm(((shard, *names, *plain),), f"{shard} of {other.name}", values=values)

    return apply


FILE_DAMAGE: tuple[Damage, ...] = (
    Damage("file cut by a half", _truncated(True), values=True, seen=True),
    Damage("file cut by a few bytes", _truncated(False), values=True, seen=True),
    Damage("file emptied", _emptied, values=True, seen=True),
    Damage("file extended", _extended, values=False, seen=True),
    Damage("bit of a header", _header_bit, values=False, seen=False),
    Damage("bit of a header's length", _header_length, values=True, seen=True),
    Damage("padding changed", _padding, values=False, seen=False),
    Damage("metadata dropped", _metadata, values=False, seen=False),
    Damage("files exchanged", _shards_exchanged, values=False, seen=True),
    Damage("file lost", _shard_lost, values=True, seen=True),
    Damage("file of another rule", _mixed_in("rule", False), values=False, seen=False),
    Damage("file of another model", _mixed_in("seed", True), values=True, seen=False),
)
