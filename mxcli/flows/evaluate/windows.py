"""The windows of a text that a model reads, and the tokens of each that are scored."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxcli.errors import InputError, RefusedError, UsageError, printable
from mxcli.flows.capture.model import Encode, Text

TOKENS = 16_384
"""Tokens read of a text by default."""
CONTEXT = 1024
LINES_SUFFIX = ".jsonl"
LEAST = 2
"""Tokens of a window: the first predicts the second."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The way a text is read: at most `tokens` of it (None: all), in windows of `context` tokens that begin `stride`
    tokens apart (None: without overlap)."""

    tokens: int | None = TOKENS
    context: int | None = None
    stride: int | None = None


@dataclass(frozen=True, slots=True)
class Window:
    """The tokens of a window, int64, and the position of the first one that is scored."""

    ids: NDArray[np.int64]
    scored_from: int

    @property
    def scored(self) -> int:
        """The number of tokens that are scored."""
        return len(self.ids) - self.scored_from


def context_of(reading: Reading, positions: int | None) -> int:
    """Return the tokens of a window: as requested, else CONTEXT or the most that the model reads. Raises UsageError for
    more than the model reads."""
    if reading.context is None:
        return min(CONTEXT, positions or CONTEXT)
    if positions is not None and reading.context > positions:
        raise UsageError(f"--context {reading.context:,}: the model reads at most {positions:,} tokens at once.")
    return reading.context


def windows_of(text: Text, encode: Encode, reading: Reading, context: int, vocabulary: int) -> tuple[Window, ...]:
    """Return the windows of a text, or of each conversation of a .jsonl file.

    Raises UsageError for a stride beyond the context, InputError for a text without two tokens or a line that is none,
    RefusedError for a token outside the vocabulary.
    """
    stride = context if reading.stride is None else reading.stride
    if stride > context:
        raise UsageError(f"--stride {stride:,} with --context {context:,}: tokens between windows would not be read.")
    found, left = list[Window](), reading.tokens
    for part in _parts(text):
        ids = np.asarray(encode(part), np.int64)[:left]
        found += _cut(ids, context, stride)
        left = None if left is None else left - len(ids)
        if left is not None and left < LEAST:
            break
    if not found:
        raise InputError(f"{printable(text.name)}: has no two tokens in a row; give a longer text.")
    highest = max(int(window.ids.max()) for window in found)
    if highest >= vocabulary:
        raise RefusedError(
            f"{printable(text.name)}: has token {highest:,}, and the model's vocabulary has {vocabulary:,}; use the "
            "tokenizer of this model, or another text."
        )
    return tuple(found)


def _cut(ids: NDArray[np.int64], context: int, stride: int) -> Iterator[Window]:
    """Yield the windows of one text: every token but the first is scored once, by the first window that has it."""
    end = 0
    for begin in range(0, len(ids), stride):
        window = ids[begin : begin + context]
        first = max(end - begin, 1)
        if len(window) > first:
            yield Window(window, first)
        end = begin + len(window)
        if end == len(ids):
            return


def _parts(text: Text) -> Iterator[Any]:
    """Yield the text, or the conversation or text of each line of a .jsonl file."""
    if not text.name.endswith(LINES_SUFFIX):
        yield text.content
        return
    for number, line in enumerate(text.content.splitlines(), 1):
        if line.strip():
            yield _of_line(text.name, number, line)


def _of_line(name: str, number: int, line: str) -> str | Sequence[dict[str, str]]:
    """Return what a line of a .jsonl file has: a text, or messages with role and content."""
    where = f"{printable(name)}: line {number:,}"
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where} is not JSON; give a line for each conversation.") from error
    messages = content.get("messages") if isinstance(content, dict) else None
    if isinstance(content, dict) and isinstance(content.get("text"), str):
        return str(content["text"])
    if not (isinstance(messages, list) and messages and all(map(_is_message, messages))):
        raise InputError(
            f'{where} has no conversation; give {{"messages": [{{"role": "user", "content": "…"}}, …]}} or {{"text": '
            '"…"}.'
        )
    return messages


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
