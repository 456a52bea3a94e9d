"""`mxcli recommend`: its forms and files, and that `quantize` carries out what it says."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import CAPTURES, SAMPLE, strict_json
from tiny_models import LLAMA, bf16, floats, llama, write_model

from mxcli.cli import recommend
from mxcli.output.recommendation import SORTS

WORDS = ("recommend", SAMPLE, "--formats", "mxfp4,nvfp4,mxfp8")
KEY = "model.layers.0.self_attn.q_proj+k_proj+v_proj"


def test_the_table_and_what_follows(mxcli: Callable[..., Any]) -> None:
    code, out, err = mxcli(*WORDS, "--bits", "5", "--top", "2")
    assert code == 0
    lines = out.splitlines()
    assert lines[1] == (
        "target: at most 5 bits per element on average, scales included; chosen for 786 k elements in 28 tensors"
    )
    assert lines[2] == "harm: error of weights (weight-error), sum over tensors of sum (y - x)^2 / sum x^2"
    assert [line.split()[0] for line in lines if line.startswith("model.")] == [
        f"model.layers.{number}.mlp.down_proj.weight" for number in (1, 2)
    ]
    assert "2 of 16 groups shown, most harm per tensor first" in lines
    assert lines[-5:] == [
        "Recommended: 4.97 bits per element on average, nvfp4 for 13, mxfp8_e4m3 for 3; 0 of 16 groups kept.",
        "That removes 52.9 % of the harm that mxfp4_e2m1 throughout would do (0.178 of 0.379).",
        "Harm of simple choices within the target: mxfp4_e2m1 throughout 0.379, nvfp4 throughout 0.255, dealt at "
        "random 0.319, first and last blocks high 0.351.",
        "The error of weights does not predict the loss: a --text, or --captures with gradients, estimates that.",
        "No other choice within the target does less harm.",
    ]
    assert "fused sets" in err


@pytest.mark.parametrize("target", [("--bits", "5.5"), ("--min-sqnr", "18.7"), ("--bits", "9")])
def test_quantize_and_report_give_what_was_predicted(
    mxcli: Callable[..., Any], tmp_path: Path, target: tuple[str, str]
) -> None:
    recipe = tmp_path / "r.toml"
    said = strict_json(mxcli(*WORDS, *target, "--save-recipe", recipe, "--json").out)
    assert said["schema"] == "mxcli.recommend/1"
    assert said["written"] == [str(recipe)]
    done = strict_json(mxcli("quantize", SAMPLE, "--recipe", recipe, "-o", tmp_path / "q", "--json").out)
    assert done["totals"] == said["predicted_totals"]
    assert strict_json(mxcli("report", SAMPLE, "--recipe", recipe, "--json").out)["totals"] == done["totals"]
    layers = {layer["name"]: layer for layer in done["layers"]}
    bits = 0.0
    for tensor in said["tensors"]:
        predicted = tensor["options"][tensor["chosen"]]
        bits += predicted["bits_per_element"] * tensor["elements"]
        if tensor["chosen"] == "keep":
            assert tensor["name"] not in layers
            assert predicted == {"bits_per_element": 16.0, "harm": 0.0, "sqnr_db": None}
        else:
            layer = layers[tensor["name"]]
            assert layer["format"] == tensor["chosen"]
            assert all(layer[key] == predicted[key] for key in ("bits_per_element", "sqnr_db"))
    assert said["bits_per_element"] == pytest.approx(bits / 786_432, rel=1e-12)


def test_what_is_kept_is_written_as_it_is(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    recipe, configs = tmp_path / "r.toml", tmp_path / "configs"
    words = ("recommend", SAMPLE, "--formats", "nvfp4", "--keep-percent", "15")
    out = mxcli(*words, "--save-recipe", recipe, "--configs", configs).out
    assert "nvfp4 for 12; 4 of 16 groups kept, 14.6 % of the elements." in out
    assert sorted(path.name for path in configs.iterdir()) == [
        "auto-round.json", "compressed-tensors.json", "llm-compressor.yaml", "modelopt.yaml",
    ]  # fmt: skip
    mxcli("quantize", SAMPLE, "--recipe", recipe, "-o", tmp_path / "q")
    config = strict_json((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    assert config == strict_json((configs / "compressed-tensors.json").read_text())["quantization_config"]
    assert "model.layers.0.self_attn.q_proj" in config["ignore"]
    again = mxcli(*words, "--configs", configs)
    assert again.code == 4
    assert mxcli(*words, "--configs", configs, "--force").code == 0


@pytest.mark.parametrize("by_outputs", [False, True])
def test_the_layer_with_outliers_is_first_and_in_the_ignore_list(
    mxcli: Callable[..., Any], tmp_path: Path, by_outputs: bool
) -> None:
    """One layer of four ruins a model, and people quantize them one by one to find it. Here an outlier in each block
    takes the scale from its neighbours; or a single channel does, small as its inputs are, which only outputs show."""
    outlier, tensors, captures = "model.layers.2.mlp.down_proj", llama(4), {}
    weight = floats(("BF16", [64, 128], tensors[f"{outlier}.weight"][1].tobytes())).copy()
    inputs = np.random.default_rng(0).standard_normal((64, 128)).astype(np.float32)
    if by_outputs:
        weight[:, 5] *= 64
        inputs[:, 5] /= 64
    else:
        weight[:, ::32] = 13
    tensors[f"{outlier}.weight"] = bf16(weight)
    for name, (_, bits) in tensors.items():
        if name.endswith("_proj.weight"):
            layer = name.removesuffix(".weight")
            captures[f"{layer}.activation"] = bf16(inputs if layer == outlier else inputs[:, -bits.shape[1] :])
    source, configs = write_model(tmp_path / "m", tensors, LLAMA), tmp_path / "configs"
    captured = write_model(tmp_path / "c", captures) / "model.safetensors"
    words = ("recommend", source, "--formats", "mxfp4", *(("--captures", captured) if by_outputs else ()))
    out = mxcli(*words, "--keep-percent", "6", "--configs", configs).out
    assert next(line.split()[0] for line in out.splitlines() if line.startswith("model.")) == f"{outlier}.weight"
    assert "mxfp4_e2m1 for 15; 1 of 16 groups kept" in out
    config = strict_json((configs / "compressed-tensors.json").read_text())["quantization_config"]
    assert config["ignore"] == ["lm_head", outlier]


def test_one_outlier_channel_is_found(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    """One channel in 128 costs a layer 4 dB: more than any other layer, though less than three that share one decision
    together."""
    outlier, tensors = "model.layers.2.mlp.down_proj.weight", llama(4)
    weight = floats(("BF16", [64, 128], tensors[outlier][1].tobytes())).copy()
    weight[:, 5] *= 16
    source = write_model(tmp_path / "m", tensors | {outlier: bf16(weight)}, LLAMA)
    for words in (
        ("recommend", source, "--formats", "mxfp4", "--keep-percent", "1"),
        ("report", source, "--format", "mxfp4"),
    ):
        first = next(line for line in mxcli(*words).out.splitlines() if line.startswith("model."))
        assert first.split()[0] == outlier


def test_captures_make_it_the_loss_or_the_error_of_outputs(mxcli: Callable[..., Any]) -> None:
    words = (*WORDS, "--bits", "5", "--json")
    loss = strict_json(mxcli(*words, "--captures", CAPTURES).out)
    outputs = strict_json(mxcli(*words, "--captures", CAPTURES, "--objective", "output-error").out)
    weights = strict_json(mxcli(*words).out)
    assert [each["objective"]["name"] for each in (loss, outputs, weights)] == ["loss", "output-error", "weight-error"]
    assert len({each["harm"] for each in (loss, outputs, weights)}) == 3
    same = strict_json(mxcli(*words, "--captures", CAPTURES, "--objective", "weight-error").out)
    assert same["harm"] == weights["harm"]
    assert "||X (W - Y)^T||^2" in mxcli("explain", "output-error").out
    assert "empirical Fisher" in mxcli("explain", "loss").out


def test_a_text_makes_it_the_loss(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    text = tmp_path / "text"
    text.write_text("the quick brown fox jumps over the lazy dog and the small cat. " * 20)
    said = strict_json(mxcli(*WORDS, "--bits", "5", "--text", text, "--json").out)
    assert said["objective"]["name"] == "loss"
    baselines = {each["name"]: each["harm"] for each in said["baselines"]}
    assert list(baselines) == [
        "mxfp4_e2m1 throughout",
        "nvfp4 throughout",
        "dealt at random",
        "first and last blocks high",
    ]
    assert said["harm"] < min(baselines.values())
    assert all(each["bits_per_element"] <= 5 for each in said["baselines"])


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["--text", "a", "--captures", CAPTURES], "--text with --captures"),
        (["--objective", "los"], "--objective los: it takes weight-error, output-error, loss. Did you mean loss?"),
        (["--objective", "loss"], "--objective loss: needs captured gradients of every layer: give a --text"),
        (["--objective", "output-error"], "--objective output-error: needs captured inputs of layers"),
    ],
)
def test_objectives_that_cannot_be_had(words: list[Any], fault: str, mxcli: Callable[..., Any]) -> None:
    code, _, err = mxcli(*WORDS, "--bits", "5", *words)
    assert code == 2
    assert fault in err


def test_csv_has_a_row_per_tensor_and_option(mxcli: Callable[..., Any]) -> None:
    rows = list(csv.DictReader(io.StringIO(mxcli(*WORDS, "--bits", "5", "--csv", "-").out)))
    assert len(rows) == 28 * 4
    assert sum(row["chosen"] == row["option"] for row in rows) == 28
    assert {row["option"] for row in rows} == {"mxfp4_e2m1", "nvfp4", "mxfp8_e4m3", "keep"}


def test_the_same_at_any_thread_count(mxcli: Callable[..., Any]) -> None:
    words = (*WORDS, "--min-sqnr", "20", "--json")
    assert mxcli(*words, "--threads", "1").out == mxcli(*words, "--threads", "2").out


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("--formats", "nvfp4"), 2, "state one target"),
        (("--formats", "nvfp4", "--bits", "5", "--min-sqnr", "20"), 2, "state one target"),
        (("--formats", "nvfp5", "--bits", "5"), 2, "unknown format 'nvfp5'"),
        (("--formats", "nvfp4,mxfp8", "--keep-percent", "5"), 2, "name one in --formats, not 2"),
        (("--formats", "nvfp4", "--bits", "4"), 4, "need 4.5012 bits per element at least (nvfp4; scales included)"),
        (("--formats", "mxfp6_e3m2", "--bits", "7", "--layout", "ct"), 4, "compressed-tensors cannot hold it"),
        (("--formats", "nvfp4", "--bits", "5", "--include", "*.qproj"), 2, "matches no tensor"),
        (("--formats", "nvfp4", "--bits", "5", "--captures", SAMPLE), 3, "holds no activations"),
        (("--formats", "nvfp4", "--bits", "5", "--max-memory", "1M"), 6, "--max-memory"),
    ],
)
def test_refusals(mxcli: Callable[..., Any], words: tuple[str, ...], code: int, told: str) -> None:
    outcome = mxcli("recommend", SAMPLE, *words, "--device", "cpu")
    assert (outcome.code, outcome.out) == (code, "")
    assert told in outcome.err


@pytest.mark.parametrize("width", [60, 100])
def test_lines_follow_the_width(mxcli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    unlimited = mxcli(*WORDS, "--bits", "5").out
    monkeypatch.setenv("COLUMNS", str(width))
    assert max(map(len, mxcli(*WORDS, "--bits", "5").out.splitlines())) <= width
    assert mxcli(*WORDS, "--bits", "5", "--wide").out == unlimited


def test_a_plan(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    words = (*WORDS, "--bits", "5", "--dry-run", "--device", "cpu")
    code, out, _ = mxcli(*words)
    assert code == 0
    lines = out.splitlines()
    assert lines[:3] == mxcli(*WORDS, "--bits", "5").out.splitlines()[:3]
    assert next(line.split() for line in lines if line.startswith(KEY)) == [
        KEY, "3", "32.8", "k", "4.25", "4.503", "8.25", "16",
    ]  # fmt: skip
    assert lines[-4:-2] == [
        "choices take 4.25 to 16 bits per element on average",
        "would measure 28 tensors under 3 formats: 84 measurements, 1.57 MB read once",
    ]
    plan = strict_json(mxcli(*words, "--json").out)
    said = strict_json(mxcli(*WORDS, "--bits", "5", "--json").out)
    assert plan["schema"] == "mxcli.recommend.plan/1"
    for key in ("source", "target", "objective", "formats", "chosen_for_elements"):
        assert plan[key] == said[key]
    assert [
        {name: option["bits_per_element"] for name, option in group["options"].items()} for group in plan["groups"]
    ] == [{name: option["bits_per_element"] for name, option in group["options"].items()} for group in said["groups"]]
    for more in (("--save-recipe", tmp_path / "r.toml"), ("--configs", tmp_path / "c"), ("--csv", "-")):
        code, _, err = mxcli(*words, *more)
        assert code == 2
        assert f"so there is no {more[0]}" in err
    assert mxcli(*WORDS, "--bits", "4", "--dry-run").code == 4


def test_json_lines_are_the_tensors_of_the_json(mxcli: Callable[..., Any]) -> None:
    words = (*WORDS, "--bits", "5")
    lines = [strict_json(line) for line in mxcli(*words, "--jsonl").out.splitlines()]
    assert lines == strict_json(mxcli(*words, "--json").out)["tensors"]
    assert mxcli(*words, "--top", "1", "--markdown", "-").out.count("\n| model") == 1


def test_orders_of_the_table(mxcli: Callable[..., Any]) -> None:
    words = (*WORDS, "--bits", "5")
    groups = strict_json(mxcli(*words, "--json").out)["groups"]

    def shown(*more: str) -> list[str]:
        return [line.split()[0] for line in mxcli(*words, *more).out.splitlines() if line.startswith("model.")]

    def by(key: Callable[[Any], Any]) -> list[str]:
        return [group["name"] for group in sorted(groups, key=key)]

    harm = by(lambda group: -group["options"]["mxfp4_e2m1"]["harm"] / len(group["tensors"]))
    assert shown() == shown("--sort", "harm") == harm
    assert shown("--sort", "name") == by(lambda group: group["name"])
    assert shown("--sort", "elements") == by(lambda group: -group["elements"])
    assert shown("--sort", "sqnr_db") == by(lambda group: group["options"][group["chosen"]]["sqnr_db"])
    assert shown("--sort", "bits_per_element", "--top", "1")[0] in {
        group["name"] for group in groups if group["chosen"] == "mxfp8_e4m3"
    }
    assert "1 of 16 groups shown, largest first" in mxcli(*words, "--sort", "elements", "--top", "1").out
    assert tuple(SORTS) == recommend.SORTS
    code, out, err = mxcli(*words, "--sort", "sqnr")
    assert (code, out) == (2, "")
    assert err == (
        "error: --sort sqnr: it takes harm, sqnr_db, bits_per_element, elements, name. Did you mean sqnr_db?\n"
    )


def test_a_recipe_says_what_is_kept_anyway(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    rules, saved = tmp_path / "rules.toml", tmp_path / "saved.toml"
    rules.write_text('as = "ocp"\nexclude = "*.v_proj"\n\n[[override]]\nselect = "*.down_proj"\nkeep = true\n')
    words = ("recommend", SAMPLE, "--formats", "mxfp4,mxfp8", "--bits", "6", "--recipe", rules)
    said = strict_json(mxcli(*words, "--save-recipe", saved, "--json").out)
    assert len(said["tensors"]) == 20
    assert said["recipe"]["dialect"] == "ocp"
    assert said["recipe"]["overrides"][0] == {"selector": "*.down_proj", "keep": True}
    report = strict_json(mxcli("report", SAMPLE, "--recipe", saved, "--json").out)
    assert report["totals"] == said["predicted_totals"]
    chosen = {tensor["name"]: tensor["chosen"] for tensor in said["tensors"]}
    assert {layer["name"]: layer["format"] for layer in report["layers"]} == {
        name: format for name, format in chosen.items() if format != "keep"
    }


def test_all_unknown_names_are_reported_at_once(mxcli: Callable[..., Any]) -> None:
    code, out, err = mxcli("recommend", "no-such-file", "--formats", "mxfp9,mxfp8,nvfp5", "--bits", "5")
    assert (code, out) == (2, "")
    assert "unknown format 'mxfp9'" in err
    assert "unknown format 'nvfp5'" in err
