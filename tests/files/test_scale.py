"""Work grows in step with the number of tensors: counted in calls, not in seconds."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from raw_checkpoint import with_header

from mxcli.errors import UsageError
from mxcli.files.checkpoint import open_checkpoint
from mxcli.files.selection import Rule, select


def _write(root: Path, count: int, shards: int) -> Path:
    """A sharded model of `count` one-byte tensors with the names of a mixture of experts."""
    root.mkdir()
    names = [f"model.layers.{n // 512}.mlp.experts.{n % 512}.up_proj.weight" for n in range(count)]
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        own = names[shard::shards]
        weight_map |= dict.fromkeys(own, file)
        header = {name: {"dtype": "U8", "shape": [1, 1], "data_offsets": [n, n + 1]} for n, name in enumerate(own)}
        (root / file).write_bytes(with_header(header, bytes(len(own))))
    index = {"metadata": {"total_size": count}, "weight_map": weight_map}
    (root / "model.safetensors.index.json").write_text(json.dumps(index))
    return root


def _calls(work: Callable[[], object]) -> int:
    """How many Python and built-in functions the work calls."""
    count = 0

    def counted(_frame: object, event: str, _arg: object) -> None:
        nonlocal count
        if event in ("call", "c_call"):
            count += 1

    sys.setprofile(counted)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


RULES = [Rule(True, "*layers.1.*"), Rule(False, r"re:.*\.7\..*")]


def test_opening_and_selecting_is_linear(tmp_path: Path) -> None:
    small, large = (_write(tmp_path / str(count), count, 8) for count in (2_000, 8_000))
    open_checkpoint(small)

    def work(root: Path) -> Callable[[], object]:
        return lambda: select(open_checkpoint(root).tensors, RULES)

    assert _calls(work(large)) < 4.4 * _calls(work(small))


def test_hints_for_selectors_are_linear(tmp_path: Path) -> None:
    small, large = (open_checkpoint(_write(tmp_path / str(n), n, 2)).tensors for n in (2_000, 8_000))

    def work(tensors: object) -> Callable[[], object]:
        def attempt() -> None:
            with pytest.raises(UsageError):
                select(tensors, [Rule(True, "*.up_prj"), Rule(True, "re:x"), Rule(True, "@mtp")])  # type: ignore[arg-type]

        return attempt

    work(small)()
    assert _calls(work(large)) < 4.4 * _calls(work(small))


@pytest.mark.slow
def test_fifty_thousand_tensors(tmp_path: Path) -> None:
    root = _write(tmp_path / "m", 50_000, 4)
    checkpoints = []
    calls = _calls(lambda: checkpoints.append(open_checkpoint(root)))
    assert len(checkpoints[0].tensors) == 50_000
    assert calls < 80 * 50_000
