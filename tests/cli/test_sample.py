"""`--sample` as typed: what each form reports, and what is refused."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import SAMPLE, strict_json
from safetensors.numpy import save_file

SAMPLED = ("--format", "mxfp4", "--sample", "0.1", "-q")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tensor of 3 MiB, of which 16 runs of 64 KiB are read, and one that is read whole."""
    path = tmp_path_factory.mktemp("sample") / "x.safetensors"
    x = np.random.default_rng(0).standard_normal((768, 1024)).astype(np.float32)
    save_file({"big.weight": x, "small.weight": x[:8].copy()}, path)
    return path


@pytest.mark.parametrize("verb", [["report"], ["compare", "--formats", "mxfp4"]])
@pytest.mark.parametrize("fraction", ["0", "1.5", "-1", "nan", "abc", ""])
def test_invalid_fractions(mxcli: Callable[..., Any], verb: list[str], fraction: str) -> None:
    code, out, err = mxcli(*verb, SAMPLE, "--sample", fraction)
    assert (code, out) == (2, "")
    assert err == (f"error: --sample '{fraction}' must be a fraction of a tensor: above 0, at most 1, such as 0.01.\n")


def test_options_that_go_together_and_those_that_do_not(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    code, out, err = mxcli("report", SAMPLE, "--seed", "3")
    assert (code, out) == (2, "")
    assert err == (
        "error: --seed 3 has no effect: nothing is random. Add --rounding stochastic or --sample FRACTION.\n"
    )
    code, _, err = mxcli("report", SAMPLE, "--sample", "0.1", "--per-block", tmp_path / "blocks.safetensors")
    assert code == 2
    assert "--per-block stores every block, but --sample reads only some" in err
    assert mxcli("report", SAMPLE, "--sample", "0.1", "--seed", "-1").code == 2


def test_the_table(mxcli: Callable[..., Any], source: Path) -> None:
    out = mxcli("report", source, *SAMPLED).out
    assert "\nsample: 34.0 % of the elements, seed 0; ± is half of a 95 % interval\n" in out
    (big,) = [line for line in out.splitlines() if line.startswith("big.weight")]
    (small,) = [line for line in out.splitlines() if line.startswith("small.weight")]
    assert re.match(r"big\.weight +768x1024 +18\.\d ±0\.0\d\d ", big)
    assert "±" not in small
    scaled = mxcli("report", source, "--format", "nvfp4", "--sample", "0.1", "-q").out.splitlines()[3]
    assert scaled.endswith("; ± is half of a 95 % interval; tensor scales are those of the sample (nvfp4)")


def test_a_narrow_table_keeps_what_is_unsure(mxcli: Callable[..., Any], source: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = mxcli("report", source, *SAMPLED).out.splitlines()
    assert max(map(len, lines)) <= 80
    assert any(re.match(r"big\.weight +18\.\d ±0\.0\d\d ", line) for line in lines)


def test_json_and_csv(mxcli: Callable[..., Any], source: Path) -> None:
    report = strict_json(mxcli("report", source, *SAMPLED, "--json", "--seed", "5").out)
    assert report["sample"] == {
        "fraction": 0.1,
        "seed": 5,
        "tensors": 2,
        "read_whole": 1,
        "elements": 776 * 1024,
        "sampled_elements": 16 * 16 * 1024 + 8 * 1024,
        "tensor_scales": [],
        "confidence_percent": 95,
    }
    big, small = report["layers"]
    assert (big["elements"], big["sampled_elements"], big["sampled_blocks"]) == (768 * 1024, 256 * 1024, 8192)
    assert 0 < big["sqnr_db_uncertainty"] < 0.1
    assert small["sqnr_db_uncertainty"] == 0
    assert report["notes"][-2:] == [
        "Counts, extremes, histograms and worst blocks are those of the sample; what is rare may not be in it.",
        "1 of 2 tensors are read whole: they are small, must be decoded, or their blocks span too many rows to sample.",
    ]
    rows = list(csv.DictReader(io.StringIO(mxcli("report", source, *SAMPLED, "--csv", "-").out)))
    assert rows[0]["sampled_elements"] == str(256 * 1024)
    assert float(rows[0]["mse_uncertainty"]) > 0
    words = ("compare", source, "--formats", "mxfp4,mxfp8", "--sample", "0.1", "-q")
    rows = list(csv.DictReader(io.StringIO(mxcli(*words, "--csv", "-").out)))
    assert [row["sampled_elements"] for row in rows] == ["262144"] * 2 + ["8192"] * 2
    comparison = strict_json(mxcli(*words, "--json").out)
    assert comparison["sample"]["sampled_elements"] == report["sample"]["sampled_elements"]
    assert comparison["conclusion"][0] == "Estimated from 34.0 % of the elements."
    assert comparison["totals"]["mxfp8_e4m3 rceil"]["sqnr_db_uncertainty"] > 0


def test_without_a_sample_nothing_is_said_of_one(mxcli: Callable[..., Any], source: Path) -> None:
    for words in (["report", source], ["compare", source, "--formats", "mxfp4,mxfp8"]):
        for form in (["--json"], ["--csv", "-"], []):
            out = mxcli(*words, "-q", *form).out.replace(str(source), "")
            assert not re.search(r"sample|uncertainty|±", out)


def test_a_sample_of_one_is_the_report(mxcli: Callable[..., Any]) -> None:
    whole = strict_json(mxcli("report", SAMPLE, "--format", "nvfp4", "--json").out)
    sample = strict_json(mxcli("report", SAMPLE, "--format", "nvfp4", "--sample", "1", "--json").out)
    assert sample.pop("sample")["sampled_elements"] == whole["totals"]["elements"]

    def plain(value: Any) -> Any:
        if isinstance(value, list):
            return [plain(each) for each in value]
        if isinstance(value, dict):
            kept = {key: each for key, each in value.items() if not re.search("^sampled_|_uncertainty$", key)}
            return {key: plain(each) for key, each in kept.items()}
        return value

    assert plain(sample) == whole


def test_a_limit_is_judged_by_the_estimate(mxcli: Callable[..., Any], source: Path) -> None:
    words = ("report", source, *SAMPLED, "--include", "big.*", "--fail-on")
    assert mxcli(*words, "sqnr_db<10").code == 0
    code, _, err = mxcli(*words, "sqnr_db<30")
    assert code == 5
    assert re.fullmatch(
        r"error: big\.weight: sqnr_db is estimated at 18\.\d+ ±0\.0\d+ \(--fail-on 'sqnr_db<30'\)\n", err
    )


def test_a_dry_run_says_what_is_read(mxcli: Callable[..., Any], source: Path) -> None:
    for words in (["report", source, *SAMPLED], ["compare", source, "--formats", "mxfp4", "--sample", "0.1", "-q"]):
        assert strict_json(mxcli(*words, "--dry-run", "--json").out)["bytes_read"] == 4 * 264 * 1024
        assert "1.08 MB read once" in mxcli(*words, "--dry-run").out


def test_a_page_says_that_it_is_of_a_sample(mxcli: Callable[..., Any], source: Path, tmp_path: Path) -> None:
    for words in (["report", source, *SAMPLED], ["compare", source, "--formats", "mxfp4,mxfp8", "--sample", "0.1"]):
        page = tmp_path / f"{words[0]}.html"
        assert mxcli(*words, "--html", page).code == 0
        text = page.read_text(encoding="utf-8")
        assert "sample: 34.0 % of the elements, seed 0" in text
        assert "Estimated from 34.0 % of the elements." in text
