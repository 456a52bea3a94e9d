"""Random Hadamard transforms as rows: sizes, signs, and what is refused."""

from __future__ import annotations

import pytest

from mxcli.errors import UsageError
from mxcli.numerics.hadamard import Hadamard, find_hadamard, hadamard_of, signs_text, stated_hadamard


def test_transformer_engines_signs_for_16() -> None:
    assert signs_text(find_hadamard(16)) == "+++-+------+-+--"
    assert find_hadamard(16).seed is None
    assert find_hadamard(16).name == "hadamard-16"


def test_signs_follow_from_the_seed() -> None:
    assert signs_text(find_hadamard(16, 0)) == "-++---+----+----"
    assert signs_text(find_hadamard(16, 1)) == "+-++-+--+++----+"
    assert find_hadamard(64) == find_hadamard(64, 0) != find_hadamard(64, 1)
    assert find_hadamard(128, 5).signs[:64] == find_hadamard(64, 5).signs
    for size in (16, 32, 64, 128):
        minus = find_hadamard(size, 9).signs.count(-1)
        assert size / 4 < minus < size * 3 / 4


def test_signs_as_text_and_back() -> None:
    for hadamard in (find_hadamard(16), find_hadamard(128)):
        assert hadamard_of(signs_text(hadamard)) == Hadamard(hadamard.size, hadamard.signs)
    assert hadamard_of(None) is None
    for wrong in ("", "+-", "+" * 17, "+" * 15 + "1", "\x1b" * 16):
        with pytest.raises(UsageError, match="is not the signs of a Hadamard transform of 16, 32, 64, 128"):
            hadamard_of(wrong)


def test_requests() -> None:
    assert stated_hadamard(None, None) is None
    assert stated_hadamard(32, 3) == find_hadamard(32, 3)
    for size in (0, 1, 8, 17, 256, -16):
        with pytest.raises(UsageError, match=rf"a Hadamard transform of {size}: --hadamard takes 16, 32, 64, 128\."):
            stated_hadamard(size, None)
    with pytest.raises(UsageError, match=r"--hadamard-seed 3 has no effect without a transform: add --hadamard"):
        stated_hadamard(None, 3)
    with pytest.raises(UsageError, match="--hadamard-seed -1: a seed is an integer from 0"):
        stated_hadamard(16, -1)
