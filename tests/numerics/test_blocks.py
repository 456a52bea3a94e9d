"""Places of blocks: folded shapes, scale grids, packed widths."""

from __future__ import annotations

import pytest

from mxcli.numerics.blocks import divides, folded, grid_shape, packed_columns
from mxcli.numerics.formats import find_format


def test_leading_dimensions_fold_and_a_vector_is_a_row() -> None:
    shapes = {(): (1, 1, 1), (5,): (1, 1, 5), (3, 5): (1, 3, 5), (2, 3, 5): (2, 3, 5), (7, 2, 3, 5): (14, 3, 5)}
    assert {shape: folded(shape) for shape in shapes} == shapes
    assert folded((0, 3, 5)) == (0, 3, 5)


@pytest.mark.parametrize(
    ("name", "shape", "grid"),
    [
        ("mxfp8", (5, 64), (5, 2)),
        ("mxfp8", (5, 65), (5, 3)),
        ("mxfp8", (65,), (1, 3)),
        ("mxfp8", (), (1, 1)),
        ("mxfp8", (2, 3, 65), (2, 3, 3)),
        ("nvfp4_2d", (33, 20), (3, 2)),
        ("nvfp4_2d", (4, 33, 20), (4, 3, 2)),
        ("fp8_e4m3_channel", (4, 33, 20), (4, 33, 1)),
        ("fp8_e4m3", (4, 33, 20), (1, 1)),
        ("fp8_e4m3_128x128", (130, 200), (2, 2)),
        ("fp8_e4m3_128x128", (576, 2048), (5, 16)),
        ("mxfp8", (0, 32), (0, 1)),
        ("mxfp8", (5, 0), (5, 0)),
        ("fp8_e4m3_channel", (5, 0), (5, 0)),
        ("fp8_e4m3", (0, 32), (1, 1)),
    ],
)
def test_scale_grids(name: str, shape: tuple[int, ...], grid: tuple[int, ...]) -> None:
    assert grid_shape(find_format(name), shape) == grid


def test_packed_rows_are_whole_bytes_and_groups_of_three() -> None:
    widths = {"mxfp4": [0, 1, 1, 2, 16], "mxfp6": [0, 3, 3, 3, 24], "mxfp8": [0, 1, 2, 3, 32]}
    for name, expected in widths.items():
        assert [packed_columns(find_format(name), columns) for columns in (0, 1, 2, 3, 32)] == expected
    assert packed_columns(find_format("e5m1:e8m0:1x32"), 5) == 5


@pytest.mark.parametrize(
    ("name", "shape", "whole"),
    [
        ("mxfp4", (3, 64), True),
        ("mxfp4", (3, 100), False),
        ("nvfp4", (3, 40), False),
        ("nvfp4_2d", (32, 48), True),
        ("nvfp4_2d", (30, 48), False),
        ("fp8_e4m3", (3, 7), True),
        ("fp8_e4m3_channel", (3, 7), True),
        ("fp8_e4m3_1x128", (3, 200), False),
        ("fp8_e4m3_128x128", (130, 200), True),
        ("e4m3:e8m0:128x128", (130, 200), True),
        ("e2m1:e8m0:128x128", (130, 200), False),
    ],
)
def test_partial_blocks_are_for_2d_fp32_scales_and_bytes(name: str, shape: tuple[int, ...], whole: bool) -> None:
    assert divides(find_format(name), shape) is whole
