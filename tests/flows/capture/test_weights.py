"""Recording runs no code of the model: training with parametrized weights is the same to the last bit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import mxcli

pytestmark = [
    pytest.mark.filterwarnings("ignore:capture"),
    pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated"),
]


class Noisy(nn.Module):
    """A parametrization that draws random numbers and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, w: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return w + 0.1 * torch.randn_like(w)


class FakeQuantized(nn.Module):
    """Stochastic rounding with a straight-through gradient."""

    def forward(self, w: torch.Tensor) -> torch.Tensor:
        return w + ((w * 8 + torch.rand_like(w)).floor() / 8 - w).detach()


class LowRank(nn.Module):
    """An update of low rank, with dropout on it, as adapters have."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Parameter(torch.randn(2, 8)), nn.Parameter(torch.randn(8, 2))

    def forward(self, w: torch.Tensor) -> torch.Tensor:
        return w + nn.functional.dropout(self.up @ self.down, 0.5, self.training)


class Symmetric(nn.Module):
    def forward(self, w: torch.Tensor) -> torch.Tensor:
        return w.triu() + w.triu(1).mT


class Computing(nn.Linear):
    """A layer whose weight is a property that draws."""

    held: nn.Parameter

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        del self.weight
        self.held = nn.Parameter(torch.randn(outputs, inputs))
        self.__class__ = type("Drawn", (nn.Linear,), {"weight": property(lambda layer: torch.rand(8, 8) * layer.held)})


def with_parametrization(make: Callable[[], nn.Module]) -> Callable[[nn.Linear], nn.Module]:
    def wrapped(layer: nn.Linear) -> nn.Module:
        parametrize.register_parametrization(layer, "weight", make(), unsafe=True)
        return layer

    return wrapped


WRAPPERS: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "plain": lambda layer: layer,
    "spectral_norm": lambda layer: parametrizations.spectral_norm(layer),
    "spectral_norm, hook": lambda layer: nn.utils.spectral_norm(layer),
    "weight_norm": lambda layer: parametrizations.weight_norm(layer),
    "weight_norm, hook": lambda layer: nn.utils.weight_norm(layer),
    "orthogonal": lambda layer: parametrizations.orthogonal(layer),
    "noisy": with_parametrization(Noisy),
    "fake quantized": with_parametrization(FakeQuantized),
    "low rank": with_parametrization(LowRank),
    "two in a row": lambda layer: with_parametrization(Noisy)(with_parametrization(Symmetric)(layer)),  # type: ignore[arg-type]
    "pruned": lambda layer: prune.random_unstructured(layer, "weight", 0.5),
    "property": lambda layer: Computing(8, 8),
}


class Net(nn.Module):
    def __init__(self, wrap: Callable[[nn.Linear], nn.Module], reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = wrap(nn.Linear(8, 8)), wrap(nn.Linear(8, 8))
        self.drop, self.norm, self.reentrant = nn.Dropout(0.3), nn.BatchNorm1d(8), reentrant

    def part(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(torch.relu(self.first(x))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.part(x) if self.reentrant is None else checkpoint(self.part, x, use_reentrant=self.reentrant)
        return self.norm(x + y)


def snapshot(model: nn.Module) -> list[Any]:
    """Everything a program can see of a model, and of the random numbers."""
    shown = [
        (name, type(module).__name__, sorted(vars(module)), len(module._forward_hooks), len(module._forward_pre_hooks))
        for name, module in model.named_modules()
    ]
    return [*shown, *model.state_dict(), torch.get_rng_state(), *(each.clone() for each in model.state_dict().values())]


def trained(wrap: Callable[[nn.Linear], nn.Module], folder: Path | None, *, reentrant: bool | None = None) -> list[Any]:
    model = Net(wrap, reentrant)
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    seen: list[Any] = []
    torch.manual_seed(1)
    with contextlib.nullcontext() if folder is None else mxcli.capture(model, folder) as recorder:
        for step in range(3):
            optimizer.zero_grad()
            model.train()
            for _ in range(2):
                with torch.autocast("cpu", torch.bfloat16, enabled=step == 1):
                    x = torch.randn(4, 8, requires_grad=True)
                    y = model(x)
                graph = [type(y.grad_fn), y.grad_fn.next_functions[0][0].name()]  # type: ignore[union-attr]
                y.float().square().sum().backward()
                seen += [graph, y.detach(), x.grad]
            seen += [None if each.grad is None else each.grad.clone() for each in model.parameters()]
            optimizer.step()
            model.eval()
            with torch.no_grad():
                seen.append(model(torch.randn(4, 8)))
            if recorder is not None:
                recorder.step(loss=y.detach().sum())
            seen += snapshot(model)
        if recorder is not None:
            assert recorder.stopped is None
    return [*seen, *snapshot(model)]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(), other.nan_to_num())
    return bool(one == other)


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("name", list(WRAPPERS))
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_training_is_the_same_to_the_last_bit(name: str, reentrant: bool | None, tmp_path: Path) -> None:
    plain = trained(WRAPPERS[name], None, reentrant=reentrant)
    recorded = trained(WRAPPERS[name], tmp_path, reentrant=reentrant)
    assert len(plain) == len(recorded)
    assert all(map(same, plain, recorded))
    names = set(load_file(tmp_path / "step-000001.safetensors"))
    weights = set() if name == "property" else {"first.weight", "last.weight"}
    rows = {f"{layer}.{role}" for layer in ("first", "last") for role in ("activation", "gradient")}
    assert names == rows | weights


@pytest.mark.parametrize("name", [name for name in WRAPPERS if name != "property"])
def test_the_weight_is_the_one_that_the_forward_used(name: str, tmp_path: Path) -> None:
    """The output less the bias is the product of what is recorded, for weights that are drawn too."""
    torch.manual_seed(0)
    model = nn.Sequential(WRAPPERS[name](nn.Linear(8, 8)))
    with mxcli.capture(model, tmp_path) as recorder:
        y = model(torch.randn(4, 8))
        model.requires_grad_(requires_grad=False)
        recorder.step()
    found = load_file(tmp_path / "step-000000.safetensors")
    product = nn.functional.linear(found["0.activation"], found["0.weight"], model[0].bias)
    # A product of copies at other addresses may be summed in another order.
    torch.testing.assert_close(y.detach(), product, rtol=1e-5, atol=1e-6)


def test_weights_that_are_cached_are_found(tmp_path: Path) -> None:
    model = nn.Sequential(with_parametrization(Noisy)(nn.Linear(8, 8)))
    with parametrize.cached():
        y = model(torch.ones(1, 8))
        with mxcli.capture(model, tmp_path) as recorder:
            assert torch.equal(model(torch.ones(1, 8)), y)
            recorder.step()
        assert torch.equal(load_file(tmp_path / "step-000000.safetensors")["0.weight"], model[0].weight)
        assert int(model[0].parametrizations.weight[0].calls) == 1


def test_weights_that_no_file_holds_are_left_out_with_a_note(tmp_path: Path) -> None:
    model = nn.Sequential(Computing(8, 8), nn.Linear(8, 8))
    with mxcli.capture(model, tmp_path) as recorder:
        model(torch.ones(1, 8)).sum().backward()
        recorder.step()
    assert sorted(load_file(tmp_path / "step-000000.safetensors")) == [
        *("0.activation", "0.gradient", "1.activation", "1.gradient", "1.weight")
    ]
    assert recorder.notes == [
        "1 of 2 layers have no whole and plain weight of floats (quantized, sharded, offloaded or computed when "
        "read); weights not recorded: 0 (step 0)"
    ]


class Counted(torch.Tensor):
    """A tensor whose every operation is counted, as quantized and sharded tensors see theirs."""

    seen: list[str] = []  # noqa: RUF012 - reset by the test

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_no_code_of_tensor_subclasses_runs(tmp_path: Path) -> None:
    def run(folder: Path | None) -> list[str]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8))
        model[0].weight = nn.Parameter(model[0].weight.detach().as_subclass(Counted))
        Counted.seen.clear()
        with contextlib.nullcontext() if folder is None else mxcli.capture(model, folder) as recorder:
            model(torch.ones(2, 8))
            if recorder is not None:
                recorder.step()
        return list(Counted.seen)

    assert run(tmp_path) == run(None)


class Listed(TorchDispatchMode):
    """A mode that draws and lists the operations that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_modes_of_the_program_see_no_operation_of_the_recording(tmp_path: Path) -> None:
    def run(folder: Path | None) -> list[str]:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        with contextlib.nullcontext() if folder is None else mxcli.capture(model, folder, sample_rows=2) as recorder:
            with Listed() as mode:
                model(torch.ones(5, 8)).sum().backward()
                if recorder is not None:
                    recorder.step()
            return mode.seen

    assert run(None) == run(tmp_path)


