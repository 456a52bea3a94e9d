"""Checks of how weights divide over several devices (tensor parallelism)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mxcli.flows.soundness.finding import PROBLEM, Check, Finding
from mxcli.flows.soundness.subject import Subject

QUERY = frozenset({"q_proj", "wq", "q", "to_q", "query", "q_b_proj", "kv_b_proj"})
KEY_VALUE = frozenset({"k_proj", "v_proj", "wk", "wv", "k", "v", "to_k", "to_v", "key", "value"})
COLUMN_PARALLEL = (
    QUERY
    | KEY_VALUE
    | frozenset(
        {"qkv_proj", "gate_proj", "up_proj", "gate_up_proj", "w1", "w3", "fc1", "c_fc", "dense_h_to_4h", "lm_head"}
    )
)
"""Last parts of modules whose rows, the outputs, are divided."""
ROW_PARALLEL = frozenset({"o_proj", "down_proj", "w2", "wo", "out_proj", "fc2", "dense_4h_to_h"})
"""Last parts of modules whose columns, the inputs, are divided."""
HEADS, KEY_VALUE_HEADS = "num_attention_heads", "num_key_value_heads"


def _divided(subject: Subject) -> Iterator[Finding]:
    devices = subject.tensor_parallel
    if devices is None or devices < 2:
        return
    heads = _heads(subject.checkpoint.config)
    yield from _indivisible_heads(heads, devices)
    for name, stored in subject.weights.items():
        weight = stored.weight
        if len(weight.shape) != 2:
            continue
        last = name.removesuffix(".weight").rpartition(".")[2]
        rows, columns = weight.format.block
        if last in COLUMN_PARALLEL:
            parts = min(devices, heads.get(KEY_VALUE_HEADS, devices)) if last in KEY_VALUE else devices
            fault = _fault(weight.shape[0], parts, rows or 1, "rows")
        elif last in ROW_PARALLEL:
            fault = _fault(weight.shape[1], devices, columns or 1, "columns")
        else:
            continue
        if fault is not None:
            yield Finding(name, *fault, "Use fewer devices, or a format with smaller blocks.")


def _fault(length: int, parts: int, block: int, what: str) -> tuple[str, str] | None:
    """What is there and what is needed where a length does not divide into whole blocks for each device."""
    if length % (parts * block) == 0:
        return None
    each = f"{length / parts:.6g}"
    need = "a whole number" if block == 1 else f"whole blocks of {block}"
    return f"{length:,} {what} over {parts} devices are {each} each", f"{need} of {what} for each device"


def _indivisible_heads(heads: Mapping[str, int], devices: int) -> Iterator[Finding]:
    count, shared = heads.get(HEADS), heads.get(KEY_VALUE_HEADS)
    if count is not None and count % devices:
        yield Finding("config.json", f"{HEADS} is {count}", f"a multiple of {devices} devices", "Use fewer devices.")
    if shared is not None and shared % devices and devices % shared:
        yield Finding(
            "config.json",
            f"{KEY_VALUE_HEADS} is {shared}",
            f"a multiple of {devices} devices, or a number that divides it",
            "Use fewer devices.",
        )


def _heads(config: Mapping[str, object] | None) -> dict[str, int]:
    """The numbers of heads that the configuration tells, of the model or of its text part."""
    parts = [config or {}, *(part for part in (config or {}).values() if isinstance(part, Mapping))]
    found: dict[str, int] = {}
    for key in (HEADS, KEY_VALUE_HEADS):
        values = [value for part in parts if isinstance(value := part.get(key), int) and value > 0]
        if values:
            found[key] = values[0]
    return found


DEVICE_CHECKS: tuple[Check[Subject], ...] = (
    Check(
        "tensor_parallel",
        PROBLEM,
        "weights that do not divide over the devices asked about",
        "rows of q, k, v, gate, up and columns of o, down over the number of devices, in whole blocks; heads as the "
        "configuration tells them",
        _divided,
    ),
)
