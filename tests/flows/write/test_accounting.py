"""Every byte of a source is read, carried along, or left out with a reason: in the record, and on the last line."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import LLAMA, llama, noise, safetensors_bytes, write_model

from mxcli.backends.cpu import Cpu
from mxcli.files.checkpoint import open_checkpoint
from mxcli.flows.plan.plan import Options, make_plan
from mxcli.flows.verify.subject import subject_of
from mxcli.flows.verify.verify import Verification, checked_originals, verify_subject
from mxcli.flows.write.accounting import accounting_of
from mxcli.flows.write.dequantize import dequantize_checkpoint
from mxcli.flows.write.quantize import quantize_checkpoint
from mxcli.flows.write.restore import open_floats
from mxcli.output.written import accounting_words

SIDES = {
    "tokenizer.json": "{}",
    "optimizer.pt": "x" * 5000,
    "onnx/model.onnx": "x" * 700,
    "onnx/config.json": "{}",
    ".gitattributes": "y" * 11,
    ".git/objects/aa": "z" * 300,
    "spk_dict.pt": "s" * 40,
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    root = write_model(tmp_path / "m", llama(), LLAMA, SIDES)
    (root / "2_Dense").mkdir()
    dense = safetensors_bytes({"linear.weight": noise(8, 8)}, {"format": "pt"})
    (root / "2_Dense" / "model.safetensors").write_bytes(dense)
    return root


def quantized(source: Path, output: Path, format: str = "mxfp8", *, requantize: bool = False) -> dict[str, Any]:
    checkpoint = open_floats(source, requantize=requantize)
    quantize_checkpoint(checkpoint, make_plan(checkpoint, Options(format)), output, backend=Cpu())
    record: dict[str, Any] = json.loads((output / "mxcli.json").read_text())
    return record


def bytes_in(folder: Path) -> tuple[int, int]:
    """The number and the bytes of all files of a folder."""
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    return len(sizes), sum(sizes)


def test_the_record_accounts_for_every_byte_of_the_folder(source: Path, tmp_path: Path) -> None:
    accounting = quantized(source, tmp_path / "q")["accounting"]
    assert (accounting["files"], accounting["bytes"]) == bytes_in(source) == (10, bytes_in(source)[1])
    read = [source / "model.safetensors", source / "config.json"]
    assert accounting["read"] == {"files": 2, "bytes": sum(path.stat().st_size for path in read)}
    dense = (source / "2_Dense" / "model.safetensors").stat().st_size
    assert accounting["carried"] == {
        "files": 3,
        "bytes": dense + 40 + 2,
        "weights": ["2_Dense/model.safetensors", "spk_dict.pt"],
    }
    assert accounting["left_out"] == {
        "files": 5,
        "bytes": 5000 + 702 + 11 + 300,
        "listed": [
            {"name": ".git/", "files": 1, "bytes": 300, "reason": "hidden"},
            {"name": ".gitattributes", "files": 1, "bytes": 11, "reason": "hidden"},
            {"name": "onnx/", "files": 2, "bytes": 702, "reason": "the model in another format"},
            {"name": "optimizer.pt", "files": 1, "bytes": 5000, "reason": "training state"},
        ],
    }
    for name in ("2_Dense/model.safetensors", "spk_dict.pt", "tokenizer.json"):
        assert (tmp_path / "q" / name).read_bytes() == (source / name).read_bytes()


def test_the_tensors_that_are_read_are_quantized_or_kept(source: Path, tmp_path: Path) -> None:
    record = quantized(source, tmp_path / "q")
    tensors = record["accounting"]["tensors"]
    counted = {what: tensors[what]["tensors"] for what in tensors}
    assert counted == {"quantized": 7, "kept": 5, "tied": 0, "left_out": 0}
    header = int.from_bytes((source / "model.safetensors").read_bytes()[:8], "little")
    stored = (source / "model.safetensors").stat().st_size - 8 - header
    assert sum(each["bytes"] for each in tensors.values()) == stored


def test_what_is_dequantized_or_quantized_again_is_accounted_for_as_stored(source: Path, tmp_path: Path) -> None:
    quantized(source, tmp_path / "q", "nvfp4")
    again = quantized(tmp_path / "q", tmp_path / "r", requantize=True)["accounting"]
    dequantize_checkpoint(open_checkpoint(tmp_path / "q"), tmp_path / "d", backend=Cpu())
    back = json.loads((tmp_path / "d" / "mxcli.json").read_text())["accounting"]
    stored = sum(info.nbytes for info in open_checkpoint(tmp_path / "q").tensors.values())
    for accounting, what in ((again, "quantized"), (back, "dequantized")):
        assert (accounting["files"], accounting["bytes"]) == bytes_in(tmp_path / "q")
        assert accounting["read"]["files"] == 3  # with the record, which describes the codes
        assert accounting["tensors"][what]["tensors"] == 7
        assert sum(each["bytes"] for each in accounting["tensors"].values()) == stored


def test_a_file_by_itself_is_all_that_is_read(tmp_path: Path) -> None:
    root = write_model(tmp_path / "m", {"a.safetensors": llama(), "b.safetensors": {"x": noise(2, 2)}}, None, SIDES)
    (root / "model.safetensors.index.json").unlink()
    accounting = quantized(root / "a.safetensors", tmp_path / "q")["accounting"]
    assert (accounting["files"], accounting["bytes"]) == (1, (root / "a.safetensors").stat().st_size)


def test_links_of_a_download_cache_count_with_what_they_lead_to(source: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0"
    shutil.move(source, tmp_path / "models--a--b" / "blobs")
    snapshot.mkdir(parents=True)
    for name in ("model.safetensors", "config.json", "tokenizer.json", "optimizer.pt"):
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    accounting = quantized(snapshot, tmp_path / "q")["accounting"]
    assert (accounting["files"], accounting["bytes"]) == bytes_in(snapshot)
    assert accounting["left_out"]["bytes"] == 5000


def test_files_that_change_later_do_not_forbid_to_resume(source: Path, tmp_path: Path) -> None:
    first = quantized(source, tmp_path / "q")
    (source / ".git" / "objects" / "bb").write_text("more")
    from mxcli.flows.write.pipeline import WriteOptions

    checkpoint = open_floats(source)
    plan = make_plan(checkpoint, Options("mxfp8"))
    options = WriteOptions(resume=True)
    written = quantize_checkpoint(checkpoint, plan, tmp_path / "q", backend=Cpu(), options=options)
    assert written.outcome.was_complete
    assert json.loads((tmp_path / "q" / "mxcli.json").read_text()) == first


def test_the_last_line_names_what_is_carried_and_what_is_not(source: Path) -> None:
    words = accounting_words(accounting_of(open_checkpoint(source)))
    assert words == (
        "read 2 files (83.7 kB), carried 3 files (298 B, weights: 2_Dense/model.safetensors, spk_dict.pt), left out 5 "
        "files (6.01 kB): training state (optimizer.pt, 5.00 kB), the model in another format (onnx/, 702 B), hidden "
        "(.git/ and 1 more, 311 B)"
    )


def test_the_last_line_of_a_plain_folder_is_short(tmp_path: Path) -> None:
    root = write_model(tmp_path / "m", llama(), LLAMA)
    assert accounting_words(accounting_of(open_checkpoint(root))).endswith("), carried none, left out none")


def test_thousands_of_files_left_out_are_counted_by_their_reason(tmp_path: Path) -> None:
    root = write_model(tmp_path / "m", llama(), LLAMA, {f"x{at}.lock": "x" * at for at in range(300)})
    accounting = quantized(root, tmp_path / "q")["accounting"]
    assert accounting["left_out"]["files"] == 300
    listed = accounting["left_out"]["listed"]
    assert (len(listed), listed[-1]["name"], listed[-1]["files"]) == (201, "", 100)
    assert sum(each["bytes"] for each in listed) == accounting["left_out"]["bytes"] == sum(range(300))


def verified(output: Path, source: Path) -> Verification:
    subject = subject_of(open_checkpoint(output))
    originals = checked_originals(open_checkpoint(source), subject)
    return verify_subject("q", subject, backend=Cpu(), against=str(source), originals=originals)


def left_behind(result: Verification) -> dict[str, list[str]]:
    names = ("weights_left_behind", "left_behind")
    return {
        each.name: [f.where for f in each.findings] for each in result.results if each.name in names and each.findings
    }


def test_verify_finds_what_is_neither_read_nor_here(source: Path, tmp_path: Path) -> None:
    quantized(source, tmp_path / "q")
    assert left_behind(verified(tmp_path / "q", source)) == {}
    (source / "3_Dense").mkdir()
    shutil.copy(source / "2_Dense" / "model.safetensors", source / "3_Dense")
    (source / "notes.md").write_text("later")
    (source / "scheduler.pt").write_text("left out for a reason")
    result = verified(tmp_path / "q", source)
    assert left_behind(result) == {
        "weights_left_behind": ["3_Dense/model.safetensors"],
        "left_behind": ["notes.md"],
    }
    assert not result.is_sound


def test_an_output_without_an_accounting_is_warned_about(source: Path, tmp_path: Path) -> None:
    quantized(source, tmp_path / "q")
    (tmp_path / "q" / "mxcli.json").unlink()
    for name in ("spk_dict.pt", "tokenizer.json"):
        os.remove(tmp_path / "q" / name)
    result = verified(tmp_path / "q", source)
    assert left_behind(result) == {"left_behind": ["spk_dict.pt"]}
    assert result.is_sound


def test_what_the_record_says_was_left_out_is_accounted_for(source: Path, tmp_path: Path) -> None:
    quantized(source, tmp_path / "q")
    path = tmp_path / "q" / "mxcli.json"
    record = json.loads(path.read_text())
    accounting = record["accounting"]
    accounting["left_out"]["listed"].append({"name": "extra.pt", "files": 1, "bytes": 3, "reason": "by hand"})
    for part in (accounting, accounting["left_out"]):
        part["files"] += 1
        part["bytes"] += 3
    path.write_text(json.dumps(record))
    (source / "extra.pt").write_bytes(np.zeros(3, np.uint8).tobytes())
    assert left_behind(verified(tmp_path / "q", source)) == {}
