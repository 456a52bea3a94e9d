"""auto-round's files of whole models, quantized without tuning, are ours, byte for byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lazy import Lazy, needs

from engines.originals import differing, llama, ours, theirs

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


@pytest.mark.parametrize("layout", ["llm_compressor", "auto_round"])
@pytest.mark.parametrize(("scheme", "format"), [("MXFP4", "mxfp4"), ("MXFP8", "mxfp8")])
def test_every_byte_of_mx_formats(tmp_path: Path, scheme: str, format: str, layout: str) -> None:
    source = llama(tmp_path / "m", without=("zeros", "negative zeros", "tiny"))
    expected = theirs(produced(source, tmp_path / "theirs", scheme, layout))
    assert differing(expected, ours(source, tmp_path / "ours", format, "compressed-tensors", "auto-round")) == {}


def test_a_block_of_zeros_has_another_scale(tmp_path: Path) -> None:
    source = llama(tmp_path / "m", without=("tiny",))
    expected = theirs(produced(source, tmp_path / "theirs", "MXFP4", "llm_compressor"))
    found = ours(source, tmp_path / "ours", "mxfp4", "compressed-tensors", "auto-round")
    names = differing(expected, found)
    assert {name.rpartition(".")[2] for name in names} == {"weight_scale"}
    for name in names:
        pairs = zip(expected[name][2], found[name][2], strict=True)
        assert {pair for pair in pairs if pair[0] != pair[1]} == {(126, 0)}
