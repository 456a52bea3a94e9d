"""Models under formats and as checkpoints, beside predictions that torch computes in binary64."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import SAMPLE
from safetensors.torch import load_file, save_file

import mxcli
from mxcli.errors import InputError, RefusedError
from mxcli.flows.capture.model import parse_text
from mxcli.flows.evaluate.candidates import Candidate, of_checkpoint, of_formats, of_recipe
from mxcli.flows.evaluate.evaluate import Evaluation, evaluate_plan, plan_evaluation
from mxcli.flows.evaluate.measures import Pair, measures_of
from mxcli.flows.evaluate.windows import Reading

TEXT = parse_text("text", b"the quick brown fox jumps over the lazy dog and the small cat. " * 4)
READING = Reading(tokens=192, context=64)


def evaluated(*candidates: Candidate, source: Path = SAMPLE, reading: Reading = READING, **options: Any) -> Evaluation:
    return evaluate_plan(plan_evaluation(str(source), TEXT, candidates, reading), **options)


def measures(evaluation: Evaluation, at: int) -> dict[str, float | None]:
    each = evaluation.original if at < 0 else evaluation.evaluated[at]
    return dict(measures_of(Pair(each, evaluation.original)))


def log_probabilities(changed: dict[str, torch.Tensor]) -> torch.Tensor:
    """Log-probabilities of the sample over TEXT in binary64, [3, 63, 256], with other weights for some layers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(SAMPLE, dtype=torch.float64).eval()
    with torch.inference_mode():
        for name, weight in changed.items():
            model.get_submodule(name.removesuffix(".weight")).weight.copy_(weight)
        return torch.log_softmax(model(input_ids=tokens()).logits[:, :-1], -1)


def tokens() -> torch.Tensor:
    return torch.tensor(list(TEXT.content.encode())[:192]).reshape(3, 64)


def quantized_layers(format: str) -> dict[str, torch.Tensor]:
    weights = load_file(SAMPLE / "model.safetensors")
    layers = [name for name in weights if "proj" in name]
    return {name: torch.as_tensor(mxcli.quantize(weights[name], format).dequantize()) for name in layers}


def test_a_format_beside_torch_in_binary64() -> None:
    found = measures(evaluated(*of_formats(["mxfp4"], ["none"], {})), 0)
    p, q = log_probabilities({}), log_probabilities(quantized_layers("mxfp4"))
    targets = tokens()[:, 1:, None]
    own, its = q.gather(2, targets), p.gather(2, targets)
    kl = (p.exp() * (p - q)).sum(-1)
    assert found["loss"] == pytest.approx(-own.mean().item(), rel=1e-6)
    assert found["loss_change"] == pytest.approx((its - own).mean().item(), rel=1e-4)
    assert found["kl_mean"] == pytest.approx(kl.mean().item(), rel=1e-4)
    assert found["kl_max"] == pytest.approx(kl.max().item(), rel=1e-4)
    assert found["kl_median"] == pytest.approx(np.sort(kl.flatten().numpy())[94], rel=1e-4)
    assert found["same_top_percent"] == 100 * (p.argmax(-1) == q.argmax(-1)).double().mean().item()
    assert found["rms_change_percent"] == pytest.approx(
        100 * (own.exp() - its.exp()).square().mean().sqrt().item(), rel=1e-4
    )


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# ModelOpt's layout stores the decode scale of a tensor; that of compressed-tensors its reciprocal, rounded once more.
@pytest.mark.parametrize(("format", "layout"), [("nvfp4", "modelopt"), ("mxfp4", "compressed-tensors")])
@pytest.mark.usefixtures("one_thread")
def test_a_checkpoint_has_the_loss_of_its_format(format: str, layout: str, tmp_path: Path) -> None:
    from mxcli.cli.app import run

    words = ["quantize", str(SAMPLE), "--format", format, "--layout", layout, "-o", str(tmp_path / "out"), "-q"]
    assert run(words) == 0
    found = evaluated(*of_formats([format], ["none"], {}), of_checkpoint(str(tmp_path / "out")))
    one, other = found.evaluated
    assert all(
        np.array_equal(a.nll, b.nll) and np.array_equal(a.kl, b.kl)
        for a, b in zip(one.scores.windows, other.scores.windows, strict=True)
    )
    assert measures(found, 0)["bits_per_weight"] == pytest.approx(measures(found, 1)["bits_per_weight"], rel=1e-3)
    assert measures(found, 1)["bytes"] == sum(
        each.nbytes for each in load_file(tmp_path / "out" / "model.safetensors").values()
    )


def test_a_quantized_model_is_the_original_of_its_formats(tmp_path: Path) -> None:
    from mxcli.cli.app import run

    assert run(["quantize", str(SAMPLE), "--format", "mxfp8", "-o", str(tmp_path / "out"), "-q"]) == 0
    found = evaluated(*of_formats(["mxfp8"], ["none"], {}), source=tmp_path / "out")
    assert measures(found, 0)["loss_change"] == 0
    assert measures(found, 0)["kl_max"] == 0
    assert measures(found, -1)["bits_per_weight"] == pytest.approx(8.86, abs=0.01)


def test_inputs_are_quantized_too() -> None:
    found = evaluated(*of_formats(["mxfp8"], ["none", "same", "mxfp4"], {}))
    changes = [measures(found, at)["kl_mean"] for at in range(3)]
    assert changes == sorted(changes)
    assert [each.name for each in found.evaluated] == [
        "mxfp8_e4m3",
        "mxfp8_e4m3, inputs mxfp8_e4m3",
        "mxfp8_e4m3, inputs mxfp4_e2m1",
    ]


