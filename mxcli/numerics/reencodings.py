"""Exact re-encodings as rows: codes under power-of-two block scales as FP8 that GPUs without MX hardware multiply.

A power-of-two scale only moves an element's exponent, so it can be folded into a wider exponent field: E4M3 reaches
from 2^-9 to 448, 17.8 binades, of which E2M1 needs 3.6, E2M3 5.9 and E3M2 8.8. What is left, 15, 12 and 10 binades, is
how far the blocks under one scale may be apart. What does not fit is rounded, and counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from mxcli.errors import UsageError, did_you_mean, printable
from mxcli.numerics.formats import BlockFormat
from mxcli.numerics.scheme import Rules, Scheme, resolve


@dataclass(frozen=True, slots=True)
class Reencoding:
    """A target of re-encoding: its format, whose scales are the smallest powers of two that let nothing saturate."""

    name: str
    format: str
    meaning: str

    @property
    def scheme(self) -> Scheme:
        """The scheme that encodes the values again."""
        return resolve(self.format, Rules(scale_rounding="rceil"))


REENCODINGS: dict[str, Reencoding] = {
    row.name: row
    for row in (
        Reencoding(
            "row",
            "e4m3:fp32:channel",
            "E4M3 under one scale per row, for a plain FP8 product with row scales: MXFP4 and MXFP6",
        ),
        Reencoding(
            "1x128",
            "fp8_e4m3_1x128",
            "E4M3 under a scale per 128 elements of a row, for the FP8 product with 1x128 scales: MXFP8",
        ),
    )
}


def find_reencoding(name: str, source: BlockFormat) -> Reencoding:
    """Return the re-encoding called `name` for codes of a format; raises UsageError for an unknown name, or for scales
    that are not powers of two."""
    row = REENCODINGS.get(name)
    if row is None:
        hint = did_you_mean(name, REENCODINGS)
        raise UsageError(f"unknown re-encoding '{printable(name)}': known are {', '.join(REENCODINGS)}.{hint}")
    if not source.has_power_of_two_scales:
        raise UsageError(
            f"{source.name}: its {source.scale.name} scales may have a mantissa, which no exponent can take up; only "
            "formats with E8M0 scales are re-encoded."
        )
    return row
