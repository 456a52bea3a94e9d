"""Tokenizers in GGUF files: what is carried, and what is said where it is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mxcli.files.gguf_metadata import gguf_header
from mxcli.files.gguf_tokenizer import PRE_TOKENIZERS, Vocabulary, vocabulary_of
from mxcli.files.layouts.layout import Entry

gguf = pytest.importorskip("gguf")

BYTES = {"type": "ByteLevel", "use_regex": True}
LLAMA_3, QWEN_2 = PRE_TOKENIZERS


def tokenizer(**more: Any) -> dict[str, Any]:
    return {
        "model": {"type": "BPE", "vocab": {"<s>": 0, "a": 1, "b": 2, "ab": 3}, "merges": [["a", "b"]]},
        "decoder": {"type": "ByteLevel"},
        "pre_tokenizer": BYTES,
        "added_tokens": [
            {"id": 0, "content": "<s>", "special": True},
            {"id": 4, "content": "<end>", "special": True},
            {"id": 5, "content": "<x>", "special": False},
        ],
        **more,
    }


def beside(folder: Path, described: Any) -> Path:
    (folder / "tokenizer.json").write_text(json.dumps(described))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "<end>"}))
    return folder


def written(vocabulary: Vocabulary, folder: Path, size: int) -> dict[str, Any]:
    header = gguf_header("llama", 38, [lambda writer: vocabulary.write(writer, size)], [Entry("a", "F32", (8,))])
    (folder / "m.gguf").write_bytes(header + bytes(32))
    fields = gguf.GGUFReader(folder / "m.gguf").fields
    return {
        key.removeprefix("tokenizer.ggml."): fields[key].contents() for key in fields if key.startswith("tokenizer")
    }


def test_a_byte_level_tokenizer_is_carried(tmp_path: Path) -> None:
    vocabulary = vocabulary_of(beside(tmp_path, tokenizer()), 8)
    assert vocabulary.remarks == []
    assert written(vocabulary, tmp_path, 8) == {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": ["<s>", "a", "b", "ab", "<end>", "<x>", "[PAD6]", "[PAD7]"],
        "scores": [0.0, 0.0, 0.0, 0.0, -1000.0, -1000.0, -1000.0, -1000.0],
        "token_type": [3, 1, 1, 1, 3, 4, 5, 5],
        "merges": ["a b"],
        "bos_token_id": 0,
        "eos_token_id": 4,
    }


@pytest.mark.parametrize(
    ("steps", "cut"),
    [
        ([{"type": "Split", "pattern": {"Regex": LLAMA_3}}, {"type": "ByteLevel", "use_regex": False}], "llama-bpe"),
        ([{"type": "Split", "pattern": {"Regex": QWEN_2}}, {"type": "ByteLevel", "use_regex": False}], "qwen2"),
        ([{"type": "Digits", "individual_digits": True}, BYTES], "smollm"),
        ([{"type": "Split", "pattern": {"Regex": "."}}, BYTES], None),
        ([{"type": "Whitespace"}], None),
    ],
)
def test_how_text_is_cut_is_named_where_it_is_known(tmp_path: Path, steps: list[Any], cut: str | None) -> None:
    described = tokenizer(pre_tokenizer={"type": "Sequence", "pretokenizers": steps})
    vocabulary = vocabulary_of(beside(tmp_path, described), 8)
    assert vocabulary.pre_tokenizer == cut
    assert len(vocabulary.remarks) == (cut is None)
    assert written(vocabulary, tmp_path, 8)["pre"] == (cut or "default")


@pytest.mark.parametrize(
    ("described", "why"),
    [
        ({"model": {"type": "Unigram"}, "decoder": {"type": "ByteLevel"}}, "Cannot find GPT-2 BPE tokenizer"),
        ([], "the top of the JSON is list, not an object"),
        ({}, "does not read tokenizer.json"),
        (tokenizer(added_tokens=[{"id": 9, "content": "<far>"}]), "to be sequential"),
        (tokenizer(added_tokens=[7]), "does not read tokenizer.json"),
    ],
)
def test_one_that_the_package_does_not_read_is_reported(tmp_path: Path, described: Any, why: str) -> None:
    vocabulary = vocabulary_of(beside(tmp_path, described), 8)
    assert why in vocabulary.remarks[0]
    assert vocabulary.remarks[0].startswith("The GGUF file holds no tokenizer, which llama.cpp needs: ")
    assert written(vocabulary, tmp_path, 8) == {}


@pytest.mark.parametrize(("merges", "said"), [([], True), (["a b"], False), ([["a", "b"]], False)])
def test_a_tokenizer_without_merges_is_reported(tmp_path: Path, merges: list[Any], said: bool) -> None:
    model = {"type": "BPE", "vocab": {"<s>": 0, "a": 1, "b": 2, "ab": 3}, "merges": merges}
    remark = "The tokenizer has no merges, without which llama.cpp does not load the file."
    assert (remark in vocabulary_of(beside(tmp_path, tokenizer(model=model)), 8).remarks) is said


def test_none_and_one_that_is_too_large_are_reported(tmp_path: Path) -> None:
    assert "there is no tokenizer.json or tokenizer.model next to" in vocabulary_of(tmp_path, 8).remarks[0]
    assert "it has 6 tokens and the embedding 5 rows" in vocabulary_of(beside(tmp_path, tokenizer()), 5).remarks[0]
