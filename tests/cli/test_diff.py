from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import SAMPLE, strict_json

from mxcli.output.schema import schema

Mxcli = Callable[..., Any]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The bundled model in MXFP4 under three rules, and in another layout."""
    from mxcli.cli.app import run

    root = tmp_path_factory.mktemp("diff")
    options = {
        "floor": ["--scale-rounding", "floor"],
        "ceil": ["--scale-rounding", "ceil"],
        "modelopt": ["--scale-rounding", "floor", "--layout", "modelopt"],
    }
    for name, more in options.items():
        words = ["quantize", str(SAMPLE), "--format", "mxfp4", *more, "-o", str(root / name), "-q"]
        assert run([*words, "--json", str(root / f"{name}.json")]) == 0
    return {name: root / name for name in options}


def test_what_is_the_same_is_said_to_be(mxcli: Mxcli, folders: dict[str, Path]) -> None:
    a, b = folders["floor"], folders["modelopt"]
    code, out, err = mxcli("diff", a, a, "--by-record")
    assert (code, err) == (0, "")
    assert out.splitlines()[-2:] == [
        "Records: 39 tensors have the same hash in both; they were not read.",
        f"{a} and {a} are the same by their records: 39 tensors, 39 of them by the hashes in both records.",
    ]
    code, out, err = mxcli("diff", a, a)
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == f"{a} and {a} are the same: 39 tensors."
    code, out, err = mxcli("diff", a, b, "--by-record")
    assert (code, err) == (0, "")
    assert out.splitlines()[-2:] == [
        "Records: 11 tensors have the same hash in both; they were not read.",
        f"{a} and {b} are the same by their records: 39 tensors, 11 of them by the hashes in both records.",
    ]


def test_differences_are_listed_counted_and_explained(mxcli: Mxcli, folders: dict[str, Path]) -> None:
    a, b = folders["floor"], folders["ceil"]
    code, out, err = mxcli("diff", a, b, "--top", 1)
    assert code == 5
    assert err == f"error: {a} and {b} differ in 28 of 39 tensors: codes 28, scales 28\n"
    lines = out.splitlines()
    assert lines[0].startswith(f"A: {a}: ")
    assert "1 of 28 tensors shown, the most first" in lines
    # Only an amax that is a power of two has the same scale under both.
    assert lines[-3] == "Scales (mxfp4_e2m1): 24,365 of 24,576 differ (99.1 %): 24,365 one step lower in A."
    assert lines[-2] == "Rules (mxfp4_e2m1): floor in A and ceil in B explain all 24,576 scales tried."
    assert lines[-1] == f"{a} and {b} differ in 28 of 39 tensors: codes 28, scales 28."


def test_json_and_csv_have_every_tensor(mxcli: Mxcli, folders: dict[str, Path], tmp_path: Path) -> None:
    code, out, _ = mxcli("diff", folders["floor"], folders["ceil"], "--json", "--csv", tmp_path / "d.csv")
    assert code == 5
    record = strict_json(out)
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(record, schema("diff"))
    assert record["schema"] == "mxcli.diff/1"
    assert record["same"] is False
    assert record["counts"] == {"equal": 11, "codes": 28, "scales": 28}
    assert len(record["tensors"]) == 39
    assert record["rules"] == [
        {
            "format": "mxfp4_e2m1",
            "blocks": 24576,
            "explained_by": [{"a": "floor", "b": "ceil"}],
            "nearest": {"a": "floor", "b": "ceil", "blocks": 24576},
            "contradictory_blocks": 0,
        }
    ]
    rows = (tmp_path / "d.csv").read_text().splitlines()
    assert len(rows) == 40
    assert rows[0].startswith("name,in_a,in_b,shape_a,shape_b,differs,elements,blocks,codes,codes_percent")


def test_one_tensor_can_be_requested(mxcli: Mxcli, folders: dict[str, Path]) -> None:
    words = ("diff", folders["floor"], folders["ceil"], "--tensor", "*.layers.0.mlp.up_proj")
    code, out, _ = mxcli(*words, "--json")
    assert code == 5
    assert [each["name"] for each in strict_json(out)["tensors"]] == ["model.layers.0.mlp.up_proj.weight"]
    code, _, err = mxcli("diff", folders["floor"], folders["ceil"], "--tensor", "up_proj")
    assert code == 2
    assert "matches no tensor" in err


def test_a_plain_side_is_compared_by_values(mxcli: Mxcli, folders: dict[str, Path]) -> None:
    code, out, _ = mxcli("diff", SAMPLE, folders["floor"], "--top", 0)
    assert code == 5
    assert out.splitlines()[-1] == f"{SAMPLE} and {folders['floor']} differ in 28 of 39 tensors: format 28."


def test_exit_codes_state_what_went_wrong(mxcli: Mxcli, folders: dict[str, Path], tmp_path: Path) -> None:
    assert mxcli("diff", folders["floor"]).code == 2
    assert mxcli("diff", folders["floor"], tmp_path / "nothing").code == 3
    assert mxcli("diff", folders["floor"], folders["ceil"], "--max-memory", "1M").code == 6
