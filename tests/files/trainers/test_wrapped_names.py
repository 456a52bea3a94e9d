"""Names that wrappers and trainers add to are stripped to those of the model, in files of every kind, and that is
said."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from raw_checkpoint import safetensors_bytes, zeros

from mxcli.errors import InputError
from mxcli.files.checkpoint import open_checkpoint, read
from mxcli.files.directory import absent_tensors, index_notes, read_index
from mxcli.files.safetensors import read_safetensors
from mxcli.files.tensors import FileContents
from mxcli.files.trainers.names import as_model, own_name, own_names

LLAMA = ("model.layers.0.self_attn.q_proj.weight", "model.norm.weight", "lm_head.weight")
GPT2 = ("transformer.h.0.attn.c_attn.weight", "transformer.wte.weight", "lm_head.weight")
BERT = ("bert.encoder.layer.0.output.dense.weight", "classifier.weight")
T5 = ("shared.weight", "encoder.block.0.layer.0.SelfAttention.q.weight")
CUSTOM = ("blocks.0.fc.weight", "head.weight")


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("_orig_mod.fc.weight", "fc.weight"),
        ("layers.0._orig_mod.fc.weight", "layers.0.fc.weight"),
        ("_fsdp_wrapped_module.layers.3._fsdp_wrapped_module.fc.weight", "layers.3.fc.weight"),
        ("_fsdp_wrapped_module._fpw_module.fc.weight", "fc.weight"),
        ("layers.3._checkpoint_wrapped_module.fc.weight", "layers.3.fc.weight"),
        ("_forward_module.model.fc.weight", "model.fc.weight"),
        ("_orig_mod._fsdp_wrapped_module._checkpoint_wrapped_module.w", "w"),
        ("my_orig_mod.fc.weight", "my_orig_mod.fc.weight"),
        ("fc._orig_mod", "fc._orig_mod"),
        ("module.fc.weight", "module.fc.weight"),
    ],
)
def test_segments_of_wrappers(name: str, own: str) -> None:
    assert own_name(name) == own


STRIPPED = [
    ("module.", LLAMA, False, ["'module' (DistributedDataParallel or AveragedModel) is stripped from all names"]),
    (
        "module.module.",
        LLAMA,
        False,
        ["'module' (DistributedDataParallel or AveragedModel) is stripped from all names"] * 2,
    ),
    ("_module.", CUSTOM, False, ["'_module' (Opacus) is stripped from all names"]),
    (
        "module._orig_mod.",
        GPT2,
        False,
        [
            "'_orig_mod' (torch.compile) is stripped from 3 of 3 names",
            "'module' (DistributedDataParallel or AveragedModel) is stripped from all names",
        ],
    ),
    ("model.", LLAMA, True, ["'model' (the trainer's name of the model) is stripped from all names"]),
    ("model.", GPT2, True, ["'model' (the trainer's name of the model) is stripped from all names"]),
    ("net.", BERT, True, ["'net' (the trainer's name of the model) is stripped from all names"]),
    ("hf_model.", T5, True, ["'hf_model' (the trainer's name of the model) is stripped from all names"]),
    (
        "_forward_module.model.",
        LLAMA,
        True,
        [
            "'_forward_module' (Lightning Fabric) is stripped from 3 of 3 names",
            "'model' (the trainer's name of the model) is stripped from all names",
        ],
    ),
]


@pytest.mark.parametrize(("prefix", "names", "trained", "notes"), STRIPPED, ids=[row[0] for row in STRIPPED])
def test_prefixes_of_all_names(prefix: str, names: tuple[str, ...], trained: bool, notes: list[str]) -> None:
    new, said = own_names([prefix + name for name in names], trained=trained)
    assert new == {prefix + name: name for name in names}
    assert said == notes


KEPT_NOTE = "all names begin with '{}', which is kept: it may be the model's own or the trainer's"


@pytest.mark.parametrize(
    ("names", "trained", "notes"),
    [
        (LLAMA, True, []),
        (LLAMA[:2], True, []),  # a tied head: all names begin with `model.`, as the model gives them
        ([f"model.{name}" for name in LLAMA], False, []),
        ([f"model.{name}" for name in CUSTOM], True, [KEPT_NOTE.format("model")]),
        ([f"net.{name}" for name in CUSTOM], True, [KEPT_NOTE.format("net")]),
        ([f"encoder.{name}" for name in CUSTOM], True, []),
        ([*(f"model.{name}" for name in LLAMA), "accuracy.total"], True, []),
        (["module.fc.weight", "head.weight"], False, []),
        (["model.diffusion_model.out.weight", "first_stage_model.decoder.weight"], True, []),
    ],
)
def test_names_that_may_be_the_models_own_are_kept(names: list[str], trained: bool, notes: list[str]) -> None:
    new, said = own_names(names, trained=trained)
    assert new == {name: name for name in names}
    assert said == notes


def contents(folder: Path, entries: Mapping[str, Any], metadata: Mapping[str, str] | None = None) -> FileContents:
    path = folder / "x.safetensors"
    path.write_bytes(safetensors_bytes(dict(entries), dict(metadata or {"format": "pt"})))
    return as_model(read_safetensors(path), path)


def test_a_safetensors_file_of_wrapped_names(tmp_path: Path) -> None:
    found = contents(tmp_path, {f"module._orig_mod.{name}": zeros("BF16", 4, 8) for name in LLAMA})
    assert [(info.name, info.role) for info in found.tensors] == [
        ("model.layers.0.self_attn.q_proj.weight", "weight"),
        ("model.norm.weight", "norm"),
        ("lm_head.weight", "lm_head"),
    ]
    assert all(info.offset > 0 for info in found.tensors)
    assert found.notes == (
        f"{tmp_path}/x.safetensors: '_orig_mod' (torch.compile) is stripped from 3 of 3 names.",
        f"{tmp_path}/x.safetensors: 'module' (DistributedDataParallel or AveragedModel) is stripped from all names.",
    )


def test_a_safetensors_file_with_a_whole_training_state(tmp_path: Path) -> None:
    model = {f"model._orig_mod.{name}": zeros("BF16", 4, 8) for name in GPT2}
    moments = ("optimizer.state.0.exp_avg", "optimizer.state.0.exp_avg_sq", "optimizer.state.0.step")
    extra = {"model._orig_mod.transformer.h.0.attn._extra_state": zeros("U8", 5)}
    found = contents(tmp_path, {**model, **{name: zeros("F32", 4) for name in moments}, **extra})
    assert [info.name for info in found.tensors] == list(GPT2)
    assert found.notes == (
        f"{tmp_path}/x.safetensors: left out: 'optimizer', optimizer state (3 tensors, 48 bytes); '_extra_state', "
        "state of Transformer Engine's FP8 recipe (1 tensor, 5 bytes).",
        f"{tmp_path}/x.safetensors: '_orig_mod' (torch.compile) is stripped from 3 of 3 names.",
        f"{tmp_path}/x.safetensors: 'model' (the trainer's name of the model) is stripped from all names.",
    )


@pytest.mark.parametrize(
    "entries",
    [
        {"optimizer.weight": zeros("F32", 4, 8), "fc.weight": zeros("F32", 4, 8)},
        {"optimizer.exp_avg": zeros("F32", 4), "optimizer.net.weight": zeros("F32", 4)},
        {"ema.weight": zeros("F32", 4, 8), "fc.weight": zeros("F32", 8, 4)},
        {"ema_encoder.fc.weight": zeros("F32", 4, 8), "decoder.fc2.weight": zeros("F32", 4, 8)},
        {"swa.layers.0.weight": zeros("F32", 4, 8)},
    ],
)
def test_modules_with_such_names_are_kept(tmp_path: Path, entries: Mapping[str, Any]) -> None:
    found = contents(tmp_path, entries)
    assert [info.name for info in found.tensors] == list(entries)
    assert found.notes == ()


COPIES = {
    "as Stable Diffusion stores them": (
        [
            "model.diffusion_model.input_blocks.0.0.weight",
            "model.diffusion_model.out.2.bias",
            "first_stage_model.d.bias",
        ],
        ["model_ema.diffusion_modelinput_blocks00weight", "model_ema.diffusion_modelout2bias"],
    ),
    "in a module of their own": (["model.fc.weight", "model.out.bias"], ["ema_model.fc.weight", "ema_model.out.bias"]),
    "under the names of a wrapper": (["net.fc.weight"], ["ema.module.fc.weight"]),
    "of a whole model": (["fc.weight", "out.weight"], ["ema.fc.weight", "ema.out.weight"]),
}


@pytest.mark.parametrize("name", COPIES)
def test_averaged_copies_among_the_tensors(tmp_path: Path, name: str) -> None:
    own, copies = COPIES[name]
    counters = {
        f"{copies[0].partition('.')[0]}.decay": zeros("F32"),
        f"{copies[0].partition('.')[0]}.num": zeros("I64"),
    }
    found = contents(tmp_path, {name: zeros("F32", 4) for name in own + copies} | counters)
    assert [info.name for info in found.tensors] == own
    nbytes = 16 * len(copies) + 12
    assert found.notes == (
        f"{tmp_path}/x.safetensors: left out: '{copies[0].partition('.')[0]}', averaged copy of the model "
        f"({len(copies) + 2} tensors, {nbytes} bytes).",
    )


def test_captures_and_quantized_files_keep_their_names(tmp_path: Path) -> None:
    record = json.dumps({"version": 1, "tensors": {"module.fc.activation": {"role": "activation"}}})
    captured = contents(tmp_path, {"module.fc.activation": zeros("F32", 4, 8)}, {"mxcli.capture": record})
    assert [info.name for info in captured.tensors] == ["module.fc.activation"]
    quantized = {"_orig_mod.fc.weight": zeros("F8_E4M3", 4, 8), "_orig_mod.fc.weight_scale": zeros("F32")}
    assert [info.name for info in contents(tmp_path, quantized).tensors] == list(quantized)


def test_a_file_with_nothing_but_state(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"holds no model, only 'optimizer', optimizer state \(2 tensors, 32 bytes\)\."
    ):
        contents(tmp_path, {"optimizer.0.exp_avg": zeros("F32", 4), "optimizer.0.exp_avg_sq": zeros("F32", 4)})


@pytest.mark.parametrize(
    "name", ["_flat_param", "layers.0._fsdp_wrapped_module.flat_param", "_fpw_module.flat_param_0"]
)
def test_flattened_parameters_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match=r"holds parameters flattened by FSDP, whose shapes are not in the file; save"):
        contents(tmp_path, {name: zeros("F32", 100), "fc.bias": zeros("F32", 4)})


def test_one_name_for_two_tensors(tmp_path: Path) -> None:
    """The same tensor under both names is one; different ones are refused."""
    shared = torch.ones(4, 8)
    torch.save({"fc.weight": shared, "_orig_mod.fc.weight": shared}, tmp_path / "x.pt")
    checkpoint = open_checkpoint(tmp_path / "x.pt")
    assert list(checkpoint.tensors) == ["fc.weight"]
    assert checkpoint.tied == {}
    torch.save({"fc.weight": shared, "_orig_mod.fc.weight": shared + 1}, tmp_path / "x.pt")
    with pytest.raises(InputError) as caught:
        open_checkpoint(tmp_path / "x.pt")
    assert str(caught.value) == (
        f"{tmp_path}/x.pt: 'fc.weight' and '_orig_mod.fc.weight' differ, and both are 'fc.weight' in the model; keep "
        "one of them."
    )


@pytest.mark.parametrize("options", [{}, {"_use_new_zipfile_serialization": False}], ids=["zip", "legacy"])
def test_values_under_stripped_names(tmp_path: Path, options: dict[str, bool]) -> None:
    values = torch.arange(12.0).reshape(3, 4)
    torch.save(
        {"module.a.weight": values, "module.b.weight": values.t(), "module.c.bias": values[0, ::2]},
        tmp_path / "x.pt",
        **options,
    )
    checkpoint = open_checkpoint(tmp_path / "x.pt")
    found = {name: read(checkpoint, info).tolist() for name, info in checkpoint.tensors.items()}
    assert found == {"a.weight": values.tolist(), "b.weight": values.t().tolist(), "c.bias": [0, 2]}


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_shards_with_an_index(tmp_path: Path, prefix: str) -> None:
    names = ("a.weight", "b.weight")
    for number, name in enumerate(names, 1):
        tensors = {f"{prefix}{name}": torch.ones(2, 2), f"{prefix}layers.{number}._extra_state": None}
        torch.save(tensors, tmp_path / f"pytorch_model-0000{number}-of-00002.bin")
    placed = {f"{prefix}{name}": f"pytorch_model-0000{number}-of-00002.bin" for number, name in enumerate(names, 1)}
    placed[f"{prefix}layers.1._extra_state"] = "pytorch_model-00001-of-00002.bin"
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 32}, "weight_map": placed}))
    checkpoint = open_checkpoint(tmp_path)
    assert list(checkpoint.tensors) == list(names)
    assert not any("does not name" in note or "places" in note for note in checkpoint.notes)
    read_placed = read_index(index)
    assert absent_tensors(read_placed, checkpoint.tensors) == []
    assert index_notes(read_placed, checkpoint.tensors) == []
    missing = {"a.weight": checkpoint.tensors["a.weight"]}
    assert absent_tensors(read_placed, missing) == [
        f"{index}: tensor '{prefix}b.weight' is neither in pytorch_model-00002-of-00002.bin nor elsewhere."
    ]


def test_parts_of_an_index_that_are_left_out(tmp_path: Path) -> None:
    """Copies and optimizer state that are in no shard are not missed; single tensors of them are."""
    (tmp_path / "a.safetensors").write_bytes(safetensors_bytes({"fc.weight": zeros("F32", 4)}, {"format": "pt"}))
    placed = dict.fromkeys(["fc.weight", "ema.fc.weight", "optimizer.0.exp_avg", "fc._extra_state"], "a.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 16}, "weight_map": placed}))
    found = {info.name: info for info in read_safetensors(tmp_path / "a.safetensors").tensors}
    assert absent_tensors(read_index(index), found) == []
    found["ema.other.weight"] = found["fc.weight"]
    assert absent_tensors(read_index(index), found) == [
        f"{index}: tensor 'ema.fc.weight' is neither in a.safetensors nor elsewhere."
    ]


def test_plain_files_are_not_touched(tmp_path: Path, model: Callable[..., Path]) -> None:
    root = model({"model.safetensors": {name: zeros("BF16", 4, 8) for name in LLAMA}})
    read_as_is = read_safetensors(root / "model.safetensors")
    assert as_model(read_as_is, root / "model.safetensors") is read_as_is


def test_an_averaged_model(tmp_path: Path) -> None:
    averaged = torch.optim.swa_utils.AveragedModel(torch.nn.Linear(4, 2))
    torch.save(averaged.state_dict(), tmp_path / "x.pt")
    checkpoint = open_checkpoint(tmp_path / "x.pt")
    assert list(checkpoint.tensors) == ["weight", "bias"]
    assert checkpoint.notes == (
        f"{tmp_path}/x.pt: left out: 'n_averaged', counter of AveragedModel (1 tensor, 8 bytes).",
        f"{tmp_path}/x.pt: 'module' (DistributedDataParallel or AveragedModel) is stripped from all names.",
    )
