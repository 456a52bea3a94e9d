"""Training checkpoints: the model is picked out by the names of parts, the rest is left out and said, and where nothing
says which part is the model the file is refused."""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import os
import pathlib
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mxcli.errors import InputError
from mxcli.files.checkpoint import open_checkpoint, read

LEGACY = {"_use_new_zipfile_serialization": False}


def weight(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def own() -> dict[str, torch.Tensor]:
    """The tensors of a model of its own names."""
    return {"fc.weight": weight(4, 8), "fc.bias": weight(4), "steps_seen": torch.tensor(7)}


def llama() -> dict[str, torch.Tensor]:
    return {
        "model.layers.0.self_attn.q_proj.weight": weight(8, 8),
        "model.norm.weight": weight(8),
        "lm_head.weight": weight(4, 8),
    }


def under(prefix: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"{prefix}{name}": tensor for name, tensor in tensors.items()}


def adam() -> dict[str, object]:
    return {"state": {0: {"exp_avg": weight(4, 8), "step": torch.tensor(3.0)}}, "param_groups": [{"lr": 1e-3}]}


class Unknown:
    """A class that only the trainer knows."""


class Items(dict):  # type: ignore[type-arg]
    """A dictionary that only the trainer knows."""


class Command:
    """A pickle that runs a command if it is loaded without care."""

    def __init__(self, call: Callable[..., object], *given: object) -> None:
        self.call = call, given

    def __reduce__(self) -> tuple[object, ...]:
        return self.call


TRAINED: dict[str, tuple[dict[str, Any], str, str]] = {
    "nanoGPT": (
        {
            "model": own(),
            "optimizer": adam(),
            "model_args": {"n_layer": 1},
            "iter_num": 5,
            "best_val_loss": weight(1)[0],
        },
        "model",
        "'optimizer', optimizer state (2 tensors, 132 bytes); 'best_val_loss', loss of training (1 tensor, 4 bytes)",
    ),
    "Lightning": (
        {
            "epoch": 1,
            "pytorch-lightning_version": "2.5",
            "state_dict": own(),
            "loops": {"fit_loop": {"done": torch.tensor(3)}},
            "callbacks": {"ModelCheckpoint": {"best": weight(1)[0]}},
            "optimizer_states": [adam()],
            "lr_schedulers": [{"last_epoch": 1}],
            "hyper_parameters": {"lr": 1e-4},
        },
        "state_dict",
        "'loops', progress and options of training (1 tensor, 8 bytes); 'callbacks', progress and options of training "
        "(1 tensor, 4 bytes); 'optimizer_states', optimizer state (2 tensors, 132 bytes)",
    ),
    "PyTorch's tutorial": (
        {"epoch": 2, "model_state_dict": own(), "optimizer_state_dict": adam(), "loss": torch.tensor(0.5)},
        "model_state_dict",
        "'optimizer_state_dict', optimizer state (2 tensors, 132 bytes); 'loss', loss of training (1 tensor, 4 bytes)",
    ),
    "DeepSpeed, one device": (
        {
            "module": own(),
            "optimizer": None,
            "lr_scheduler": {"x": weight(2)},
            "ds_version": "0.16",
            "dp_world_size": 1,
        },
        "module",
        "'lr_scheduler', learning rates (1 tensor, 8 bytes)",
    ),
    "timm": (
        {"state_dict": own(), "state_dict_ema": own(), "amp_scaler": {"scale": weight(1)}, "arch": "vit", "epoch": 3},
        "state_dict",
        "'state_dict_ema', averaged copy of the model (3 tensors, 152 bytes); 'amp_scaler', loss scaling "
        "(1 tensor, 4 bytes)",
    ),
    "a GAN": (
        {"generator": own(), "discriminator": {"d.weight": weight(2, 2)}, "optim_g": adam(), "optim_d": adam()},
        "generator",
        "'discriminator', discriminator, which only training uses (1 tensor, 16 bytes); 'optim_g', optimizer state "
        "(2 tensors, 132 bytes); 'optim_d', optimizer state (2 tensors, 132 bytes)",
    ),
    "BasicSR": (
        {"params": own(), "params_ema": own()},
        "params",
        "'params_ema', averaged copy of the model (3 tensors, 152 bytes)",
    ),
    "Composer": (
        {
            "state": {"model": own(), "optimizers": {"Adam": adam()}, "timestamp": {"batch": 3}},
            "rng": [torch.ones(3).byte()],
        },
        "state.model",
        "'rng', random states (1 tensor, 3 bytes); 'optimizers', optimizer state (2 tensors, 132 bytes)",
    ),
    "random states": (
        {
            "net": own(),
            "torch_rng_state": torch.ones(5).byte(),
            "cuda_rng_state_all": [torch.ones(2).byte()],
            "opt": adam(),
        },
        "net",
        "'torch_rng_state', random states (1 tensor, 5 bytes); 'cuda_rng_state_all', random states (1 tensor, 2 bytes)"
        "; 'opt', optimizer state (2 tensors, 132 bytes)",
    ),
    "its only other part": (
        {"tagger": own(), "optimizer": adam()},
        "tagger",
        "'optimizer', optimizer state (2 tensors, 132 bytes)",
    ),
    "a copy alone": (
        {"ema_state_dict": own(), "optimizer": adam()},
        "ema_state_dict",
        "'optimizer', optimizer state (2 tensors, 132 bytes)",
    ),
}


@pytest.mark.parametrize("options", [{}, LEGACY], ids=["zip", "legacy"])
@pytest.mark.parametrize("name", TRAINED)
def test_the_model_is_picked_out(tmp_path: Path, name: str, options: dict[str, bool]) -> None:
    saved, part, left_out = TRAINED[name]
    path = tmp_path / "x.ckpt"
    torch.save(saved, path, **options)
    checkpoint = open_checkpoint(path)
    assert list(checkpoint.tensors) == list(own())
    values = {name: read(checkpoint, info).tolist() for name, info in checkpoint.tensors.items()}
    assert values == {name: tensor.tolist() for name, tensor in own().items()}
    assert checkpoint.notes[:2] == (
        f"{path}: its part '{part}' is read as the model.",
        f"{path}: left out: {left_out}.",
    )


@pytest.mark.parametrize("copy", ["ema", "model_ema", "ema_model", "swa_model", "averaged_model", "EMA"])
def test_how_to_read_a_copy_is_said(tmp_path: Path, copy: str) -> None:
    path = tmp_path / "last.ckpt"
    torch.save({copy: under("x.", own()), "model": own()}, path)
    checkpoint = open_checkpoint(path)
    assert list(checkpoint.tensors) == list(own())
    assert (
        f"{path}: to read '{copy}' instead of the model, save it alone: "
        f"torch.save(torch.load('last.ckpt')['{copy}'], '{copy}.pt')." in checkpoint.notes
    )


def test_tensors_next_to_training_state(tmp_path: Path) -> None:
    """A flat state dict that an optimizer was added to keeps its names."""
    torch.save({**own(), "optimizer": adam(), "epoch": 3}, tmp_path / "x.pt")
    checkpoint = open_checkpoint(tmp_path / "x.pt")
    assert list(checkpoint.tensors) == list(own())
    assert checkpoint.notes[0] == (
        f"{tmp_path / 'x.pt'}: left out: 'optimizer', optimizer state (2 tensors, 132 bytes)."
    )


AMBIGUOUS: dict[str, tuple[dict[str, Any], str, str]] = {
    "actor and critic": (
        {"actor": own(), "critic": {"v.weight": weight(2, 2)}, "optimizer": adam()},
        "'actor' (3 tensors, 152 bytes), 'critic' (1 tensor, 16 bytes)",
        "actor",
    ),
    "student and teacher": (
        {"student": own(), "teacher": own(), "optimizer": adam(), "epoch": 1},
        "'student' (3 tensors, 152 bytes), 'teacher' (3 tensors, 152 bytes)",
        "student",
    ),
    "a model and a head": (
        {"model": own(), "head": {"weight": weight(2, 4)}, "optimizer": adam()},
        "'model' (3 tensors, 152 bytes), 'head' (1 tensor, 32 bytes)",
        "model",
    ),
    "two models": (
        {"model": own(), "net": own(), "lr_scheduler": {"x": weight(2)}},
        "'model' (3 tensors, 152 bytes), 'net' (3 tensors, 152 bytes)",
        "model",
    ),
    "virtual stages": (
        {"model0": own(), "model1": own(), "optimizer": adam()},
        "'model0' (3 tensors, 152 bytes), 'model1' (3 tensors, 152 bytes)",
        "model0",
    ),
    "StyleGAN": (
        {"g": own(), "d": own(), "g_ema": own(), "g_optim": adam()},
        "'g_ema' (3 tensors, 152 bytes), 'g' (3 tensors, 152 bytes), 'd' (3 tensors, 152 bytes)",
        "g_ema",
    ),
    "vocoder's discriminators": (
        {"mpd": own(), "msd": own(), "optim_g": adam()},
        "'mpd' (3 tensors, 152 bytes), 'msd' (3 tensors, 152 bytes)",
        "mpd",
    ),
}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_where_nothing_says_which_part_is_the_model(tmp_path: Path, name: str) -> None:
    saved, parts, first = AMBIGUOUS[name]
    torch.save(saved, tmp_path / "x.pth")
    with pytest.raises(InputError) as caught:
        open_checkpoint(tmp_path / "x.pth")
    assert str(caught.value) == (
        f"{tmp_path / 'x.pth'}: a training checkpoint, and nothing says which of its parts is the model: {parts}; save "
        f"one alone: torch.save(torch.load('x.pth')['{first}'], '{first}.pt')."
    )
    assert caught.value.exit_code == 3


def test_a_state_of_training_alone_is_refused(tmp_path: Path) -> None:
    torch.save(adam(), tmp_path / "optimizer.pt")
    with pytest.raises(InputError, match=r"optimizer\.pt: the state of an optimizer, without a model; give the file"):
        open_checkpoint(tmp_path / "optimizer.pt")
    torch.save({"optimizer": adam(), "scaler": {"scale": weight(1)}, "epoch": 3}, tmp_path / "x.pt")
    with pytest.raises(InputError) as caught:
        open_checkpoint(tmp_path / "x.pt")
    assert str(caught.value) == (
        f"{tmp_path / 'x.pt'}: holds no model, only state of training: 'optimizer' (2 tensors, 132 bytes), 'scaler' "
        "(1 tensor, 4 bytes)."
    )


WHOLE: dict[str, tuple[dict[str, Any], list[str]]] = {
    "a nested state dict": (
        {"encoder": {"fc": {"weight": weight(2, 2)}}, "decoder": {"weight": weight(2, 2)}},
        ["encoder.fc.weight", "decoder.weight"],
    ),
    "a body and a head": (
        {"model": {"embed": {"weight": weight(4, 2)}}, "lm_head": {"weight": weight(4, 2)}},
        ["model.embed.weight", "lm_head.weight"],
    ),
    "modules called like parts": (
        {"loss.weight": weight(2, 2), "optimizer.weight": weight(2), "model.weight": weight(2, 2)},
        ["loss.weight", "optimizer.weight", "model.weight"],
    ),
    "a module called model with others": (
        {"model": weight(2, 2), "scale": weight(2), "step": torch.tensor(3)},
        ["model", "scale", "step"],
    ),
    "a list": ({"blocks": [weight(2, 2), weight(2, 2)]}, ["blocks.0", "blocks.1"]),
}


@pytest.mark.parametrize("name", WHOLE)
def test_state_dicts_are_read_as_a_whole(tmp_path: Path, name: str) -> None:
    saved, names = WHOLE[name]
    torch.save(saved, tmp_path / "x.pt")
    checkpoint = open_checkpoint(tmp_path / "x.pt")
    assert list(checkpoint.tensors) == names
    assert not any("left out" in note for note in checkpoint.notes)


OBJECTS: dict[str, object] = {
    "options": argparse.Namespace(lr=1e-3, path=pathlib.Path("a")),
    "a path": pathlib.PurePosixPath("a/b"),
    "a class of the trainer": Unknown(),
    "a dictionary of the trainer": Items(lr=1),
    "a dictionary with a default": collections.defaultdict(int, lr=1),
    "a queue": collections.deque([1, 2]),
    "a number of NumPy": np.float64(3),
    "an array of NumPy": np.arange(3),
    "a class": Unknown,
    "a module": torch.nn.Linear(2, 2),
}


@pytest.mark.parametrize("options", [{}, LEGACY], ids=["zip", "legacy"])
@pytest.mark.parametrize("name", [name for name in OBJECTS if name != "a module"])
def test_objects_outside_the_model_are_not_loaded(tmp_path: Path, name: str, options: dict[str, bool]) -> None:
    torch.save(
        {"hyper_parameters": OBJECTS[name], "state_dict": own(), "optimizer": adam()}, tmp_path / "x.pt", **options
    )
    checkpoint = open_checkpoint(tmp_path / "x.pt")
    assert list(checkpoint.tensors) == list(own())
    assert f"{tmp_path / 'x.pt'}: objects that only the program that wrote them can load are not read: 1." in (
        checkpoint.notes
    )


@pytest.mark.parametrize("name", OBJECTS)
def test_objects_inside_the_model_are_refused(tmp_path: Path, name: str) -> None:
    for saved in ({"state_dict": {**own(), "x": OBJECTS[name]}, "optimizer": adam()}, {**own(), "x": OBJECTS[name]}):
        torch.save(saved, tmp_path / "x.pt")
        with pytest.raises(InputError, match=r"its pickle needs code \(\S+\), which is never run; save the state_dict"):
            open_checkpoint(tmp_path / "x.pt")


@pytest.mark.parametrize("options", [{}, LEGACY], ids=["zip", "legacy"])
@pytest.mark.parametrize(
    ("command", "named"),
    [
        (Command(eval, "open('ran', 'w')"), r"builtins\.eval"),
        (Command(exec, "open('ran', 'w')"), r"builtins\.exec"),
        (Command(os.system, "touch ran"), r"posix\.system"),
        (Command(subprocess.Popen, "touch ran"), r"(commands|subprocess)\.Popen"),
    ],
    ids=["eval", "exec", "system", "Popen"],
)
def test_commands_are_refused_wherever_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command, named: str, options: dict[str, bool]
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"args": [argparse.Namespace(), command], "model": own(), "optimizer": adam()}, "x.pt", **options)
    with pytest.raises(InputError, match=rf"its pickle needs code \({named}\), which is never run"):
        open_checkpoint(tmp_path / "x.pt")
    assert not (tmp_path / "ran").exists()


