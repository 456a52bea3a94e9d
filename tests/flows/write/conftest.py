"""A check that every output of the tests passes through."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from clean_outputs import assert_clean

from mxcli.flows.write import convert, dequantize, quantize
from mxcli.flows.write.pipeline import write_checkpoint


@pytest.fixture(autouse=True)
def outputs_are_clean(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing unconsumed and no stale marker in what is written, but where a test is marked as about such a source."""
    if request.node.get_closest_marker("unclean") is not None:
        return

    def checked(checkpoint: Any, folder: Path, work: Any, options: Any) -> Any:
        outcome = write_checkpoint(checkpoint, folder, work, options)
        if outcome.complete and not options.check:
            assert_clean(folder)
        return outcome

    written: Callable[..., Any] = checked
    for module in (convert, dequantize, quantize):
        monkeypatch.setattr(module, "write_checkpoint", written)
