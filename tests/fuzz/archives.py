"""NumPy arrays, zip archives and PyTorch checkpoints with a part that is not as it should be."""

from __future__ import annotations

import contextlib
import io
import pickletools
import re
import struct
import warnings
import zipfile
from collections.abc import Callable, Mapping
from random import Random

warnings.filterwarnings("ignore", "Duplicate name")
NUMBERS = (0, 1, 2, 7, 8, 9, 10, 12, 14, 20, 45, 63, 99, 0xFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1)
TYPES = (
    "'<f4'", "'>f4'", "'<f8'", "'<f2'", "'|u1'", "'|b1'", "'<c8'", "'|O'", "'<U4'", "'|S4'", "'|V4'", "'<M8[ns]'",
    "'=f4'", "'f4,f4'",
    "[('a', '<f4')]", "[('a', '<f4', (2,))]", "[('a', '|O')]", "None", "4", "'" + "f" * 5000 + "'", "'<f4' * 2",
    "('<f4', (2**40,))",
    "'V2'", "'|V1'", "'<i3'", "''", "{'a': 1}", "'" + "(" * 300 + "'",
)  # fmt: skip
SHAPES = (
    "()", "(32,)", "(32, 32)", "(-1, 32)", "(32, 0)", "(0, 2305843009213693952)", "(4294967296, 4294967296)", "32",
    "[32, 32]",
    "(32.0, 32)", "(True, 8)", "(32, 32, 1)", "(" + "1," * 70 + ")", "(" + "1," * 3000 + ")", "None", "('a',)",
    "(1e3,)", "(9" + "9" * 40 + ",)",
    "(" * 100 + ")" * 100, "(10**100,)", "__import__('os').system('touch executed')",
)  # fmt: skip
NAMES = (
    "../x.npy",
    "/x.npy",
    "a\0b.npy",
    "x" * 5000 + ".npy",
    "a.weight.npy",
    "é.npy",
    "a/b.npy",
    "a\\b.npy",
    ".npy",
    "x.txt",
    "a.weight",
    "",
)
HOSTILE = (
    b"cos\nsystem\n(S'touch executed'\ntR.", b"c__builtin__\neval\n(S'1'\ntR.",
    b"\x8c\x02os\x8c\x06system\x93(S'touch executed'\ntR.",
    b"(S'touch executed'\nios\nsystem\n.", b"(cos\nsystem\nS'touch executed'\no.", b"cos\nsystem\n)\x81.",
    b"\x82\x01.", b"Pa\n.",
    b"ctorch.serialization\nload\n(S'x.pt'\ntR.", b"cnumpy.core.multiarray\n_reconstruct\n(tR.",
    b"ccollections\nOrderedDict\n)R}b.",
    b"ctorch\nload\n.", b"cbuiltins\ngetattr\n(ctorch\nTensor\nS'__init__'\ntR.", b"ctorch.hub\nload\n(S'a'\nS'b'\ntR.",
)  # fmt: skip
OPCODES = (
    b"R", b"\x81", b"b", b"(", b"t", b"\x85", b"\x86", b"\x87", b"}", b"]", b")", b"s", b"u", b"a", b"e", b"0", b"1",
    b"2", b".", b"h\0",
    b"q\0", b"q\xff", b"r\xff\xff\xff\x7f", b"j\0\0\0\x7f", b"\x94", b"Q", b"N", b"\x88", b"\x89", b"K\xff",
    b"M\xff\xff", b"J\xff\xff\xff\xff",
    b"\x8a\x09" + b"\xff" * 8 + b"\x7f", b"\x8b\xff\xff\xff\x7f", b"\x8d" + b"\xff" * 8,
    b"\x95" + b"\xff" * 7 + b"\x7f", b"X\xff\xff\xff\x7f",
    b"B\xff\xff\xff\x7f", b"G" + b"\xff" * 8, b"I99999999999999999999999\n", b"L9L\n", b"F1e999\n", b"\x80\x05",
    b"\x80\xff", b"\x8f", b"\x90",
    b"\x91(", b"\x96" + b"\xff" * 8, b"\x97", b"\x98", b"]h\0a", b"]" * 3000, b"(" * 3000, b"\x85" * 3000,
    b"X\x02\0\0\0\xed\xa0", *HOSTILE,
)  # fmt: skip


def _npy(content: bytes, random: Random) -> bytes:
    """An array with another header."""
    order = random.choice(("True", "False", "None", "0", "'a'"))
    kind = random.choice((*TYPES, *["'<f4'"] * 10))
    shape = random.choice((*SHAPES, *["(32, 32)"] * 8))
    keys = [f"'descr': {kind}", f"'fortran_order': {order}", f"'shape': {shape}"]
    choice = random.random()
    if choice < 0.1:
        keys.pop(random.randrange(3))
    elif choice < 0.2:
        keys.append(random.choice(("'a': 1", keys[0], "**{}", "1: 1", "'shape': (1,)")))
    text = "{" + ", ".join(keys) + ", }"
    if random.random() < 0.1:
        text = random.choice(("[" * 300, "{" + "{}," * 500, text * 2, text + " " * 70_000, "1", "", text + "\0"))
    encoded = text.encode("latin-1", "replace") + b"\n"
    version = random.choice(((1, 0), (1, 0), (2, 0), (3, 0), (0, 0), (1, 9), (255, 255)))
    length = random.choice((len(encoded),) * 8 + (0, len(encoded) + 1, 65_535, 2**31))
    wide = struct.pack("<H", length % 65_536) if version[0] == 1 else struct.pack("<I", length % 2**32)
    data = content[128:]
    return b"\x93NUMPY" + bytes(version) + wide + encoded + random.choice((data, data, data, data[:-1], b"", data * 2))


