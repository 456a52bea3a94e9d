"""Directories, shards, indexes and files next to them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from raw_checkpoint import safetensors_bytes, zeros

from mxcli.errors import InputError
from mxcli.files.checkpoint import open_checkpoint, read
from mxcli.files.model_folder import left_out_notes

Writer = Callable[..., Path]

Q = "model.layers.0.self_attn.q_proj.weight"
K = "model.layers.0.self_attn.k_proj.weight"
EMBED = "model.embed_tokens.weight"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def _sharded(weight_map: dict[str, str] | None = None, total: object = 256) -> dict[str, object]:
    """Two shards of 128 bytes each, and their index."""
    return {
        FIRST: {EMBED: zeros("BF16", 4, 8), "model.norm.weight": zeros("BF16", 32)},
        SECOND: {Q: zeros("BF16", 4, 8), K: zeros("BF16", 4, 8)},
        "model.safetensors.index.json": {
            "metadata": {"total_size": total},
            "weight_map": weight_map or {EMBED: FIRST, "model.norm.weight": FIRST, Q: SECOND, K: SECOND},
        },
    }


def test_every_way_to_name_a_model(model: Writer) -> None:
    root = model({"model.safetensors": {Q: zeros("BF16", 4, 8)}, "config.json": {"model_type": "llama"}})
    for source in (root, str(root), root / "model.safetensors", f"{root}/"):
        checkpoint = open_checkpoint(source)
        assert checkpoint.kind == "safetensors"
        assert checkpoint.root == root
        assert checkpoint.files == (root / "model.safetensors",)
        assert list(checkpoint.tensors) == [Q]
        assert checkpoint.config == {"model_type": "llama"}
        assert checkpoint.notes == ()
        assert checkpoint.dialect is None


def test_sharded_directory_and_its_index(model: Writer) -> None:
    root = model(_sharded())
    for source in (root, root / "model.safetensors.index.json"):
        checkpoint = open_checkpoint(source)
        assert checkpoint.files == (root / FIRST, root / SECOND)
        assert list(checkpoint.tensors) == [EMBED, "model.norm.weight", Q, K]
        assert checkpoint.index == root / "model.safetensors.index.json"
        assert checkpoint.notes == ()
        assert checkpoint.side_files == ()


def test_index_of_another_name(model: Writer) -> None:
    files = _sharded()
    files["diffusion.safetensors.index.json"] = files.pop("model.safetensors.index.json")
    assert len(open_checkpoint(model(files)).tensors) == 4
    files["other.safetensors.index.json"] = files["diffusion.safetensors.index.json"]
    root = model(files)
    with pytest.raises(InputError, match=r"2 indexes and no model\.safetensors\.index\.json; give one"):
        open_checkpoint(root)
    files["model.safetensors.index.json"] = files["other.safetensors.index.json"]
    notes = open_checkpoint(model(files)).notes
    assert notes[0] == "3 indexes found; model.safetensors.index.json is followed."


def test_missing_shards_are_all_named(model: Writer) -> None:
    names = [f"model-{n:05d}-of-00030.safetensors" for n in range(1, 31)]
    files: dict[str, object] = {name: {f"layer.{name}": zeros("F32", 2, 2)} for name in names[:15]}
    index = {"weight_map": {f"layer.{name}": name for name in names}}
    root = model(files | {"model.safetensors.index.json": index})
    with pytest.raises(InputError) as caught:
        open_checkpoint(root)
    error = caught.value
    assert error.exit_code == 3
    assert error.message == f"{root}/model.safetensors.index.json: 15 of 30 shards are missing: 15 problems."
    assert error.details[0] == f"{root}/{names[15]}: no such file or directory."
    assert str(error).endswith("and 5 more")
    (root / "model.safetensors.index.json").unlink()
    with pytest.raises(InputError, match="15 shards are missing"):
        open_checkpoint(root)


def test_tensors_the_index_names_and_no_shard_holds(model: Writer) -> None:
    root = model(_sharded({EMBED: FIRST, Q: SECOND, "model.layers.9.x": SECOND, "model.layers.9.y": FIRST}))
    with pytest.raises(InputError) as caught:
        open_checkpoint(root)
    index = root / "model.safetensors.index.json"
    assert caught.value.details == (
        f"{index}: tensor 'model.layers.9.x' is neither in {SECOND} nor elsewhere.",
        f"{index}: tensor 'model.layers.9.y' is neither in {FIRST} nor elsewhere.",
    )


def test_weight_and_scale_in_different_shards_are_found(model: Writer) -> None:
    """Also when the index places them wrongly."""
    files = {
        FIRST: {"fc.weight": zeros("F8_E4M3", 128, 128)},
        SECOND: {"fc.weight_scale_inv": zeros("F32", 1, 1)},
        "model.safetensors.index.json": {
            "metadata": {"total_size": 16388},
            "weight_map": {"fc.weight": FIRST, "fc.weight_scale_inv": FIRST},
        },
        # keeps both shards named
    }
    files["model.safetensors.index.json"]["weight_map"]["fc.bias"] = SECOND  # type: ignore[index]
    files[SECOND]["fc.bias"] = zeros("F32", 1)
    checkpoint = open_checkpoint(model(files))
    assert checkpoint.tensors["fc.weight_scale_inv"].file.name == SECOND
    assert checkpoint.dialect == "fp8-block"
    assert "model.safetensors.index.json places 'fc.weight_scale_inv' in another shard than the one holding it." in (
        checkpoint.notes
    )


def test_odd_indexes_are_noted(model: Writer) -> None:
    checkpoint = open_checkpoint(model(_sharded({EMBED: FIRST, Q: SECOND}, total=7)))
    assert checkpoint.notes == (
        "model.safetensors.index.json does not name 'model.norm.weight' and 1 more, found in the shards; "
        "read nevertheless.",
        "model.safetensors.index.json states total_size 7; the tensors hold 256 bytes.",
    )
    assert len(checkpoint.tensors) == 4


def test_extra_shard_next_to_an_index_is_noted(model: Writer) -> None:
    """Nothing is dropped without a word."""
    root = model(_sharded() | {"mtp.safetensors": {"mtp.0.weight": zeros("BF16", 4, 8)}})
    notes = open_checkpoint(root).notes
    assert notes[0] == "mtp.safetensors is not named by model.safetensors.index.json; not read."


def test_mtp_tensors_are_read_with_their_role(model: Writer) -> None:
    prefix = "model.layers.61."
    names = ("eh_proj.weight", "mlp.experts.0.up_proj.weight", "self_attn.o_proj.weight", "enorm.weight")
    tensors = {prefix + name: zeros("BF16", *((8, 8) if "norm" not in name else (8,))) for name in names}
    tensors |= {"mtp.0.weight": zeros("BF16", 8, 8), "model.layers.6.mlp.up_proj.weight": zeros("BF16", 8, 8)}
    checkpoint = open_checkpoint(model({"model.safetensors": tensors}))
    assert [info.role for info in checkpoint.tensors.values()] == [
        "mtp",
        "mtp",
        "mtp",
        "norm",
        "mtp",
        "weight",
    ]


@pytest.mark.parametrize(
    "shard",
    [
        "../outside.safetensors",
        "/etc/passwd",
        "a/../../b.safetensors",
        "..\\b.safetensors",
        "C:\\b.safetensors",
        "",
    ],
)
def test_path_traversal_in_an_index_is_refused(model: Writer, shard: str) -> None:
    root = model({"model.safetensors.index.json": {"weight_map": {"a": shard}}})
    with pytest.raises(InputError, match="is outside its directory; shards must be next to it"):
        open_checkpoint(root)


@pytest.mark.parametrize(
    ("index", "fault"),
    [
        ("{", "not valid JSON"),
        ("[]", "the top of the JSON is list, not an object"),
        ("{}", "needs a weight_map from tensor names to file names"),
        ('{"weight_map": {"a": 1}}', "weight_map: 'a' is 1; it must be a file name"),
        ('{"weight_map": {"a": ["b"]}}', "weight_map: 'a' is ['b']; it must be a file name"),
        ('{"weight_map": [["a", "b"]]}', "needs a weight_map from tensor names to file names"),
        ('{"weight_map": {"a": "1.bin", "a": "2.bin"}}', "the key 'a' occurs twice, with two values; keep one"),
        ('{"weight_map": {"a": "1.bin"}, "weight_map": {}}', "the key 'weight_map' occurs twice, with two values"),
        ('{"metadata": {"total_size": 1, "total_size": true}}', "the key 'total_size' occurs twice, with two values"),
        ('{"weight_map": ' + "[" * 101 + "]" * 101 + "}", "its JSON nests more than 100 deep"),
        ('{"weight_map": {}}', "its weight_map is empty"),
        ('{"weight_map": {"a": "config.json"}}', "its shards must all be .safetensors or all PyTorch files"),
        ("[" * 100_000, "not valid JSON"),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 23950\n", "a Git LFS pointer, not the file"),
        ("<!DOCTYPE html><html></html>", "an HTML page, probably a failed download"),
    ],
)
def test_broken_indexes(model: Writer, index: str, fault: str) -> None:
    root = model({"model.safetensors.index.json": index, "config.json": {}})
    with pytest.raises(InputError, match=re.escape(fault)):
        open_checkpoint(root)


@pytest.mark.parametrize(
    ("config", "fault"),
    [
        ('{"model_type": []}', "config.json: model_type is []; it must be text"),
        ('{"model_type": {"a": 1}}', 'config.json: model_type is {"a": 1}; it must be text'),
        ('{"model_type": true}', "config.json: model_type is true; it must be text"),
        ('{"architectures": "LlamaForCausalLM"}', 'architectures is "LlamaForCausalLM"; it must be a list of text'),
        ('{"architectures": [1]}', "config.json: architectures is [1]; it must be a list of text"),
        ('{"tie_word_embeddings": "yes"}', 'config.json: tie_word_embeddings is "yes"; it must be true or false'),
        ('{"text_config": [1]}', "config.json: text_config is [1]; it must be an object"),
        ('{"text_config": {"model_type": []}}', "config.json: text_config.model_type is []; it must be text"),
        ('{"vision_config": {"architectures": 1}}', "vision_config.architectures is 1; it must be a list of text"),
        ('{"quantization_config": "fp8"}', 'config.json: quantization_config is "fp8"; it must be an object'),
        ('{"text_config": {"quantization_config": []}}', "text_config.quantization_config is []; it must be an object"),
        ('{"model_type": "llama", "model_type": "gpt2"}', "the key 'model_type' occurs twice, with two values"),
    ],
)
def test_settings_of_another_type(model: Writer, config: str, fault: str) -> None:
    root = model({"config.json": config, "model.safetensors": {"model.norm.weight": zeros("BF16", 8)}})
    with pytest.raises(InputError, match=re.escape(fault)):
        open_checkpoint(root)


def test_all_settings_of_another_type_at_once(model: Writer) -> None:
    files = {"model.safetensors": {"model.norm.weight": zeros("BF16", 8)}}
    root = model(files | {"config.json": {"model_type": 1, "architectures": 2, "text_config": {"model_type": 3}}})
    with pytest.raises(InputError) as caught:
        open_checkpoint(root)
    assert len(caught.value.reasons) == 3
    root = model(files | {"config.json": {"model_type": None, "text_config": None, "hidden_size": [8, 16]}})
    (root / "hf_quant_config.json").write_text('{"quantization": "FP8"}')
    with pytest.raises(InputError, match=r'hf_quant_config.json: quantization is "FP8"; it must be an object'):
        open_checkpoint(root)
    (root / "hf_quant_config.json").unlink()
    assert list(open_checkpoint(root).tensors) == ["model.norm.weight"]


def test_keys_repeated_with_one_value_are_no_fault(model: Writer) -> None:
    files = {"model.safetensors": {"model.norm.weight": zeros("BF16", 8)}}
    root = model(files | {"config.json": '{"model_type": "llama", "a": {"b": [1]}, "model_type": "llama"}'})
    assert open_checkpoint(root).config == {"model_type": "llama", "a": {"b": [1]}}


def test_problems_of_all_shards_come_at_once(model: Writer) -> None:
    files = _sharded()
    root = model(files | {"config.json": "{", FIRST: b"", SECOND: b"<html>"})
    with pytest.raises(InputError) as caught:
        open_checkpoint(root)
    assert caught.value.message == f"{root}: 3 problems."
    assert [detail.split(":")[0] for detail in caught.value.details] == [
        f"{root}/{FIRST}",
        f"{root}/{SECOND}",
        f"{root}/config.json",
    ]


def test_files_without_index(model: Writer) -> None:
    root = model({"a.safetensors": {"x": zeros("F32", 2, 2)}, "b.safetensors": {"y": zeros("F32", 2, 2)}})
    checkpoint = open_checkpoint(root)
    assert list(checkpoint.tensors) == ["x", "y"]
    assert checkpoint.notes == ("2 files (a.safetensors, b.safetensors) are read together; there is no index.",)
    model({"b.safetensors": {"x": zeros("F32", 2, 2)}})
    with pytest.raises(InputError, match=r"tensor 'x' is in a\.safetensors and b\.safetensors; keep one of them"):
        open_checkpoint(root)


def test_model_safetensors_is_the_model(model: Writer) -> None:
    entries = {"x": zeros("F32", 2, 2)}
    root = model({"model.safetensors": entries, "copy.safetensors": entries, "pytorch_model.bin": b"PK"})
    checkpoint = open_checkpoint(root)
    assert checkpoint.files == (root / "model.safetensors",)
    assert checkpoint.notes == ("copy.safetensors is next to model.safetensors, which is the model; not read.",)
    assert checkpoint.left_out == {"another copy of the weights": ["copy.safetensors", "pytorch_model.bin"]}
    assert open_checkpoint(root / "copy.safetensors").files == (root / "copy.safetensors",)


def test_one_shard_by_itself_says_so(model: Writer) -> None:
    root = model(_sharded())
    checkpoint = open_checkpoint(root / SECOND)
    assert list(checkpoint.tensors) == [Q, K]
    assert checkpoint.notes == (f"{SECOND} is one of 2 shards; model.safetensors.index.json gives all of them.",)


def test_sources_that_are_not_there(model: Writer, tmp_path: Path) -> None:
    root = model({"model.safetensors": {Q: zeros("BF16", 4, 8)}})
    with pytest.raises(InputError, match=r"no such file or directory\. Did you mean model\.safetensors\?"):
        open_checkpoint(root / "modell.safetensors")
    with pytest.raises(InputError, match="a parent of it is a file"):
        open_checkpoint(root / "model.safetensors" / "x")
    with pytest.raises(InputError, match="The source is empty"):
        open_checkpoint("")
    with pytest.raises(InputError, match="cannot be opened"):
        open_checkpoint("a\0b")
    with pytest.raises(InputError, match="cannot be opened"):
        open_checkpoint("x" * 5000)
    (root / "dangling.safetensors").symlink_to("../blobs/abc")
    with pytest.raises(InputError, match=r"link to \.\./blobs/abc, which does not exist; finish the download"):
        open_checkpoint(root / "dangling.safetensors")


def test_directories_without_weights(model: Writer, tmp_path: Path) -> None:
    empty = model({"config.json": {}}, "empty")
    with pytest.raises(InputError, match=r"no weights in it; \.safetensors, \.pt"):
        open_checkpoint(empty)
    pipeline = model({"unet/model.safetensors": {}, "vae/model.safetensors": {}, "model_index.json": {}}, "pipe")
    with pytest.raises(InputError, match=r"pipe: a diffusers pipeline, .*; give one of them: .*pipe/unet, .*pipe/vae"):
        open_checkpoint(pipeline)
    folders = model({"unet/model.safetensors": {}, "vae/model.safetensors": {}}, "folders")
    with pytest.raises(InputError, match="no weights in it, but in its folders unet, vae; give one of those"):
        open_checkpoint(folders)
    with pytest.raises(InputError, match=r"no weights that can be read, only m\.onnx"):
        open_checkpoint(model({"m.onnx": b"ONNX"}, "onnx"))
    with pytest.raises(InputError, match=r"config\.json: not a checkpoint; known endings are"):
        open_checkpoint(empty / "config.json")


def test_download_caches_with_links(model: Writer, tmp_path: Path) -> None:
    cache = tmp_path / "models--org--name"
    snapshot = cache / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    (cache / "blobs" / "f00d").write_bytes(safetensors_bytes({Q: zeros("BF16", 4, 8)}, {"format": "pt"}))
    (cache / "blobs" / "beef").write_text("{}")
    (snapshot / "model.safetensors").symlink_to("../../blobs/f00d")
    (snapshot / "config.json").symlink_to("../../blobs/beef")
    (snapshot / "tokenizer.json").symlink_to("../../blobs/beef")
    checkpoint = open_checkpoint(snapshot)
    assert checkpoint.files == (snapshot / "model.safetensors",)
    assert checkpoint.side_files == (snapshot / "tokenizer.json",)
    assert read(checkpoint, checkpoint.tensors[Q]).shape == (4, 8)
    assert list(open_checkpoint(cache / "blobs" / "f00d").tensors) == [Q]
    with pytest.raises(InputError, match=r"a download cache, .*; give one of its snapshots: .*0123abcd"):
        open_checkpoint(cache)


def test_side_files(model: Writer) -> None:
    carried = [
        "1_Pooling/config.json",
        "added_tokens.json",
        "chat_template.jinja",
        "generation_config.json",
        "modeling_custom.py",
        "preprocessor_config.json",
        "processor_config.json",
        "tokenizer.json",
        "tokenizer.model",
    ]
    files: dict[str, object] = dict.fromkeys(carried, "{}")
    files |= {
        "model.safetensors": {Q: zeros("BF16", 4, 8)},
        "config.json": {},
        "mxcli.json": {},
        "model.safetensors.index.json.partial": "x",
        "hf_quant_config.json": {},
        "pytorch_model.bin": b"x",
        "original/consolidated.00.pth": b"x",
        ".cache/huggingface/x.json": "{}",
        ".gitattributes": "x",
        "__pycache__/modeling_custom.cpython-311.pyc": b"x",
    }
    root = model(files)
    checkpoint = open_checkpoint(root)
    assert [path.relative_to(root).as_posix() for path in checkpoint.side_files] == carried
    assert checkpoint.notes == ("model.safetensors.index.json.partial is left by an unfinished run; not read.",)
    weights = [
        "Not carried to an output, another copy of the weights: pytorch_model.bin.",
        "Not carried to an output, the same model under its maker's own names: original/consolidated.00.pth.",
    ]
    assert left_out_notes(checkpoint.left_out) == [
        "Not carried to an output, an old quantization config: hf_quant_config.json.",
        *weights,
    ]
    assert left_out_notes(checkpoint.left_out, ["hf_quant_config.json", "config.json"]) == weights


def test_side_files_that_are_pipes_are_not_carried(model: Writer) -> None:
    root = model({"model.safetensors": {Q: zeros("BF16", 4, 8)}})
    os.mkfifo(root / "pipe.json")
    checkpoint = open_checkpoint(root)
    assert checkpoint.side_files == ()
    assert (checkpoint.notes, checkpoint.left_out) == (
        (),
        {"not a regular file": ["pipe.json"]},
    )


def test_broken_config_is_an_error_for_a_model_and_a_note_for_a_lone_file(model: Writer) -> None:
    entries = {Q: zeros("BF16", 4, 8)}
    root = model({"a.safetensors": entries, "b.safetensors": entries, "config.json": "[1]"})
    assert open_checkpoint(root / "a.safetensors").notes == (
        f"{root}/config.json: the top of the JSON is list, not an object.",
    )
    (root / "b.safetensors").unlink()
    with pytest.raises(InputError, match="the top of the JSON is list"):
        open_checkpoint(root)


def test_missing_format_metadata_is_noted(model: Writer) -> None:
    content = safetensors_bytes({Q: zeros("BF16", 4, 8)})
    checkpoint = open_checkpoint(model({"model.safetensors": content}))
    assert checkpoint.notes == (
        "1 file ('model.safetensors') without a format in __metadata__; outputs get the usual 'pt'.",
    )
    kept = safetensors_bytes({Q: zeros("BF16", 4, 8)}, {"format": "pt", "made by": "x"})
    root = model({"model.safetensors": kept})
    assert open_checkpoint(root).metadata == {root / "model.safetensors": {"format": "pt", "made by": "x"}}


def test_adapters_are_recognised(model: Writer) -> None:
    name = "base_model.model.layers.0.q_proj.lora_{}.weight"
    tensors = {name.format("A"): zeros("F32", 2, 8), name.format("B"): zeros("F32", 8, 2)}
    checkpoint = open_checkpoint(model({"adapter_model.safetensors": tensors, "adapter_config.json": {}}))
    assert checkpoint.notes == ("LoRA adapter: all 2 tensors belong to it; it is not a model by itself.",)
    assert {info.role for info in checkpoint.tensors.values()} == {"lora"}


def test_hostile_tensor_names_are_read_and_noted(model: Writer) -> None:
    tensors = dict.fromkeys(["\x1b[2J.weight", "", "é中.weight"], zeros("F32", 2, 2))
    checkpoint = open_checkpoint(model({"model.safetensors": tensors}))
    assert list(checkpoint.tensors) == list(tensors)
    assert checkpoint.notes == ("2 names ('\\x1b[2J.weight', …) empty or with control characters, shown escaped.",)


def test_opening_is_deterministic(model: Writer) -> None:
    root = model(_sharded() | {"tokenizer.json": "{}"})
    assert open_checkpoint(root) == open_checkpoint(root)


def test_headers_are_read_without_torch(model: Writer) -> None:
    root = model(_sharded())
    code = (
        "import sys; from mxcli.files.checkpoint import open_checkpoint, read; "
        "c = open_checkpoint(sys.argv[1]); "
        "[read(c, info) for info in c.tensors.values()]; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(root)], check=True)


@pytest.mark.parametrize("name", ["tokenizer.json", "sub/vocab.txt", "1_Pooling/config.json", "a/b/c.jinja"])
def test_a_link_to_itself_is_left_and_said(model: Writer, name: str) -> None:
    root = model({"model.safetensors": {Q: zeros("BF16", 4, 8)}, "notes.txt": "x"})
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).symlink_to(Path(name).name)
    checkpoint = open_checkpoint(root)
    assert checkpoint.side_files == (root / "notes.txt",)
    assert left_out_notes(checkpoint.left_out) == [f"Not carried to an output, not a regular file: {name}."]


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "hf_quant_config.json"])
def test_a_document_that_is_a_link_to_itself(model: Writer, name: str) -> None:
    root = model({"model.safetensors": {Q: zeros("BF16", 4, 8)}})
    (root / name).symlink_to(name)
    with pytest.raises(InputError, match=re.escape(name)):
        open_checkpoint(root)
