"""Print the kernel's instruction set and digests of its results as JSON; no digests if its set is not the argument.

The second argument selects the scale rules of named formats: default or every.
"""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import fields

from kernel_oracle import CHANNELS, SPELLED, Array, default_rules, format_rules, kernel, scheme_of, stats_of
from kernel_samples import SAMPLES, normal

from mxcli.backends import cpu
from mxcli.numerics.formats import FORMATS
from mxcli.numerics.scheme import Scheme
from mxcli.numerics.stats import Histogram, Stats

WIDE = ("mxfp8_e4m3", "nvfp4", "fp8_e4m3", "fp8_e4m3_128x128", "e2m1:e8m0:1x1024", "e4m3:fp32:8x24", "e5m2:e8m0:1x7")
"""Formats also tested on a tensor of several chunks."""


def digest_of(x: Array, scheme: Scheme) -> bytes:
    """Return a digest of codes, scales, statistics, per-block arrays and dequantized values."""
    q = kernel(x, scheme, per_block=True)
    assert q.per_block is not None
    counts = [getattr(stats_of(q), field.name) for field in fields(Stats)]
    numbers = [list(count.counted) if isinstance(count, Histogram) else count for count in counts]
    values = cpu.quantize_dequantize(x, "F32", scheme)
    arrays = [q.packed, q.scales, cpu.dequantize(q), values, *(getattr(q.per_block, n) for n in q.per_block.__slots__)]
    text = repr((q.tensor_scale, q.tensor_encode, numbers)).encode()
    return hashlib.sha256(b"".join([text, *(a.tobytes() for a in arrays)])).digest()


def digests(rules: list[tuple[str, str]]) -> dict[str, str]:
    """Return a digest for each of the rules of named formats, and for each spelled format."""
    found = {}
    for name, rule in [*rules, *((name, None) for name in (*SPELLED, *CHANNELS))]:
        schemes = [scheme_of(name, rule, rounding=rounding) for rounding in ("nearest-even", "half-away")]
        inputs = [*SAMPLES.values(), normal(3, 1100)]
        parts = [digest_of(x, scheme) for scheme in schemes for x in inputs]
        if name in WIDE:
            parts.append(digest_of(normal(170, 777), schemes[0]))
        found[f"{name} {rule}"] = hashlib.sha256(b"".join(parts)).hexdigest()
    return found


if __name__ == "__main__":
    instruction_set = cpu.instruction_set()
    wanted, rules = sys.argv[1:]
    chosen = default_rules() if rules == "default" else format_rules(tuple(FORMATS))
    found = digests(chosen) if instruction_set == wanted else {}
    print(json.dumps({"instruction_set": instruction_set, "digests": found}))
