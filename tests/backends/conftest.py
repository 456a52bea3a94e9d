"""Where the kernel differs from the oracle on purpose."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import oracle
import pytest


@pytest.fixture(autouse=True)
def finite_torchao_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel caps torchao's factors at FLT_MAX, as every other recipe's: infinite ones turn zeros into NaN."""
    capped = replace(
        oracle.RECIPES["torchao"],
        argument=lambda x, s, g: x * np.minimum(oracle.ONE / g.decode / s, oracle.FLT_MAX),
    )
    monkeypatch.setitem(oracle.RECIPES, "torchao", capped)
