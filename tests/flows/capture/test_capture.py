"""What `mxcli.capture` records of hand-made models, held against what autograd says, and what it leaves alone."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.utils.checkpoint import checkpoint

import mxcli
from mxcli.errors import EnvironmentFailure, MxcliError, RefusedError, UsageError
from mxcli.files.checkpoint import open_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:capture")


class Block(nn.Module):
    """Two layers that are called twice, one that is called once, and one that is not called as a module."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)
        self.head, self.idle = nn.Linear(8, 4), nn.Linear(8, 4)
        self.reentrant = reentrant

    def part(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = self.part(x) if self.reentrant is None else checkpoint(self.part, x, use_reentrant=self.reentrant)
        return self.head(x) + nn.functional.linear(x, self.idle.weight)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def step(folder: Path, number: int = 0) -> dict[str, torch.Tensor]:
    return load_file(folder / f"step-{number:06d}.safetensors")


def described(path: Path) -> dict[str, Any]:
    with safe_open(path, "pt") as file:
        record: dict[str, Any] = json.loads(file.metadata()["mxcli.capture"])
    return record


def seeded(count: int, *shape: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield torch.randn(shape, generator=generator)


def block(**options: Any) -> Block:
    torch.manual_seed(0)
    return Block(**options)


def test_two_layers_by_hand(tmp_path: Path) -> None:
    """y = b(a(x)), loss = sum(y^2): dY of b is 2y, that of a is 2y B."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False))
    a, b = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0, -1.0]])
    model.load_state_dict({"0.weight": a, "1.weight": b})
    with mxcli.capture(model, tmp_path) as recorder:
        model(torch.tensor([[[1.0, 0.0], [0.0, 2.0]]])).square().sum().backward()
        written = recorder.step()
    assert {name: tensor.tolist() for name, tensor in step(tmp_path).items()} == {
        "0.activation": [[1, 0], [0, 2]],
        "0.gradient": [[-4, 4], [-8, 8]],
        "0.weight": [[1, 2], [3, 4]],
        "1.activation": [[1, 3], [4, 8]],
        "1.gradient": [[-4], [-8]],
        "1.weight": [[1, -1]],
    }
    assert written is not None
    assert (written.step, written.layers, written.tokens, written.tokens_seen) == (0, 2, 2, 2)
    assert written.nbytes == (tmp_path / "step-000000.safetensors").stat().st_size
    record = described(written.path)
    assert record["version"] == 1
    assert record["tensors"]["1.gradient"] == {
        "role": "gradient",
        "layer": "1",
        "step": 0,
        "rank": 0,
        "axis": "row",
        "tokens": 2,
        "tokens_seen": 2,
        "xxh3_128": xxhash.xxh3_128_hexdigest(np.array([-4, -8], np.float32).tobytes()),
    }
    assert record["tensors"]["0.weight"] == {
        "role": "weight",
        "layer": "0",
        "step": 0,
        "rank": 0,
        "axis": "row",
        "xxh3_128": xxhash.xxh3_128_hexdigest(np.array([1, 2, 3, 4], np.float32).tobytes()),
    }


def test_captures_are_a_source(tmp_path: Path) -> None:
    model = block()
    with mxcli.capture(model, tmp_path, layers=["head"]) as recorder:
        for x in seeded(2, 3, 8):
            model(x).sum().backward()
            recorder.step()
    opened = open_checkpoint(tmp_path)
    roles = {"head.activation": "activation", "head.gradient": "gradient", "head.weight": "weight"}
    assert {name: info.role for name, info in opened.tensors.items()} == {
        f"step-00000{number}/{name}": role for number in (0, 1) for name, role in roles.items()
    }
    assert opened.captures["step-000001/head.gradient"]["step"] == 1


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_gradients_times_inputs_are_weight_gradients(tmp_path: Path, reentrant: bool | None) -> None:
    """Also of layers called twice, over several micro-batches, under activation checkpointing and validations."""
    model = block(reentrant=reentrant)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with mxcli.capture(model, tmp_path) as recorder:
        for number in range(2):
            optimizer.zero_grad()
            before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
            for x in seeded(2, 2, 5, 8):
                model(x.requires_grad_()).square().sum().backward()
                with torch.no_grad():
                    model(torch.ones(7, 8))
            gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
            optimizer.step()
            recorder.step()
            captured = step(tmp_path, number)
            for layer, tokens in (("up", 40), ("down", 40), ("head", 20)):
                x, dy = captured[f"{layer}.activation"], captured[f"{layer}.gradient"]
                assert len(x) == len(dy) == tokens
                torch.testing.assert_close(dy.T @ x, gradients[f"{layer}.weight"], rtol=1e-5, atol=1e-5)
                assert torch.equal(captured[f"{layer}.weight"], before[f"{layer}.weight"])
    assert recorder.notes == [
        "1 of 4 layers were never called as modules; not recorded: idle (2 steps, the first 0)",
        "3 of 4 layers were also called without gradients; those calls are not recorded: up, down, head "
        "(2 steps, the first 0)",
    ]


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_training_is_the_same_to_the_last_bit(tmp_path: Path, reentrant: bool | None, autocast: bool) -> None:
    def trained(folder: Path | None) -> list[torch.Tensor]:
        model = block(reentrant=reentrant)
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        seen = []
        recording = contextlib.nullcontext() if folder is None else mxcli.capture(model, folder, sample_rows=3)
        with recording as recorder:
            for x in seeded(3, 2, 5, 8):
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    y = model(x.requires_grad_())
                y.float().square().sum().backward()
                optimizer.step()
                if recorder is not None:
                    recorder.step()
                seen += [y.detach(), x.grad, *(parameter.detach().clone() for parameter in model.parameters())]
        assert not any(module._forward_hooks for module in model.modules())
        return seen

    plain, recorded = trained(None), trained(tmp_path)
    assert len(files(tmp_path)) == 3
    assert all(torch.equal(one, other) for one, other in zip(plain, recorded, strict=True))


def test_types_stay_what_they_were(tmp_path: Path) -> None:
    model = block()
    with mxcli.capture(model, tmp_path) as recorder, torch.autocast("cpu", torch.bfloat16):
        model(torch.ones(2, 8)).float().sum().backward()
        recorder.step()
    types = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in step(tmp_path).items()}
    assert types == {
        "up.activation": "float32",
        "up.gradient": "bfloat16",
        "up.weight": "float32",
        "down.activation": "bfloat16",
        "down.gradient": "bfloat16",
        "down.weight": "float32",
        "head.activation": "float32",
        "head.gradient": "bfloat16",
        "head.weight": "float32",
    }


def test_sampled_rows_are_the_same_tokens_everywhere(tmp_path: Path) -> None:
    """Of a token's number, which runs through all layers: over micro-batches of any size."""

    class Numbered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
            nn.init.ones_(self.a.weight)
            nn.init.ones_(self.b.weight)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x))

    model, kept = Numbered(), []
    for number, sizes in enumerate([(60,), (7, 53), (1,) * 60]):
        with mxcli.capture(model, tmp_path / str(number), sample_rows=9, seed=5) as recorder:
            for _ in range(2):
                for x in torch.arange(60.0)[:, None].split(sizes):
                    (model(x).square().sum() / 2).backward()
                written = recorder.step()
                assert written is not None
                assert (written.tokens, written.tokens_seen) == (9, 60)
        for at in (0, 1):
            tensors = step(tmp_path / str(number), at)
            tokens = [
                tensors[f"{layer}.{role}"][:, 0].tolist() for layer in "ab" for role in ("activation", "gradient")
            ]
            assert all(each == tokens[0] for each in tokens)
            assert sorted(set(tokens[0])) == tokens[0]
            kept.append(tokens[0])
    assert kept == [kept[0], kept[1]] * 3
    assert kept[0] != kept[1]


