"""An error of the recording ends the recording with one warning, never the training."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import mxcli
from mxcli.errors import EnvironmentFailure, MxcliError, UsageError
from mxcli.files.capture_writer import CaptureFile
from mxcli.files.checkpoint import open_checkpoint
from mxcli.flows.capture.layer_step import LayerStep


@contextlib.contextmanager
def file_size_limit(nbytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def trained(
    folder: Path | None, fault: Callable[[nn.Module, Path], object], *, at: int = 1, **options: Any
) -> tuple[list[torch.Tensor], Any]:
    """Train for four steps, with a fault before the one numbered `at`."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 64))
    optimizer, seen = torch.optim.AdamW(model.parameters(), 0.1), []
    with contextlib.nullcontext() if folder is None else mxcli.capture(model, folder, **options) as recorder:
        for number in range(4):
            optimizer.zero_grad()
            with contextlib.ExitStack() as stack:
                if number == at and folder is not None:
                    found = fault(model, folder)
                    if isinstance(found, contextlib.AbstractContextManager):
                        stack.enter_context(found)
                x = torch.randn(256, 64, requires_grad=True)
                y = checkpoint(model, x, use_reentrant=False)
                y.square().sum().backward()
                optimizer.step()
                if recorder is not None:
                    recorder.step(loss=y.sum().detach())
            seen += [y.detach(), x.grad, *(each.detach().clone() for each in model.parameters())]
    return [*seen, torch.get_rng_state()], recorder


