"""Damage to the content of a file: of its bytes, of JSON and its text, of safetensors headers, logs and TOML."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import archives
import gguf_files

import mxcli
from mxcli.errors import MxcliError
from mxcli.files.progress_lines import line_bytes

NUMBERS = (
    0, 1, -1, 2, 7, 255, 256, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**62, 2**63 - 1, 2**63, 2**64, 10**30, -(2**63),
    10**400,
)  # fmt: skip
DEEP = json.loads("[" * 300 + "]" * 300)
PATTERNS = (
    "re:(a+)+$",
    "re:(.*.*.*.*.*)*x",
    "re:[",
    "re:.*",
    "re:(?P<a>.)(?P=a)",
    "re:(\\w+\\.?)+!",
    "*" * 40 + "x",
    "@norm",
)
VALUES: tuple[Any, ...] = (
    None, True, False, "", "a", "\x1b[31m\n", "../../evil", "/etc/passwd", "\ud800", "a\0b", "x" * 70_000, [], {}, [[]],
    [None], {"a": 1}, [1, 2], 1.5, 1e308, -0.0, 5e-324, float("nan"), float("inf"), DEEP, {"": {"": [{}]}},
    [0] * 5000, {str(at): at for at in range(3000)}, *PATTERNS, *NUMBERS,
)  # fmt: skip
TYPES = (
    ("F64", 64), ("F32", 32), ("F16", 16), ("BF16", 16), ("F8_E4M3", 8), ("F8_E5M2", 8), ("F8_E8M0", 8), ("F4", 4),
    ("F6_E2M3", 6), ("F6_E3M2", 6), ("I64", 64), ("I32", 32), ("I8", 8), ("U8", 8), ("BOOL", 8), ("C64", 64),
)  # fmt: skip
NAMES = (
    "", ".", "..", "a", "x" * 300, "x" * 50_000, "../x", "/x", "a\0b", "\ud800", "lm_head.weight", "a.weight_scale",
    "a.weight_packed", "model.norm.weight", "model.layers.0.mlp.experts.gate_up_proj", "\x1b[2J", "é.weight",
    "model.layers.0.mlp.experts.down_proj", "model.layers.99999999999.self_attn.q_proj.weight", "a.b." * 500 + "weight",
    "model.layers.0.self_attn.q_proj.weight_scale_inv", "lora_A.weight", "__metadata__x", "a.scales", "a_blocks",
    "model.layers.0.self_attn.q_proj.weight_scale_2", "visual.patch.weight", "weight", "model.mtp.0.q_proj.weight",
    "re:(.weight", "re:(a*)*.weight", "*.weight", "model.layers.?.mlp.weight",
)  # fmt: skip
LITERALS = (
    b"True", b"None", b"[", b"(", b"()", b"-1", b"9" * 40, b"9" * 5000, b"'a'", b"{}", b"(True, 8)", b"1e9", b"8L",
    b"\xff", b"nan", b"-inf", b"1979-05-27T07:32:00Z", b'"""', b"[[[[[[[[", b"0x10", b'"\\uD800"', b'"../x"', b"0.0",
)  # fmt: skip
TEXTS = (b"\xef\xbb\xbf", b"\xff\xfe", b"\0", b"//", b" " * 100_000, b"NaN", b"-Infinity", b"1e999", b"\xe2\x82",
b",", b"}{",
         b'"\\ud800"', b"9" * 5000, b"-", b"\r", b"'", b"\x80", b"[" * 100_000, b'{"a":' * 50_000, b"\xc0\xaf",
         b"1_0", b"0x1")  # fmt: skip
CODE = b"cos\nsystem\n(S'touch executed'\ntR."
WIDTHS = "BHIQ"

Mutation = Callable[[bytes, Random], bytes]


def damaged(content: bytes, name: str, random: Random) -> bytes:
    """The content with one to four mutations."""
    for _ in range(random.choice((1, 1, 1, 1, 2, 3, 4))):
        content = random.choice(_mutations(name))(content, random)[: 1 << 23]
    return content


