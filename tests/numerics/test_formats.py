"""Block formats: the named rows, the spelling of others, and what is refused with which words."""

from __future__ import annotations

import pytest

from mxcli.errors import UsageError
from mxcli.numerics.formats import FORMATS, find_format

# spelling, stored bits per element
ROWS = {
    "mxfp8_e4m3": ("e4m3:e8m0:1x32", 8.25),
    "mxfp8_e5m2": ("e5m2:e8m0:1x32", 8.25),
    "mxfp6_e2m3": ("e2m3:e8m0:1x32", 6.25),
    "mxfp6_e3m2": ("e3m2:e8m0:1x32", 6.25),
    "mxfp4_e2m1": ("e2m1:e8m0:1x32", 4.25),
    "mxint8": ("int8:e8m0:1x32", 8.25),
    "nvfp4": ("e2m1:e4m3:1x16:fp32", 4.5),
    "nvfp4_2d": ("e2m1:e4m3:16x16:fp32", 4.03125),
    "fp8_e4m3": ("e4m3:fp32:tensor", 8.0),
    "fp8_e4m3_channel": ("e4m3:fp32:channel", 8.0),
    "fp8_e4m3_1x128": ("e4m3:fp32:1x128", 8.25),
    "fp8_e4m3_128x128": ("e4m3:fp32:128x128", 8.001953125),
    "fp8_e5m2": ("e5m2:fp32:tensor", 8.0),
    "fp8_e5m2_channel": ("e5m2:fp32:channel", 8.0),
    "fp8_e5m2_1x128": ("e5m2:fp32:1x128", 8.25),
    "fp8_e5m2_128x128": ("e5m2:fp32:128x128", 8.001953125),
}
ALIASES = {"mxfp8": "mxfp8_e4m3", "mxfp6": "mxfp6_e2m3", "mxfp4": "mxfp4_e2m1"}


def test_the_named_rows() -> None:
    assert {row.name: (row.spelling, row.bits_per_element) for row in FORMATS.values()} == ROWS
    assert {alias: row.name for row in FORMATS.values() for alias in row.aliases} == ALIASES


@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_found_by_name_and_by_spelling(name: str) -> None:
    spelling, _ = ROWS[name]
    for written in (name, spelling, spelling.upper(), f"  {name} "):
        assert find_format(written) is FORMATS[name]
    if len(spelling.split(":")) == 3:
        assert find_format(f"{spelling}:none") is FORMATS[name]


@pytest.mark.parametrize("alias", ALIASES)
def test_a_row_is_found_by_alias(alias: str) -> None:
    assert find_format(alias) is FORMATS[ALIASES[alias]]


def test_a_spelled_format() -> None:
    row = find_format("e3m2:e8m0:1x16")
    assert (row.element.name, row.scale.name, row.block, row.tensor_scale) == ("e3m2", "e8m0", (1, 16), None)
    assert (row.name, row.block_name, row.bits_per_element) == ("e3m2:e8m0:1x16", "1x16", 6.5)
    assert find_format("int4:e8m0:channel").block == (1, None)
    assert find_format("int4:e8m0:tensor").block == (None, None)
    assert find_format("e5m1:e5m2:4x64:fp32").tensor_scale is not None
    assert find_format("e2m1:e4m3:1x16").tensor_scale is None
    assert find_format("e4m3:e8m0:65536x65536").block == (65536, 65536)


def test_power_of_two_scales() -> None:
    kinds = {row.scale.name: row.has_power_of_two_scales for row in FORMATS.values()}
    assert kinds == {"e8m0": True, "e4m3": False, "fp32": False}


@pytest.mark.parametrize("spelling", ["E3M2:e8m0:1x16", "e3m2:e8m0:01x016", "e2m1:e4m3:1x32:none"])
def test_equal_formats_have_one_name(spelling: str) -> None:
    assert find_format(spelling).name == find_format(spelling).spelling


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mxfp5", "unknown format 'mxfp5': `mxcli formats` lists the named ones"),
        ("mxfp8_e4m4", "Did you mean mxfp8_e4m3"),
        ("", "unknown format ''"),
        ("e4m3:e8m0", "has 2 parts; it needs ELEMENT:SCALE:BLOCK"),
        ("a:b:c:d:e", "has 5 parts"),
        (
            "e9m9:e8m0:1x32",
            "element 'e9m9' is none of e4m3, e5m2, e2m3, e3m2, e2m1, int8, int6, int4 nor eXmY of 2 to 8 bits",
        ),
        ("e4m3:e3m4:1x32", "scale 'e3m4' is none of e8m0, e4m3, e5m2, fp32"),
        ("e4m3:e8m0:0x32", "block '0x32' is not ROWSxCOLUMNS"),
        ("e4m3:e8m0:1x65537", "1 to 65536"),
        ("e4m3:e8m0:32", "block '32' is not ROWSxCOLUMNS"),
        ("e4m3:e8m0:row", "channel or tensor"),
        ("e4m3:e8m0:-1x32", "block '-1x32'"),
        ("e2m1:e4m3:1x16:e8m0", "tensor scale 'e8m0' is not fp32"),
        ("e2m1:e8m0:1x32:fp32", "a tensor scale serves block scales of narrow range; e8m0 needs none, leave it out"),
        ("e4m3:fp32:1x128:fp32", "fp32 needs none, leave it out"),
        ("e2m1:e8m0:1x6", "columns must be a multiple of 4"),
        ("e3m2:e8m0:1x30", "blocks of packed codes begin on a byte"),
    ],
)
def test_refusals_say_what_would_do(name: str, words: str) -> None:
    with pytest.raises(UsageError) as refusal:
        find_format(name)
    assert words in str(refusal.value)
    assert refusal.value.exit_code == 2


def test_a_name_with_unprintable_characters_is_shown_escaped() -> None:
    with pytest.raises(UsageError, match=r"unknown format 'mx\\x1b\[31mfp8'"):
        find_format("mx\x1b[31mfp8")