def test_a_recipe(tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text('format = "mxfp4"\n[[override]]\nselect = "*.mlp.*"\nkeep = true\n')
    found = evaluated(of_recipe(str(recipe), "none", {}), *of_formats(["mxfp4"], ["none"], {}))
    mixed, plain = (measures(found, at) for at in range(2))
    assert mixed["kl_mean"] < plain["kl_mean"]
    assert mixed["bits_per_weight"] > plain["bits_per_weight"] + 5


def test_predictions_are_kept_and_used_again(tmp_path: Path) -> None:
    candidates = tuple(of_formats(["mxfp8"], ["none"], {}))
    kept = tmp_path / "p"
    first = evaluated(*candidates, baseline=kept)
    again = evaluated(*candidates, baseline=kept)
    assert kept.stat().st_size > 189 * 256 * 4
    assert measures(first, 0) | {"tokens_per_second": None} == measures(again, 0) | {"tokens_per_second": None}
    assert measures(again, -1)["tokens_per_second"] is None
    with pytest.raises(RefusedError, match=r"has predictions of another run: .*context was 64 and is 32"):
        evaluated(*candidates, baseline=kept, reading=Reading(tokens=192, context=32))


def test_an_interrupted_run_continues(tmp_path: Path) -> None:
    candidates = tuple(of_formats(["mxfp8", "mxfp4"], ["none"], {}))
    whole = evaluated(*candidates)
    stops = iter([False] * 5 + [True] * 9)
    part = evaluated(*candidates, baseline=tmp_path / "p", stop=lambda: next(stops))
    assert (len(part.evaluated), part.unfinished) == (0, 2)
    done: list[str] = []
    rest = evaluated(*candidates, baseline=tmp_path / "p", resume=True, on_window=lambda *of: done.append(of[2]))
    for at in range(2):
        assert measures(rest, at) | {"tokens_per_second": 0} == measures(whole, at) | {"tokens_per_second": 0}
    lines = [json.loads(line) for line in (tmp_path / "p.scores").read_text().splitlines()[1:]]
    assert sorted((line["candidate"], line["window"]) for line in lines) == [
        (f"format {name} none", at) for name in ("mxfp4_e2m1", "mxfp8_e4m3") for at in range(3)
    ]


def damaged(folder: Path, name: str, change: Any) -> Path:
    folder.mkdir()
    tensors = load_file(SAMPLE / "model.safetensors")
    tensors[name] = change(tensors[name])
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_bytes((SAMPLE / "config.json").read_bytes())
    return folder


def with_nan(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y.view(-1)[0] = torch.nan
    return y


def test_a_model_that_predicts_nothing_is_refused(tmp_path: Path) -> None:
    source = damaged(tmp_path / "m", "model.norm.weight", with_nan)
    with pytest.raises(InputError, match="189 of 189 predictions of the original are not finite"):
        evaluated(*of_formats(["mxfp8"], ["none"], {}), source=source)


def test_a_candidate_that_predicts_nothing_has_no_loss(tmp_path: Path) -> None:
    other = damaged(tmp_path / "m", "model.norm.weight", with_nan)
    found = measures(evaluated(of_checkpoint(str(other))), 0)
    assert found["nonfinite"] == 189
    assert [found[name] for name in ("loss", "loss_change", "kl_mean", "kl_max")] == [None] * 4


@pytest.mark.parametrize(
    ("names", "fault"),
    [
        (["mxfp8", "mxfp8_e4m3"], "named twice"),
        (["mxfp8"] * 2, "'format mxfp8_e4m3 none' is named twice; name each candidate once"),
    ],
)
def test_candidates_are_named_once(names: Sequence[str], fault: str) -> None:
    with pytest.raises(RefusedError, match=fault):
        plan_evaluation(str(SAMPLE), TEXT, tuple(of_formats(names, ["none"], {})), READING)


def test_other_models_are_refused(tmp_path: Path) -> None:
    config = json.loads((SAMPLE / "config.json").read_text())
    source = damaged(tmp_path / "m", "lm_head.weight", lambda x: x[:128].clone())
    (source / "config.json").write_text(json.dumps({**config, "vocab_size": 128}))
    with pytest.raises(RefusedError, match=r"has a vocabulary of 128, and .* one of 256"):
        plan_evaluation(str(SAMPLE), TEXT, (of_checkpoint(str(source)),), READING)
    (source / "config.json").write_text(json.dumps({**config, "vocab_size": 4096}))
    with pytest.raises(InputError, match=r"has no tokenizer, and its vocabulary of 4,096 is not one of bytes"):
        plan_evaluation(str(source), TEXT, (), READING)
    (source / "config.json").unlink()
    with pytest.raises(InputError, match=r"has no config\.json with a model_type"):
        plan_evaluation(str(source), TEXT, (), READING)


def test_missing_weights_are_named(tmp_path: Path) -> None:
    tensors = load_file(SAMPLE / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    (tmp_path / "config.json").write_bytes((SAMPLE / "config.json").read_bytes())
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(
        InputError, match=r"lacks 1 weights of a LlamaForCausalLM, such as model\.layers\.1\.mlp\.up_proj"
    ):
        evaluated(*of_formats(["mxfp8"], ["none"], {}), source=tmp_path)
