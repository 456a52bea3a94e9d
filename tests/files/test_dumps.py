"""What other programs dump is read as captures, by the names they use."""

from __future__ import annotations

import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mxcli.errors import InputError
from mxcli.files.capture_source import step_and_rank
from mxcli.files.captured_layers import captured_layers, check_pairs
from mxcli.files.checkpoint import open_checkpoint, read

torch = pytest.importorskip("torch")

SHAPES = {"activation": (2, 3, 8), "gradient": (6, 16), "weight": (16, 8), "wgrad": (16, 8)}


def ones(*shape: int) -> Any:
    return torch.ones(shape, dtype=torch.bfloat16)


def dump_tensors(root: Path, more: Mapping[str, object] | None = None) -> Path:
    """What DumpTensors leaves behind of two ranks, two steps and three layers."""
    for rank in (0, 1):
        for step in (5, 100):
            folder = root / "tensor_dumps" / f"rank_{rank}" / f"iter_{step:06d}"
            folder.mkdir(parents=True)
            for layer in ("layers_2_mlp_fc1", "layers_10_mlp_fc1"):
                for tensor, shape in SHAPES.items():
                    torch.save({"high_precision": ones(*shape) * step, **(more or {})}, folder / f"{layer}_{tensor}.pt")
    return root


@pytest.mark.parametrize("inside", ["", "tensor_dumps"])
def test_dumps_of_transformer_engine(tmp_path: Path, inside: str) -> None:
    checkpoint = open_checkpoint(dump_tensors(tmp_path) / inside)
    prefix = "" if inside else "tensor_dumps/"
    assert len(checkpoint.tensors) == 2 * 2 * 2 * 4
    assert list(checkpoint.tensors)[:4] == [
        f"{prefix}rank_0/iter_000005/layers_2_mlp_fc1.{tensor}"
        for tensor in ("activation", "gradient", "weight", "wgrad")
    ]
    assert [info.role for info in checkpoint.tensors.values()][:4] == ["activation", "gradient", "weight", "other"]
    layers = captured_layers(checkpoint.tensors, checkpoint.captures)
    check_pairs(checkpoint.where, layers)
    assert [(each.layer, each.step, each.rank, each.tokens) for each in layers] == [
        (layer, step, rank, 6)
        for layer in ("layers_2_mlp_fc1", "layers_10_mlp_fc1")
        for step in (5, 100)
        for rank in (0, 1)
    ]
    held = layers[-1].activation
    assert held is not None
    assert read(checkpoint, held).tolist() == np.full((2, 3, 8), 0x42C8).tolist(), "100 in BF16"


def test_one_step_and_one_file_of_a_dump(tmp_path: Path) -> None:
    step = dump_tensors(tmp_path) / "tensor_dumps" / "rank_1" / "iter_000005"
    assert list(open_checkpoint(step).tensors)[:4] == [
        f"layers_2_mlp_fc1.{tensor}" for tensor in ("activation", "gradient", "weight", "wgrad")
    ]
    one = open_checkpoint(step / "layers_2_mlp_fc1_weight.pt")
    assert one.captures == {
        "layers_2_mlp_fc1.weight": {"role": "weight", "layer": "layers_2_mlp_fc1", "step": 5, "rank": 1}
    }


class _Quantized:
    """As Transformer Engine's tensors are pickled: by a method of their class (in 2.15) or a function of a module."""

    def __init__(self, *held: object) -> None:
        raise AssertionError("no code of the file is run")

    @classmethod
    def rebuild(cls, *held: object) -> object:
        raise AssertionError("no code of the file is run")

    def __reduce_ex__(self, protocol: int) -> tuple[object, ...]:  # type: ignore[override]
        return self.how, (torch.zeros(4, dtype=torch.uint8), self.dtype, torch.ones(1), torch.Size((2, 2)))


class _DType:
    def __getstate__(self) -> int:
        return 3

    def __setstate__(self, state: int) -> None:
        raise AssertionError("no code of the file is run")


def _function(*held: object) -> object:
    raise AssertionError("no code of the file is run")


