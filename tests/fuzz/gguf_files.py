"""GGUF files with one field that is not as it should be."""

from __future__ import annotations

import struct
from random import Random

WIDE = (0, 1, 2, 3, 5, 31, 255, 2**16, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1)
TEXTS = (b"", b"a", b"general.architecture", b"general.alignment", b"../x", b"/x", b"a\0b", b"\xff\xfe",
b"\xed\xa0\x80", b"x" * 70_000,
         b"\x1b[2J", b"token_embd.weight", b"blk.0.attn_q.weight", b"blk.99999999999.attn_q.weight",
         b"blk.0.attn_q.scale")  # fmt: skip
SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
TEXT, ARRAY = 8, 9


def damaged(content: bytes, random: Random) -> bytes:
    """A new GGUF file of one to four tensors with settings, of which one or two fields are wrong."""
    wrong = {random.choice(_FIELDS) for _ in range(random.choice((1, 1, 2)))}

    def number(field: str, value: int, width: str) -> bytes:
        if field in wrong and random.random() < 0.7:
            value = random.choice((*WIDE, value + 1, value - 1, value ^ 1))
        return struct.pack("<" + width, value % (1 << 8 * struct.calcsize("<" + width)))

    def text(field: str, value: bytes) -> bytes:
        if field in wrong and random.random() < 0.7:
            value = random.choice(TEXTS)
        return number(field + " length", len(value), "Q") + value

    def value(kind: int, depth: int = 0) -> bytes:
        if kind == TEXT:
            return text("text", random.choice((b"llama", b"x")))
        if kind == ARRAY:
            of = random.choice((TEXT, 4, 6, ARRAY)) if depth < 3 else 4
            count = random.choice((0, 1, 3))
            return (
                number("array type", of, "I")
                + number("array count", count, "Q")
                + b"".join(value(of, depth + 1) for _ in range(count))
            )
        return random.randbytes(SIZES.get(kind, 4))

    alignment = random.choice((8, 32, 64)) if "alignment" not in wrong else random.choice(WIDE)
    settings = [text("key", b"general.architecture") + number("kind", TEXT, "I") + text("architecture", b"llama")]
    settings += [text("key", b"general.alignment") + number("kind", 4, "I") + struct.pack("<I", alignment % 2**32)]
    for at in range(random.randrange(4)):
        kind = random.choice((*SIZES, TEXT, ARRAY))
        settings.append(text("key", b"a.%d" % at) + number("kind", kind, "I") + value(kind))
    if "deep" in wrong:
        settings.append(
            text("key", b"deep")
            + struct.pack("<I", ARRAY)
            + struct.pack("<IQ", ARRAY, 1) * random.choice((50, 5000, 90_000))
        )
    entries, at = [], 0
    for place in range(random.randrange(1, 5)):
        sizes = random.choice(((32, 32), (32,), (64, 2), (256, 1), (32, 2, 2)))
        stored: int = random.choice((0, 1, 30, 8, 2, 39, 40, 12, 14, 28, 24))
        if "kind of tensor" in wrong:
            stored = random.randrange(60)
        shape = b"".join(number("size", each, "Q") for each in sizes)
        name = text("name", b"blk.0.ffn_%d.weight" % place if "repeated" not in wrong else b"a.weight")
        entries.append(
            name
            + number("dimensions", len(sizes), "I")
            + shape
            + number("type", stored, "I")
            + number("offset", at, "Q")
        )
        at += 4096
    head = (b"GGUF" if "magic" not in wrong else random.choice((b"FUGG", b"GGML", b"gguf"))) + number(
        "version", random.choice((2, 3)), "I"
    )
    head += number("tensors", len(entries), "Q") + number("settings", len(settings), "Q")
    made = head + b"".join(settings) + b"".join(entries)
    made += bytes(-len(made) % max(1, min(alignment, 4096)))
    data = content[-4096:] * (at // 4096)
    return made + random.choice((data, data, data, data[:-1], data[:100], b"", data + bytes(100)))


_FIELDS = (
    "key", "key length", "text", "text length", "architecture", "array type", "array count", "kind", "alignment",
    "deep", "size",
    "name", "name length", "dimensions", "type", "offset", "magic", "version", "tensors", "settings",
    "kind of tensor", "repeated",
)  # fmt: skip
