"""Prints the kernel's instruction set and a digest of what it computes, as JSON: run once per instruction set."""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields

from kernel_oracle import format_rules, kernel, recipe_of
from kernel_samples import SAMPLES, normal

from mxcli.backends import cpu

WIDE = ("mxfp8_e4m3", "nvfp4", "fp8_e4m3", "fp8_e4m3_128x128", "e2m1:e8m0:1x1024", "e4m3:fp32:8x24", "e5m2:e8m0:1x7")
"""Formats also tried on a tensor of several chunks."""


def digests() -> dict[str, str]:
    """One digest of codes, scales, statistics and per-block arrays for each format and rule."""
    found = {}
    for name, rule in format_rules():
        digest = hashlib.sha256()
        large = [normal(170, 777)] if name in WIDE else []
        for rounding in ("nearest-even", "half-away"):
            for x in (*SAMPLES.values(), normal(3, 1100), *large):
                q = kernel(x, recipe_of(name, rule, rounding=rounding), per_block=True)
                arrays = [getattr(q.per_block, field.name) for field in fields(q.per_block)]
                for array in (q.packed, q.scales, *arrays):
                    digest.update(array.tobytes())
                digest.update(repr((q.tensor_scale, q.tensor_encode, q.stats)).encode())
                digest.update(cpu.dequantize(q).tobytes())
        found[f"{name} {rule}"] = digest.hexdigest()
    return found


if __name__ == "__main__":
    print(json.dumps({"instruction_set": cpu.instruction_set(), "digests": digests()}))
