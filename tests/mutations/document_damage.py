"""Damage to documents: configuration, index, record and carried files changed, cut or lost."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from typing import Any

from mutations.file_damage import some_shard
from mutations.kinds import Damage, Harm, Random, files
from mutations.outputs import CONFIG, INDEX, RECORD, Output

Document = dict[str, Any]
_SETTINGS = "quantization_config"


# Carried files.


def _carried(name: str, change: Callable[[Document], Document | None]) -> Callable[[Output, Random], Harm | None]:
    def apply(output: Output, random: Random) -> Harm | None:
        if not output.has(name):
            return None
        content = change(output.document(name))
        if content is None:
            (output.folder / name).unlink()
        else:
            output.write_document(name, content)
        return files("lost" if content is None else "changed", name)

    return apply


def _document_cut(name: str) -> Callable[[Output, Random], Harm | None]:
    def apply(output: Output, random: Random) -> Harm | None:
        if not output.has(name):
            return None
        size = (output.folder / name).stat().st_size
        os.truncate(output.folder / name, int(random.integers(1, size - 2)))
        return files("cut", name)

    return apply


# config.json.


def _config(what: str, change: Callable[[Document, Random], bool], *names: str) -> Callable[..., Harm | None]:
    """Change config.json; `change` returns whether it could. `names`, beside the file's, say what is damaged."""

    def apply(output: Output, random: Random) -> Harm | None:
        if not output.has(CONFIG):
            return None
        config = output.document(CONFIG)
        before = json.dumps(config)
        if not change(config, random) or json.dumps(config) == before:
            return None
        output.write_document(CONFIG, config)
        return Harm(((CONFIG, *names),), what)

    return apply


def _number(*keys: str) -> Callable[[Output, Random], Harm | None]:
    def change(config: Document, random: Random) -> bool:
        key = next((key for key in keys if isinstance(config.get(key), int)), None)
        if key is None:
            return False
        config[key] = int(config[key]) + int(random.choice([-2, -1, 1, 2])) * (1 if config[key] < 64 else 32)
        return True

    return _config(" or ".join(keys), change, *keys)


def _setting(what: str, change: Callable[[Document, Random], bool], *names: str) -> Callable[..., Harm | None]:
    def of_settings(config: Document, random: Random) -> bool:
        settings = config.get(_SETTINGS)
        return isinstance(settings, dict) and change(settings, random)

    return _config(f"{_SETTINGS}: {what}", of_settings, _SETTINGS, *names)


def _everywhere(document: Any, key: str, new: Callable[[Any], Any]) -> bool:
    """Change every value of a key, however deep; return whether there is one."""
    found = False
    if isinstance(document, dict):
        for name, value in document.items():
            if name == key and value is not None:
                document[name] = new(value)
                found = True
            else:
                found |= _everywhere(value, key, new)
    elif isinstance(document, list):
        for value in document:
            found |= _everywhere(value, key, new)
    return found


def _keyed(key: str, new: Callable[[Any], Any]) -> Callable[[Output, Random], Harm | None]:
    return _setting(key, lambda settings, random: _everywhere(settings, key, new), key)


_OTHER_FORMATS = {"nvfp4-pack-quantized": "mxfp4-pack-quantized", "mxfp4-pack-quantized": "nvfp4-pack-quantized"}
_OTHER_METHODS = {"compressed-tensors": "modelopt", "modelopt": "compressed-tensors", "fp8": "gptq"}
_IGNORE = ("ignore", "modules_to_not_convert", "exclude_modules", "exclude", "ignored_layers")
_LISTED = "model.layers.1.self_attn.o_proj"


def _list_emptied(settings: Document, random: Random) -> bool:
    key = next((key for key in _IGNORE if settings.get(key)), None)
    if key is not None:
        settings[key] = []
    return key is not None


def _list_extended(settings: Document, random: Random) -> bool:
    key = next((key for key in _IGNORE if isinstance(settings.get(key), list)), None)
    if key is not None:
        settings[key] = [*settings[key], _LISTED]
    return key is not None


def _no_settings(config: Document, random: Random) -> bool:
    return config.pop(_SETTINGS, None) is not None


def _untied(config: Document, random: Random) -> bool:
    config["tie_word_embeddings"] = not config.get("tie_word_embeddings")
    return True


def _dtype(config: Document, random: Random) -> bool:
    key = next((key for key in ("dtype", "torch_dtype") if key in config), None)
    if key is not None:
        config[key] = "float16"
    return key is not None


def _set(key: str, value: Any) -> Callable[[Document, Random], bool]:
    def change(config: Document, random: Random) -> bool:
        config[key] = value
        return True

    return change


def _of_another_model(config: Document, random: Random) -> bool:
    kept = {_SETTINGS: config[_SETTINGS]} if _SETTINGS in config else {}
    config.clear()
    config |= {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "dtype": "bfloat16",
        "tie_word_embeddings": True,
        **kept,
    }
    return True


# The index.


