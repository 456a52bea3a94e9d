"""Weights and scales that cannot be cut over devices (tensor parallelism)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mxcli.files.layouts.layout import Weight


QUERY = frozenset({"q_proj", "wq", "q", "to_q", "query", "q_b_proj", "kv_b_proj"})
KEY_VALUE = frozenset({"k_proj", "v_proj", "wk", "wv", "k", "v", "to_k", "to_v", "key", "value"})
COLUMN_PARALLEL = (
    QUERY
    | KEY_VALUE
    | frozenset(
        {"qkv_proj", "gate_proj", "up_proj", "gate_up_proj", "w1", "w3", "fc1", "c_fc", "dense_h_to_4h", "lm_head"}
    )
)
"""Last name parts of modules split by rows (outputs)."""
ROW_PARALLEL = frozenset({"o_proj", "down_proj", "w2", "wo", "out_proj", "fc2", "dense_4h_to_h"})
"""Last name parts of modules split by columns (inputs)."""
REPLICATED = frozenset({"q_a_proj", "kv_a_proj_with_mqa", "gate", "router"})
"""Last name parts of modules that every device holds whole."""
HEADS, KEY_VALUE_HEADS = "num_attention_heads", "num_key_value_heads"
CONFIG = "config.json"


@dataclass(frozen=True, slots=True)
class Uncut:
    """A weight, or a setting of the model, that does not divide over devices: the value, and what it must be."""

    where: str
    value: str
    need: str


def uncut(weights: Iterable[Weight], config: Mapping[str, object] | None, devices: int) -> Iterator[Uncut]:
    """Yield the heads and weights that do not divide into whole blocks over a number of devices; none for one."""
    if devices < 2:
        return
    heads = heads_of(config)
    yield from _indivisible_heads(heads, devices)
    for weight in weights:
        if len(weight.shape) != 2:
            continue
        last, (rows, columns) = _last(weight), weight.format.block
        if last in COLUMN_PARALLEL:
            parts = min(devices, heads.get(KEY_VALUE_HEADS, devices)) if last in KEY_VALUE else devices
            fault = _fault(weight.shape[0], parts, rows or 1, "rows")
        elif last in ROW_PARALLEL:
            fault = _fault(weight.shape[1], devices, columns or 1, "columns")
        else:
            continue
        if fault is not None:
            yield Uncut(weight.name, *fault)


def not_known(weights: Iterable[Weight]) -> list[str]:
    """Return the names of weights of which it is not known how engines cut them."""
    known = COLUMN_PARALLEL | ROW_PARALLEL | REPLICATED
    return [weight.name for weight in weights if len(weight.shape) != 2 or _last(weight) not in known]


def heads_of(config: Mapping[str, object] | None) -> dict[str, int]:
    """Return the numbers of heads in the configuration, of the model or of its text part."""
    parts = [config or {}, *(part for part in (config or {}).values() if isinstance(part, Mapping))]
    found: dict[str, int] = {}
    for key in (HEADS, KEY_VALUE_HEADS):
        values = [value for part in parts if isinstance(value := part.get(key), int) and value > 0]
        if values:
            found[key] = values[0]
    return found


def _last(weight: Weight) -> str:
    return weight.name.removesuffix(".weight").rpartition(".")[2]


def _fault(length: int, parts: int, block: int, what: str) -> Sequence[str] | None:
    """Return the value and the need if a length does not divide into whole blocks per device, else None."""
    if length % (parts * block) == 0:
        return None
    each = f"{length / parts:.6g}"
    need = "a whole number" if block == 1 else f"whole blocks of {block}"
    return f"{length:,} {what} over {parts} devices are {each} each", f"{need} of {what} for each device"


def _indivisible_heads(heads: Mapping[str, int], devices: int) -> Iterator[Uncut]:
    count, shared = heads.get(HEADS), heads.get(KEY_VALUE_HEADS)
    if count is not None and count % devices:
        yield Uncut(CONFIG, f"{HEADS} is {count}", f"a multiple of {devices} devices")
    if shared is not None and shared % devices and devices % shared:
        need = f"a multiple of {devices} devices, or a number that divides it"
        yield Uncut(CONFIG, f"{KEY_VALUE_HEADS} is {shared}", need)
