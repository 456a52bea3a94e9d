"""Values that are not finite: found in the bits of every float dtype, by their place, and where they may stand."""

from __future__ import annotations

import numpy as np
import pytest

from mxcli.files.finite import FLOAT_BITS, NotFinite, may_be_infinite, not_finite

FLOATS = {"F64": np.float64, "F32": np.float32, "F16": np.float16}


def stored(values: np.ndarray, dtype: str) -> np.ndarray:
    """Values as a file holds them."""
    if dtype == "BF16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(FLOATS[dtype])


@pytest.mark.parametrize("dtype", [*FLOATS, "BF16"])
def test_the_first_is_found_by_its_place_in_every_dtype(dtype: str) -> None:
    values = np.ones((3, 5))
    assert not_finite(stored(values, dtype), "a.weight", dtype, (3, 5)) is None
    values[1, 2] = -np.inf
    assert not_finite(stored(values, dtype), "a.weight", dtype, (3, 5)) == NotFinite(0, 1, 7, "-inf")
    values[2, 4], values[0, 3] = np.nan, np.inf
    found = not_finite(stored(values, dtype), "a.weight", dtype, (3, 5))
    assert found == NotFinite(1, 2, 3, "inf")
    assert found.text((3, 5)) == "1 NaN and 2 infinite of 15 values, the first (inf) at [0, 3]"
    # The bytes of a file, not yet as numbers.
    raw = stored(values, dtype).reshape(-1).view(np.uint8)
    assert not_finite(raw, "a.weight", dtype, (3, 5)) == found


def test_large_finite_values_and_subnormals_are_finite() -> None:
    for dtype, kind in FLOATS.items():
        info = np.finfo(kind)
        values = np.array([info.max, -info.max, info.smallest_subnormal, -0.0], kind)
        assert not_finite(values, "a.weight", dtype, (4,)) is None
    assert not_finite(np.array([0x7F7F, 0xFF7F, 1, 0x8000], np.uint16), "a.weight", "BF16", (4,)) is None


def test_a_value_in_a_late_piece_of_a_long_tensor() -> None:
    values = np.zeros(300_001, np.float32)
    values[300_000] = np.nan
    assert not_finite(values, "a.weight", "F32", (300_001,)) == NotFinite(1, 0, 300_000, "NaN")


def test_scalars_empty_tensors_and_other_dtypes() -> None:
    scalar = not_finite(np.array(np.nan, np.float32), "logit_scale", "F32", ())
    assert scalar is not None
    assert scalar.text(()) == "1 NaN of 1 values, the first (NaN) at []"
    assert not_finite(np.zeros((0, 4), np.float32), "a.weight", "F32", (0, 4)) is None
    assert not_finite(np.full(4, 0xFF, np.uint8), "a.weight_scale", "U8", (4,)) is None
    assert {"F64", "F32", "F16", "BF16"} == FLOAT_BITS.keys()


@pytest.mark.parametrize(
    "name",
    [
        "h.0.attn.bias",
        "h.0.attn.masked_bias",
        "layers.0.blocks.1.attn_mask",
        "transformer.causal_mask",
        "decoder.future_mask",
        "text_model.mask",
        "model.alibi",
        "final_logits_bias",
        "lm_head.bias",
        "cls.predictions.lm_head.bias",
    ],
)
def test_masks_and_biases_of_logits_may_hold_infinities_but_no_nan(name: str) -> None:
    values = np.zeros((1, 4), np.float32)
    values[0, 2] = -np.inf
    assert not_finite(values, name, "F32", (1, 4)) is None
    values[0, 3] = np.nan
    assert not_finite(values, name, "F32", (1, 4)) == NotFinite(1, 0, 3, "NaN")


@pytest.mark.parametrize(
    "name",
    [
        "model.norm.weight",
        "model.layers.0.self_attn.q_proj.bias",
        "lm_head.weight",
        "mask_decoder.norm.weight",
        "A_log",
    ],
)
def test_nothing_else_may(name: str) -> None:
    assert not_finite(np.array([1, np.inf], np.float32), name, "F32", (2,)) == NotFinite(0, 1, 1, "inf")
    assert not may_be_infinite(name, "norm")
