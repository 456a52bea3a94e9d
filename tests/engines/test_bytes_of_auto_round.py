"""auto-round's files of whole models, quantized without tuning, are ours, byte for byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lazy import Lazy, needs
from originals import differing, llama, ours, theirs

pytestmark = [pytest.mark.slow, needs("auto_round", "tokenizers", "torch", "transformers")]
auto_round: Any = Lazy("auto_round")
tokenizers: Any = Lazy("tokenizers")
transformers: Any = Lazy("transformers")


def produced(source: Path, output: Path, scheme: str, format: str, **settings: Any) -> Path:
    """What auto-round writes of a model by rounding to nearest alone."""
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    words = {str(number): number for number in range(model.config.vocab_size)}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="0"))
    )
    rounder = auto_round.AutoRound(
        model, tokenizer=tokenizer, scheme=scheme, iters=0, disable_opt_rtn=True, device_map="cpu", **settings
    )
    rounder.quantize_and_save(str(output), format=format)
    (folder,) = {path.parent for path in output.rglob("*.safetensors")}
    return folder