@cache
def _mutations(name: str) -> Sequence[Mutation]:
    found: list[Mutation] = [_bytes, _number, _cut, _insert, _repeated]
    if name.endswith(".safetensors"):
        found += [_header] * 12 + [_retyped] * 10 + [_offsets] * 5
    elif name.endswith((".gguf", ".pt", ".bin", ".npz", ".npy")):
        mutate = gguf_files.damaged if name.endswith(".gguf") else archives.MUTATIONS[Path(name).suffix]
        found += [mutate] * 20
    elif name.endswith((".json", ".partial")):
        found += [_lines] * 15 + [_text] * 3
    elif name.endswith((".toml", ".txt")):
        found += [_literal] * 8 + [_text] * 4 + [_setting] * 8
    return found


@cache
def words() -> tuple[str, ...]:
    """The texts that the readers know: the short literals of their source."""
    root = Path(mxcli.__file__).parent
    found = set[str]()
    for path in sorted((*root.glob("files/**/*.py"), *root.glob("numerics/*.py"), *root.glob("flows/plan/*.py"))):
        found |= set(re.findall(r'"([\w.:/*@-]{2,40})"', path.read_text("utf-8")))
    return tuple(sorted(found))


def _place(content: bytes, random: Random) -> int:
    """A position, more often near the beginning or the end, where headers and directories are."""
    reach = random.choice((16, 128, 1024, len(content)))
    at = random.randrange(max(1, min(reach, len(content))))
    return at if random.random() < 0.7 else max(0, len(content) - 1 - at)


def _bytes(content: bytes, random: Random) -> bytes:
    changed = bytearray(content)
    for _ in range(random.choice((1, 1, 2, 8))):
        if changed:
            changed[_place(content, random)] = random.choice((0, 255, 127, 128, random.randrange(256)))
    return bytes(changed)


def _number(content: bytes, random: Random) -> bytes:
    at, width = _place(content, random), random.choice(WIDTHS)
    number = random.choice(NUMBERS) % (1 << 8 * struct.calcsize("<" + width))
    return content[:at] + struct.pack("<" + width, number) + content[at + struct.calcsize("<" + width) :]


def _cut(content: bytes, random: Random) -> bytes:
    at = _place(content, random)
    return content[:at] if random.random() < 0.5 else content[:at] + content[at + random.choice((1, 8, 100)) :]


def _insert(content: bytes, random: Random) -> bytes:
    at = _place(content, random)
    return content[:at] + random.choice((b"\0", b"\xff" * 8, b"\n", CODE, b"../", b'"', bytes(1000))) + content[at:]


def _repeated(content: bytes, random: Random) -> bytes:
    at, size = _place(content, random), random.choice((4, 30, 300))
    return content[: at + size] + content[at : at + size] + content[at + size :]


def _text(content: bytes, random: Random) -> bytes:
    """A text with something in it that is no part of its language, or in another encoding."""
    if random.random() < 0.05:
        return content.decode("utf-8", "replace").encode(random.choice(("utf-16", "utf-32", "utf-7")), "replace")
    at = random.choice((0, _place(content, random), len(content)))
    return content[:at] + random.choice(TEXTS) + content[at:]


def _literal(content: bytes, random: Random) -> bytes:
    """A number, word or text of a text header replaced by another literal."""
    found = list(re.finditer(rb"\d+|True|False|true|'[^'\n]*'|\"[^\"\n]*\"|[(\[{}\])=,]", content[:4096]))
    if not found:
        return content
    match, literal = random.choice(found), random.choice((*LITERALS, b"x" * 5))
    if random.random() < 0.5:
        literal = literal[: len(match[0])].ljust(len(match[0]))
    return content[: match.start()] + literal + content[match.end() :]


