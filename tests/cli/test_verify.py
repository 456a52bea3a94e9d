from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import SAMPLE, strict_json

from mxcli.errors import SHOWN_CHARACTERS
from mxcli.output.schema import schema

Mxcli = Callable[..., Any]
SHARD = "model.safetensors"


@pytest.fixture(scope="module")
def nvfp4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model in NVFP4."""
    from mxcli.cli.app import run

    folder = tmp_path_factory.mktemp("verify") / "q"
    assert run(["quantize", str(SAMPLE), "--format", "nvfp4", "-o", str(folder), "-q", "--json", f"{folder}.json"]) == 0
    return folder


@pytest.fixture
def broken(nvfp4: Path, tmp_path: Path) -> Path:
    """It without its record, with a class as target, an incomplete list of ignored modules and one too many in it."""
    folder = shutil.copytree(nvfp4, tmp_path / "broken")
    (folder / "mxcli.json").unlink()
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["ignore"] = ["re:.*mlp.up_proj"]
    config["quantization_config"]["config_groups"]["group_0"]["targets"] = ["Linear"]
    path.write_text(json.dumps(config))
    return folder


def test_a_sound_checkpoint_is_said_to_be(mxcli: Mxcli, nvfp4: Path) -> None:
    code, out, err = mxcli("verify", nvfp4)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].endswith("F32 0.0%; quantized (compressed-tensors)")
    assert lines[1] == "28 quantized weights: nvfp4 28"
    assert lines[-1].startswith(f"{nvfp4} is sound: nothing found; ")
    assert lines[-1].endswith(" checks of 28 weights.")
    assert lines[-2] == (
        "Checked: 28 of 28 weights (28 by the record). Bytes: the bytes of all 95 tensors are as recorded. Names and "
        "shapes: by a table of usual models."
    )


def test_one_shard_of_an_output_is_refused_with_the_way_out(mxcli: Mxcli, tmp_path: Path) -> None:
    output = tmp_path / "q"
    assert mxcli("quantize", SAMPLE, "--format", "mxfp4", "--max-shard-size", "200K", "-o", output, "-q")[0] == 0
    shards = sorted(path for path in output.iterdir() if path.suffix == ".safetensors")
    assert len(shards) > 1
    for options in ([], ["--against", SAMPLE], ["--against", SAMPLE, "--repair"]):
        code, out, err = mxcli("verify", shards[1], *options)
        assert (code, out) == (4, "")
        assert err.endswith(
            f"{shards[1]}: is one of the {len(shards)} shards that mxcli.json records; an output is verified as a "
            f"whole: give {output}.\n"
        )
    assert mxcli("verify", output)[0] == 0


def test_the_one_file_of_an_output_is_verified(mxcli: Mxcli, nvfp4: Path) -> None:
    assert mxcli("verify", nvfp4 / SHARD)[0] == 0


def test_a_flipped_bit_is_a_problem_with_a_way_out(mxcli: Mxcli, nvfp4: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(nvfp4, tmp_path / "q")
    content = bytearray((folder / SHARD).read_bytes())
    content[-100] ^= 1
    (folder / SHARD).write_bytes(content)
    code, out, err = mxcli("verify", folder)
    assert code == 5
    assert err == f"error: {folder}: 1 problem (recorded_bytes 1)\n"
    assert "problem recorded_bytes: bytes that changed since they were written" in out
    assert f"mxcli verify {folder} --against SOURCE --repair." in out
    code, out, _ = mxcli("verify", folder, "--json")
    record = strict_json(out)
    assert (code, record["sound"], record["checked"]["by_record"]) == (5, False, 27)
    assert record["checked"]["tensors_by_record"] == 94


def test_a_format_that_is_not_read_could_not_be_checked(mxcli: Mxcli, nvfp4: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(nvfp4, tmp_path / "q")
    (folder / "mxcli.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    args = {"num_bits": 3, "type": "int", "strategy": "channel"}
    config["quantization_config"] |= {"config_groups": {"g": {"targets": ["Linear"], "weights": args}}}
    (folder / "config.json").write_text(json.dumps(config))
    header = (folder / SHARD).read_bytes()
    (folder / SHARD).write_bytes(header.replace(b"_packed", b"_coded_").replace(b"_global_scale", b"_global_thing"))
    code, out, err = mxcli("verify", folder)
    assert code == 5
    assert err.startswith(f"error: {folder}: could not be checked: config.json: config group g: its weights match none")
    assert "Checked: 0 of " in out
    assert "sound" not in out


def test_with_its_source_errors_and_the_rule_are_reported(mxcli: Mxcli, nvfp4: Path) -> None:
    code, out, _ = mxcli("verify", nvfp4, "--against", SAMPLE, "--top", 1)
    assert code == 0
    lines = out.splitlines()
    assert lines[1] == f"28 quantized weights: nvfp4 28; against {SAMPLE}"
    assert lines[5].split() == [
        *("model.layers.3.self_attn.q_proj.weight", "128x128", "nvfp4"),
        *("20.3", "0.0971", "0.0382", "te", "as", "mxcli"),
    ]
    assert "1 of 28 tensors shown, worst sqnr_db first" in lines
    assert lines[-3] == (
        "Bytes: all 28 weights match scale rounding te, element rounding nearest-even, as mxcli (nvfp4)."
    )


def test_problems_are_grouped_listed_and_counted(mxcli: Mxcli, broken: Path) -> None:
    code, out, err = mxcli("verify", broken, "--top", 2)
    assert code == 5
    assert err == f"error: {broken}: 5 problems (ignored_but_quantized 4, not_ignored 1)\n"
    lines = out.splitlines()
    start = lines.index("problem ignored_but_quantized: modules that the ignore list names and that hold codes")
    entry = "quantized, but named by the entry 're:.*mlp.up_proj' of the list ignore"
    assert lines[start + 1 : start + 5] == [
        f"  model.layers.0.mlp.up_proj: {entry}",
        f"  model.layers.1.mlp.up_proj: {entry}",
        "  and 2 more",
        "  needed: a list that matches the weights: loaders read a module by its path, or by a regular expression "
        "after re: that matches its beginning. Remove 're:.*mlp.up_proj', or name the intended modules in full.",
    ]
    assert lines[-1].startswith(f"{broken} is not sound: 5 problems (ignored_but_quantized 4, not_ignored 1); ")


def test_json_has_every_check_finding_and_weight(mxcli: Mxcli, broken: Path) -> None:
    code, out, _ = mxcli("verify", broken, "--against", SAMPLE, "--tp", 8, "--json")
    assert code == 5
    record = strict_json(out)
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(record, schema("verify"))
    assert record["schema"] == "mxcli.verify/1"
    assert (record["sound"], record["layout"]) == (False, "compressed-tensors")
    assert record["counts"] == {"problems": 6, "warnings": 0, "notes": 0}
    assert record["findings"][-2] == {
        "check": "not_ignored",
        "severity": "problem",
        "where": "lm_head",
        "value": "not quantized and not in the list",
        "need": "an entry of the list ignore: loaders look for its codes and leave it without weights",
        "way_out": "Add 'lm_head' to ignore.",
    }
    assert record["findings"][-1]["value"] == "num_attention_heads is 4"
    assert {check["skipped"] for check in record["checks"]} == {
        *(None, "no index", "no mxcli.json", "no mxcli.json with tensors", "needs --deep", "needs --for ENGINE"),
        *("no weights in third-party formats", "every weight is proven by the record or the source"),
    }
    up = next(each for each in record["weights"] if each["name"] == "model.layers.0.mlp.up_proj.weight")
    assert (up["problems"], up["warnings"]) == (1, 0)
    assert up["bytes_of"]["scale_rounding"] == "te"
    assert up["bytes_of"]["exact"] is True
    assert record["totals"]["tensors"] == 28
    assert record["totals"]["relative_error"] == pytest.approx(0.0953, abs=5e-5)


def test_csv_has_a_row_per_weight_and_per_other_place(mxcli: Mxcli, broken: Path, tmp_path: Path) -> None:
    file = tmp_path / "v.csv"
    code, out, _ = mxcli("verify", broken, "--csv", file)
    assert code == 5
    assert "is not sound" in out
    rows = file.read_text().splitlines()
    assert rows[0].startswith("name,format,shape,problems,warnings,notes,amax,tensor_scale,sqnr_db")
    assert len(rows) == 1 + 28 + 1
    assert rows[-1].startswith("lm_head,,,1,0,0,")


def test_markdown_is_a_page(mxcli: Mxcli, nvfp4: Path) -> None:
    code, out, _ = mxcli("verify", nvfp4, "--against", SAMPLE, "--markdown", "-")
    assert code == 0
    assert "| tensor | shape | format |" in out


def test_exit_codes_state_what_went_wrong(mxcli: Mxcli, nvfp4: Path, tmp_path: Path) -> None:
    code, out, err = mxcli("verify", SAMPLE)
    assert (code, out) == (4, "")
    assert err == f"error: {SAMPLE}: not quantized; there is nothing to verify. Use `mxcli inspect`.\n"
    folder = shutil.copytree(nvfp4, tmp_path / "cut")
    (folder / SHARD).write_bytes((folder / SHARD).read_bytes()[:-1])
    code, out, err = mxcli("verify", folder)
    assert (code, out) == (3, "")
    assert "truncated" in err
    assert mxcli("verify", nvfp4, "--against", tmp_path / "nothing").code == 3
    assert mxcli("verify", nvfp4, "--tp", 0).code == 2
    assert mxcli("verify", nvfp4, "--json", "--csv", "-").code == 2
    assert mxcli("verify").code == 2
    code, _, err = mxcli("verify", nvfp4, "--against", SAMPLE.parent / "tiny-llama-captures.safetensors")
    assert code == 2
    assert "has none of the tensors of" in err
    assert mxcli("verify", nvfp4, "--max-memory", "1M").code == 6


def test_narrow_screens_and_hostile_names(
    mxcli: Mxcli, nvfp4: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(nvfp4, tmp_path / "q")
    (folder / "mxcli.json").unlink()
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["ignore"] += ["\x1b[31mevil" + "x" * 500]
    path.write_text(json.dumps(config))
    monkeypatch.setenv("COLUMNS", "60")
    code, out, _ = mxcli("verify", folder, "--against", SAMPLE)
    assert code == 0
    assert "\x1b" not in out
    assert "\\x1b[31mevil" in out
    assert max(map(len, out.splitlines())) < SHOWN_CHARACTERS + 20
