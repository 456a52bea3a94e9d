"""convert from the outside: what it prints, writes and refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import SAMPLE, strict_json

from mxcli.cli.app import run

WEIGHTS = 28


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("convert") / "q"
    assert run(["quantize", str(SAMPLE), "--format", "mxfp8", "-o", str(output), "-q"]) == 0
    return output


def test_it_prints_what_it_carried_and_where(mxcli: Callable[..., Any], quantized: Path, tmp_path: Path) -> None:
    code, out, _ = mxcli("convert", quantized, "--layout", "mlx", "-o", tmp_path / "m")
    assert code == 0
    assert out.startswith(
        f"written to {tmp_path / 'm'}: 28 weights (28 mxfp8_e4m3) carried over from compressed-tensors to mlx; "
        "read 3 files ("
    )
    assert sorted(path.name for path in (tmp_path / "m").iterdir()) == [
        *("config.json", "generation_config.json", "model.safetensors", "mxcli.json")
    ]
    assert mxcli("convert", tmp_path / "m", "--layout", "ct", "-o", tmp_path / "back", "-q").code == 0
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (quantized / "model.safetensors").read_bytes()
    assert mxcli("verify", tmp_path / "back", "--against", SAMPLE).code == 0


def test_json_has_what_was_written(mxcli: Callable[..., Any], quantized: Path, tmp_path: Path) -> None:
    record = strict_json(mxcli("convert", quantized, "--layout", "modelopt", "-o", tmp_path / "m", "--json").out)
    assert record["schema"] == "mxcli.convert/1"
    assert (record["converted_from"], record["layout"]) == ("compressed-tensors", "modelopt")
    assert (record["weights"], record["formats"], record["rules_known"]) == (WEIGHTS, {"mxfp8_e4m3": WEIGHTS}, True)
    assert record["files"] == [
        *("model.safetensors", "config.json", "hf_quant_config.json", "generation_config.json", "mxcli.json")
    ]
    assert record["ignored"] == ["lm_head"]


def test_a_dry_run_writes_nothing_and_meets_every_refusal(
    mxcli: Callable[..., Any], quantized: Path, tmp_path: Path
) -> None:
    code, out, _ = mxcli("convert", quantized, "--layout", "torchao", "-o", tmp_path / "t", "--dry-run")
    assert code == 0
    assert out.splitlines()[0] == "would carry 28 weights (28 mxfp8_e4m3) over from compressed-tensors to torchao"
    plan = strict_json(mxcli("convert", quantized, "--layout", "torchao", "--dry-run", "--json").out)
    assert (plan["schema"], plan["output"], len(plan["tensors"])) == ("mxcli.convert.plan/1", None, 39)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "file").write_text("mine")
    refused = mxcli("convert", quantized, "--layout", "torchao", "-o", tmp_path / "t", "--dry-run")
    assert refused.code == 4
    assert str(tmp_path / "t") in refused.err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--layout", "quark"], 4, "the layout quark has no mxfp8_e4m3; it holds mxfp4_e2m1, "),
        (["--layout", "quak"], 2, "unknown layout 'quak': known are compressed-tensors, "),
        ([], 2, "missing option '--layout LAYOUT': name the layout to write."),
        (["--layout", "modelopt", "--for", "transformers"], 4, "transformers"),
        (["--layout", "mlx", "--max-memory", "1K"], 6, "needs about "),
    ],
)
def test_refusals(
    mxcli: Callable[..., Any], quantized: Path, tmp_path: Path, arguments: list[str], code: int, message: str
) -> None:
    found = mxcli("convert", quantized, "-o", tmp_path / "out", *arguments)
    assert (found.code, list(tmp_path.iterdir())) == (code, [])
    assert message in found.err


def test_a_plain_source_and_a_missing_output_are_refused(mxcli: Callable[..., Any], quantized: Path) -> None:
    assert mxcli("convert", SAMPLE, "--layout", "mlx", "-o", "x").code == 4
    found = mxcli("convert", quantized, "--layout", "mlx")
    assert (found.code, "missing option '-o/--output DIR'" in found.err) == (2, True)


def test_shares_are_merged(mxcli: Callable[..., Any], quantized: Path, tmp_path: Path) -> None:
    options = ("convert", quantized, "--layout", "modelopt", "--max-shard-size", "300K", "-q", "-o")
    assert mxcli(*options, tmp_path / "whole").code == 0
    for share in ("1/2", "2/2"):
        assert mxcli(*options, tmp_path / "shared", "--shard-range", share).code == 0
    assert mxcli("merge", tmp_path / "shared").code == 0
    for path in (tmp_path / "whole").iterdir():
        if path.name != "mxcli.json":
            assert (tmp_path / "shared" / path.name).read_bytes() == path.read_bytes()
    records = [json.loads((tmp_path / name / "mxcli.json").read_text()) for name in ("whole", "shared")]
    assert records[0]["tensors"] == records[1]["tensors"]
