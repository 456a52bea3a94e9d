"""Intended differences between the kernel and the oracle."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import oracle
import pytest


@pytest.fixture(autouse=True)
def finite_torchao_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cap torchao's factors at FLT_MAX, as the kernel does for all schemes: infinite factors turn zeros into NaN."""
    capped = replace(
        oracle.RECIPES["torchao"],
        argument=lambda x, s, g: x * np.minimum(oracle.ONE / g.decode / s, oracle.FLT_MAX),
    )
    monkeypatch.setitem(oracle.RECIPES, "torchao", capped)