def _setting(content: bytes, random: Random) -> bytes:
    """A TOML document with another setting, or with another value of one."""
    lines = content.split(b"\n")
    at = random.randrange(len(lines) + 1)
    key = random.choice(
        (b"format", b"scale_rounding", b"rounding", b"keep", b"select", b"include", b"exclude", b"layout", b"seed",
         b"as",
         b"hadamard", b"hadamard_seed", b"fuse", b"nonfinite", b"on_indivisible", b"axis", b"[override]",
         b"[[override]]",
         b"[[override.override]]", b"override.select", b"a.b.c", random.choice(words()).encode())
    )  # fmt: skip
    value = random.choice(
        (json.dumps(random.choice(words())).encode(), json.dumps(random.choice((*PATTERNS, *NAMES))).encode(),
         str(random.choice(NUMBERS)).encode(), random.choice(LITERALS), b"[1, 2]", b'["*", "@norm"]', b"{a = 1}",
         b"{a = " * 500 + b"1" + b"}" * 500, b"[" * 2000 + b"]" * 2000, b"true", b"1.5", b'["*"]' * 2)
    )  # fmt: skip
    lines[at:at] = [key if key.startswith(b"[") else key + b" = " + value]
    return b"\n".join(lines)


def _split(content: bytes) -> tuple[dict[str, Any], bytes]:
    """The parsed header of a safetensors file and its data. Raises ValueError."""
    length = int.from_bytes(content[:8], "little")
    if length > len(content):
        raise ValueError("no header")
    header = json.loads(content[8 : 8 + length])
    if not isinstance(header, dict):
        raise ValueError("no object")
    return header, content[8 + length :]


def _joined(text: bytes, data: bytes, random: Random) -> bytes:
    if random.random() < 0.9:
        text += b" " * (-len(text) % 8)
    length = len(text) if random.random() < 0.95 else random.choice((0, len(text) - 1, len(text) + 1, 2**63, 10**8 + 1))
    return struct.pack("<Q", length % 2**64) + text + data


def _header(content: bytes, random: Random) -> bytes:
    length = int.from_bytes(content[:8], "little")
    if length > len(content):
        return _bytes(content, random)
    return _joined(_json(content[8 : 8 + length], random), content[8 + length :], random)


def _offsets(content: bytes, random: Random) -> bytes:
    """A safetensors file whose tensors overlap, leave gaps, or are somewhere else."""
    try:
        header, data = _split(content)
        names = [name for name in header if name != "__metadata__"]
        first, second = header[random.choice(names)], header[random.choice(names)]
        begin, end = first["data_offsets"]
        move = random.choice((1, -1, 4, -4, 1 << 20, -(1 << 20), 2**62, -(2**63)))
        first["data_offsets"] = random.choice(
            (second["data_offsets"], [end, begin], [begin + move, end + move], [begin, end + move], [begin, begin],
             [end],
             [begin, end, end], [str(begin), end], [float(min(max(begin, -(2**62)), 2**62)), end], [True, end],
             [0, len(data)], None)
        )  # fmt: skip
        if random.random() < 0.3:
            first["shape"] = random.choice(
                ([2**62, 4], [2**32, 2**32], [0, 2**63], [1] * 5000, [-1, 32], [1.0], [True], [0])
            )
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return _bytes(content, random)
    if random.random() < 0.2:
        data = random.choice((data + b"\0", data[:-1], b"", data * 2))
    return _joined(json.dumps(header).encode(), data, random)


