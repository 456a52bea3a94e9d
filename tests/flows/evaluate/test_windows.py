"""Windows of texts: every token but the first is scored once."""

from __future__ import annotations

import numpy as np
import pytest

from mxcli.errors import InputError, RefusedError, UsageError
from mxcli.flows.capture.model import Text, byte_tokens, parse_text
from mxcli.flows.evaluate.windows import Reading, context_of, windows_of

LETTERS = "abcdefghij"


def text(content: str, name: str = "a.txt") -> Text:
    return Text(name, content, "0")


def read(content: str, reading: Reading, context: int, name: str = "a.txt") -> list[tuple[str, int]]:
    found = windows_of(text(content, name), byte_tokens, reading, context, 256)
    return [(bytes(window.ids.tolist()).decode(), window.scored_from) for window in found]


def test_windows_do_not_overlap() -> None:
    assert read(LETTERS, Reading(), 4) == [("abcd", 1), ("efgh", 1), ("ij", 1)]


def test_a_single_token_at_the_end_is_not_scored() -> None:
    assert read(LETTERS[:9], Reading(), 4) == [("abcd", 1), ("efgh", 1)]


def test_a_stride_scores_each_token_once() -> None:
    found = read(LETTERS, Reading(stride=2), 4)
    assert found == [("abcd", 1), ("cdef", 2), ("efgh", 2), ("ghij", 2)]
    assert "".join(window[first:] for window, first in found) == LETTERS[1:]


def test_an_uneven_stride() -> None:
    assert read(LETTERS, Reading(stride=3), 5) == [("abcde", 1), ("defgh", 2), ("ghij", 2)]


def test_the_number_of_tokens_is_limited() -> None:
    assert read(LETTERS, Reading(tokens=6), 4) == [("abcd", 1), ("ef", 1)]


def test_lines_of_texts_are_windows_of_their_own() -> None:
    lines = '{"text": "abc"}\n\n{"text": "defgh"}\n{"text": "i"}\n'
    assert read(lines, Reading(), 4, "a.jsonl") == [("abc", 1), ("defg", 1)]


def test_lines_of_messages_are_given_to_the_encoder() -> None:
    given = []

    def encode(part: object) -> list[int]:
        given.append(part)
        return [1, 2, 3]

    lines = '{"messages": [{"role": "user", "content": "hi"}]}\n'
    (window,) = windows_of(text(lines, "a.jsonl"), encode, Reading(), 8, 4)
    assert given == [[{"role": "user", "content": "hi"}]]
    assert window.ids.tolist() == [1, 2, 3]
    assert window.scored == 2


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("[1]", "a.jsonl: line 1 has no conversation"),
        ('{"messages": []}', "a.jsonl: line 1 has no conversation"),
        ('{"messages": [{"role": "user"}]}', "a.jsonl: line 1 has no conversation"),
        ("{", "a.jsonl: line 1 is not JSON"),
    ],
)
def test_other_lines_are_refused(line: str, fault: str) -> None:
    with pytest.raises(InputError, match=fault):
        read(line, Reading(), 4, "a.jsonl")


def test_what_cannot_be_scored_is_refused() -> None:
    with pytest.raises(InputError, match=r"a\.txt: has no two tokens in a row"):
        read("a", Reading(), 4)
    with pytest.raises(UsageError, match="--stride 5 with --context 4"):
        read(LETTERS, Reading(stride=5), 4)
    with pytest.raises(RefusedError, match="has token 122, and the model's vocabulary has 100"):
        windows_of(text("az"), byte_tokens, Reading(), 4, 100)


def test_the_context_is_what_the_model_reads() -> None:
    assert [context_of(Reading(), positions) for positions in (128, 4096, None)] == [128, 1024, 1024]
    assert context_of(Reading(context=64), 128) == 64
    with pytest.raises(UsageError, match="--context 129: the model reads at most 128 tokens at once"):
        context_of(Reading(context=129), 128)


def test_tokens_are_64_bit_integers() -> None:
    assert windows_of(text("ab"), byte_tokens, Reading(), 4, 256)[0].ids.dtype == np.int64


def test_ends_of_lines_are_line_feeds() -> None:
    assert parse_text("a.txt", b"a\r\nb\rc\n").content == "a\nb\nc\n"