EXTRA: dict[str, object] = {
    "a stream": io.BytesIO(b"pickled"),
    "bytes in a tensor": torch.ones(3).byte(),
    "nothing": None,
    "bytes": b"pickled",
    "a dictionary": {"scale_fwd": weight(2), "extra": [1, argparse.Namespace()]},
    "a class of the trainer": Unknown(),
}


@pytest.mark.parametrize("options", [{}, LEGACY], ids=["zip", "legacy"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("name", EXTRA)
def test_extra_states_are_passed_over(tmp_path: Path, name: str, nested: bool, options: dict[str, bool]) -> None:
    state = {**llama(), "model.layers.0.self_attn.q_proj._extra_state": EXTRA[name], "_extra_state": None}
    path = tmp_path / "x.pt"
    torch.save({"model": state, "optimizer": adam()} if nested else state, path, **options)
    checkpoint = open_checkpoint(path)
    assert list(checkpoint.tensors) == list(llama())
    (note,) = (note for note in checkpoint.notes if "'_extra_state'" in note)
    assert note.startswith(f"{path}: left out: '_extra_state', state of Transformer Engine's FP8 recipe (")


def test_extra_states_are_counted(tmp_path: Path) -> None:
    extra = {"a._extra_state": torch.ones(3).byte(), "b._extra_state": io.BytesIO(b"x"), "c._extra_state": weight(2)}
    torch.save({**llama(), **extra}, tmp_path / "x.pt")
    assert open_checkpoint(tmp_path / "x.pt").notes == (
        f"{tmp_path / 'x.pt'}: left out: '_extra_state', state of Transformer Engine's FP8 recipe (3 of them, 11 bytes "
        "in tensors).",
    )


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    shared = weight(4, 8)
    torch.save(
        {"model": {"_orig_mod.embed.weight": shared, "_orig_mod.lm_head.weight": shared}, "optimizer": adam()},
        tmp_path / "x.pt",
    )
    checkpoint = open_checkpoint(tmp_path / "x.pt")
    assert checkpoint.tied == {"lm_head.weight": "embed.weight"}
    assert read(checkpoint, checkpoint.tensors["lm_head.weight"]).tolist() == shared.tolist()


def test_large_parts_that_are_left_out_are_not_read(tmp_path: Path) -> None:
    """Tensors of the model are in place though those of the optimizer have the same sizes."""
    torch.save(
        {"optimizer": {"a": weight(64, 64), "b": weight(64, 64)}, "model": {"w": weight(64, 64)}}, tmp_path / "x.pt"
    )
    checkpoint = open_checkpoint(tmp_path / "x.pt")
    info = checkpoint.tensors["w"]
    stored = (tmp_path / "x.pt").read_bytes()[info.offset : info.offset + info.nbytes]
    assert info.offset > 0
    assert np.frombuffer(stored, "<f4").tolist() == weight(64, 64).flatten().tolist()


def test_damaged_training_checkpoints_raise_nothing_else(tmp_path: Path) -> None:
    """Bytes changed one by one over the whole pickle, and the file cut short."""
    torch.save(
        {"model": under("_orig_mod.", own()), "optimizer": adam(), "args": argparse.Namespace(a=1)}, tmp_path / "x.pt"
    )
    content = (tmp_path / "x.pt").read_bytes()
    begin, length = content.index(b"\x80\x02}"), 900
    for at in [*range(begin, begin + length, 29), *range(0, len(content), 499)]:
        damaged = bytearray(content)
        damaged[at] ^= 0x15
        for part in (bytes(damaged), content[:at]):
            (tmp_path / "y.pt").write_bytes(part)
            with contextlib.suppress(InputError):
                open_checkpoint(tmp_path / "y.pt")