def _retyped(content: bytes, random: Random) -> bytes:
    """A valid safetensors file with a tensor of another type, shape or name, over the same bytes."""
    try:
        header, data = _split(content)
        name = random.choice([name for name in header if name != "__metadata__"])
        entry = header.pop(name)
        rows, columns = (*entry["shape"], 1, 1)[:2]
        begin, end = entry["data_offsets"]
        nbytes = end - begin
        dtype, bits = random.choice(TYPES)
        size = nbytes * 8 // bits
        wide = max(size // rows, 1) if rows else 1
        shapes: tuple[list[int], ...] = (
            [rows, wide],
            [wide, rows],
            [size],
            [1, rows, wide],
            [rows, wide, 1],
            [size, 1],
            [2, rows // 2, wide],
            [],
        )
        entry |= (
            {"dtype": dtype, "shape": random.choice(shapes)} if random.random() < 0.8 else {"shape": [columns, rows]}
        )
        header[name if random.random() < 0.6 else random.choice(NAMES)] = entry
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return _bytes(content, random)
    if random.random() < 0.5:  # values of any kind
        at = random.randrange(max(1, len(data)))
        data = (
            data[:at] + random.choice((b"\xff", b"\x7f", b"\0", b"\x80")) * len(data[at : at + 256]) + data[at + 256 :]
        )
    text = json.dumps(header).encode()
    return _joined(text + b" " * (-len(text) % 8), data, random)


def _lines(content: bytes, random: Random) -> bytes:
    """A JSON document, or a log of several lines of JSON, whose hashes are mostly those of the damaged lines."""
    is_log = content.count(b"\n{") > 0 and b'"check":' in content
    lines = content.split(b"\n") if is_log else [content]
    at = random.randrange(len(lines))
    lines[at] = _json(lines[at], random)
    if is_log and random.random() < 0.8:
        lines[at] = _signed(lines[at])
    if is_log and random.random() < 0.2:
        lines.insert(random.randrange(len(lines) + 1), random.choice(lines))
    if is_log and random.random() < 0.1:
        del lines[random.randrange(len(lines))]
    return b"\n".join(lines)


def _signed(line: bytes) -> bytes:
    try:
        parsed = json.loads(line)
        parsed.pop("check", None)
        return line_bytes(parsed)[:-1]
    except (ValueError, TypeError, AttributeError, RecursionError, MxcliError):
        return line


def _json(text: bytes, random: Random) -> bytes:
    try:
        parsed = json.loads(text)
        encoded = json.dumps(_changed(parsed, random)).encode()
    except (ValueError, RecursionError):
        return _bytes(text, random)
    chance = random.random()
    if chance < 0.05:  # the same key twice
        encoded = re.sub(rb'("[^"]+": )([^,{}\[\]]+),', rb"\1\2, \1 0,", encoded, count=1)
    elif chance < 0.08:
        middle = len(encoded) // 2
        encoded = encoded[:middle] + b"[" * random.choice((50, 200, 100_000)) + encoded[middle:]
    elif chance < 0.12:
        encoded = _text(encoded, random)
    return encoded


def _changed(parsed: Any, random: Random) -> Any:
    """The value with one of its parts changed."""
    places: list[tuple[Any, Any]] = []
    pending = [parsed]
    while pending:
        each = pending.pop()
        keys = list(each) if isinstance(each, dict) else range(len(each)) if isinstance(each, list) else ()
        places += [(each, key) for key in keys]
        pending += [each[key] for key in keys]
    if not places:
        return random.choice(VALUES)
    parent, key = random.choice(places)
    old = parent[key]
    choice = random.random()
    if isinstance(old, str) and old[:1] in "{[" and len(old) > 2 and choice < 0.8:  # JSON in a text
        parent[key] = _json(old.encode(errors="replace"), random).decode(errors="replace")
    elif choice < 0.4:
        parent[key] = random.choice(VALUES)
    elif choice < 0.5:
        del parent[key]
    elif choice < 0.6 and isinstance(parent, dict):
        parent[str(random.choice((*VALUES, key + "x", random.choice(words()))))[:100]] = parent.pop(key)
    elif choice < 0.65 and isinstance(parent, dict):
        parent[random.choice(words())] = random.choice((*VALUES, old))
    elif choice < 0.75:
        owner, other = random.choice(places)
        parent[key] = old if isinstance(owner[other], dict | list) else owner[other]
    elif isinstance(old, int | float) and not isinstance(old, bool):
        near = (
            old + 1,
            old - 1,
            -old,
            old * 2,
            str(old),
            random.choice(NUMBERS),
            old + 0.5 if abs(old) < 2**60 else 0.5,
        )
        parent[key] = random.choice(near)
    elif isinstance(old, str):
        parent[key] = random.choice(
            (old + "x", old[:-1], old * 100, "../" + old, old.upper(), {old: old}, [old], *[random.choice(words())] * 4)
        )
    else:
        parent[key] = random.choice(VALUES)
    return parsed