def removed(model: nn.Module, folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("a file where the folder was")


def taken(model: nn.Module, folder: Path) -> None:
    (folder / "step-000001.safetensors").write_bytes(b"of another run")


@contextlib.contextmanager
def broken(owner: Any, name: str) -> Iterator[None]:
    """Replace a method of ours by one with a bug."""
    before = getattr(owner, name)

    def failing(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a bug")

    setattr(owner, name, failing)
    try:
        yield
    finally:
        setattr(owner, name, before)


FAULTS: dict[str, tuple[Callable[[nn.Module, Path], object], str]] = {
    "file size": (lambda model, folder: file_size_limit(40_000), "exceeds the limit on file sizes"),
    "small file size": (lambda model, folder: file_size_limit(0), "exceeds the limit on file sizes"),
    "folder removed": (removed, "Not a directory|File exists|not a directory|cannot be written"),
    "name taken": (taken, "step-000001.safetensors: exists"),
    "bug in the forward": (
        lambda model, folder: broken(CaptureFile, "add"),
        "ZeroDivisionError: a bug",
    ),
    "bug at the end of the step": (
        lambda model, folder: broken(CaptureFile, "finish"),
        "ZeroDivisionError: a bug",
    ),
}


@pytest.mark.parametrize("name", list(FAULTS))
def test_training_goes_on_as_without_recording(name: str, tmp_path: Path) -> None:
    fault, sentence = FAULTS[name]
    folder = tmp_path / "out"
    plain, _ = trained(None, fault)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        recorded, recorder = trained(folder, fault)
    assert all(map(torch.equal, plain, recorded))
    (message,) = [str(each.message) for each in caught if "capture" in str(each.message)]
    assert message.startswith("capture: recording stopped at step 1, the program continues: ")
    assert recorder.number == 4
    assert recorder.stopped is not None
    assert [each.step for each in recorder.files] == [0]
    assert recorder.notes == [f"recording stopped at step 1: {recorder.stopped}"]
    assert re.search(sentence, message)
    if folder.is_dir():
        assert sorted(path.name for path in folder.glob("step-*")) == sorted(
            ["step-000000.safetensors", *(["step-000001.safetensors"] if name == "name taken" else [])]
        )
        if "file size" not in name or (folder / "mxcli-incomplete.json").exists():
            assert json.loads((folder / "mxcli-incomplete.json").read_text()) == {
                "schema": "mxcli.capture.incomplete/1",
                "complete": False,
                "step": 1,
                "rank": 0,
                "reason": recorder.stopped,
            }


def test_types_that_cannot_be_recorded_are_no_error_of_the_program(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with (  # noqa: PT031 - the block is what warns
        pytest.warns(UserWarning, match=r"stopped at step 0, .*torch\.float32 and torch\.bfloat16 in one step"),
        mxcli.capture(model, tmp_path / "out", roles=["activation"]) as recorder,
    ):
        model(torch.ones(1, 2))
        model.bfloat16()
        assert model(torch.ones(1, 2, dtype=torch.bfloat16)).dtype is torch.bfloat16
        assert recorder.step() is None
    assert recorder.stopped is not None
    assert not (tmp_path / "out").exists()


def test_limits_and_metadata_end_the_recording_too(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 16))
    with (  # noqa: PT031 - the block is what warns
        pytest.warns(UserWarning, match="bytes of memory"),
        mxcli.capture(model, tmp_path, max_memory=100) as recorder,
    ):
        model(torch.ones(64, 8)).sum().backward()
        assert recorder.step() is None
    with (  # noqa: PT031 - the block is what warns
        pytest.warns(UserWarning, match="must be JSON values"),
        mxcli.capture(model, tmp_path / "other") as recorder,
    ):
        model(torch.ones(1, 8)).sum().backward()
        assert recorder.step(loss=torch.ones(2)) is None
        assert recorder.step(loss=object()) is None
    assert recorder.stopped is not None


def test_transformed_and_traced_calls_end_the_recording_too(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    for number, run in enumerate(
        (lambda: torch.vmap(model)(torch.ones(3, 2)), lambda: torch.jit.trace(model, torch.ones(3, 2)))
    ):
        with (
            pytest.warns(UserWarning, match="recording stopped at step 0"),
            warnings.catch_warnings(),
            mxcli.capture(model, tmp_path / str(number)) as recorder,
        ):
            run()
        assert recorder.stopped is not None


def test_an_error_in_the_backward_pass_is_not_one_of_the_program(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(2, 2)), torch.ones(3, 2, requires_grad=True)
    with (  # noqa: PT031 - the block is what warns
        pytest.warns(UserWarning, match="a bug"),
        mxcli.capture(model, tmp_path / "out") as recorder,
    ):
        y = model(x).sum()
        with broken(LayerStep, "_take_inputs"):
            y.backward()
        recorder.step()
    assert x.grad is not None
    assert model[0].weight.grad is not None


def test_raise_raises_in_the_forward(tmp_path: Path) -> None:
    with (
        pytest.raises(EnvironmentFailure, match="exceeds the limit on file sizes"),
        warnings.catch_warnings(),
    ):
        trained(tmp_path, lambda model, folder: file_size_limit(1000), on_error="raise")


def test_where_warnings_are_errors_the_program_continues(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with mxcli.capture(model, tmp_path / "out", max_memory=1) as recorder:
            model(torch.ones(1, 2)).sum().backward()
            recorder.step()
    assert capsys.readouterr().err.count("capture: recording stopped at step 0, the program continues: ") == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written_to(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.warns(UserWarning, match="cannot be written"):
        trained(tmp_path / "out", lambda model, folder: None)


@pytest.mark.filterwarnings("ignore:capture")
def test_the_mark_is_gone_after_a_recording_to_the_end(tmp_path: Path) -> None:
    trained(tmp_path, FAULTS["name taken"][0])
    assert (tmp_path / "mxcli-incomplete.json").exists()
    assert len(open_checkpoint(tmp_path / "step-000000.safetensors").tensors) == 6
    trained(tmp_path, lambda model, folder: None, force=True)
    assert not (tmp_path / "mxcli-incomplete.json").exists()
    assert len(open_checkpoint(tmp_path).tensors) == 24


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"on_error": "ignore"}, "on_error 'ignore': give warn or raise"),
        ({"on_error": None}, "on_error None: give warn or raise"),
        ({"on_error": ["warn"]}, r"on_error \['warn'\]: give warn or raise"),
        ({"force": "no"}, "force 'no': give True or False"),
        ({"directory": ""}, "directory '': give the path of a directory"),
        ({"directory": "~/steps"}, "directory '~/steps': '~' is not expanded"),
        ({"directory": "a\0b"}, "give the path of a directory"),
        ({"directory": b"steps"}, "directory b'steps': give a path"),
        ({"directory": None}, "directory None: give a path"),
        ({"seed": float("nan")}, "seed nan: seeds are integers"),
        ({"seed": "1"}, "seed '1': seeds are integers"),
        ({"sample_rows": True}, "sample_rows True: keep one row at least"),
        ({"layers": [1]}, "layers has 1: give strings"),
        ({"roles": [None]}, "roles has None: give strings"),
        ({"about": []}, "about is a list"),
        ({"max_disk": "8G"}, "max_disk '8G': give a number of bytes"),
        ({"rank": -1}, "rank -1: ranks are integers from 0"),
    ],
)
def test_arguments_are_refused_before_the_block(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        mxcli.capture(nn.Linear(2, 2), **{"directory": "out", **options}).__enter__()
    with pytest.raises(MxcliError, match=r"is not a torch\.nn\.Module"):
        mxcli.capture(None, "out").__enter__()  # type: ignore[arg-type]