def _index(what: str, change: Callable[[Document, Output, Random], list[str]]) -> Callable[..., Harm | None]:
    """Change the index; `change` returns the names that its damage may be reported under."""

    def apply(output: Output, random: Random) -> Harm | None:
        if not output.has(INDEX):
            return None
        index = output.document(INDEX)
        names = change(index, output, random)
        output.write_document(INDEX, index)
        return Harm(((INDEX, *names),), what)

    return apply


def _some_entry(index: Document, random: Random) -> str:
    names = sorted(index["weight_map"])
    return str(names[int(random.integers(len(names)))])


def _entry_elsewhere(index: Document, output: Output, random: Random) -> list[str]:
    name = _some_entry(index, random)
    index["weight_map"][name] = next(shard for shard in output.shards if shard != index["weight_map"][name])
    return [name]


def _entry_to_nowhere(index: Document, output: Output, random: Random) -> list[str]:
    name = _some_entry(index, random)
    index["weight_map"][name] = "model-00099-of-00099.safetensors"
    return [name, "model-00099-of-00099.safetensors"]


def _entries_lost(index: Document, output: Output, random: Random) -> list[str]:
    name = _some_entry(index, random)
    del index["weight_map"][name]
    return [name]


def _entry_added(index: Document, output: Output, random: Random) -> list[str]:
    index["weight_map"]["model.layers.7.input_layernorm.weight"] = output.shards[0]
    return ["model.layers.7.input_layernorm.weight"]


def _total_size(index: Document, output: Output, random: Random) -> list[str]:
    metadata = index.setdefault("metadata", {})
    metadata["total_size"] = int(metadata.get("total_size", 0)) + int(random.integers(1, 10_000))
    return []


def _shard_unlisted(index: Document, output: Output, random: Random) -> list[str]:
    shard = some_shard(output, random)
    lost = [name for name, file in index["weight_map"].items() if file == shard]
    for name in lost:
        del index["weight_map"][name]
    return [shard, *lost]


# The record.


def _record(what: str, change: Callable[[Document, Random], list[str] | None]) -> Callable[..., Harm | None]:
    """Change the record; `change` returns the names that its damage may be reported under, None if it could not."""

    def apply(output: Output, random: Random) -> Harm | None:
        record = output.document(RECORD)
        names = change(record, random)
        if names is None:
            return None
        output.write_document(RECORD, record)
        return Harm(((RECORD, *names),), what)

    return apply


def _quantized(record: Document) -> list[str]:
    tensors = record.get("tensors", {})
    return [name for name, entry in tensors.items() if entry.get("decision") == "quantized"]


def _other_record(output: Output, random: Random) -> Harm | None:
    other = output.others.get("seed")
    if other is None:
        return None
    shutil.copyfile(other / RECORD, output.folder / RECORD)
    return Harm(((RECORD, *_quantized(output.document(RECORD)), *output.shards),), "of another model")


def _some_quantized(record: Document, random: Random) -> str:
    names = _quantized(record)
    return names[int(random.integers(len(names)))]


def _other_rule(record: Document, random: Random) -> list[str] | None:
    name = _some_quantized(record, random)
    entry = record["tensors"][name]
    for key, (one, other) in {"scale_rounding": ("floor", "rceil"), "dialect": ("mxcli", "modelopt")}.items():
        if key in entry:
            entry[key] = other if entry[key] == one else one
            return [name]
    return None


def _other_format(record: Document, random: Random) -> list[str]:
    name = _some_quantized(record, random)
    entry = record["tensors"][name]
    entry["format"] = "mxfp4_e2m1" if entry["format"] != "mxfp4_e2m1" else "nvfp4"
    return [name]


def _file_unlisted(record: Document, random: Random) -> list[str]:
    name = str(random.choice(record["files"]))
    record["files"] = [each for each in record["files"] if each != name]
    return [name]


def _file_added(record: Document, random: Random) -> list[str]:
    record["files"] = sorted([*record["files"], "chat_template.jinja"])
    return ["chat_template.jinja"]


def _tensor_unlisted(record: Document, random: Random) -> list[str]:
    name = _some_quantized(record, random)
    del record["tensors"][name]
    return [name]


def _hash_changed(key: str) -> Callable[[Document, Random], list[str] | None]:
    def other(text: str, random: Random) -> str:
        at = int(random.integers(len(text)))
        return text[:at] + ("0" if text[at] != "0" else "f") + text[at + 1 :]

    def change(record: Document, random: Random) -> list[str] | None:
        found = record.get(key)
        if not isinstance(found, dict) or not found:
            return None
        name = str(random.choice(sorted(found)))
        if not isinstance(found[name], dict):
            found[name] = other(found[name], random)
            return [name]
        entry = str(random.choice(sorted(found[name])))
        found[name][entry]["xxh3_128"] = other(found[name][entry]["xxh3_128"], random)
        return [entry]

    return change


