"""Colours are distinguishable, also for the colour-blind, and words are readable."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from mxcli.output.axes import DARK, LIGHT, SERIES_DARK, SERIES_LIGHT

F64 = np.ndarray

# Machado, Oliveira and Fernandes 2009, severity 1, for linear sRGB.
SIGHT = {
    "trichromat": np.eye(3),
    "protanope": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranope": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]]
    ),
    "tritanope": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]]
    ),
}
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def linear(colour: str) -> F64:
    channels = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def lab(rgb: F64) -> F64:
    xyz = XYZ @ np.clip(rgb, 0, 1) / np.array([0.9505, 1.0, 1.089])
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def contrast(one: str, other: str) -> float:
    low, high = sorted(float(XYZ[1] @ linear(colour)) for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize("series", [SERIES_LIGHT, SERIES_DARK], ids=["light", "dark"])
def test_series_differ_to_everyone(series: tuple[str, ...], sight: str) -> None:
    seen = [lab(SIGHT[sight] @ linear(colour)) for colour in series]
    assert min(float(np.linalg.norm(a - b)) for a, b in itertools.combinations(seen, 2)) > 20


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_signs_and_words_stand_out(colours: dict[str, str]) -> None:
    for ground in ("paper", "card"):
        for name in (*(f"series-{at}" for at in range(8)), "saturated", "underflowed"):
            assert contrast(colours[name], colours[ground]) > 3, name
        for name in ("ink", "soft", "accent"):
            assert contrast(colours[name], colours[ground]) > 4.5, name


def test_both_know_the_same_names() -> None:
    assert LIGHT.keys() == DARK.keys()
