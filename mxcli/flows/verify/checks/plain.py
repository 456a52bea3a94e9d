"""Checks of plain tensors: norms, embeddings, biases and layers that were kept."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from mxcli.files.checkpoint import Checkpoint, read
from mxcli.files.finite import FLOAT_BITS, PIECE_ELEMENTS, may_be_infinite
from mxcli.files.tensors import Array, TensorInfo
from mxcli.flows.verify.checks.check import PROBLEM, WARNING, Check, Finding
from mxcli.flows.verify.errors import widened

HUGE = 2.0**16
"""No plain tensor of a known model reaches this magnitude, except buffers."""
RUN_BYTES = 4096
"""Zeros of a matrix are looked at in pieces of this size."""
FEW_RUNS = 64
"""A matrix with more runs of zeros than this was pruned."""
ADD_ONE = frozenset(
    {
        *(
            "gemma",
            "gemma2",
            "gemma3",
            "gemma3_text",
            "recurrent_gemma",
            "vaultgemma",
            "t5gemma",
            "t5gemma2",
            "paligemma",
        ),
        *("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "nemotron"),
    }
)
"""Model types whose norms multiply by 1 + their values."""
_COMPARE = "Compare with --against SOURCE."


@dataclass(frozen=True, slots=True)
class PlainSummary:
    """A plain tensor: its largest finite magnitude, how many values are NaN and infinite, the index of the first of
    these, and the runs of zeros as first and last element (in pieces of RUN_BYTES). With `adds_one` it is a norm that
    multiplies by 1 + its values, which begin as 0."""

    info: TensorInfo
    amax: float
    nan: int
    infinite: int
    first: int | None
    zeros: tuple[tuple[int, int], ...]
    adds_one: bool = False


def plain_tensors(checkpoint: Checkpoint, quantized: frozenset[str]) -> tuple[TensorInfo, ...]:
    """Return the float tensors that hold values by themselves; `quantized` are the tensors of quantized weights."""
    return tuple(
        info for name, info in checkpoint.tensors.items() if name not in quantized and info.dtype in FLOAT_BITS
    )


def summarize_plain(checkpoint: Checkpoint, info: TensorInfo) -> PlainSummary:
    """Read a plain tensor and return its summary."""
    row = FLOAT_BITS[info.dtype]
    mask = np.asarray(row.mask, row.unsigned)
    x = read(checkpoint, info).reshape(-1)
    bits = x.view(row.unsigned)
    largest = _largest_by_piece(bits, mask)
    top = int(largest.max(initial=0))
    adds_one = info.role == "norm" and bool(_model_types(checkpoint) & ADD_ONE)
    if top < row.infinity:
        return PlainSummary(info, _value(top, info.dtype), 0, 0, None, _zero_runs(bits), adds_one)
    found = bits & mask
    bad = found >= row.infinity
    finite = int(found[~bad].max(initial=0))
    nan = int(np.count_nonzero(found > row.infinity))
    infinite, first = int(np.count_nonzero(bad)) - nan, int(bad.argmax())
    return PlainSummary(info, _value(finite, info.dtype), nan, infinite, first, _zero_runs(bits), adds_one)


def _model_types(checkpoint: Checkpoint) -> set[object]:
    """Return the model types that the configuration and its parts state."""
    config = checkpoint.config or {}
    parts = [config, *(part for part in config.values() if isinstance(part, Mapping))]
    return {kind for part in parts if isinstance(kind := part.get("model_type"), str)}


def _largest_by_piece(bits: Array, mask: Array) -> Array:
    """Return the largest magnitude of each piece of a tensor, as bits."""
    pieces = range(0, bits.size, PIECE_ELEMENTS)
    return np.asarray([(bits[at : at + PIECE_ELEMENTS] & mask).max() for at in pieces], bits.dtype)


def _value(bits: int, dtype: str) -> float:
    unsigned = FLOAT_BITS[dtype].unsigned
    stored = np.asarray([bits], unsigned)
    values = stored if dtype == "BF16" else stored.view({"F32": "f4", "F16": "f2", "F64": "f8"}[dtype])
    return float(widened(values, dtype)[0])


def _zero_runs(bits: Array) -> tuple[tuple[int, int], ...]:
    """Return first and last element of each run of pieces of RUN_BYTES that are all zero bits."""
    each = RUN_BYTES // bits.itemsize
    whole = bits.size // each
    if not whole:
        return ()
    # Most pieces differ in their first element already.
    pieces = bits[: whole * each].reshape(whole, each)
    at = np.flatnonzero(pieces[:, 0] == 0)
    at = at[~pieces[at].any(axis=1)]
    if not at.size:
        return ()
    ends = np.flatnonzero(np.diff(at) > 1)
    begins, lasts = at[np.concatenate(([0], ends + 1))], at[np.concatenate((ends, [at.size - 1]))]
    return tuple(
        _widest(bits, int(begin) * each, int(last + 1) * each, each) for begin, last in zip(begins, lasts, strict=True)
    )


def _widest(bits: Array, begin: int, end: int, each: int) -> tuple[int, int]:
    """Return a run of zeros with the zeros right before and after it."""
    before, after = np.flatnonzero(bits[max(0, begin - each) : begin]), np.flatnonzero(bits[end : end + each])
    begin = max(0, begin - each) + int(before[-1]) + 1 if before.size else max(0, begin - each)
    return begin, end + int(after[0]) if after.size else min(bits.size, end + each)


def _not_finite(plain: PlainSummary) -> Iterator[Finding]:
    infinite = 0 if may_be_infinite(plain.info.name, plain.info.role) else plain.infinite
    if plain.nan or infinite:
        counts = [f"{count:,} {what}" for count, what in ((plain.nan, "NaN"), (infinite, "infinite")) if count]
        yield Finding(
            plain.info.name,
            f"{' and '.join(counts)} of {plain.info.elements:,} values, the first at {_index(plain)}",
            "finite values: others make every output NaN",
            "Copy the tensor from the source: mxcli verify … --against SOURCE --repair.",
        )


def _index(plain: PlainSummary) -> list[int]:
    assert plain.first is not None
    return [int(at) for at in np.unravel_index(plain.first, plain.info.shape)] if plain.info.shape else []


def _zero(plain: PlainSummary, *, words: bool) -> Iterator[Finding]:
    is_position = plain.info.role == "embedding" and _POSITION.search(plain.info.name) is not None
    roles = _NEVER_ZERO if words else _MAY_BE_ZERO
    is_other = is_position == words if is_position else plain.info.role not in roles
    is_usual = plain.adds_one or plain.info.elements == 1 or is_other
    if plain.amax == 0 and not plain.nan and not is_usual:
        yield Finding(
            plain.info.name,
            f"all {plain.info.elements:,} values are 0",
            "other values, unless the layer is not used or adds 1 to them",
            _COMPARE,
        )


_MAY_BE_ZERO = frozenset({"norm", "weight", "router"})
_POSITION = re.compile(r"pos(ition|_emb|_bias)|(^|\.)[cm]ls_token|relative_|class_emb|time_emb|mask_token|registers?")
"""Tables that begin training at 0, and may stay there: those of positions and of special tokens."""
_NEVER_ZERO = frozenset({"embedding", "lm_head"})
_DENSE = frozenset({"embedding", "lm_head", "weight", "mtp"})


def _huge(plain: PlainSummary) -> Iterator[Finding]:
    if plain.amax > HUGE and plain.info.role in _MAY_BE_ZERO | _NEVER_ZERO:
        magnitude = f"2^{math.frexp(plain.amax)[1] - 1}"
        yield Finding(
            plain.info.name,
            f"its values reach {plain.amax:.3g} ({magnitude})",
            f"values below {HUGE:,.0f}, as in known models",
            _COMPARE,
        )


def _zero_pieces(plain: PlainSummary, *, within: bool) -> Iterator[Finding]:
    """Yield runs of zeros in a matrix that begin or end `within` a row, or that are whole rows before the last ones."""
    info = plain.info
    if info.role not in _DENSE or len(info.shape) < 2 or not 0 < len(plain.zeros) <= FEW_RUNS or not plain.amax:
        return
    columns = info.shape[-1]
    for begin, end in plain.zeros:
        rows = (begin // columns, (end - 1) // columns)
        whole = all(at % columns <= _SLACK or columns - at % columns <= _SLACK for at in (begin, end))
        several = end - begin >= (_ROWS * columns if end < info.elements else info.elements / 10)
        if not whole if within else whole and several:
            yield Finding(
                info.name,
                f"elements {begin:,} to {end:,} are 0 (rows {rows[0]:,} to {rows[1]:,} of {list(info.shape)})",
                "other values: trained weights are not 0 in one piece",
                _COMPARE,
            )


_SLACK = 16
"""Zeros next to a row of zeros that may be values of other rows."""
_ROWS = 8
"""Fewer rows of zeros are entries that the model does not use."""

PLAIN_CHECKS: tuple[Check[PlainSummary], ...] = (
    Check(
        "nan_plain",
        PROBLEM,
        "plain tensors with values that are NaN or infinite",
        "every value of every float tensor that is not quantized; infinities of buffers such as masks and of biases of "
        "logits are left out",
        _not_finite,
    ),
    Check(
        "zero_plain",
        WARNING,
        "plain tensors that are all 0",
        "norms, routers, tables of positions and layers that were kept",
        lambda plain: _zero(plain, words=False),
    ),
    Check(
        "zero_words",
        PROBLEM,
        "embeddings and output heads that are all 0",
        "every value of embeddings of words and output heads",
        lambda plain: _zero(plain, words=True),
    ),
    Check(
        "zeros_within",
        PROBLEM,
        "matrices of which a part is 0",
        f"runs of {RUN_BYTES:,} bytes of zeros within rows, in embeddings and layers that were kept; not in "
        "pruned ones",
        lambda plain: _zero_pieces(plain, within=True),
    ),
    Check(
        "zero_rows",
        PROBLEM,
        "matrices of which many rows are 0",
        f"{_ROWS} rows of zeros or more in one piece, before the last row, or a tenth of all rows",
        lambda plain: _zero_pieces(plain, within=False),
    ),
    Check(
        "huge_plain",
        PROBLEM,
        "plain tensors with values far larger than in known models",
        f"magnitudes above {HUGE:,.0f} in norms, embeddings, heads and layers that were kept",
        _huge,
    ),
)
CERTAIN_PLAIN_CHECKS = tuple(check for check in PLAIN_CHECKS if check.name in ("nan_plain", "zero_plain"))
"""Checks whose findings do not depend on a proof."""
_DOUBTED = tuple(check for check in PLAIN_CHECKS if check not in CERTAIN_PLAIN_CHECKS)


def _odd(plain: PlainSummary) -> Iterator[Finding]:
    for check in _DOUBTED:
        for finding in check.find(plain):
            need = f"{finding.need}; but the bytes are those that were read of the source"
            yield replace(finding, need=need, way_out="Check the source, or the model, for a part that is not used.")


COPIED_CHECKS: tuple[Check[PlainSummary], ...] = (
    Check(
        "odd_plain",
        WARNING,
        "plain tensors that look damaged, and are as in the source",
        f"what {', '.join(check.name for check in _DOUBTED)} find, where the record or the source proves the bytes",
        _odd,
    ),
)
"""Checks of tensors whose bytes are proven: what looks like damage is what the model has."""