@pytest.fixture(params=["method", "function"])
def quantized(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> object:
    name = "transformer_engine.pytorch.tensor.float8_tensor"
    for parent in ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.tensor"):
        monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
    for known, module in ((_Quantized, name), (_function, name), (_DType, "transformer_engine_torch")):
        monkeypatch.setattr(known, "__module__", module)
        place = sys.modules.get(module) or types.ModuleType(module)
        setattr(place, known.__name__, known)
        monkeypatch.setitem(sys.modules, module, place)
    made = object.__new__(_Quantized)
    made.dtype = object.__new__(_DType)  # type: ignore[attr-defined]
    made.how = _Quantized.rebuild if request.param == "method" else _function  # type: ignore[attr-defined]
    return made


def test_quantized_objects_are_passed_over(tmp_path: Path, quantized: object) -> None:
    root = dump_tensors(tmp_path, {"quantized": quantized})
    checkpoint = open_checkpoint(root)
    assert len(checkpoint.captures) == 24
    first = next(iter(checkpoint.tensors.values()))
    assert read(checkpoint, first).tolist() == np.full((2, 3, 8), 0x40A0).tolist(), "5 in BF16"
    assert checkpoint.notes == (
        "Read as captures, by names: Transformer Engine's DumpTensors.",
        "32 files ('layers_2_mlp_fc1_activation.pt', …), each: objects that only the program that wrote them can load "
        "are not read: 1.",
    )


def test_quantized_objects_alone_are_refused(tmp_path: Path, quantized: object) -> None:
    torch.save({"quantized": quantized}, tmp_path / "a.pt")
    with pytest.raises(InputError) as caught:
        open_checkpoint(tmp_path / "a.pt")
    assert str(caught.value) == (
        f"{tmp_path / 'a.pt'}: holds no tensors, only objects that only the program that wrote them can load: 1. Dump "
        "tensors before quantization too."
    )


def test_other_code_next_to_quantized_objects_is_refused(tmp_path: Path, quantized: object) -> None:
    torch.save({"quantized": quantized, "x": ones(2, 2), "path": Path("a")}, tmp_path / "a.pt")
    with pytest.raises(InputError, match=r"its pickle needs code \(pathlib\S*\), which is never run"):
        open_checkpoint(tmp_path / "a.pt")


PLAIN = {
    "flat": {
        "layers.0.fc.activation": ones(4, 8),
        "layers.0.fc.grad_output": ones(4, 16),
        "layers.0.fc.weight": ones(16, 8),
    },
    "of layers": {"layers.0.fc": {"input": ones(4, 8), "gradient": ones(4, 16), "weight": ones(16, 8)}},
    "nested": {"layers": {"0": {"fc": {"x": ones(4, 8), "dY": ones(4, 16), "Weight": ones(16, 8)}}}},
    "lists of layers": {"layers": [{"fc": {"X": ones(4, 8), "grad": ones(4, 16), "weight": ones(16, 8)}}]},
}


@pytest.mark.parametrize("content", PLAIN.values(), ids=PLAIN)
def test_plain_dicts_by_the_last_word(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / "hooks.pt")
    checkpoint = open_checkpoint(tmp_path / "hooks.pt")
    records = {"layer": "layers.0.fc"}
    assert list(checkpoint.captures.values()) == [
        {"role": role, **records} for role in ("activation", "gradient", "weight")
    ]
    (layer,) = captured_layers(checkpoint.tensors, checkpoint.captures)
    assert (layer.layer, layer.tokens) == ("layers.0.fc", 4)


def test_a_file_of_a_layer_and_a_file_of_a_step(tmp_path: Path) -> None:
    torch.save({"x": ones(4, 8), "dy": ones(4, 16)}, tmp_path / "layers.0.fc.pt")
    assert list(open_checkpoint(tmp_path).tensors) == ["layers.0.fc.x", "layers.0.fc.dy"]
    (tmp_path / "steps").mkdir()
    for step in (3, 20):
        torch.save({"fc": {"x": ones(4, 8) * step, "dy": ones(4, 16)}}, tmp_path / "steps" / f"step{step}.pt")
    checkpoint = open_checkpoint(tmp_path / "steps")
    assert list(checkpoint.tensors) == ["step3/fc.x", "step3/fc.dy", "step20/fc.x", "step20/fc.dy"]
    assert [each.step for each in captured_layers(checkpoint.tensors, checkpoint.captures)] == [3, 20]
    assert read(checkpoint, checkpoint.tensors["step20/fc.x"])[0, 0] == 0x41A0, "20 in BF16"


def test_a_list_of_tensors_is_one_of_each_step(tmp_path: Path) -> None:
    torch.save({"fc": {"input": [ones(4, 8), ones(2, 8)], "grad": [ones(4, 16), ones(2, 16)]}}, tmp_path / "a.pt")
    checkpoint = open_checkpoint(tmp_path)
    assert list(checkpoint.tensors) == ["fc.input.0", "fc.input.1", "fc.grad.0", "fc.grad.1"]
    found = captured_layers(checkpoint.tensors, checkpoint.captures)
    assert [(each.layer, each.step, each.tokens) for each in found] == [("fc", 0, 4), ("fc", 1, 2)]


def test_numpy_archives_and_files(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **{"fc.activation": np.ones((4, 8), "f4"), "fc.gradient": np.ones((4, 16), "f4")})
    assert [record["role"] for record in open_checkpoint(tmp_path).captures.values()] == ["activation", "gradient"]
    folder = tmp_path / "fc"
    folder.mkdir()
    for name, shape in (("x", (4, 8)), ("dy", (4, 16)), ("weight", (16, 8))):
        np.save(folder / f"{name}.npy", np.ones(shape, "f4"))
    checkpoint = open_checkpoint(folder)
    assert list(checkpoint.tensors) == ["fc.dy", "fc.weight", "fc.x"]
    (layer,) = captured_layers(checkpoint.tensors, checkpoint.captures)
    assert (layer.layer, layer.tokens, layer.weight is not None) == ("fc", 4, True)
    assert read(checkpoint, checkpoint.tensors["fc.x"]).shape == (4, 8)


@pytest.mark.parametrize(
    "content",
    [
        {"fc.weight": ones(16, 8), "fc.bias": ones(16)},
        {"x": ones(4, 8)},
        {"weight": ones(4, 8)},
        {"fc.activation": torch.ones(4, dtype=torch.int64)},
        {"fc.activation": torch.ones(4, 8, dtype=torch.int64)},
        {"fc.activation": torch.tensor(1.0)},
        {"fc.activation_scale": ones(1, 1)},
    ],
)
def test_other_files_are_not_dumps(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / "a.pt")
    assert open_checkpoint(tmp_path / "a.pt").captures == {}


def test_a_model_next_to_dumps_is_refused(tmp_path: Path) -> None:
    torch.save({"fc.activation": ones(4, 8)}, tmp_path / "dump.pt")
    torch.save({"fc.weight": ones(16, 8), "other.weight": ones(2, 2)}, tmp_path / "m.pt")
    torch.save({"third.weight": ones(16, 8)}, tmp_path / "n.pt")
    with pytest.raises(InputError, match=r"2 files \(dump\.pt, m\.pt\) are captures and n\.pt is not; keep them in"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("run/step-000100.safetensors", {"step": 100}),
        ("rank_3/iter_7/a.pt", {"step": 7, "rank": 3}),
        ("a/Iteration12_rank1.npz", {"step": 12, "rank": 1}),
        ("a/footstep3/b.pt", {}),
        ("step_9/a/b/c.pt", {"step": 9}),
        ("a/step.pt", {}),
    ],
)
def test_steps_and_ranks_in_paths(path: str, told: dict[str, int]) -> None:
    assert step_and_rank(Path(path)) == told


