"""Damage to valid inputs: of their JSON values by type, of their numbers, and of their bytes."""

from __future__ import annotations

import json
import re
import struct
from random import Random
from typing import Any

NUMBERS = (
    0,
    1,
    -1,
    2,
    7,
    255,
    256,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**53,
    2**62,
    2**63 - 1,
    2**63,
    2**64,
    10**30,
    -(2**63),
)
VALUES: tuple[Any, ...] = (
    None, True, False, "", "a", "\x1b[31m\n", "../../evil", "/etc/passwd", "\ud800", "x" * 70_000, [], {}, [[]], [None],
    {"a": 1}, [1, 2], 1.5, 1e308, float("nan"), float("inf"), *NUMBERS,
)  # fmt: skip
TYPES = (
    ("F64", 64), ("F32", 32), ("F16", 16), ("BF16", 16), ("F8_E4M3", 8), ("F8_E5M2", 8), ("F8_E8M0", 8), ("F4", 4),
    ("F6_E2M3", 6), ("I64", 64), ("I32", 32), ("I8", 8), ("U8", 8), ("BOOL", 8), ("C64", 64),
)  # fmt: skip
NAMES = (
    "", ".", "a", "x" * 300, "../x", "lm_head.weight", "a.weight_scale", "a.weight_packed", "model.norm.weight",
    "model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj", "\x1b[2J", "é.weight",
    "model.layers.99999999999.self_attn.q_proj.weight", "model.layers.0.self_attn.q_proj.weight_scale_inv",
    "lora_A.weight", "__metadata__x", "a.scales", "a_blocks", "visual.patch.weight", "weight",
)  # fmt: skip
LITERALS = (b"True", b"None", b"[", b"(", b"()", b"-1", b"9" * 40, b"'a'", b"{}", b"(True, 8)", b"1e9", b"8L", b"\xff")
CODE = b"cos\nsystem\n(S'touch executed'\ntR."
OPCODES = [bytes([code]) for code in b"Rb(t}]sue0.N"]
WIDTHS = "BHIQ"


def damaged(content: bytes, name: str, random: Random) -> bytes:
    """The content with one to three mutations."""
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        content = random.choice(_mutations(content, name))(content, random)
    return content


def _mutations(content: bytes, name: str) -> list[Any]:
    found = [_bytes, _number, _cut, _insert, _repeated]
    if name.endswith(".safetensors"):
        found += [_header] * 10 + [_retyped] * 15
    elif name.endswith((".json", ".partial")):
        found += [_lines] * 15
    elif name.endswith((".npy", ".npz", ".toml")):
        found += [_literal] * 8
    elif name.endswith(".pt"):
        found += [_opcodes] * 5
    return found


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


def _literal(content: bytes, random: Random) -> bytes:
    """A number, word or text of a text header replaced by another literal."""
    found = list(re.finditer(rb"\d+|True|False|'[^'\n]*'|\"[^\"\n]*\"|[(\[{}\])=,]", content[:4096]))
    if not found:
        return content
    match, literal = random.choice(found), random.choice((*LITERALS, b"x" * 5))
    if random.random() < 0.5:
        literal = literal[: len(match[0])].ljust(len(match[0]))
    return content[: match.start()] + literal + content[match.end() :]


def _opcodes(content: bytes, random: Random) -> bytes:
    """A pickle with opcodes of another kind."""
    start = max(content.find(b"\x80\x02"), 0)
    at = start + random.randrange(600)
    opcode = random.choice(
        (
            b"R",
            b"\x81",
            b"b",
            b"(",
            b"t",
            b"\x85",
            b"\x86",
            b"}",
            b"]",
            b"s",
            b"u",
            b"e",
            b"0",
            b".",
            b"h\0",
            b"q\0",
            CODE,
        )
    )
    return content[:at] + opcode + content[at + random.choice((0, len(opcode))) :]


