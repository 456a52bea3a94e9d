"""Capture files say which tensors are activations and gradients, of which layer, step and rank."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from raw_checkpoint import Entry, safetensors_bytes, zeros

from mxcli.errors import InputError
from mxcli.files.checkpoint import open_checkpoint, read

UP = "model.layers.0.mlp.up_proj"
TENSORS = {
    f"{UP}.input": zeros("BF16", 4, 8),
    f"{UP}.grad_output": zeros("BF16", 4, 16),
    f"{UP}.weight": zeros("BF16", 16, 8),
}
X, DY, W = TENSORS


def _capture(records: object, version: object = 1, tensors: dict[str, Entry] = TENSORS) -> bytes:
    entry = json.dumps({"version": version, "tensors": records, "loss": 2.5})
    return safetensors_bytes(tensors, {"format": "pt", "mxcli.capture": entry})


def test_roles_come_from_the_capture(model: Callable[..., Path]) -> None:
    records = {
        X: {"role": "activation", "layer": UP, "axis": "row", "step": 7, "rank": 1, "tokens": 4, "tokens_seen": 64},
        DY: {"role": "gradient", "layer": UP, "batch": "mine"},
    }
    checkpoint = open_checkpoint(model({"a.safetensors": _capture(records)}))
    assert [info.role for info in checkpoint.tensors.values()] == ["activation", "gradient", "weight"]
    assert checkpoint.captures == records


def test_what_a_record_leaves_out_is_reported_by_names(model: Callable[..., Path]) -> None:
    records = {X: {"role": "activation"}, DY: {"role": "gradient", "step": 3}}
    checkpoint = open_checkpoint(model({"rank-2_step-000040.safetensors": _capture(records)}))
    assert checkpoint.captures == {
        X: {"role": "activation", "layer": UP, "step": 40, "rank": 2},
        DY: {"role": "gradient", "layer": UP, "step": 3, "rank": 2},
    }


def test_an_activation_may_have_a_batch_dimension(model: Callable[..., Path]) -> None:
    tensors = {"a.x": ("F32", [2, 3, 4], np.arange(24, dtype="<f4").tobytes())}
    records = {"a.x": {"role": "activation", "tokens": 6}}
    checkpoint = open_checkpoint(model({"a.safetensors": _capture(records, tensors=tensors)}))
    assert read(checkpoint, checkpoint.tensors["a.x"])[1, 2].tolist() == [20, 21, 22, 23]


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (_capture({}, 2), "mxcli.capture has version 2; this program reads 1"),
        (_capture([]), "mxcli.capture needs a 'tensors' object"),
        (_capture({"x": {"role": "activation"}}), "describes 'x', which the file does not hold"),
        (_capture({X: {"role": "boss"}}), f"role boss of '{X}' is unknown; known are activation, gradient, weight"),
        (_capture({X: []}), "role None of"),
        (_capture({X: {"role": ["gradient"]}}), "role ['gradient'] of"),
        (safetensors_bytes(TENSORS, {"mxcli.capture": "{"}), "mxcli.capture is not valid JSON"),
        (safetensors_bytes(TENSORS, {"mxcli.capture": "[]"}), "has version None"),
    ],
)
def test_broken_captures(model: Callable[..., Path], content: bytes, fault: Any) -> None:
    root = model({"a.safetensors": content})
    with pytest.raises(InputError, match=re.escape(fault)):
        open_checkpoint(root)


@pytest.mark.parametrize(
    ("key", "value", "fault"),
    [
        ("axis", "column", f"axis column of '{X}' must be one of row."),
        ("axis", ["row"], f"axis ['row'] of '{X}' must be one of row."),
        ("layer", "", f"layer  of '{X}' must be the name of a module."),
        ("layer", 3, f"layer 3 of '{X}' must be the name of a module."),
        ("step", "7", f"step 7 of '{X}' must be an integer from 0."),
        ("step", True, f"step True of '{X}' must be an integer from 0."),
        ("rank", -1, f"rank -1 of '{X}' must be an integer from 0."),
        ("tokens", 4.0, f"tokens 4.0 of '{X}' must be an integer from 0."),
        ("tokens", 64, f"tokens 64 of '{X}' are not the 4 rows of [4, 8]."),
        ("tokens_seen", 3, f"tokens_seen 3 of '{X}' are fewer than its 4 rows."),
    ],
)
def test_every_key_is_checked(model: Callable[..., Path], key: str, value: object, fault: str) -> None:
    root = model({"a.safetensors": _capture({X: {"role": "activation", key: value}})})
    with pytest.raises(InputError) as caught:
        open_checkpoint(root)
    assert str(caught.value) == f"{root / 'a.safetensors'}: mxcli.capture: {fault}"


def test_all_faults_are_reported_at_once(model: Callable[..., Path]) -> None:
    records = {X: {"role": "boss", "step": -1, "axis": "up"}, "gone": {"role": "weight"}}
    root = model(
        {"a.safetensors": _capture(records), "b.safetensors": _capture({DY: {"role": "gradient", "rank": 0.5}})}
    )
    with pytest.raises(InputError) as caught:
        open_checkpoint(root)
    assert [reason.split("mxcli.capture: ")[1] for reason in caught.value.reasons] == [
        f"role boss of '{X}' is unknown; known are activation, gradient, weight.",
        f"step -1 of '{X}' must be an integer from 0.",
        f"axis up of '{X}' must be one of row.",
        "describes 'gone', which the file does not hold.",
        f"rank 0.5 of '{DY}' must be an integer from 0.",
    ]


@pytest.mark.parametrize(
    ("entry", "fault"),
    [
        (("F32", [], bytes(4)), "has shape [], and captured tensors are [tokens, features] or [out, in]"),
        (("F32", [8], b""), "has shape [8], and captured tensors are [tokens, features] or [out, in]"),
        (zeros("I64", 4, 8), "holds I64, and captured tensors hold floats"),
    ],
)
@pytest.mark.parametrize("name", ["a.x", "ü/層\n.x", "n" * 5000])
def test_tensors_that_no_layer_takes(model: Callable[..., Path], name: str, entry: Entry, fault: str) -> None:
    entry = (entry[0], entry[1], bytes(32) if entry[0] == "F32" and entry[1] else entry[2])
    root = model({"a.safetensors": _capture({name: {"role": "activation"}}, tensors={name: entry})})
    with pytest.raises(InputError, match=re.escape(fault)) as caught:
        open_checkpoint(root)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize("name", ["ü/層\n.x", "/", "../../up.x", "n" * 5000])
def test_odd_names_are_names(model: Callable[..., Path], name: str) -> None:
    content = _capture({name: {"role": "gradient"}}, tensors={name: zeros("F32", 2, 2)})
    checkpoint = open_checkpoint(model({"a.safetensors": content, "b.safetensors": content}))
    assert list(checkpoint.tensors) == [f"a/{name}", f"b/{name}"]
    assert [info.role for info in checkpoint.tensors.values()] == ["gradient", "gradient"]


def test_an_expert_without_tokens_is_not_a_fault_of_the_file(model: Callable[..., Path]) -> None:
    content = _capture({"e.x": {"role": "activation", "tokens": 0}}, tensors={"e.x": zeros("F32", 0, 8)})
    assert open_checkpoint(model({"a.safetensors": content})).captures["e.x"]["role"] == "activation"


@pytest.mark.parametrize("layers", ["h.0.a", ["h.0.a", 1], [""], {"h": 12}, 12, None])
def test_layers_of_the_model_are_names(model: Callable[..., Path], layers: object) -> None:
    entry = json.dumps({"version": 1, "tensors": {X: {"role": "activation"}}, "layers_of_model": layers})
    root = model({"a.safetensors": safetensors_bytes(TENSORS, {"mxcli.capture": entry})})
    with pytest.raises(InputError) as caught:
        open_checkpoint(root)
    where = f"{root / 'a.safetensors'}: mxcli.capture"
    assert str(caught.value) == f"{where}: layers_of_model must be a list of names of modules."


@pytest.mark.parametrize(
    ("name", "content", "note"),
    [
        (
            "mxcli-incomplete.json",
            '{"schema": "mxcli.capture.incomplete/1", "step": 4, "rank": 0, "complete": false, "reason": "the disk is '
            'full."}',
            "The recording stopped in step 4, which is missing like all later ones: the disk is full "
            "(mxcli-incomplete.json).",
        ),
        (
            "mxcli-incomplete-rank-12.json",
            '{"schema": "mxcli.capture.incomplete/1", "step": 0, "reason": "no\\u001b[2J rows"}',
            "The recording stopped in step 0, which is missing like all later ones: no\\x1b[2J rows "
            "(mxcli-incomplete-rank-12.json).",
        ),
        *(
            (
                "mxcli-incomplete.json",
                content,
                "DIR/mxcli-incomplete.json says that the recording stopped early: later steps may be missing.",
            )
            for content in (
                "",
                "[]",
                '{"schema": "mxcli.capture.incomplete/2", "step": 4, "reason": "full"}',
                '{"schema": "mxcli.capture.incomplete/1", "step": -1, "reason": "full"}',
                '{"schema": "mxcli.capture.incomplete/1", "step": 1, "reason": ["full"]}',
            )
        ),
    ],
)
def test_a_recording_that_stopped_early_has_a_note(
    model: Callable[..., Path], name: str, content: str, note: str
) -> None:
    folder = model({"step-000003.safetensors": _capture({X: {"role": "activation"}}), name: content.encode()})
    assert [each.replace(str(folder), "DIR") for each in open_checkpoint(folder).notes if "stopped" in each] == [note]


def test_other_files_next_to_captures_have_no_note(model: Callable[..., Path]) -> None:
    files = {"a.safetensors": _capture({X: {"role": "activation"}}), "mxcli-incomplete-rank-x.json": b"{}"}
    assert not any("stopped" in each for each in open_checkpoint(model(files)).notes)
