"""A model's tokenizer as settings of a GGUF file, as far as the package gguf reads tokenizers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mxcli.errors import InputError, printable
from mxcli.files.gguf import gguf_package
from mxcli.files.plain import read_json_object

TOKENIZER, SENTENCEPIECE = "tokenizer.json", "tokenizer.model"
_SENTENCEPIECE_PRE_TOKENIZER: str | None = "default"
_ANY_FAULT = (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError, InputError)

# llama.cpp's names of pre-tokenizers, which split text before merges apply, by their regex in tokenizer.json.
_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PRE_TOKENIZERS = {
    _LETTERS + r"\p{N}{1,3}" + _REST: "llama-bpe",
    _LETTERS + r"\p{N}" + _REST: "qwen2",
}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer ready to be written: the kind of model, tokens with scores and types, the pre-tokenizer (None:
    unknown), and the package's merges and special tokens; or why there is none (`missing`)."""

    missing: str = ""
    model: str = ""
    tokens: tuple[tuple[bytes, float, int], ...] = ()
    pre_tokenizer: str | None = None
    special: Any = None

    @property
    def remarks(self) -> list[str]:
        """Return notes on the file's tokenizer."""
        if self.missing:
            return [f"The GGUF file holds no tokenizer, which llama.cpp needs: {self.missing}."]
        remarks = []
        if self.pre_tokenizer is None:
            remarks.append("The tokenizer's pre-tokenizer has no known name in llama.cpp, which uses its default.")
        if self.model == "gpt2" and not self.special.merges:
            remarks.append("The tokenizer has no merges, without which llama.cpp does not load the file.")
        return remarks

    def write(self, writer: Any, size: int) -> None:
        """Add the tokenizer, padded with unused tokens to the `size` of the embedding."""
        if self.missing:
            return
        gguf = gguf_package()
        fill = [(f"[PAD{index}]".encode(), -1000.0, gguf.TokenType.UNUSED) for index in range(len(self.tokens), size)]
        texts, scores, kinds = zip(*self.tokens, *fill, strict=True)
        writer.add_tokenizer_model(self.model)
        writer.add_tokenizer_pre(self.pre_tokenizer or "default")
        writer.add_token_list(list(texts))
        writer.add_token_scores(list(scores))
        writer.add_token_types([int(kind) for kind in kinds])
        self.special.add_to_gguf(writer, quiet=True)


def vocabulary_of(root: Path, size: int) -> Vocabulary:
    """Read the tokenizer of a model whose embedding has `size` rows, from the model's directory."""
    present = [name for name in (SENTENCEPIECE, TOKENIZER) if (root / name).is_file()]
    if not present:
        return Vocabulary(f"there is no {TOKENIZER} or {SENTENCEPIECE} next to the weights")
    gguf, pre_tokenizer = gguf_package(), _SENTENCEPIECE_PRE_TOKENIZER
    try:
        if present[0] == SENTENCEPIECE:
            vocabulary = gguf.SentencePieceVocab(root)
            tokens = vocabulary.all_tokens()
        else:
            described = read_json_object(root / TOKENIZER)
            vocabulary = gguf.BpeVocab(root)
            pre_tokenizer, tokens = _pre_tokenizer(described), _with_kinds(vocabulary.all_tokens(), described)
        found = tuple((text if isinstance(text, bytes) else text.encode(), score, kind) for text, score, kind in tokens)
        special = gguf.SpecialVocab(root, load_merges=vocabulary.tokenizer_model == "gpt2", n_vocab=size)
    except ImportError as error:
        return Vocabulary(f"reading {present[0]} needs the package {printable(error.name)}")
    except _ANY_FAULT as error:
        return Vocabulary(f"the package gguf does not read {present[0]} ({printable(error)})")
    if len(found) > size:
        return Vocabulary(f"it has {len(found):,} tokens and the embedding {size:,} rows")
    return Vocabulary(model=vocabulary.tokenizer_model, tokens=found, pre_tokenizer=pre_tokenizer, special=special)


def _with_kinds(tokens: Any, described: Mapping[str, Any]) -> Any:
    """Yield the tokens, with the kind of those that tokenizer.json lists as special or added."""
    kinds = gguf_package().TokenType
    added = {
        str(token["content"]): kinds.CONTROL if token.get("special") else kinds.USER_DEFINED
        for token in described.get("added_tokens", [])
    }
    for text, score, kind in tokens:
        plain = text.decode() if isinstance(text, bytes) else text
        yield text, score, added.get(plain, kind)


def _pre_tokenizer(described: Mapping[str, Any]) -> str | None:
    """Return llama.cpp's name of the pre-tokenizer; None if it has none here."""
    outer = described.get("pre_tokenizer") or {}
    steps = outer.get("pretokenizers", [outer])
    kinds = [step.get("type") for step in steps]
    if kinds == ["Split", "ByteLevel"]:
        return PRE_TOKENIZERS.get(steps[0].get("pattern", {}).get("Regex"))
    if kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits"):
        return "smollm"
    return "gpt-2" if kinds == ["ByteLevel"] and steps[0].get("use_regex", True) else None
