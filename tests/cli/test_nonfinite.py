"""Values that are not finite: no output that `mxcli verify` calls not sound has its final names and exit code 0."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import LLAMA, llama, noise, write_model

from mxcli.backends.cpu import Cpu
from mxcli.errors import RefusedError
from mxcli.files.checkpoint import open_checkpoint
from mxcli.flows.plan.plan import Options, make_plan
from mxcli.flows.verify.written import check_written
from mxcli.flows.write.pipeline import WriteOptions
from mxcli.flows.write.quantize import quantize_checkpoint
from mxcli.numerics.scheme import Rules

NAN, INF, MINUS_INF = 0x7FC0, 0x7F80, 0xFF80
"""Bits of bfloat16."""
UP = "model.layers.0.mlp.up_proj.weight"
Command = Callable[..., Any]


def poisoned(folder: Path, values: Mapping[str, tuple[tuple[int, ...], int]], **more: Any) -> Path:
    """A tiny Llama with some values replaced, each by tensor and place."""
    tensors = {**llama(), **more}
    for name, (place, bits) in values.items():
        tensors[name][1][place] = bits
    return write_model(folder, tensors, LLAMA)


def quantize(source: Path, output: Path, *more: str) -> tuple[object, ...]:
    return ("quantize", source, "--format", "mxfp8", "-o", output, "-q", *more)


KEPT = {
    "norm": ("model.norm.weight", (3,), NAN, "1 NaN of 64 values, the first (NaN) at [3]"),
    "norm of a layer": (
        "model.layers.0.input_layernorm.weight",
        (63,),
        INF,
        "1 infinite of 64 values, the first (inf)",
    ),
    "embedding": ("model.embed_tokens.weight", (2, 5), NAN, "1 NaN of 2,048 values, the first (NaN) at [2, 5]"),
    "head": ("lm_head.weight", (31, 0), MINUS_INF, "1 infinite of 2,048 values, the first (-inf) at [31, 0]"),
    "bias": ("model.layers.0.self_attn.q_proj.bias", (1,), NAN, "1 NaN of 64 values, the first (NaN) at [1]"),
    "buffer": ("h.0.attn_mask", (0, 1), NAN, "1 NaN of 16 values, the first (NaN) at [0, 1]"),
}
MORE = {"model.layers.0.self_attn.q_proj.bias": noise(64, seed=7), "h.0.attn_mask": noise(4, 4, seed=8)}


@pytest.mark.parametrize("kind", KEPT)
def test_a_kept_tensor_that_is_not_finite_is_refused_by_its_place(mxcli: Command, tmp_path: Path, kind: str) -> None:
    name, place, bits, values = KEPT[kind]
    more = {name: (MORE[name][0], MORE[name][1].copy())} if name in MORE else {}
    source, output = poisoned(tmp_path / "m", {name: (place, bits)}, **more), tmp_path / "out"
    for policy in ("error", "saturate", "nan-block"):
        code, _, err = mxcli(*quantize(source, output, "--nonfinite", policy))
        assert code == 4
        assert f"error: {name}: {values}" in err
        assert "`mxcli verify` would call the output not sound. Correct it in the source, or use --no-verify to " in err
        assert not output.exists()
    # The way out that it names; verify then says the same.
    assert mxcli(*quantize(source, output, "--no-verify")).code == 0
    code, out, _ = mxcli("verify", output)
    assert code == 5
    assert "nan_plain" in out
    assert name in out


def test_all_tensors_are_named_at_once(mxcli: Command, tmp_path: Path) -> None:
    places = {"model.norm.weight": ((0,), NAN), "model.embed_tokens.weight": ((0, 0), INF), UP: ((1, 1), NAN)}
    code, _, err = mxcli(*quantize(poisoned(tmp_path / "m", places), tmp_path / "out"))
    assert code == 4
    assert "error: Values that are not finite: 3 problems." in err
    assert all(f"  {name}: 1 " in err for name in places)


def test_masks_and_forbidden_tokens_may_be_infinite(mxcli: Command, tmp_path: Path) -> None:
    more = {"h.0.attn_mask": noise(4, 4, seed=8), "lm_head.bias": noise(32, seed=9)}
    places = {"h.0.attn_mask": ((0, 1), MINUS_INF), "lm_head.bias": ((31,), MINUS_INF)}
    source, output, back = poisoned(tmp_path / "m", places, **more), tmp_path / "out", tmp_path / "back"
    assert mxcli(*quantize(source, output)).code == 0
    found = mxcli("verify", output).out
    assert "nan_plain" not in found
    assert mxcli("dequantize", output, "-o", back).code == 0
    assert mxcli("convert", output, "--layout", "mxcli", "-o", tmp_path / "other").code == 0


@pytest.mark.parametrize("policy", ["error", "saturate", "nan-block"])
def test_a_nan_in_a_weight_has_no_code(mxcli: Command, tmp_path: Path, policy: str) -> None:
    source, output = poisoned(tmp_path / "m", {UP: ((3, 7), NAN)}), tmp_path / "out"
    code, _, err = mxcli(*quantize(source, output, "--nonfinite", policy))
    assert code == 4
    assert (
        f"error: {UP}: 1 of 8,192 values are NaN or infinite, the first at [3, 7]. No code stands for NaN: correct it "
        "in the source, or use --no-verify with --nonfinite saturate or nan-block, or with --exclude "
        f"'{UP}', for an output that `mxcli verify` calls not sound.\n"
    ) in err
    assert not output.exists()
    for number, ways in enumerate((("--nonfinite", "saturate"), ("--nonfinite", "nan-block"), ("--exclude", UP))):
        written = tmp_path / f"out{number}"
        assert mxcli(*quantize(source, written, "--no-verify", *ways)).code == 0
        assert mxcli("verify", written).code == 5


@pytest.mark.parametrize("format", ["mxfp8", "mxfp4", "nvfp4", "mxint8", "fp8_e4m3", "fp8_e4m3_channel"])
def test_an_infinity_in_a_weight_is_stored_as_the_largest_value(mxcli: Command, tmp_path: Path, format: str) -> None:
    source, output = poisoned(tmp_path / "m", {UP: ((3, 7), INF)}), tmp_path / "out"
    words = ("quantize", source, "--format", format, "-o", output, "-q")
    for policy in ("error", "nan-block"):
        code, _, err = mxcli(*words, "--nonfinite", policy)
        assert code == 4
        assert "at [3, 7]. Use --nonfinite saturate, which stores infinities as the largest value.\n" in err
    assert mxcli(*words, "--nonfinite", "saturate").code == 0
    code, out, _ = mxcli("verify", output)
    assert "recorded_statistics" not in out
    assert code == 0


SCALES = {"mxfp8": ("weight_scale", 0xFF), "nvfp4": ("weight_scale", 0x7F), "fp8_e4m3_channel": ("weight_scale", None)}


@pytest.mark.parametrize("format", SCALES)
def test_a_source_with_a_nan_scale_is_neither_dequantized_nor_converted(
    mxcli: Command, tmp_path: Path, format: str
) -> None:
    """A checkpoint of another producer: without a record."""
    ending, byte = SCALES[format]
    source, name = tmp_path / "q", UP.replace("weight", ending)
    model = poisoned(tmp_path / "m", {})
    assert mxcli("quantize", model, "--format", format, "-o", source, "-q").code == 0
    (source / "mxcli.json").unlink()
    path = source / "model.safetensors"
    damaged = load_file(path)
    damaged[name].reshape(-1).view(torch.uint8)[:] = 0xFF if byte is None else byte
    save_file(damaged, path, {"format": "pt"})
    back, other = tmp_path / "back", tmp_path / "other"
    code, _, err = mxcli("dequantize", source, "-o", back)
    assert code == 4
    assert f"error: {UP}: 8,192 NaN of 8,192 values, the first (NaN) at [0, 0]" in err
    code, _, err = mxcli("convert", source, "--layout", "mxcli", "-o", other)
    assert code == 4
    assert name in err
    assert not back.exists()
    assert not other.exists()
    assert mxcli("dequantize", source, "-o", back, "--no-verify").code == 0
    assert mxcli("convert", source, "--layout", "mxcli", "-o", other, "--no-verify").code == 0
    assert mxcli("verify", other).code == 5


def test_values_beyond_the_dtype_that_is_written_are_refused(mxcli: Command, tmp_path: Path) -> None:
    source, back = tmp_path / "q", tmp_path / "back"
    model = poisoned(tmp_path / "m", {UP: ((0, 0), 0x4800)})
    assert mxcli(*quantize(model, source)).code == 0
    code, _, err = mxcli("dequantize", source, "-o", back, "--dtype", "f16")
    assert code == 4
    assert f"error: {UP}: 1 infinite of 8,192 values, the first (inf) at [0, 0]" in err
    assert "--dtype F32 holds what F16 does not" in err
    assert mxcli("dequantize", source, "-o", back, "--dtype", "f32").code == 0


@pytest.mark.parametrize(("name", "place"), [("model.norm.weight", (5,)), (UP, (0, 0))])
def test_shares_that_were_not_verified_are_not_merged(
    mxcli: Command, tmp_path: Path, name: str, place: tuple[int, ...]
) -> None:
    source, output = poisoned(tmp_path / "m", {name: (place, NAN)}), tmp_path / "out"
    for share in ("1/2", "2/2"):
        ways = ("--no-verify", "--nonfinite", "saturate", "--max-shard-size", "16K", "--shard-range", share)
        assert mxcli(*quantize(source, output, *ways)).code == 0
    code, _, err = mxcli("merge", output)
    assert code == 4
    assert name in err
    assert not (output / "mxcli.json").exists()
    assert mxcli("merge", output, "--no-verify").code == 0
    assert mxcli("verify", output).code == 5


@pytest.mark.parametrize(("name", "place"), [("model.embed_tokens.weight", (5, 0)), (UP, (0, 0))])
def test_what_was_not_verified_is_not_kept_by_a_run_that_verifies(
    tmp_path: Path, mxcli: Command, name: str, place: tuple[int, ...]
) -> None:
    source, output = poisoned(tmp_path / "m", {name: (place, NAN)}), tmp_path / "out"
    checkpoint = open_checkpoint(source)
    plan = make_plan(checkpoint, Options("mxfp8", Rules(nonfinite="saturate")))
    done: list[str] = []

    def run(**more: Any) -> None:
        options = WriteOptions(on_progress=lambda at, total, tensor: done.append(tensor), **more)
        quantize_checkpoint(checkpoint, plan, output, backend=Cpu(1), options=options)

    run(stop=lambda: name in done)
    assert name in done
    assert not (output / "mxcli.json").exists()
    with pytest.raises(RefusedError, match=name):
        run(resume=True, check=lambda folder: check_written(folder, output))
    assert list(output.iterdir()) == []


def test_a_complete_output_that_was_not_verified_is_not_called_done(mxcli: Command, tmp_path: Path) -> None:
    source, output = poisoned(tmp_path / "m", {"model.norm.weight": ((5,), NAN)}), tmp_path / "out"
    assert mxcli(*quantize(source, output, "--no-verify")).code == 0
    for words in (quantize(source, output, "--resume"), ("merge", output)):
        code, _, err = mxcli(*words)
        assert code == 4
        assert f"error: {output}: is complete, and was written with --no-verify: nothing says that it is sound." in err
        assert mxcli(*words, "--no-verify").code == 0
