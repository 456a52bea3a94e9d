"""Several capture files are one source; captures and other checkpoints are not."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from raw_checkpoint import safetensors_bytes, zeros

from mxcli.errors import InputError
from mxcli.files.checkpoint import open_checkpoint, read

Roles = Mapping[str, str]


def capture(roles: Roles, value: float = 0.0, **more: object) -> bytes:
    """A capture file of 2x2 tensors that hold one value."""
    data = np.full((2, 2), value, "<f4").tobytes()
    entry = {"version": 1, "tensors": {name: {"role": role, **more} for name, role in roles.items()}}
    return safetensors_bytes({name: ("F32", [2, 2], data) for name in roles}, {"mxcli.capture": json.dumps(entry)})


BOTH = {"fc.activation": "activation", "fc.gradient": "gradient"}


def test_steps_in_a_directory_are_one_source(model: Callable[..., Path]) -> None:
    files = {f"step-{step}.safetensors": capture(BOTH, step, step=step) for step in (10, 0, 2)}
    checkpoint = open_checkpoint(model(files))
    assert list(checkpoint.tensors) == [
        *("step-0/fc.activation", "step-0/fc.gradient"),
        *("step-2/fc.activation", "step-2/fc.gradient"),
        *("step-10/fc.activation", "step-10/fc.gradient"),
    ]
    assert checkpoint.captures["step-10/fc.gradient"] == {"role": "gradient", "layer": "fc", "step": 10}
    assert [read(checkpoint, info)[1, 1] for info in checkpoint.tensors.values()] == [0, 0, 2, 2, 10, 10]


def test_only_names_that_several_files_hold_get_a_prefix(model: Callable[..., Path]) -> None:
    files = {
        "rank-0.safetensors": capture({"fc.activation": "activation", "own.activation": "activation"}),
        "rank-1.safetensors": capture({"fc.activation": "activation"}),
    }
    checkpoint = open_checkpoint(model(files))
    assert list(checkpoint.tensors) == ["rank-0/fc.activation", "own.activation", "rank-1/fc.activation"]
    assert [record["rank"] for record in checkpoint.captures.values()] == [0, 0, 1]


def test_folders_of_ranks_and_steps(model: Callable[..., Path]) -> None:
    files = {f"rank_{rank}/step-{step}.safetensors": capture(BOTH) for rank in (0, 1) for step in (0, 1)}
    checkpoint = open_checkpoint(model(files))
    found = {name: (record["rank"], record["step"]) for name, record in checkpoint.captures.items()}
    assert list(found) == [
        f"rank_{rank}/step-{step}/{name}"
        for rank in (0, 1)
        for step in (0, 1)
        for name in ("fc.activation", "fc.gradient")
    ]
    assert found["rank_1/step-0/fc.gradient"] == (1, 0)
    assert str(checkpoint.where) == str(checkpoint.root)


def test_captures_and_other_checkpoints_are_not_mixed(model: Callable[..., Path]) -> None:
    other = safetensors_bytes({"a.weight": zeros("F32", 2, 2)}, {"format": "pt"})
    root = model({"c.safetensors": capture(BOTH), "m.safetensors": other, "n.safetensors": other})
    with pytest.raises(InputError) as caught:
        open_checkpoint(root)
    assert str(caught.value) == (
        f"{root}: c.safetensors is captures and 2 files (m.safetensors, n.safetensors) are not; keep them in "
        "separate directories, or give one file."
    )


def test_ordinary_shards_are_read_as_before(model: Callable[..., Path]) -> None:
    names = {"a.safetensors": "x.input", "b.safetensors": "fc.weight"}
    shards = {
        f"model-0000{at + 1}-of-00002.safetensors": {name: zeros("F32", 2, 2)} for at, name in enumerate(names.values())
    }
    checkpoint = open_checkpoint(model(shards))
    assert list(checkpoint.tensors) == ["x.input", "fc.weight"]
    assert checkpoint.captures == {}


def test_folders_of_checkpoints_are_not_captures(model: Callable[..., Path]) -> None:
    """A training leaves a model behind for each of some steps: which one is meant has to be said."""
    root = model({f"step_{step}/model.safetensors": {"a.weight": zeros("F32", 2, 2)} for step in (1, 2)})
    with pytest.raises(InputError, match=r"no weights in it, but in its folders step_1, step_2; give one of those\."):
        open_checkpoint(root)


def test_the_same_stem_twice_is_refused(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    for ending in ("pt", "pth"):
        torch.save({"fc.activation": torch.ones(2, 2)}, tmp_path / f"a.{ending}")
    with pytest.raises(InputError, match=r"'a/fc\.activation' is in a\.pt and a\.pth; keep one of them"):
        open_checkpoint(tmp_path)


def test_how_a_capture_is_named_changes_nothing(model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own name and the folders below the source give step and rank; those above may be called anything."""
    root = model({f"rank-7/iter_5/{name}.safetensors": capture(BOTH) for name in ("c", "step-3")})
    plain, stepped = {"role": "gradient", "layer": "fc"}, {"role": "gradient", "layer": "fc", "step": 3}
    monkeypatch.chdir(root / "rank-7" / "iter_5")
    for folder in (root / "rank-7" / "iter_5", Path("."), Path("../iter_5"), Path("../../rank-7/iter_5")):
        assert open_checkpoint(folder / "c.safetensors").captures["fc.gradient"] == plain
        assert open_checkpoint(folder / "step-3.safetensors").captures["fc.gradient"] == stepped
        both = open_checkpoint(folder).captures
        assert (both["c/fc.gradient"], both["step-3/fc.gradient"]) == (plain, stepped)
    for source in (root / "rank-7", ".."):
        assert open_checkpoint(source).captures["iter_5/c/fc.gradient"] == {**plain, "step": 5}
    for source in (root, "../.."):
        assert open_checkpoint(source).captures["rank-7/iter_5/c/fc.gradient"] == {**plain, "step": 5, "rank": 7}


def test_how_long_the_model_is(model: Callable[..., Path]) -> None:
    """Each rank of a pipeline may know its own part."""
    parts = (["h.0.a", "h.0.b"], ["h.0.b", "h.1.a"])
    files: dict[str, bytes] = {}
    for rank, layers in enumerate(parts):
        entry = {"version": 1, "tensors": {"h.0.a.x": {"role": "activation"}}, "layers_of_model": layers}
        tensors = {"h.0.a.x": ("F32", [2, 2], bytes(16))}
        files[f"rank-{rank}.safetensors"] = safetensors_bytes(tensors, {"mxcli.capture": json.dumps(entry)})
    root = model(files)
    assert open_checkpoint(root).layers_of_model == ("h.0.a", "h.0.b", "h.1.a")
    assert open_checkpoint(root / "rank-1.safetensors").layers_of_model == ("h.0.b", "h.1.a")
    untold = model({"c.safetensors": capture(BOTH)}) / "c.safetensors"
    assert open_checkpoint(untold).layers_of_model == ()