DOCUMENT_DAMAGE: tuple[Damage, ...] = (
    Damage("tokenizer changed", _carried("tokenizer.json", lambda c: {**c, "version": "1.1"}), False, False),
    Damage("tokenizer cut", _document_cut("tokenizer.json"), values=False, seen=True),
    Damage("generation config lost", _carried("generation_config.json", lambda c: None), values=False, seen=False),
    Damage(
        "generation config changed",
        _carried("generation_config.json", lambda c: {**c, "eos_token_id": 7}),
        values=False,
        seen=False,
    ),
    Damage("config lost", _carried("config.json", lambda c: None), values=False, seen=True),
    Damage("config cut", _document_cut("config.json"), values=False, seen=True),
    Damage("config: number of layers", _number("num_hidden_layers"), values=False, seen=True),
    Damage("config: hidden size", _number("hidden_size"), values=False, seen=True),
    Damage("config: intermediate size", _number("intermediate_size"), values=False, seen=True),
    Damage("config: vocabulary", _number("vocab_size"), values=False, seen=True),
    Damage("config: attention heads", _number("num_attention_heads"), values=False, seen=True),
    Damage("config: key heads", _number("num_key_value_heads"), values=False, seen=True),
    Damage("config: experts", _number("num_local_experts"), values=False, seen=True),
    Damage(
        "config: tied embedding",
        _config("tie_word_embeddings", _untied, "tie_word_embeddings"),
        values=False,
        seen=True,
    ),
    Damage("config: dtype", _config("dtype", _dtype, "dtype"), values=False, seen=False),
    Damage("config: rope theta", _config("rope_theta", _set("rope_theta", 500000.0)), values=False, seen=False),
    Damage("config: epsilon", _config("rms_norm_eps", _set("rms_norm_eps", 1e-3)), values=False, seen=False),
    Damage("config: of another model", _config("another model's", _of_another_model), values=False, seen=True),
    Damage("config: settings removed", _config(_SETTINGS, _no_settings, _SETTINGS), values=False, seen=True),
    Damage("settings: format", _keyed("format", lambda x: _OTHER_FORMATS.get(x, "nvfp4-pack-quantized")), False, True),
    Damage("settings: method", _keyed("quant_method", lambda x: _OTHER_METHODS.get(x, "awq")), False, True),
    Damage("settings: algorithm", _keyed("quant_algo", lambda x: "NVFP4" if x != "NVFP4" else "FP8"), False, True),
    Damage("settings: group size", _keyed("group_size", lambda x: 2 * x), values=False, seen=True),
    Damage("settings: bits", _keyed("num_bits", lambda x: 4 if x != 4 else 8), values=False, seen=True),
    Damage("settings: type", _keyed("type", lambda x: "int" if x == "float" else x), values=False, seen=True),
    Damage("settings: strategy", _keyed("strategy", lambda x: "channel" if x != "channel" else "tensor"), False, True),
    Damage("settings: block size", _keyed("weight_block_size", lambda x: [64, 64]), values=False, seen=True),
    Damage("settings: scale dtype", _keyed("scale_dtype", lambda x: "torch.float32"), values=False, seen=True),
    Damage("settings: symmetric", _keyed("symmetric", lambda x: not x), values=False, seen=True),
    Damage("settings: targets", _keyed("targets", lambda x: ["re:.*nothing_proj$"]), values=False, seen=True),
    Damage("settings: list emptied", _setting("list emptied", _list_emptied, *_IGNORE), values=False, seen=True),
    Damage(
        "settings: list with a weight",
        _setting("list extended", _list_extended, *_IGNORE, _LISTED),
        values=False,
        seen=True,
    ),
    Damage("index: entry to another file", _index("an entry to another file", _entry_elsewhere), False, True),
    Damage("index: entry to no file", _index("an entry to a file not there", _entry_to_nowhere), False, True),
    Damage("index: entry lost", _index("an entry lost", _entries_lost), values=False, seen=True),
    Damage("index: entry added", _index("an entry added", _entry_added), values=False, seen=True),
    Damage("index: total size", _index("total_size", _total_size), values=False, seen=True),
    Damage("index: file not listed", _index("a file's entries lost", _shard_unlisted), values=False, seen=True),
    Damage("index cut", _document_cut(INDEX), values=False, seen=True),
    Damage("index lost", _carried(INDEX, lambda c: None), values=False, seen=True),
    Damage("record of another model", _other_record, values=False, seen=False, record=True),
    Damage("record: rule", _record("a tensor's rule", _other_rule), False, False, record=True),
    Damage("record: format", _record("a tensor's format", _other_format), False, False, record=True),
    Damage("record: file not listed", _record("files", _file_unlisted), False, False, record=True),
    Damage("record: file added", _record("files", _file_added), False, False, record=True),
    Damage("record: tensor not listed", _record("tensors", _tensor_unlisted), False, False, record=True),
    Damage("record: hash of a file", _record("sha256", _hash_changed("sha256")), False, False, record=True),
    Damage("record: hash of a tensor", _record("stored", _hash_changed("stored")), False, False, record=True),
    Damage("record: hash of a header", _record("headers", _hash_changed("headers")), False, False, record=True),
    Damage("record cut", _document_cut(RECORD), values=False, seen=False, record=True),
)