def test_another_seed_keeps_other_tokens(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    for seed in (0, 1):
        with mxcli.capture(model, tmp_path / str(seed), sample_rows=4, seed=seed) as recorder, torch.no_grad():
            model(torch.arange(1000.0)[:, None])
            recorder.step()
    one, other = (step(tmp_path / str(seed))["0.activation"].flatten().tolist() for seed in (0, 1))
    assert one != other


def test_outputs_changed_in_place(tmp_path: Path) -> None:
    """An activation function in place, after which autograd no longer comes to what the layer returned."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, 4))
    with mxcli.capture(model, tmp_path) as recorder:
        model(torch.randn(2, 3, 8)).square().sum().backward()
        recorder.step()
    captured = step(tmp_path)
    torch.testing.assert_close(captured["0.gradient"].T @ captured["0.activation"], model[0].weight.grad)


def test_without_gradients(tmp_path: Path) -> None:
    model = block()
    with mxcli.capture(model, tmp_path) as recorder, torch.inference_mode():
        model(torch.ones(2, 3, 8))
        recorder.step()
    assert sorted(step(tmp_path)) == sorted(
        f"{layer}.{role}" for layer in ("up", "down", "head") for role in ("activation", "weight")
    )
    assert "3 of 4 layers received no gradient: up, down, head (step 0)" in recorder.notes


def test_nan_is_recorded_and_reported(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with mxcli.capture(model, tmp_path) as recorder:
        (model(torch.ones(3, 2)) * torch.tensor([[1.0], [float("nan")], [1.0]])).sum().backward()
        recorder.step()
    assert step(tmp_path)["0.gradient"].isnan().sum(1).tolist() == [0, 2, 0]
    assert recorder.notes == ["2 elements are NaN or infinite (recorded unchanged) in 0.gradient (step 0)"]


def test_what_else_a_file_says(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with mxcli.capture(model, tmp_path, about={"run": "a"}, on_error="raise") as recorder:
        model(torch.ones(1, 2)).sum().backward()
        written = recorder.step(loss=float("nan"), gradient_scale=1024.0)
        model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(UsageError, match="must be JSON values: Object of type Tensor is not"):
            recorder.step(loss=torch.ones(2))
        model(torch.ones(1, 2)).sum().backward()
        recorder.step(loss=torch.ones(1), rate=np.float32(0.5), norms=[torch.tensor(float("inf")), np.int64(3)])
    assert written is not None
    record = described(written.path)
    assert (record["run"], record["loss"], record["gradient_scale"]) == ("a", None, 1024.0)
    assert files(tmp_path) == ["step-000000.safetensors", "step-000001.safetensors"]
    record = described(tmp_path / "step-000001.safetensors")
    assert (record["loss"], record["rate"], record["norms"]) == (1.0, 0.5, [None, 3])


def test_all_layers_of_the_model_are_named(tmp_path: Path) -> None:
    model = block()
    with mxcli.capture(model, tmp_path, layers=["down"], about={"layers_of_model": "mine"}) as recorder:
        model(torch.ones(1, 8)).sum().backward()
        recorder.step()
    assert described(tmp_path / "step-000000.safetensors")["layers_of_model"] == ["up", "down", "head", "idle"]


def test_requested_steps(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2))

    def train(folder: Path, first: int = 0, **options: Any) -> list[str]:
        with mxcli.capture(model, folder, **options) as recorder:
            recorder.at(first)
            for _ in range(5):
                model(torch.ones(1, 2)).sum().backward()
                recorder.step()
        return [name.removesuffix(".safetensors") for name in files(folder)]

    assert train(tmp_path / "a", steps=2) == ["step-000000", "step-000001"]
    assert train(tmp_path / "b", steps=[1, 4]) == ["step-000001", "step-000004"]
    assert train(tmp_path / "e", steps=np.arange(2, 4)) == ["step-000002", "step-000003"]
    assert train(tmp_path / "f", steps=np.int64(1)) == ["step-000000"]
    assert train(tmp_path / "c", first=1_000_000, steps=2) == ["step-1000000", "step-1000001"]
    assert train(tmp_path / "d", steps=1, rank=1) == ["step-000000-rank-1"]


def test_every_rank_has_files_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    for rank in (0, 1):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        with mxcli.capture(model, tmp_path) as recorder:
            model(torch.ones(1, 2)).sum().backward()
            recorder.step()
    assert files(tmp_path) == ["step-000000-rank-0.safetensors", "step-000000-rank-1.safetensors"]
    assert {record["rank"] for record in open_checkpoint(tmp_path).captures.values()} == {0, 1}


def test_layers_roles_and_wrappers(tmp_path: Path) -> None:
    model = block()
    wrapped = nn.DataParallel(model)
    for layers in (["*p"], ["re:.*p.weight"], "up"):
        with mxcli.capture(wrapped, tmp_path, layers=layers, roles=["gradient"], force=True) as recorder:
            model(torch.ones(1, 8)).sum().backward()
            recorder.step()
        assert list(step(tmp_path)) == ["up.gradient"]
    with pytest.raises(UsageError, match=r"--layers upp: matches no linear layer\. Did you mean up \(1 tensor\)\?"):
        mxcli.capture(model, tmp_path, layers=["upp"]).__enter__()
    with pytest.raises(UsageError, match=r"role 'weights' is not recorded: .* Did you mean weight\?"):
        mxcli.capture(model, tmp_path, roles=["weights"]).__enter__()


def test_conv1d_of_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(0)
    model = nn.Sequential(Conv1D(3, 5))
    with mxcli.capture(model, tmp_path) as recorder:
        model(torch.randn(2, 4, 5)).square().sum().backward()
        recorder.step()
    captured = step(tmp_path)
    assert torch.equal(captured["0.weight"], model[0].weight.detach().T)
    torch.testing.assert_close(captured["0.gradient"].T @ captured["0.activation"], model[0].weight.grad.T)


def test_tied_weights_are_those_of_the_step(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6, bias=False))
    model[1].weight = model[0].weight
    before = model[0].weight.detach().clone()
    with mxcli.capture(model, tmp_path) as recorder:
        model(torch.tensor([1, 2])).sum().backward()
        torch.optim.SGD(model.parameters(), 1.0).step()
        recorder.step()
    assert torch.equal(step(tmp_path)["1.weight"], before)


def test_compiled_models_run_uncompiled(tmp_path: Path) -> None:
    model = block()
    with mxcli.capture(torch.compile(model, backend="eager"), tmp_path) as recorder:
        compiled = torch.compile(model, backend="eager")
        compiled(torch.ones(2, 8)).sum().backward()
        recorder.step()
    assert len(step(tmp_path)) == 9
    assert recorder.notes[0] == "compiled code (torch.compile) runs uncompiled during recording (step 0)"


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_what_was_compiled_around_the_model_runs_uncompiled(tmp_path: Path, backend: str) -> None:
    """A wrapper of the model and a function that calls it, both compiled before there was anything to record."""
    model = nn.Sequential(nn.Linear(2, 2), nn.GELU(), nn.Linear(2, 2))
    wrapper = torch.compile(model, backend=backend)
    function = torch.compile(lambda x: model(x).sum(), backend=backend)
    wrapper(torch.ones(3, 2)).sum().backward()
    function(torch.ones(3, 2)).backward()
    with mxcli.capture(model, tmp_path) as recorder:
        wrapper(torch.ones(3, 2)).sum().backward()
        recorder.step()
        function(torch.ones(3, 2)).backward()
        recorder.step()
    for number in (0, 1):
        assert {name: len(rows) for name, rows in step(tmp_path, number).items()} == {
            "0.activation": 3,
            "0.gradient": 3,
            "0.weight": 2,
            "2.activation": 3,
            "2.gradient": 3,
            "2.weight": 2,
        }


def test_what_fails_leaves_nothing(tmp_path: Path) -> None:
    model = block()
    with pytest.raises(RuntimeError), mxcli.capture(model, tmp_path / "out"):  # noqa: PT012 - the first call works
        model(torch.ones(2, 8))
        model(torch.ones(2, 9))
    assert not (tmp_path / "out").exists()
    assert not any(module._forward_hooks for module in model.modules())


def test_rows_that_no_step_wrote_are_reported(tmp_path: Path) -> None:
    model = block()
    with (
        pytest.warns(UserWarning, match="step 0 is not written: call step"),
        mxcli.capture(model, tmp_path / "out"),
    ):
        model(torch.ones(2, 8))
    assert not (tmp_path / "out").exists()


def test_notes_are_warned_of_at_the_end(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with mxcli.capture(model, tmp_path / "out") as recorder:
            recorder.step()
            recorder.step()
        with mxcli.capture(model, tmp_path / "out"):
            pass
        with mxcli.capture(model, tmp_path / "out") as recorder:
            model(torch.ones(1, 2)).sum().backward()
            recorder.step()
    nothing = "capture: nothing was recorded: no layer was called as a module in a recorded step, followed by step()."
    assert [str(each.message) for each in caught] == [
        "capture: no layer was called; no file written (2 steps, the first 0).",
        nothing,
        nothing,
    ]
    assert {each.filename for each in caught} == {__file__}


def test_copies_and_files_of_the_model_are_not_recorded(tmp_path: Path) -> None:
    """Made before the first call, and while a file is open; a file of the model needs nothing of ours."""
    model, saved = nn.Sequential(nn.Linear(2, 2)), io.BytesIO()
    with mxcli.capture(model, tmp_path) as recorder:
        copies = [copy.deepcopy(model)]
        model(torch.ones(1, 2)).sum().backward()
        copies += [copy.deepcopy(model), torch.optim.swa_utils.AveragedModel(model)]
        torch.save(model, saved)
        copies.append(torch.load(io.BytesIO(saved.getvalue()), weights_only=False))
        for each in copies:
            each(torch.full((5, 2), 9.0)).sum().backward()
        recorder.step()
    assert step(tmp_path)["0.activation"].tolist() == [[1, 1]]
    assert b"mxcli" not in saved.getvalue()


def test_threads_that_call_the_model_at_once_lose_nothing(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(20)))
    with mxcli.capture(model, tmp_path) as recorder, ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            list(pool.map(lambda count: model(torch.ones(count, 4)).sum().backward(), [3] * 8))
            recorder.step()
    for number in range(5):
        captured = step(tmp_path, number)
        assert len(captured) == 60
        assert {tuple(captured[f"{layer}.gradient"].shape) for layer in range(20)} == {(24, 4)}


@pytest.mark.parametrize(
    "run",
    [
        lambda model, x: torch.vmap(model)(x),
        lambda model, x: torch.func.jacrev(model)(x),
        lambda model, x: torch.func.jvp(model, (x,), (x,)),
        lambda model, x: torch.autograd.grad(model(x), x, torch.eye(4).reshape(4, 2, 2), is_grads_batched=True),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_transformed_tensors_are_refused(tmp_path: Path, run: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with (
        pytest.raises(
            RefusedError, match=r"0: runs under torch\.func, vmap or batched gradients, whose tensors cannot"
        ),
        mxcli.capture(model, tmp_path / "out", on_error="raise"),
    ):
        run(model, torch.ones(2, 2, requires_grad=True))
    assert not (tmp_path / "out").exists()


def test_files_are_not_overwritten(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    (tmp_path / "step-000002.safetensors").write_bytes(b"precious")
    with pytest.raises(RefusedError, match=r"step-000002\.safetensors: exists"):
        mxcli.capture(model, tmp_path, steps=3).__enter__()
    with mxcli.capture(model, tmp_path, on_error="raise") as recorder:
        recorder.at(2)
        with pytest.raises(RefusedError, match=r"step-000002\.safetensors: exists"):
            model(torch.ones(1, 2))
    assert (tmp_path / "step-000002.safetensors").read_bytes() == b"precious"
    assert files(tmp_path) == ["step-000002.safetensors"]


def test_limits_are_foreseen(tmp_path: Path) -> None:
    """64 rows of 8 inputs and 16 outputs are 6,144 bytes in float32; the largest, 4,096, are in memory twice."""
    model = nn.Sequential(nn.Linear(8, 16))
    options: dict[str, Any] = {"roles": ("activation", "gradient"), "steps": 3}
    with pytest.raises(EnvironmentFailure, match="take 10,240 bytes of memory, and 10,239 are allowed"):
        mxcli.capture(model, tmp_path, sample_rows=64, max_memory=10_239, **options).__enter__()
    with pytest.raises(
        EnvironmentFailure, match="3 steps of 6,144 bytes would be 18,432 bytes on the disk, and 18,431 are"
    ):
        mxcli.capture(model, tmp_path, sample_rows=64, max_disk=18_431, **options).__enter__()
    with pytest.raises(EnvironmentFailure, match=r"bytes on the disk, and [\d,]+ are available"):
        mxcli.capture(model, tmp_path, sample_rows=1 << 50, **options).__enter__()
    with mxcli.capture(model, tmp_path / "out", max_memory=10_240, on_error="raise", **options):
        model(torch.ones(64, 8))
        with pytest.raises(EnvironmentFailure, match="take 10,400 bytes of memory"):
            model(torch.ones(1, 8))


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        (lambda: mxcli.capture(nn.ReLU(), "x"), r"the model has no linear layers \(torch.nn.Linear or"),
        (lambda: mxcli.capture(nn.Linear(2, 2), "x", sample_rows=0), "sample_rows 0: keep one row at least"),
        (lambda: mxcli.capture(nn.Linear(2, 2), "x", steps=0), "steps 0: record one step at least, or all with None"),
        (lambda: mxcli.capture(nn.Linear(2, 2), "x", steps=-1), "steps -1: record one step at least"),
        (lambda: mxcli.capture(nn.Linear(2, 2), "x", steps=[]), "steps is empty: record one step at least"),
        (lambda: mxcli.capture(nn.Linear(2, 2), "x", steps=[0, -1]), "steps has -1: steps are integers from 0"),
        (lambda: mxcli.capture(nn.Linear(2, 2), "x", steps=range(5, -2, -1)), "steps has -1: steps are integers"),
        (
            lambda: mxcli.capture(nn.Linear(2, 2), "x", steps=True),
            "steps True: give a number of steps, or the steps themselves",
        ),
        (lambda: mxcli.capture(nn.Linear(2, 2), "x", steps=[1.5]), r"steps has 1\.5: steps are integers from 0"),
        (lambda: mxcli.capture(nn.LazyLinear(2), "x"), r"a LazyLinear without a width .*; run the model once first"),
    ],
)
def test_what_is_refused_at_once(fault: Any, sentence: str) -> None:
    with pytest.raises(MxcliError, match=sentence):
        fault().__enter__()


def test_two_types_in_a_step_are_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with mxcli.capture(model, tmp_path / "out", roles=["activation"], layers=["0"], on_error="raise"):
        model(torch.ones(1, 2))
        model.to(torch.bfloat16)
        with pytest.raises(RefusedError, match=r"0: torch\.float32 and torch\.bfloat16 in one step"):
            model(torch.ones(1, 2, dtype=torch.bfloat16))
        model.float()
