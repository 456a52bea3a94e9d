"""Sources with values that look like damage: their outputs are sound, since they are as in the source; the same values
in a file that nothing proves are not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import strict_json
from tiny_models import LLAMA, Tensor, bf16, llama, noise, write_model

HUGE = bf16(np.full(1, 1e6))[1][0]


def zeroed(rows: slice, columns: slice = slice(None)) -> Callable[[np.ndarray], None]:
    def change(x: np.ndarray) -> None:
        x[rows, columns] = 0

    return change


def all_zero(x: np.ndarray) -> None:
    x[...] = 0


def with_a_huge_value(x: np.ndarray) -> None:
    x.reshape(-1)[3] = HUGE


def run_within(x: np.ndarray) -> None:
    x.reshape(-1)[90 : 90 + 5000] = 0


EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.layers.1.input_layernorm.weight"
ODD = {
    "embedding of zeros": (EMBEDDING, all_zero, "zero_words", "odd_plain"),
    "head of zeros": (HEAD, all_zero, "zero_words", "odd_plain"),
    "norm of zeros": (NORM, all_zero, "zero_norm", "zero_plain"),
    "rows of zeros": (EMBEDDING, zeroed(slice(60, 130)), "zero_rows", "odd_plain"),
    "zeros within rows": (HEAD, run_within, "zeros_within", "odd_plain"),
    "a huge value in a norm": (NORM, with_a_huge_value, "huge_plain", "odd_plain"),
    "a huge value in an embedding": (EMBEDDING, with_a_huge_value, "huge_plain", "odd_plain"),
}


def found(out: str, severity: str) -> dict[str, list[str]]:
    """The checks of a severity that found something, with the places."""
    by_check: dict[str, list[str]] = {}
    for finding in strict_json(out)["findings"]:
        if finding["severity"] == severity:
            by_check.setdefault(finding["check"], []).append(finding["where"])
    return by_check


def model() -> dict[str, Tensor]:
    """Three layers, with an embedding and a head of several pages."""
    return {**llama(3), EMBEDDING: noise(256, 64, seed=100), HEAD: noise(256, 64, seed=101)}


@pytest.mark.parametrize("kind", ODD)
def test_what_looks_like_damage_and_is_the_sources(mxcli: Callable[..., Any], tmp_path: Path, kind: str) -> None:
    name, change, problem, warning = ODD[kind]
    tensors = model()
    change(tensors[name][1])
    source, output = write_model(tmp_path / "m", tensors, LLAMA), tmp_path / "out"
    assert mxcli("quantize", source, "--format", "mxfp8", "-o", output, "-q").code == 0
    alone = mxcli("verify", output, "--json")
    assert alone.code == 0
    assert found(alone.out, "warning")[warning] == [name]
    # Without the record nothing proves it, and with the source it is proven again.
    (output / "mxcli.json").unlink()
    foreign = mxcli("verify", output, "--json")
    assert foreign.code == 5
    assert found(foreign.out, "problem") == {problem: [name]}
    against = mxcli("verify", output, "--against", source, "--json")
    assert against.code == 0
    assert found(against.out, "warning")[warning] == [name]


def test_a_type_that_the_source_has_too(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    tensors = {**llama(3), NORM: ("F16", np.ones(64, np.float16))}
    source, output = write_model(tmp_path / "m", tensors, LLAMA), tmp_path / "out"
    assert mxcli("quantize", source, "--format", "mxfp8", "-o", output, "-q").code == 0
    assert mxcli("verify", output).code == 0
    (output / "mxcli.json").unlink()
    foreign = mxcli("verify", output, "--json")
    assert found(foreign.out, "problem") == {"odd_type": [NORM]}


def test_damage_is_still_found_where_the_record_proves_it(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    source, output = write_model(tmp_path / "m", model(), LLAMA), tmp_path / "out"
    assert mxcli("quantize", source, "--format", "mxfp8", "-o", output, "-q").code == 0
    path = output / "model.safetensors"
    content = bytearray(path.read_bytes())
    at = content.index(model()[EMBEDDING][1].tobytes())
    content[at : at + 256 * 64 * 2] = bytes(256 * 64 * 2)
    path.write_bytes(content)
    for more in ((), ("--against", source)):
        done = mxcli("verify", output, *more, "--json")
        assert done.code == 5
        assert found(done.out, "problem")["zero_words"] == [EMBEDDING]