def _members(content: bytes) -> list[tuple[str, bytes, int]]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return [
            (each.filename, archive.read(each), each.compress_type)
            for each in archive.infolist()[:20]
            if each.file_size < 1 << 20
        ]


def _zip(content: bytes, random: Random, change: Callable[[bytes, Random], bytes], wanted: str) -> bytes:
    """An archive with a member changed by `change`, or members and directory that are odd."""
    try:
        members = _members(content)
        at = random.choice([at for at, each in enumerate(members) if each[0].endswith(wanted)])
    except Exception:  # what it has become is no archive that zipfile can read
        return _patched(content, random)
    name, data, method = members[at]
    choice = random.random()
    if choice < 0.6:
        members[at] = name, change(data, random), method
    elif choice < 0.7:
        members[at] = random.choice(NAMES), data, method
    elif choice < 0.75:
        members.append(random.choice(members))
    elif choice < 0.8:
        members.pop(random.randrange(len(members)))
    elif choice < 0.85:
        members[at] = name, data, random.choice((0, 8, 12, 14))
    elif choice < 0.88:
        members[at] = name, bytes(random.choice((1 << 16, 1 << 16, 1 << 20))), 8
    elif choice < 0.92:
        random.shuffle(members)
    made = io.BytesIO() if random.random() < 0.9 else _Unseekable()
    with zipfile.ZipFile(made, "w") as archive:
        for each, data, method in members:
            info = zipfile.ZipInfo(each or "x")
            info.compress_type = method
            with archive.open(info, "w", force_zip64=random.random() < 0.05) as member:
                member.write(data)
        archive.comment = random.choice((b"",) * 8 + (b"PK\x05\x06" + bytes(18), b"x" * 60_000))
    content = made.getvalue()
    if random.random() < 0.05:
        content = b"\0" * random.choice((1, 100)) + content
    return _patched(content, random) if random.random() < 0.4 else content


class _Unseekable(io.BytesIO):
    """A stream that makes zipfile write data descriptors."""

    def seekable(self) -> bool:
        return False

    def seek(self, *arguments: int) -> int:
        raise OSError("no seeking")

    def tell(self) -> int:
        raise OSError("no position")


_LOCAL = ((4, "H"), (6, "H"), (8, "H"), (14, "I"), (18, "I"), (22, "I"), (26, "H"), (28, "H"))
_CENTRAL = (
    (6, "H"),
    (8, "H"),
    (10, "H"),
    (16, "I"),
    (20, "I"),
    (24, "I"),
    (28, "H"),
    (30, "H"),
    (32, "H"),
    (34, "H"),
    (42, "I"),
)
_END = ((4, "H"), (8, "H"), (10, "H"), (12, "I"), (16, "I"), (20, "H"))


def _patched(content: bytes, random: Random) -> bytes:
    """An archive with a wrong field in a header of a member, the directory or its end: flags, sizes, places."""
    signature, fields = random.choice(((b"PK\x03\x04", _LOCAL), (b"PK\x01\x02", _CENTRAL), (b"PK\x05\x06", _END)))
    starts = [found.start() for found in re.finditer(re.escape(signature), content)]
    if not starts:
        return content[: len(content) // 2] + bytes(8) + content[len(content) // 2 :]
    at, (offset, width) = random.choice(starts), random.choice(fields)
    place, size = at + offset, struct.calcsize("<" + width)
    old = int.from_bytes(content[place : place + size], "little")
    new = random.choice((*NUMBERS, old + 1, old - 1, old ^ 1, old | 8, old | 0x800)) % (1 << 8 * size)
    return content[:place] + new.to_bytes(size, "little") + content[place + size :]


def _pickle(content: bytes, random: Random) -> bytes:
    """A pickle with operations added, dropped, repeated or exchanged."""
    starts = []
    with contextlib.suppress(Exception):  # a pickle may end early
        starts = [at for _, _, at in pickletools.genops(content) if at is not None]
    if not starts or random.random() < 0.1:
        return random.choice(HOSTILE)
    parts = [content[begin:end] for begin, end in zip(starts, [*starts[1:], len(content)], strict=True)]
    for _ in range(random.choice((1, 1, 2, 5))):
        at, other = random.randrange(len(parts)), random.randrange(len(parts))
        choice = random.random()
        if choice < 0.35:
            parts[at] = random.choice(OPCODES)
        elif choice < 0.6:
            parts.insert(at, random.choice(OPCODES))
        elif choice < 0.75:
            parts.insert(at, parts[other])
        elif choice < 0.9 and len(parts) > 1:
            parts.pop(at)
        else:
            parts[at], parts[other % len(parts)] = parts[other % len(parts)], parts[at]
    return b"".join(parts)


def _pytorch(content: bytes, random: Random) -> bytes:
    if content.startswith(b"PK"):
        return _zip(content, random, _pickle, random.choice(("data.pkl",) * 12 + ("version", "byteorder", "/0")))
    ends = [found.end() for found in re.finditer(rb"\.", content[:4096])][:8]
    begin = random.choice((0, *ends))
    try:
        end = begin + max(at for _, _, at in pickletools.genops(content[begin:]) if at is not None) + 1
    except Exception:  # not the beginning of a pickle
        end = len(content)
    return content[:begin] + _pickle(content[begin:end], random) + content[end:]


MUTATIONS: Mapping[str, Callable[[bytes, Random], bytes]] = {
    ".npy": _npy,
    ".npz": lambda content, random: _zip(content, random, _npy, ".npy"),
    ".pt": _pytorch,
    ".bin": _pytorch,
}
