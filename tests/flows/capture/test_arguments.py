"""Arguments of mxcli.capture, checked on entry, before anything is hooked or written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import mxcli
from mxcli.errors import RefusedError, UsageError
from mxcli.flows.capture.arguments import (
    parse_folder,
    parse_roles,
    parse_selectors,
    parse_size,
    parse_steps,
    step_count,
)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"sample_rows": "64"}, "sample_rows '64': keep one row at least, or all with None."),
        ({"sample_rows": True}, "sample_rows True: keep one row at least, or all with None."),
        ({"sample_rows": 1.5}, "sample_rows 1.5: keep one row at least, or all with None."),
        ({"max_disk": "8G"}, "max_disk '8G': give a number of bytes, such as 8 * 2**30."),
        ({"max_memory": 0}, "max_memory 0: give a number of bytes, such as 8 * 2**30."),
        ({"rank": "a"}, "rank 'a': ranks are integers from 0."),
        ({"rank": 1.5}, "rank 1.5: ranks are integers from 0."),
        ({"rank": -1}, "rank -1: ranks are integers from 0."),
        ({"rank": True}, "rank True: ranks are integers from 0."),
        ({"seed": "a"}, "seed 'a': seeds are integers."),
        ({"seed": 1.5}, "seed 1.5: seeds are integers."),
        ({"layers": []}, "layers is empty: name one layer at least, or all with None."),
        ({"layers": [3]}, "layers has 3: give strings."),
        ({"roles": [3]}, "roles has 3: give strings."),
        ({"roles": []}, "role '' is not recorded: there are activation, gradient, weight."),
        ({"steps": "abc"}, "steps 'abc': give a number of steps, or the steps themselves."),
        ({"steps": ["0"]}, "steps has '0': steps are integers from 0."),
        ({"steps": np.array(3)}, "steps array(3): give a number of steps, or the steps themselves."),
        ({"steps": range(5, 0)}, "steps is empty: record one step at least, or all with None."),
        ({"about": 3}, "about is a int: give a mapping with the metadata of each file."),
        (
            {"about": {"a": torch.ones(3)}},
            "about must hold JSON values: Object of type Tensor is not JSON serializable.",
        ),
        ({"directory": 3}, "directory 3: give a path."),
        (
            {"model": len},
            "a builtin_function_or_method is not a torch.nn.Module: give the model whose layers to record.",
        ),
    ],
)
def test_what_means_nothing(tmp_path: Path, options: dict[str, Any], sentence: str) -> None:
    asked = {"model": nn.Linear(2, 2), "directory": tmp_path / "out", **options}
    with pytest.raises(UsageError) as raised:
        mxcli.capture(asked.pop("model"), asked.pop("directory"), **asked).__enter__()
    assert str(raised.value) == sentence
    assert not (tmp_path / "out").exists()


def test_iterators_are_not_steps() -> None:
    with pytest.raises(UsageError, match=r"list_iterator object .*: give a number of steps, or the steps themselves"):
        parse_steps(iter([1]))  # type: ignore[arg-type]


def test_what_is_understood() -> None:
    assert parse_roles("activation") == ("activation",)
    assert parse_roles(iter(["weight", "activation"])) == ("activation", "weight")
    assert parse_selectors("up") == ["up"]
    assert parse_selectors(iter(["up", "down"])) == ["up", "down"]
    assert parse_size("max_disk", np.int64(5)) == 5
    assert parse_steps({3: "a"}) == {3}
    assert parse_steps(np.arange(2)) == {0, 1}


@pytest.mark.parametrize(
    ("steps", "count"),
    [(None, None), (3, 3), (range(0, 10, 3), 4), (range(9, -1, -3), 4), (frozenset({1, 5}), 2)],
)
def test_how_many_steps(steps: Any, count: int | None) -> None:
    assert step_count(parse_steps(steps)) == count


@pytest.mark.parametrize("steps", [range(10**30), 10**30, range(0, 10**30, 7)])
def test_steps_that_are_not_there_are_not_gone_through(tmp_path: Path, steps: Any) -> None:
    (tmp_path / "step-000007.safetensors").write_bytes(b"")
    with pytest.raises(RefusedError, match=r"step-000007\.safetensors: exists"):
        mxcli.capture(nn.Linear(2, 2), tmp_path, steps=steps).__enter__()


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for folder in ("file", "file/out"):
        with pytest.raises(RefusedError, match=f"{tmp_path / 'file'}: not a directory; captures need one"):
            parse_folder(tmp_path / folder)
    assert parse_folder(str(tmp_path / "out" / "in")) == tmp_path / "out" / "in"
