"""quantize and dequantize from the outside: what they print, write and refuse."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import SAMPLE, strict_json
from odd_files import odd_checkpoint
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from tiny_models import read_raw


def listing(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))}


def test_dry_run_writes_nothing_and_reports_all(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    before, output = listing(SAMPLE), tmp_path / "out"
    code, out, _ = mxcli("quantize", SAMPLE, "--format", "nvfp4", "--dry-run", "-o", output)
    assert code == 0
    assert listing(SAMPLE) == before
    assert listing(tmp_path) == {}
    lines = out.splitlines()
    assert sum("kept: norm, normalization" in line for line in lines) == 9
    assert sum("quantized: weight, linear layer" in line for line in lines) == 28
    assert "quantized 28, padded 0, kept 11 (norm 9, lm_head 1, embedding 1), tied 0" in lines
    assert any(line.startswith("final size 586 kB, 34% of the source's 1.71 MB; peak memory about ") for line in lines)
    assert "would write 4 files: model.safetensors, config.json, generation_config.json, mxcli.json" in lines
    assert any(line.startswith("free disk ") for line in lines)

    plan = strict_json(mxcli("quantize", SAMPLE, "--format", "nvfp4", "--dry-run", "--json", "-o", output).out)
    assert plan["schema"] == "mxcli.quantize.plan/1"
    assert listing(tmp_path) == {}
    mxcli("quantize", SAMPLE, "--format", "nvfp4", "-o", output)
    assert sorted(plan["files"]) == sorted(listing(output))
    assert plan["output_bytes"] == (output / "model.safetensors").stat().st_size


def test_a_dry_run_says_which_tensors_a_selector_takes(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    """Layer 1 was meant, and 10 to 19 were taken along; a pattern was meant for some layers, and took them all."""
    shape, source = (1, 32), tmp_path / "twenty.safetensors"
    names = [f"model.layers.{number}.mlp.down_proj.weight" for number in range(20)]
    save_file({name: np.ones(shape, np.float32) for name in names}, source)

    def planned(*selectors: str) -> dict[str, str]:
        words = ("quantize", source, "--format", "mxfp4", "--dry-run", *selectors, "--json")
        plan = strict_json(mxcli(*words).out)["tensors"]
        return {t["name"].split(".")[2]: t["reason"] for t in plan if t["decision"] == "quantized"}

    assert planned("--include", "*layers.1.*") == {"1": "quantized: --include *layers.1.*"}
    assert planned("--exclude", "*layers.1.*").keys() == {str(number) for number in range(20)} - {"1"}
    assert planned("--include", "re:.*layers.1.*").keys() == {"1", *map(str, range(10, 20))}
    assert planned("--include", r"re:.*layers\.1\..*") == {"1": r"quantized: --include re:.*layers\.1\..*"}
    lines = mxcli("quantize", source, "--format", "mxfp4", "--dry-run", "--include", "*layers.1.*", "--wide").out
    assert [line.split()[0] for line in lines.splitlines() if line.endswith("quantized: --include *layers.1.*")] == [
        "model.layers.1.mlp.down_proj.weight"
    ]
    code, _, err = mxcli("quantize", source, "--format", "mxfp4", "--dry-run", "--include", "re:layers.1")
    assert code == 2
    assert "--include re:layers.1: matches no tensor. It must match the whole name" in err
    code, _, err = mxcli("quantize", source, "--format", "mxfp4", "--dry-run", "--exclude", "re:.*")
    assert code == 4
    assert "20 kept: excluded by --exclude re:.*" in err


def test_a_nan_is_refused_by_its_place_or_takes_its_block_alone(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    """One NaN among 32 values: some programs lose the block, some the tensor, and most say nothing."""
    x = np.ones((2, 64), np.float32)
    clean, source, output = x.copy(), tmp_path / "nan.safetensors", tmp_path / "out"
    x[1, 37] = np.nan
    save_file({"a.weight": x, "b.weight": clean}, source, {"format": "pt"})
    words = ("quantize", source, "--format", "mxfp8", "-o", output)
    code, out, err = mxcli(*words)
    assert (code, out) == (4, "")
    assert err == (
        "error: a.weight: 1 of 128 values are NaN or infinite, the first at [1, 37]. No code stands for NaN: correct "
        "it in the source, or use --no-verify with --nonfinite saturate or nan-block, or with --exclude 'a.weight', "
        "for an output that `mxcli verify` calls not sound.\n"
    )
    assert not output.exists()
    done = strict_json(mxcli(*words, "--nonfinite", "saturate", "--no-verify", "--json").out)
    assert {layer["name"]: layer["nonfinite"] for layer in done["layers"]} == {"a.weight": 1, "b.weight": 0}
    stored = read_raw(output / "model.safetensors")
    assert stored["a.weight_scale"] == ("U8", [2, 2], bytes([119, 119, 119, 255]))
    assert stored["b.weight_scale"] == ("U8", [2, 2], bytes([119, 119, 119, 119]))
    mxcli("dequantize", output, "-o", tmp_path / "back", "--no-verify")
    back = load_file(tmp_path / "back" / "model.safetensors")
    clean[1, 32:] = np.nan
    np.testing.assert_array_equal(back["a.weight"], clean)
    assert (back["b.weight"] == 1).all()


def test_dry_run_needs_no_output_and_refuses_what_the_run_would(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    assert mxcli("quantize", SAMPLE, "--format", "nvfp4", "--dry-run").code == 0
    assert mxcli("quantize", SAMPLE, "--format", "nvfp4", "--dry-run", "-o", SAMPLE).code == 4
    assert mxcli("quantize", SAMPLE, "--format", "nvfp4", "--dry-run", "--csv", tmp_path / "x.csv").code == 2


def test_the_report_of_a_run_is_that_of_report(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    code, out, err = mxcli("quantize", SAMPLE, "--format", "mxfp8", "-o", tmp_path / "out")
    assert code == 0
    *table, written = out.splitlines()
    report = mxcli("report", SAMPLE, "--format", "mxfp8", "--nonfinite", "error", "--on-indivisible", "error").out
    assert table == report.splitlines()
    assert written.startswith(f"written to {tmp_path / 'out'}: 4 files, layout compressed-tensors, ")
    assert "error" not in err
    with safe_open(tmp_path / "out" / "model.safetensors", "np") as file:
        assert "model.layers.0.mlp.up_proj.weight_scale" in file.keys()  # noqa: SIM118 - not a mapping
    again = mxcli("quantize", SAMPLE, "--format", "mxfp8", "-o", tmp_path / "out")
    assert again.code == 4
    assert mxcli("quantize", SAMPLE, "--format", "mxfp8", "-o", tmp_path / "out", "--force").code == 0


def test_json_of_a_run(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    output = tmp_path / "out"
    report = strict_json(mxcli("quantize", SAMPLE, "--format", "nvfp4", "-o", output, "--json").out)
    assert report["schema"] == "mxcli.quantize/1"
    assert report["layout"] == "compressed-tensors"
    assert report["output"] == str(output)
    assert report["ignored"] == ["lm_head"]
    assert len(report["layers"]) == 28
    record = strict_json((output / "mxcli.json").read_text())
    assert record["command"] == ["quantize", str(SAMPLE), "--format", "nvfp4", "-o", str(output), "--json"]


def test_refusals_leave_nothing(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    source, output = odd_checkpoint(tmp_path), tmp_path / "out"
    code, out, err = mxcli("quantize", source, "--format", "mxfp8", "-o", output)
    assert (code, out) == (4, "")
    assert "ragged.weight [4, 100]: last dimension 100 is not a multiple of 32" in err
    code, out, err = mxcli("quantize", source, "--format", "mxfp8", "-o", output, "--on-indivisible", "keep")
    assert (code, out) == (4, "")
    assert "nan.weight" in err
    assert not output.exists()
    words = ("quantize", source, "--format", "mxfp8", "-o", output, "--exclude", "re:.*nan.*|ragged.*")
    code, out, err = mxcli(*words)
    assert (code, out) == (4, "")
    assert "nan.weight: 1 NaN and 1 infinite of 256 values, the first (NaN) at [1, 3]" in err
    assert not output.exists()
    assert mxcli(*words, "--no-verify").code == 0


@pytest.mark.parametrize(("dtype", "stored"), [(None, "BF16"), ("bf16", "BF16"), ("F32", "F32")])
def test_dequantize_prints_its_path(mxcli: Callable[..., Any], tmp_path: Path, dtype: str | None, stored: str) -> None:
    quantized, back = tmp_path / "q", tmp_path / "back"
    mxcli("quantize", SAMPLE, "--format", "nvfp4", "-o", quantized)
    code, out, _ = mxcli("dequantize", quantized, "-o", back, *(["--dtype", dtype] if dtype else []))
    line = f"written to {back}: 28 weights dequantized; read 3 files ("
    assert (code, out.startswith(line), out.count("\n")) == (0, True, 1)
    with safe_open(back / "model.safetensors", "np") as file:
        assert file.get_slice("model.layers.0.mlp.up_proj.weight").get_dtype() == stored
    other = tmp_path / "again"
    record = strict_json(mxcli("dequantize", quantized, "-o", other, "--json").out)
    assert record["schema"] == "mxcli.dequantize/1"
    assert record["output"] == str(other)
    assert len(record["dtypes"]) == 28


def test_a_quantized_checkpoint_is_not_measured_or_quantized_again(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    mxcli("quantize", SAMPLE, "--format", "nvfp4", "-o", tmp_path / "q")
    for arguments in (["report"], ["quantize", "--format", "mxfp8", "-o", tmp_path / "r"]):
        code, out, err = mxcli(*arguments, tmp_path / "q")
        assert (code, out) == (4, "")
        assert "already quantized (compressed-tensors)" in err
    assert "quantized (compressed-tensors)" in mxcli("inspect", tmp_path / "q").out


def test_captures_give_layers_scales_of_their_inputs(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    captures = SAMPLE.parent / "tiny-llama-captures.safetensors"
    words = ("quantize", SAMPLE, "--format", "nvfp4", "--captures", captures)
    code, _, told = mxcli(*words, "--dry-run")
    assert code == 0
    assert "Activations of 28 layers are quantized with static scales calibrated on tiny-llama-captures" in told
    assert mxcli(*words, "-o", tmp_path / "q").code == 0
    raw = read_raw(tmp_path / "q" / "model.safetensors")
    scales = {name: each for name, each in raw.items() if name.endswith(".input_global_scale")}
    assert len(scales) == 28
    # The amax of the captured inputs of the first attention is 3.578125; 2688 divided by it is 751.2314453125.
    bits = np.float32(751.2314453125).tobytes()
    assert scales["model.layers.0.self_attn.q_proj.input_global_scale"] == ("F32", [1], bits)
    code, _, told = mxcli("quantize", SAMPLE, "--format", "fp8_e4m3", "--layout", "modelopt", "-o", tmp_path / "no")
    assert code == 4
    assert "Give captured inputs with --captures" in told


# --- Chance and transforms ---------------------------------------------------------------------------------


def test_stochastic_rounding_is_decided_by_the_seed_and_names(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    def bytes_with(*words: object) -> bytes:
        folder = tmp_path / ("-".join(map(str, words)) or "usual")
        asked = ("--format", "mxfp4", "--rounding", "stochastic", "-o", folder)
        assert mxcli("quantize", SAMPLE, *asked, *words).code == 0
        record = strict_json((folder / "mxcli.json").read_text())
        assert record["tensors"]["model.layers.0.mlp.down_proj.weight"]["seed"] == (3 if "3" in map(str, words) else 0)
        return (folder / "model.safetensors").read_bytes()

    usual = bytes_with()
    assert bytes_with("--threads", 1) == usual
    assert bytes_with("--seed", 3) != usual


def test_a_transformed_checkpoint_comes_back(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    """Only our own layout stores the signs, so that they can be undone; others refuse, and none is written unasked."""
    made, back = tmp_path / "made", tmp_path / "back"
    code, _, err = mxcli("quantize", SAMPLE, "--format", "mxfp8", "--hadamard", 64, "--hadamard-seed", 5, "-o", made)
    assert code == 0
    assert "Written in the layout mxcli, since compressed-tensors holds no transforms and no blocks along" in err
    config = strict_json((made / "config.json").read_text())["quantization_config"]
    assert len(config["hadamard_signs"]) == 64
    assert strict_json((made / "mxcli.json").read_text())["options"]["hadamard"] == {
        "size": 64,
        "seed": 5,
        "signs": config["hadamard_signs"],
    }
    assert mxcli("dequantize", made, "-o", back).code == 0
    name = "model.layers.3.self_attn.q_proj.weight"
    with safe_open(SAMPLE / "model.safetensors", "pt") as before, safe_open(back / "model.safetensors", "pt") as after:
        x, y = before.get_tensor(name).float(), after.get_tensor(name).float()
    assert 0.01 < (x - y).norm() / x.norm() < 0.03
    assert mxcli("verify", made, "--against", SAMPLE).code == 0

    code, _, err = mxcli(
        "quantize", SAMPLE, "--format", "mxfp8", "--hadamard", 16, "--layout", "ct", "-o", tmp_path / "c"
    )
    assert code == 4
    assert "its loaders do not support the hadamard-16 transform and would use transformed weights" in err
    config["hadamard_signs"] = "+-"
    (made / "config.json").write_text(json.dumps({"quantization_config": config}))
    code, _, err = mxcli("dequantize", made, "-o", tmp_path / "d")
    assert code == 3
    assert "'+-' is not the signs of a Hadamard transform of 16, 32, 64, 128" in err


def test_lengths_that_a_transform_does_not_divide_come_all_at_once(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    source = tmp_path / "odd.safetensors"
    save_file({f"model.layers.{n}.mlp.down_proj.weight": np.ones((4, 96), np.float32) for n in range(3)}, source)
    words = ("quantize", source, "--format", "mxfp4", "--hadamard", 64, "--dry-run")
    code, _, err = mxcli(*words)
    assert code == 4
    assert err.count("its length 96 along the blocks is not a multiple of 64 (Hadamard transform)") == 3
    assert "Use --exclude 'model.layers.0.mlp.down_proj.weight', another --hadamard, or --on-indivisible keep." in err
    code, _, err = mxcli(*words, "--on-indivisible", "keep")
    assert code == 4
    assert "nothing to quantize among 3 tensors" in err
    assert mxcli("quantize", source, "--format", "mxfp4", "--hadamard", 32, "--dry-run").code == 0


def test_a_seed_and_signs_need_something_to_choose(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    for words, told in (
        (("--seed", 3), "--seed 3 has no effect: nothing is random"),
        (("--hadamard-seed", 3), "--hadamard-seed 3 has no effect without a transform: add --hadamard"),
        (("--hadamard", 24), "a Hadamard transform of 24: --hadamard takes 16, 32, 64, 128."),
        (("--rounding", "stochastic", "--seed", 2**32), "a seed is an integer from 0 to 4294967295"),
    ):
        code, _, err = mxcli("quantize", SAMPLE, "--format", "mxfp4", *words, "-o", tmp_path / "out")
        assert code == 2, words
        assert told in err
    assert not (tmp_path / "out").exists()


def test_a_complete_output_is_checked_and_nothing_is_done(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    for words in (
        ("quantize", SAMPLE, "--format", "nvfp4", "-o", tmp_path / "q"),
        ("dequantize", tmp_path / "q", "-o", tmp_path / "d"),
    ):
        output = words[-1]
        assert mxcli(*words).code == 0
        before = listing(output)
        for _ in range(2):
            code, out, err = mxcli(*words, "--resume")
            assert code == 0
            assert "note: Nothing to do: the output is complete, and it and its source have the recorded hashes." in err
            assert str(output) in out.splitlines()[-1].replace("written to ", "")
            assert listing(output) == before
        assert mxcli(*words).code == 4
    code, _, err = mxcli("quantize", SAMPLE, "--format", "mxfp4", "-o", tmp_path / "q", "--resume")
    assert code == 4
    assert "is complete, with other options or another source: options format was nvfp4 and is mxfp4." in err
    assert mxcli("quantize", SAMPLE, "--format", "nvfp4", "-o", tmp_path / "q", "--resume", "--dry-run").code == 0
    with (tmp_path / "q" / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x55")
    for words in (
        ("quantize", SAMPLE, "--format", "nvfp4", "-o", tmp_path / "q", "--resume"),
        ("merge", tmp_path / "q"),
    ):
        code, _, err = mxcli(*words)
        assert code == 3
        assert "model.safetensors: tensor 'model.layers." in err


def test_shares_are_merged_once_and_then_checked(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    words = ("quantize", SAMPLE, "--format", "mxfp8", "-o", tmp_path / "out", "--max-shard-size", "400K")
    for share in ("1/2", "2/2"):
        assert mxcli(*words, "--shard-range", share).code == 0
        code, _, err = mxcli(*words, "--shard-range", share, "--resume")
        assert code == 0
        assert "note: Nothing to quantize: everything was finished before, and still has its hash." in err
    assert mxcli("merge", tmp_path / "out").code == 0
    before = listing(tmp_path / "out")
    code, out, err = mxcli("merge", tmp_path / "out")
    assert (code, out) == (0, f"{tmp_path / 'out'}\n")
    assert "note: Nothing to do: the output is complete, and its files have the recorded hashes." in err
    assert mxcli(*words, "--shard-range", "2/2", "--resume").code == 0
    assert listing(tmp_path / "out") == before


def test_the_record_has_the_hash_of_every_file(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    for words, verified in (((), True), (("--no-verify",), False)):
        output = tmp_path / f"out{len(words)}"
        assert mxcli("quantize", SAMPLE, "--format", "nvfp4", "-o", output, *words).code == 0
        record = json.loads((output / "mxcli.json").read_text())
        files = [path for path in output.iterdir() if path.name != "mxcli.json"]
        assert record["sha256"] == {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
        assert record["files"] == sorted(record["sha256"])
        assert record["verified"] is verified
        assert record["source_hashes"].keys() == record["tensors"].keys()
        assert set(record["stored"]["model.safetensors"]) == set(read_raw(output / "model.safetensors"))


def test_a_quantization_config_that_the_output_has_is_not_missed(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    assert mxcli("quantize", SAMPLE, "--format", "nvfp4", "--layout", "modelopt", "-o", tmp_path / "q").code == 0
    words = ("quantize", tmp_path / "q", "--requantize", "--format", "nvfp4", "-o")
    again = mxcli(*words, tmp_path / "again", "--layout", "modelopt")
    assert (again.code, "Not carried" in again.err) == (0, False)
    other = mxcli(*words, tmp_path / "other", "--layout", "compressed-tensors")
    assert "note: Not carried to an output, an old quantization config: hf_quant_config.json.\n" in other.err


@pytest.mark.parametrize("text", ["mine", ""])
def test_force_keeps_an_edited_readme_with_a_note(mxcli: Callable[..., Any], tmp_path: Path, text: str) -> None:
    shutil.copytree(SAMPLE, tmp_path / "model")
    (tmp_path / "model/README.md").write_text("theirs")
    assert mxcli("quantize", tmp_path / "model", "--format", "mxfp8", "-o", tmp_path / "q").code == 0
    (tmp_path / "q/README.md").write_text(text)
    code, _, err = mxcli("quantize", SAMPLE, "--format", "nvfp4", "-o", tmp_path / "q", "--force")
    assert code == 0
    assert "note: Kept, since they are not as mxcli wrote them in the output before: README.md.\n" in err
    assert (tmp_path / "q/README.md").read_text() == text


def test_a_source_without_layers_that_its_configuration_counts(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    folder = tmp_path / "m"
    shutil.copytree(SAMPLE, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 9}))

    for end in (["-o", tmp_path / "q"], ["--dry-run"]):
        code, _, err = mxcli("quantize", folder, "--format", "nvfp4", *end)
        assert (code, "num_hidden_layers is 9, and 4 layers are here" in err) == (3, True)
    assert not (tmp_path / "q").exists()
    assert mxcli("quantize", folder, "--format", "nvfp4", "--no-verify", "-o", tmp_path / "q").code == 0


def test_a_source_of_codes_that_nothing_explains_names_one(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    save_file({"fc.weight": np.zeros((64, 51), np.uint8)}, tmp_path / "codes.safetensors")
    code, _, err = mxcli("quantize", tmp_path / "codes.safetensors", "--format", "nvfp4", "-o", tmp_path / "q")
    assert code == 4
    assert "already quantized (unknown: 'fc.weight' is U8, as codes are); quantizing codes again" in err
