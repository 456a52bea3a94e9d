"""Blocks of a model from the names of its layers, and notes on those that stay high."""

from __future__ import annotations

import pytest

from mxcli.flows.products.trained_layers import blocks_of, high_notes, shown
from mxcli.numerics.training import TRAINING_RECIPES

NVFP4, FP8, MXFP8 = (TRAINING_RECIPES[name] for name in ("nvfp4", "fp8_current", "mxfp8"))


@pytest.mark.parametrize(
    ("layers", "stacks"),
    [
        (["model.layers.0.q", "model.layers.11.q", "lm_head"], {"model.layers.": (0, 11)}),
        (["decoder_layers_0_mlp_fc1", "decoder_layers_1_mlp_fc1"], {"decoder_layers_": (0, 1)}),
        (["h.0.fc_1.w", "conv_2_x"], {"h.": (0,)}),
        (["enc.0.a", "dec.0.a", "dec.1.a"], {"enc.": (0,), "dec.": (0, 1)}),
        (["0.a", "1.a"], {"": (0, 1)}),
        (["fc1", "layers.3"], {}),
    ],
)
def test_numbers_between_dots_or_else_underscores(layers: list[str], stacks: dict[str, tuple[int, ...]]) -> None:
    assert blocks_of(layers).stacks == stacks


def test_high_blocks_of_names_without_dots() -> None:
    blocks = blocks_of(f"decoder_layers_{number}_fc1" for number in range(10))
    assert shown(blocks.high(NVFP4)) == ("decoder_layers_8", "decoder_layers_9")
    assert shown(blocks.high(FP8)) == ("decoder_layers_0", "decoder_layers_9")
    assert high_notes([NVFP4, MXFP8], blocks, ["decoder_layers_1_fc1", "decoder_layers_9_fc1"]) == [
        "nvfp4: 2 of 10 blocks stay high (the last 15 % of blocks, rounded up: decoder_layers_8, decoder_layers_9); "
        "the products of 1 layer there are exact."
    ]


def test_unknown_blocks_are_reported() -> None:
    assert high_notes([MXFP8], blocks_of(["fc1"]), ["fc1"]) == []
    assert high_notes([NVFP4, FP8, MXFP8], blocks_of(["fc1"]), ["fc1"]) == [
        "nvfp4: no block stays high, though the last 15 % of blocks, rounded up should: names of layers, such as "
        "'fc1', have no number of a block.",
        "fp8_current: no block stays high, though the first block and the last block should: names of layers, such as "
        "'fc1', have no number of a block.",
    ]


def test_that_the_length_of_the_model_is_not_known_is_said() -> None:
    notes = high_notes([FP8], blocks_of(["h.5.fc", "h.6.fc"], is_whole=False), ["h.5.fc", "h.6.fc"])
    assert notes[0].startswith("fp8_current: 2 of 2 blocks stay high")
    assert notes[1] == (
        "Blocks were counted among the captured layers, as the captures do not say which others the model has: its "
        "first and last may be others."
    )
    assert high_notes([MXFP8], blocks_of(["h.5.fc"], is_whole=False), ["h.5.fc"]) == []
