"""What recording costs: `python tests/flows/capture/time_recording.py MODEL_DIR`, with mxcli[capture] installed.

Steps of 256 tokens, forward and backward in binary32, with nothing recorded and with more and more of it; seconds of a
step, the median of eight in two series.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers

import mxcli

TOKENS, STEPS, SERIES = 256, 4, 2
KINDS: dict[str, dict[str, Any] | None] = {
    "nothing": None,
    "X and dY of 64 tokens": {"sample_rows": 64, "roles": ("activation", "gradient")},
    "X and dY": {"roles": ("activation", "gradient")},
    "X, dY and W": {},
}


def main(model_directory: str) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32)
    tokens = (torch.arange(TOKENS)[None] * 7 + 100) % model.config.vocab_size

    def seconds(recorder: Any = None) -> float:
        start = time.perf_counter()
        model.zero_grad(set_to_none=True)
        model(input_ids=tokens, labels=tokens).loss.backward()
        if recorder is not None:
            recorder.step()
        return time.perf_counter() - start

    seconds()
    for kind, options in KINDS.items():
        taken: list[float] = []
        for _ in range(SERIES):
            if options is None:
                taken += [seconds() for _ in range(STEPS)]
                continue
            with (
                tempfile.TemporaryDirectory() as folder,
                mxcli.capture(model, Path(folder) / "steps", **options) as recorder,
            ):
                taken += [seconds(recorder) for _ in range(STEPS)]
        print(f"{kind:24} {statistics.median(taken):.2f} s ({min(taken):.2f} to {max(taken):.2f})", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
