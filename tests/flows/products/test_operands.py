"""Products and the sums of their errors, which hang on no number of threads."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mxcli.flows.products import operands as module
from mxcli.flows.products.operands import Energies, energies, product


def test_sums_are_those_of_the_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    exact, off = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), np.array([[1.0, -1.0], [0.5, 0.0], [0.0, 2.0]])
    expected = Energies(6, 91.0, 6.25, 12.5, 2.5)
    assert energies(exact, off) == expected
    monkeypatch.setattr(module, "PIECE", 2)
    assert energies(exact, off) == expected
    assert expected.metrics["bias"] == pytest.approx(2.5 / 6)
    assert energies(exact[:0], off[:0]) == Energies(0, 0.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize(("m", "n", "k"), [(64, 384, 128), (16, 16, 4096), (300, 2000, 700)])
def test_threads_do_not_change_a_bit(m: int, n: int, k: int) -> None:
    random = np.random.default_rng(0)
    a, b = random.standard_normal((m, k)), random.standard_normal((n, k))
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            d = product(a, b)
            found.append((d.tobytes(), energies(d, d - 1)))
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1] == found[2]
