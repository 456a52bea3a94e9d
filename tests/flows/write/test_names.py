"""The names of an output's files are those of its source, by which the same loaders find them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tiny_models import LLAMA, layer, llama, noise, safetensors_bytes

from mxcli.backends.cpu import Cpu
from mxcli.errors import RefusedError
from mxcli.files.checkpoint import open_checkpoint
from mxcli.flows.plan.plan import Options, make_plan
from mxcli.flows.verify.subject import subject_of
from mxcli.flows.verify.verify import verify_subject
from mxcli.flows.write.arrange import arrange
from mxcli.flows.write.dequantize import dequantize_checkpoint
from mxcli.flows.write.pipeline import planned_draft
from mxcli.flows.write.quantize import quantize_checkpoint


def pair(stem: str) -> tuple[str, str]:
    """The names of two shards."""
    return f"{stem}-00001-of-00002.safetensors", f"{stem}-00002-of-00002.safetensors"


ONE, TWO = layer(), layer("model.layers.1", seed=20)


def source(folder: Path, shards: Mapping[str, Mapping[str, Any]], index: str | None = None, prefix: str = "") -> Path:
    """A model with its tensors in these files, and an index of them."""
    for name, tensors in shards.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(safetensors_bytes(tensors, {"format": "pt"}))
    if index is not None:
        weight_map = {tensor: prefix + name for name, tensors in shards.items() for tensor in tensors}
        (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return folder


def quantized(root: Path, output: Path) -> dict[str, Any]:
    """Quantize and return the names of weight files and indexes, each index with the files that it names."""
    checkpoint = open_checkpoint(root)
    plan = make_plan(checkpoint, Options("mxfp8"))
    quantize_checkpoint(checkpoint, plan, output, backend=Cpu())
    names = {path.relative_to(output).as_posix(): path for path in output.rglob("*") if path.is_file()}
    found: dict[str, Any] = {name: None for name in names if name.endswith(".safetensors")}
    for name in names:
        if ".index." in name:
            found[name] = sorted(set(json.loads(names[name].read_text())["weight_map"].values()))
    return found


@pytest.mark.parametrize(
    ("files", "index", "written", "index_written"),
    [
        (
            pair("model"),
            "model.safetensors.index.json",
            None,
            "model.safetensors.index.json",
        ),
        (
            pair("diffusion_pytorch_model"),
            "diffusion_pytorch_model.safetensors.index.json",
            None,
            "diffusion_pytorch_model.safetensors.index.json",
        ),
        (
            pair("model.fp16"),
            "model.safetensors.index.fp16.json",
            None,
            "model.safetensors.index.fp16.json",
        ),
        (
            pair("diffusion_pytorch_model.fp16"),
            "diffusion_pytorch_model.safetensors.index.fp16.json",
            None,
            "diffusion_pytorch_model.safetensors.index.fp16.json",
        ),
        (
            pair("weights/model"),
            "model.safetensors.index.json",
            None,
            "model.safetensors.index.json",
        ),
        (
            ("one/part.safetensors", "two/part.safetensors"),
            "model.safetensors.index.json",
            None,
            "model.safetensors.index.json",
        ),
        (("a.safetensors", "b.safetensors"), None, None, "model.safetensors.index.json"),
        (
            pair("model"),
            None,
            None,
            "model.safetensors.index.json",
        ),
        (
            pair("model.fp16"),
            None,
            None,
            "model.safetensors.index.fp16.json",
        ),
        (("model.safetensors",), None, None, None),
        (("diffusion_pytorch_model.safetensors",), None, None, None),
        (("diffusion_pytorch_model.fp16.safetensors",), None, None, None),
        (("model.fp16.safetensors",), None, None, None),
        (("flux1-dev.safetensors",), None, ("model.safetensors",), None),
    ],
)
def test_files_keep_their_names(
    tmp_path: Path,
    files: tuple[str, ...],
    index: str | None,
    written: tuple[str, ...] | None,
    index_written: str | None,
) -> None:
    root = source(tmp_path / "m", dict(zip(files, (ONE, TWO), strict=False)), index)
    found = quantized(root, tmp_path / "q")
    names = list(written or files)
    assert found == {**dict.fromkeys(names), **({index_written: names} if index_written else {})}
    assert [path.relative_to(tmp_path / "q").as_posix() for path in open_checkpoint(tmp_path / "q").files] == names


def test_names_that_begin_with_a_dot_are_those_of_the_same_files(tmp_path: Path) -> None:
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    root = source(tmp_path / "m", dict(zip(names, (ONE, TWO), strict=True)), "model.safetensors.index.json", "./")
    assert quantized(root, tmp_path / "q")["model.safetensors.index.json"] == names


def test_pytorch_files_get_the_names_of_safetensors(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    (tmp_path / "m").mkdir()
    names = [f"pytorch_model-0000{number}-of-00002.bin" for number in (1, 2)]
    tensors = [{f"model.layers.{at}.mlp.up_proj.weight": torch.randn(64, 64)} for at in (0, 1)]
    for name, each in zip(names, tensors, strict=True):
        torch.save(each, tmp_path / "m" / name)
    weight_map = {tensor: name for name, each in zip(names, tensors, strict=True) for tensor in each}
    (tmp_path / "m" / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    expected = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert quantized(tmp_path / "m", tmp_path / "q") == {
        **dict.fromkeys(expected),
        "model.safetensors.index.json": expected,
    }


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("pytorch_model.bin", "model.safetensors"),
        ("diffusion_pytorch_model.bin", "diffusion_pytorch_model.safetensors"),
        ("pytorch_model.fp16.bin", "model.fp16.safetensors"),
        ("open_clip_pytorch_model.bin", "open_clip_model.safetensors"),
        ("checkpoint.pt", "model.safetensors"),
    ],
)
def test_one_pytorch_file_gets_the_name_that_loaders_look_for(tmp_path: Path, name: str, written: str) -> None:
    torch = pytest.importorskip("torch")
    (tmp_path / "m").mkdir()
    torch.save({"model.layers.0.mlp.up_proj.weight": torch.randn(64, 64)}, tmp_path / "m" / name)
    assert quantized(tmp_path / "m", tmp_path / "q") == {written: None}


@pytest.mark.parametrize(
    ("name", "stem"),
    [("diffusion_pytorch_model", "diffusion_pytorch_model"), ("model.fp16", "model.fp16"), ("flux", "model")],
)
def test_files_of_another_size_are_numbered_by_the_same_name(tmp_path: Path, name: str, stem: str) -> None:
    root = source(tmp_path / "m", {f"{name}.safetensors": ONE | TWO})
    checkpoint = open_checkpoint(root)
    shards = arrange(checkpoint, make_plan(checkpoint, Options("mxfp8")), max_shard_bytes=30_000).shards
    assert [shard.name for shard in shards] == [
        f"{stem}-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)
    ]
    assert len(shards) > 1


def test_an_output_in_subfolders_is_proven_by_its_record(tmp_path: Path) -> None:
    files = ("one/part.safetensors", "two/part.safetensors")
    root = source(tmp_path / "m", dict(zip(files, (ONE, TWO), strict=True)), "model.safetensors.index.json")
    quantized(root, tmp_path / "q")
    record = json.loads((tmp_path / "q" / "mxcli.json").read_text())
    assert (sorted(record["headers"]), sorted(record["input"])) == (list(files), list(files))
    output = open_checkpoint(tmp_path / "q")
    result = verify_subject("q", subject_of(output), backend=Cpu())
    assert result.coverage.tensors_by_record == len(output.tensors) > 0
    damaged = tmp_path / "q" / "two" / "part.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\x55")
    result = verify_subject("q", subject_of(open_checkpoint(tmp_path / "q")), backend=Cpu())
    assert [each.name for each in result.found("problem")] == ["recorded_bytes"]


def test_a_carried_file_never_replaces_one_of_the_output(tmp_path: Path) -> None:
    files = ("a.safetensors", "b.safetensors")
    root = source(tmp_path / "m", dict(zip(files, (ONE, TWO), strict=True)), "model.safetensors.index.json")
    (root / "model.safetensors").write_bytes(safetensors_bytes({"mtp.fc.weight": noise(4, 8)}, {"format": "pt"}))
    checkpoint = open_checkpoint(root)
    plan = make_plan(checkpoint, Options("mxfp8"))
    kept = arrange(checkpoint, plan)
    assert planned_draft(checkpoint, kept.shards, kept.configs).carried.keys() == {"model.safetensors"}
    joined = arrange(checkpoint, plan, max_shard_bytes=1 << 30)
    with pytest.raises(RefusedError, match=r"m/model\.safetensors: an output has a file of this name"):
        planned_draft(checkpoint, joined.shards, joined.configs)


def test_one_shard_of_a_set_keeps_its_name_and_says_what_is_missing(tmp_path: Path) -> None:
    files = pair("model")
    root = source(tmp_path / "m", dict(zip(files, (ONE, TWO), strict=True)), "model.safetensors.index.json")
    assert quantized(root / files[0], tmp_path / "q") == {
        files[0]: None,
        "model.safetensors.index.json": [files[0]],
    }
    left_out = json.loads((tmp_path / "q" / "mxcli.json").read_text())["accounting"]["left_out"]
    assert left_out["listed"] == [
        {
            "name": files[1],
            "files": 1,
            "bytes": (root / files[1]).stat().st_size,
            "reason": "another shard of the model",
        }
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stem", "index", "variant"),
    [
        ("model", "model.safetensors.index.json", None),
        ("model.fp16", "model.safetensors.index.fp16.json", "fp16"),
        ("weights/model", "model.safetensors.index.json", None),
    ],
)
def test_transformers_finds_every_weight(tmp_path: Path, stem: str, index: str, variant: str | None) -> None:
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    rest = {name: each for name, each in llama().items() if name not in ONE}
    root = source(tmp_path / "m", dict(zip(pair(stem), (ONE, rest | TWO), strict=True)), index)
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 32}
    config = {**LLAMA, **sizes, "intermediate_size": 128, "num_hidden_layers": 2}
    (root / "config.json").write_text(json.dumps(config))
    quantized(root, tmp_path / "q")
    dequantize_checkpoint(open_checkpoint(tmp_path / "q"), tmp_path / "d", backend=Cpu())
    _, loading = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "d", variant=variant, output_loading_info=True
    )
    assert not any(loading.values())