@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE])
def test_selective_checkpoints_save_and_repeat_the_operations_of_the_model_alone(
    policy: CheckpointPolicy, tmp_path: Path
) -> None:
    def run(folder: Path | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
        x = torch.randn(5, 8, requires_grad=True)

        def contexts() -> Any:
            return create_selective_checkpoint_contexts(lambda *_, **__: policy)

        with contextlib.nullcontext() if folder is None else mxcli.capture(model, folder, sample_rows=3) as recorder:
            y = checkpoint(model, x, use_reentrant=False, context_fn=contexts)
            y.square().sum().backward()
            if recorder is not None:
                recorder.step()
        assert x.grad is not None
        return [y, x.grad, *(each.grad for each in model.parameters() if each.grad is not None)]

    assert all(map(torch.equal, run(None), run(tmp_path)))
    assert len(load_file(tmp_path / "step-000000.safetensors")) == 6


def test_the_fast_path_of_transformer_layers_is_taken_as_before(tmp_path: Path) -> None:
    """torch takes it only without hooks on the modules."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    model = nn.Sequential(layer, nn.Linear(16, 4))
    x = torch.randn(2, 5, 16)
    with torch.no_grad(), torch.profiler.profile() as profile:
        plain = model(x)
    assert any("_transformer_encoder_layer_fwd" in event.key for event in profile.key_averages())
    with mxcli.capture(model, tmp_path) as recorder, torch.no_grad(), torch.profiler.profile() as profile:
        recorded = model(x)
        recorder.step()
    assert any("_transformer_encoder_layer_fwd" in event.key for event in profile.key_averages())
    assert torch.equal(plain, recorded)


def test_nothing_is_left_on_the_process(tmp_path: Path) -> None:
    from torch.nn.modules import module

    def state() -> list[Any]:
        return [
            {
                name: len(held)
                for name, held in vars(module).items()
                if name.startswith("_global") and hasattr(held, "__len__")
            },
            __import__("warnings").filters[:],
        ]

    model, before = nn.Sequential(nn.Linear(8, 8)), state()
    with mxcli.capture(model, tmp_path) as recorder:
        model(torch.ones(1, 8)).sum().backward()
        recorder.step()
        assert not any(each._forward_hooks for each in model.modules())
    assert state() == before


def test_distributed_data_parallel_is_the_same_to_the_last_bit(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        found = []
        for folder in (None, tmp_path / "out"):
            torch.manual_seed(0)
            model = nn.parallel.DistributedDataParallel(
                nn.Sequential(parametrizations.spectral_norm(nn.Linear(8, 8)), nn.Dropout(0.5), nn.Linear(8, 8))
            )
            with contextlib.nullcontext() if folder is None else mxcli.capture(model, folder) as recorder:
                model(torch.randn(4, 8)).square().sum().backward()
                if recorder is not None:
                    recorder.step()
            found.append([torch.get_rng_state(), *model.state_dict().values(), *(p.grad for p in model.parameters())])
        assert all(map(torch.equal, *found))
        assert "0.weight" in load_file(tmp_path / "out" / "step-000000.safetensors")
    finally:
        torch.distributed.destroy_process_group()


def test_the_storage_of_a_weight_stays_resizable(tmp_path: Path) -> None:
    """Sharding frees weights that way after a forward."""
    model = nn.Sequential(nn.Linear(8, 8))
    with mxcli.capture(model, tmp_path) as recorder:
        model(torch.ones(1, 8)).sum().backward()
        recorder.step()
    for tensor in (model[0].weight, model[0].weight.grad):
        assert tensor is not None
        assert tensor.untyped_storage().resizable()
