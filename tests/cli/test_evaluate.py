"""`mxcli evaluate`: its forms, refusals and exit codes."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import SAMPLE, strict_json

from mxcli.output.schema import schema

SHORT = ("--tokens", "256", "--context", "64")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog and the small cat. " * 9)
    return path


@pytest.fixture
def evaluate(mxcli: Callable[..., Any], text: Path) -> Callable[..., Any]:
    return lambda *words: mxcli("evaluate", SAMPLE, "--text", text, *SHORT, *words)


def test_a_table(evaluate: Callable[..., Any]) -> None:
    code, out, err = evaluate("--formats", "mxfp8,mxfp4")
    assert code == 0
    lines = out.splitlines()
    assert lines[0].endswith("tiny-llama: LlamaForCausalLM, computed in F32")
    assert lines[1].endswith("text.txt: 252 tokens scored in 4 windows of 64")
    assert [line.split()[0] for line in lines[5:8]] == ["original", "mxfp8_e4m3", "mxfp4_e2m1"]
    assert "has no tokenizer: every byte of the text is a token." in err


def test_json_is_as_its_schema_says(evaluate: Callable[..., Any]) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    found = strict_json(evaluate("--formats", "nvfp4", "--activations", "none,same", "--json").out)
    jsonschema.validate(found, schema("evaluate"))
    original, weights, both = found["evaluated"]
    assert (original["kind"], original["weights"], original["loss_change"]) == ("original", None, None)
    assert (weights["weights"], weights["activations"]) == ("nvfp4", "none")
    assert both["activations"] == "nvfp4"
    assert 0 < weights["kl_mean"] < both["kl_mean"]
    assert weights["loss"] - original["loss"] == pytest.approx(weights["loss_change"], abs=1e-6)


def test_csv_has_a_row_for_each(evaluate: Callable[..., Any]) -> None:
    rows = list(csv.DictReader(io.StringIO(evaluate("--formats", "mxfp8", "--csv", "-").out)))
    assert [row["name"] for row in rows] == ["original", "mxfp8_e4m3"]
    assert rows[0]["kl_mean"] == ""
    assert float(rows[1]["kl_mean"]) > 0


def test_a_study_has_the_published_figures(evaluate: Callable[..., Any]) -> None:
    found = strict_json(evaluate("--study", "mixed", "--json").out)
    assert found["study"] == "mixed"
    published = {each["name"]: each["published_change"] for each in found["evaluated"]}
    assert published["mxfp4_e2m1, inputs mxfp4_e2m1"] == pytest.approx(1.0532, abs=1e-4)  # log(27.201 / 9.488)
    assert published["mxfp4_e2m1, inputs mxfp8_e4m3"] == pytest.approx(0.1902, abs=1e-4)
    assert published["original"] is None
    assert len(published) == 8


def test_blocks_one_by_one(evaluate: Callable[..., Any]) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    found = strict_json(evaluate("--formats", "nvfp4", "--per", "block", "--json").out)
    jsonschema.validate(found, schema("evaluate"))
    _, *parts = found["evaluated"]
    assert {each["name"] for each in parts} == {f"model.layers.{at}" for at in range(4)}
    assert {each["kind"] for each in parts} == {"part"}
    assert [each["kl_mean"] for each in parts] == sorted((each["kl_mean"] for each in parts), reverse=True)
    assert all(each["bytes"] is None for each in parts)


def test_a_plan_needs_no_weights(evaluate: Callable[..., Any], tmp_path: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    plan = strict_json(evaluate("--formats", "mxfp8,nvfp4", "--dry-run", "--json").out)
    jsonschema.validate(plan, schema("evaluate.plan"))
    assert plan["candidates"] == ["mxfp8_e4m3", "nvfp4"]
    assert plan["predictions_bytes"] == 252 * 256 * 4
    assert "would score the original and 2 candidates" in evaluate("--formats", "mxfp8,nvfp4", "--dry-run").out


def test_a_limit_that_is_broken(evaluate: Callable[..., Any]) -> None:
    code, out, err = evaluate("--formats", "mxfp8,mxfp4", "--fail-on", "bits_per_weight<6")
    assert code == 5
    assert "mxfp4_e2m1: bits_per_weight is 5.1" in err
    assert "mxfp8_e4m3:" not in err
    assert out


def test_a_kept_baseline_and_other_texts(evaluate: Callable[..., Any], text: Path, tmp_path: Path) -> None:
    words = ("--formats", "mxfp8", "--baseline", tmp_path / "p", "--json")
    first = strict_json(evaluate(*words).out)
    again = strict_json(evaluate(*words).out)
    assert [each["loss"] for each in first["evaluated"]] == [each["loss"] for each in again["evaluated"]]
    text.write_text("another text, " * 50)
    code, _, err = evaluate(*words)
    assert code == 4
    assert "has predictions of another run: text was" in err
    assert evaluate(*words, "--force").code == 0


def test_conversations_need_a_template(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    lines = tmp_path / "chats.jsonl"
    lines.write_text(json.dumps({"messages": [{"role": "user", "content": "hi"}]}) + "\n")
    code, _, err = mxcli("evaluate", SAMPLE, "--text", lines, "--formats", "mxfp8")
    assert code == 3
    assert "has no tokenizer, and so no template for conversations; give a plain text." in err


@pytest.mark.parametrize(
    ("words", "code", "fault"),
    [
        ([], 2, "nothing to evaluate: name --formats, a --recipe, a --study, or checkpoints of the same model."),
        (["--formats", "mxfp9"], 2, "mxfp9"),
        (["--formats", "mxfp8", "--activations", "some"], 2, "some"),
        (["--formats", "mxfp8", "--stride", "100"], 2, "--stride 100 with --context 64"),
        (["--formats", "mxfp8", "--resume"], 2, "--resume needs --baseline FILE"),
        (["--formats", "mxfp8", "--fail-on", "sqnr_db<20"], 2, "no metric is called sqnr_db; loss, "),
        (["--formats", "mxfp8", "--compute-dtype", "f64"], 2, "f64: models compute in f32, bf16 or f16."),
        (["--formats", "mxfp8", "--threads", "100000"], 6, "--threads 100000: more than"),
        (["--study", "mixd"], 2, "--study mixd: direct-cast, mixed are known. Did you mean mixed?"),
        (["--study", "mixed", "--activations", "same"], 2, "the study names those of each row"),
        (["--formats", "mxfp8", "--per", "row"], 2, "--per row: it takes layer, block, kind."),
        (["--formats", "mxfp8,mxfp4", "--per", "block"], 2, "--per: name one format or recipe"),
        (["--formats", "mxfp8", "--left"], 2, "--left has no effect without --per"),
        (["no-such-directory"], 3, "no-such-directory"),
        (["--recipe", "no-such.toml"], 3, "no-such.toml"),
    ],
)
def test_one_sentence_and_the_right_code(words: list[str], code: int, fault: str, evaluate: Callable[..., Any]) -> None:
    found = evaluate(*words)
    assert found.code == code
    assert fault in found.err
    assert found.out == ""


def test_a_text_is_needed(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    assert "missing option '--text FILE'" in mxcli("evaluate", SAMPLE, "--formats", "mxfp8").err
    empty = tmp_path / "empty"
    empty.write_bytes(b"")
    assert mxcli("evaluate", SAMPLE, "--text", empty, "--formats", "mxfp8").code == 3
    empty.write_bytes(b"a")
    found = mxcli("evaluate", SAMPLE, "--text", empty, "--formats", "mxfp8")
    assert (found.code, "has no two tokens in a row" in found.err) == (3, True)


def test_no_source_is_a_baseline(mxcli: Callable[..., Any], text: Path, tmp_path: Path) -> None:
    model = tmp_path / "m"
    model.mkdir()
    for name in ("config.json", "model.safetensors"):
        (model / name).write_bytes((SAMPLE / name).read_bytes())
    before = {path: path.read_bytes() for path in (model / "model.safetensors", text)}
    for path in before:
        found = mxcli("evaluate", model, "--text", text, *SHORT, "--formats", "mxfp8", "--baseline", path, "--force")
        assert found.code == 4
        assert path.name in found.err
    other = tmp_path / "p.scores"
    other.write_text("a file of the user")
    words = ("evaluate", model, "--text", text, *SHORT, "--formats", "mxfp8", "--baseline", tmp_path / "p")
    assert [mxcli(*words, *more).code != 0 for more in ([], ["--force"])] == [True, True]
    assert other.read_text() == "a file of the user"
    assert {path: path.read_bytes() for path in before} == before
