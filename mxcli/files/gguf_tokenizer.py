"""The tokenizer of a model as settings of a GGUF file, as far as the package gguf reads tokenizers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mxcli.errors import InputError, printable
from mxcli.files.gguf import gguf_package
from mxcli.files.plain import read_json_object

TOKENIZER, SENTENCEPIECE = "tokenizer.json", "tokenizer.model"
_SENTENCEPIECE_CUT: str | None = "default"
_ANYTHING_ODD = (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError, InputError)

# How text is cut before merges apply, by the expression in tokenizer.json, under the name that llama.cpp knows it by.
_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CUTS = {
    _LETTERS + r"\p{N}{1,3}" + _REST: "llama-bpe",
    _LETTERS + r"\p{N}" + _REST: "qwen2",
}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer ready to be written: the kind of model, tokens with scores and types, how text is cut (None: not
    known), and what merges tokens and names special ones; or why there is none (`missing`)."""

    missing: str = ""
    model: str = ""
    tokens: tuple[tuple[bytes, float, int], ...] = ()
    cut: str | None = None
    special: Any = None

    @property
    def remarks(self) -> list[str]:
        """What a user should know of the file's tokenizer."""
        if self.missing:
            return [f"The GGUF file holds no tokenizer, which llama.cpp needs: {self.missing}."]
        if self.cut is None:
            return ["llama.cpp has no name known here for how the tokenizer cuts text first: it takes its default."]
        return []

    def write(self, writer: Any, size: int) -> None:
        """Add the tokenizer, filled up with unused tokens to the `size` of the embedding."""
        if self.missing:
            return
        gguf = gguf_package()
        fill = [(f"[PAD{place}]".encode(), -1000.0, gguf.TokenType.UNUSED) for place in range(len(self.tokens), size)]
        texts, scores, kinds = zip(*self.tokens, *fill, strict=True)
        writer.add_tokenizer_model(self.model)
        writer.add_tokenizer_pre(self.cut or "default")
        writer.add_token_list(list(texts))
        writer.add_token_scores(list(scores))
        writer.add_token_types([int(kind) for kind in kinds])
        self.special.add_to_gguf(writer, quiet=True)


def vocabulary_of(root: Path, size: int) -> Vocabulary:
    """The tokenizer beside a model whose embedding has `size` rows."""
    present = [name for name in (SENTENCEPIECE, TOKENIZER) if (root / name).is_file()]
    if not present:
        return Vocabulary(f"there is no {TOKENIZER} or {SENTENCEPIECE} beside the weights")
    gguf, cut = gguf_package(), _SENTENCEPIECE_CUT
    try:
        if present[0] == SENTENCEPIECE:
            vocabulary = gguf.SentencePieceVocab(root)
            tokens = vocabulary.all_tokens()
        else:
            described = read_json_object(root / TOKENIZER)
            vocabulary = gguf.BpeVocab(root)
            cut, tokens = _cut(described), _with_kinds(vocabulary.all_tokens(), described)
        found = tuple((text if isinstance(text, bytes) else text.encode(), score, kind) for text, score, kind in tokens)
        special = gguf.SpecialVocab(root, load_merges=vocabulary.tokenizer_model == "gpt2", n_vocab=size)
    except ImportError as error:
        return Vocabulary(f"reading {present[0]} needs the package {printable(error.name)}")
    except _ANYTHING_ODD as error:
        return Vocabulary(f"the package gguf does not read {present[0]} ({printable(error)})")
    if len(found) > size:
        return Vocabulary(f"it has {len(found):,} tokens and the embedding {size:,} rows")
    return Vocabulary(model=vocabulary.tokenizer_model, tokens=found, cut=cut, special=special)


def _with_kinds(tokens: Any, described: Mapping[str, Any]) -> Any:
    """Tokens of which tokenizer.json says that they are special, or added, as such."""
    kinds = gguf_package().TokenType
    added = {
        str(token["content"]): kinds.CONTROL if token.get("special") else kinds.USER_DEFINED
        for token in described.get("added_tokens", [])
    }
    for text, score, kind in tokens:
        plain = text.decode() if isinstance(text, bytes) else text
        yield text, score, added.get(plain, kind)


def _cut(described: Mapping[str, Any]) -> str | None:
    """The name of how text is cut; None for ways that have none here."""
    outer = described.get("pre_tokenizer") or {}
    steps = outer.get("pretokenizers", [outer])
    kinds = [step.get("type") for step in steps]
    if kinds == ["Split", "ByteLevel"]:
        return CUTS.get(steps[0].get("pattern", {}).get("Regex"))
    if kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits"):
        return "smollm"
    return "gpt-2" if kinds == ["ByteLevel"] and steps[0].get("use_regex", True) else None
