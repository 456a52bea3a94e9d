"""A text as tokens, cut into windows that are read one after another."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mxcli.errors import InputError, RefusedError, printable

PIECE_CHARACTERS = 1 << 20
BYTES = "bytes"

Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Text:
    """A text, what to call it, and the SHA-256 of its bytes."""

    name: str
    content: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Windows:
    """How much of a text is read: `steps` steps of `batch` windows of `tokens` tokens, without gaps, and of each window
    the next token too, which the last is to predict."""

    steps: int
    batch: int
    tokens: int

    @property
    def step_tokens(self) -> int:
        """Tokens that a step reads."""
        return self.batch * self.tokens

    @property
    def needed(self) -> int:
        """Tokens that the text must have."""
        return self.steps * self.step_tokens + 1

    def of_step(self, ids: NDArray[np.int64], step: int) -> NDArray[np.int64]:
        """[batch, tokens + 1]: the windows of a step, each with the token after it."""
        starts = (step * self.batch + np.arange(self.batch)) * self.tokens
        return np.take(ids, starts[:, None] + np.arange(self.tokens + 1))


def stated_text(name: str, data: bytes) -> Text:
    """The text that bytes spell; raises InputError where there is none, or it is not UTF-8."""
    shown = printable(name)
    if not data:
        raise InputError(f"{shown}: is empty, so that there is nothing to read; give a text.")
    try:
        content = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{shown}: is not UTF-8 text: byte 0x{data[error.start]:02x} at {error.start:,}; convert it first."
        ) from error
    return Text(name, content, hashlib.sha256(data).hexdigest())


def byte_tokens(text: str) -> list[int]:
    """Every byte of the text as a token, for models that are made so."""
    return list(text.encode())


def tokens_of(text: Text, encode: Encode, windows: Windows, vocabulary: int) -> NDArray[np.int64]:
    """The first tokens of a text, as many as the windows need.

    The text is encoded in pieces of whole lines, of a million characters at least, until there are enough. Raises
    InputError where there are too few, and RefusedError for a token that the model does not know.
    """
    ids: list[int] = []
    for piece in _pieces(text.content):
        ids += encode(piece)
        if len(ids) >= windows.needed:
            break
    if len(ids) < windows.needed:
        steps = max(0, len(ids) - 1) // windows.step_tokens
        way = f"--steps {steps}" if steps else "fewer --tokens"
        counted = "1 step" if windows.steps == 1 else f"{windows.steps:,} steps"
        raise InputError(
            f"{printable(text.name)}: has {len(ids):,} tokens, and {counted} of {windows.batch:,} x "
            f"{windows.tokens:,} tokens and the one after need {windows.needed:,}; give a longer text, or {way}."
        )
    found = np.array(ids[: windows.needed], np.int64)
    if found.max() >= vocabulary:
        at = int(np.argmax(found >= vocabulary))
        raise RefusedError(
            f"{printable(text.name)}: token {at:,} is {found[at]:,}, and the model knows those below {vocabulary:,} "
            "only; give a text that it can read, or the tokenizer that belongs to it."
        )
    return found


def _pieces(content: str) -> Iterator[str]:
    start = 0
    while start < len(content):
        line_end = content.find("\n", start + PIECE_CHARACTERS)
        end = len(content) if line_end < 0 else line_end + 1
        yield content[start:end]
        start = end