def _header(content: bytes, random: Random) -> bytes:
    length = int.from_bytes(content[:8], "little")
    if length > len(content):
        return _bytes(content, random)
    text = _json(content[8 : 8 + length], random)
    if random.random() < 0.9:
        text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + content[8 + length :]


def _retyped(content: bytes, random: Random) -> bytes:
    """A valid safetensors file with a tensor of another type, shape or name, over the same bytes."""
    length = int.from_bytes(content[:8], "little")
    try:
        header = json.loads(content[8 : 8 + length])
        name = random.choice([name for name in header if name != "__metadata__"])
        entry = header.pop(name)
        rows, *rest = entry["shape"] or [1]
        columns = rest[-1] if rest else 1
        nbytes = entry["data_offsets"][1] - entry["data_offsets"][0]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return _bytes(content, random)
    dtype, bits = random.choice(TYPES)
    size = nbytes * 8 // bits
    wide = max(size // rows, 1) if rows else 1
    shapes = ([rows, wide], [wide, rows], [size], [1, rows, wide], [rows, wide, 1], [size, 1], [2, rows // 2, wide], [])
    entry |= {"dtype": dtype, "shape": random.choice(shapes)} if random.random() < 0.8 else {"shape": [columns, rows]}
    header[name if random.random() < 0.6 else random.choice(NAMES)] = entry
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    data = content[8 + length :]
    if random.random() < 0.5:  # values of any kind
        at = random.randrange(max(1, len(data)))
        data = (
            data[:at] + random.choice((b"\xff", b"\x7f", b"\0", b"\x80")) * len(data[at : at + 256]) + data[at + 256 :]
        )
    return struct.pack("<Q", len(text)) + text + data


def _lines(content: bytes, random: Random) -> bytes:
    """A JSON document, or one of several lines of JSON."""
    lines = content.split(b"\n") if content.count(b"\n{") else [content]
    at = random.randrange(len(lines))
    lines[at] = _json(lines[at], random)
    if random.random() < 0.1:
        lines.insert(random.randrange(len(lines) + 1), random.choice(lines))
    return b"\n".join(lines)


def _json(text: bytes, random: Random) -> bytes:
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        return _bytes(text, random)
    places: list[tuple[Any, Any]] = []
    pending = [parsed]
    while pending:
        each = pending.pop()
        keys = list(each) if isinstance(each, dict) else range(len(each)) if isinstance(each, list) else ()
        places += [(each, key) for key in keys]
        pending += [each[key] for key in keys]
    if not places:
        return json.dumps(random.choice(VALUES)).encode()
    parent, key = random.choice(places)
    old = parent[key]
    choice = random.random()
    if choice < 0.5:
        parent[key] = random.choice(VALUES)
    elif choice < 0.6:
        del parent[key]
    elif choice < 0.7 and isinstance(parent, dict):
        parent[str(random.choice((*VALUES, key + "x")))[:100]] = parent.pop(key)
    elif choice < 0.8:
        owner, other = random.choice(places)
        parent[key] = old if isinstance(owner[other], dict | list) else owner[other]
    elif isinstance(old, int | float) and not isinstance(old, bool):
        parent[key] = random.choice((old + 1, old - 1, -old, old * 2, float(old), str(old), random.choice(NUMBERS)))
    elif isinstance(old, str):
        parent[key] = random.choice((old + "x", old[:-1], old * 100, "../" + old, old.upper(), {old: old}, [old]))
    else:
        parent[key] = random.choice(VALUES)
    encoded = json.dumps(parsed).encode()
    if random.random() < 0.05:  # the same key twice
        encoded = re.sub(rb'("[^"]+": )([^,{}\[\]]+),', rb"\1\2, \1 0,", encoded, count=1)
    if random.random() < 0.03:
        encoded = encoded[: len(encoded) // 2] + b"[" * random.choice((50, 200, 100_000)) + encoded[len(encoded) // 2 :]
    return encoded
