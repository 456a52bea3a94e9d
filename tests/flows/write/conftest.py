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
def outputs_are_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing unconsumed and no stale marker in what is written."""

    def checked(checkpoint: Any, folder: Path, work: Any, options: Any) -> Any:
        outcome = write_checkpoint(checkpoint, folder, work, options)
        # A share has no final names, and what is looked at by another check may be of any kind.
        if outcome.complete and options.share is None and options.check is None:
            assert_clean(folder)
        return outcome

    written: Callable[..., Any] = checked
    for module in (convert, dequantize, quantize):
        monkeypatch.setattr(module, "write_checkpoint", written)