@pytest.mark.parametrize("above", ["", "rank_1/iter_000005/"])
def test_how_a_dump_is_named_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, above: str) -> None:
    """A step of a dump is known by the two folders it is in, from any path to them."""
    folder = dump_tensors(tmp_path) / "tensor_dumps" / "rank_1" / "iter_000005"
    monkeypatch.chdir(folder.parents[1] if above else folder)
    file = "layers_2_mlp_fc1_weight.pt"
    record = {"role": "weight", "layer": "layers_2_mlp_fc1", "step": 5, "rank": 1}
    for source in (folder / file, f"{above}{file}", f"{above}../iter_000005/{file}"):
        assert open_checkpoint(source).captures == {"layers_2_mlp_fc1.weight": record}
    for source in (folder, above or ".", f"{above}../iter_000005"):
        assert open_checkpoint(source).captures["layers_2_mlp_fc1.weight"] == record


def test_a_layer_is_named_by_its_folder_from_within_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "fc"
    folder.mkdir()
    for name, shape in (("x", (4, 8)), ("dy", (4, 16))):
        np.save(folder / f"{name}.npy", np.ones(shape, "f4"))
    monkeypatch.chdir(folder)
    for source in (folder, ".", "../fc"):
        assert list(open_checkpoint(source).tensors) == ["fc.dy", "fc.x"]


def test_dumps_of_two_kinds_of_file_are_refused(tmp_path: Path) -> None:
    """To read the files of one kind would leave out the steps of the other."""
    for path in ("rank_0/iter_1", "rank_0/iter_2", "rank_0/iter_10"):
        (tmp_path / path).mkdir(parents=True)
    torch.save({"fc.activation": ones(4, 8)}, tmp_path / "rank_0/iter_1/a.pt")
    np.savez(tmp_path / "rank_0/iter_2/b.npz", **{"fc.activation": np.ones((4, 8), "f4")})
    torch.save({"fc.activation": ones(4, 8)}, tmp_path / "rank_0/iter_10/c.pt")
    with pytest.raises(InputError) as caught:
        open_checkpoint(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}: 2 files (rank_0/iter_1/a.pt, rank_0/iter_10/c.pt) are pytorch and rank_0/iter_2/b.npz is numpy; "
        "captures must be of one kind: keep each in a directory of its own, or give one file."
    )
    assert list(open_checkpoint(tmp_path / "rank_0/iter_2").captures) == ["fc.activation"]
