"""`mxcli recommend`: its forms and files, and that `quantize` carries out what it says."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import CAPTURES, SAMPLE, command, strict_json

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
        KEY, KEY.replace(".0.", ".1."),
    ]  # fmt: skip
    assert "2 of 16 groups shown, most harm first" in lines
    assert lines[-3:] == [
        "Recommended: 4.97 bits per element on average, nvfp4 for 13, mxfp8_e4m3 for 3; 0 of 16 groups kept.",
        "That removes 52.9 % of the harm that mxfp4_e2m1 throughout would do (0.178 of 0.379).",
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


def test_captures_make_it_the_error_of_outputs(mxcli: Callable[..., Any]) -> None:
    said = strict_json(mxcli(*WORDS, "--bits", "5", "--captures", CAPTURES, "--json").out)
    assert said["objective"]["name"] == "output-error"
    weights = strict_json(mxcli(*WORDS, "--bits", "5", "--json").out)
    assert weights["objective"]["name"] == "weight-error"
    assert said["harm"] != weights["harm"]
    assert "||X (W - Y)^T||^2" in mxcli("explain", said["objective"]["name"]).out


def test_csv_has_a_row_per_tensor_and_option(mxcli: Callable[..., Any]) -> None:
    rows = list(csv.DictReader(io.StringIO(mxcli(*WORDS, "--bits", "5", "--csv", "-").out)))
    assert len(rows) == 28 * 4
    assert sum(row["chosen"] == "True" for row in rows) == 28
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
def test_lines_follow_the_width(width: int) -> None:
    done = command(*WORDS, "--bits", "5", env={"COLUMNS": str(width)})
    assert max(map(len, done.stdout.splitlines())) <= width
    assert command(*WORDS, "--bits", "5", "--wide", env={"COLUMNS": str(width)}).stdout == mxcli_wide()


def mxcli_wide() -> str:
    return command(*WORDS, "--bits", "5").stdout
