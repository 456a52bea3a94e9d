"""`--recipe` and `--save-recipe`: the same plan and bytes, flags that override, faults with their lines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import SAMPLE, strict_json

RECIPE = """format = "mxfp4"
scale_rounding = "floor"
exclude = ["*layers.0.*"]

[[override]]
select = ["*.down_proj", "*.v_proj"]
format = "nvfp4"

[[override]]
select = "*layers.3.mlp.down_proj"
keep = true
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "r.toml").write_text(RECIPE)
    return tmp_path / "r.toml"


def test_a_saved_recipe_writes_the_same_bytes(mxcli: Callable[..., Any], tmp_path: Path, recipe: Path) -> None:
    saved, one, two = tmp_path / "saved.toml", tmp_path / "one", tmp_path / "two"
    assert mxcli("quantize", SAMPLE, "--recipe", recipe, "-o", one, "--save-recipe", saved).code == 0
    assert mxcli("quantize", SAMPLE, "--recipe", saved, "-o", two).code == 0
    for name in ("model.safetensors", "config.json"):
        assert (one / name).read_bytes() == (two / name).read_bytes()
    assert saved.read_text() == (
        f"# mxcli quantize {SAMPLE}\n"
        'format = "mxfp4_e2m1"\nscale_rounding = "floor"\nrounding = "nearest-even"\nas = "mxcli"\n'
        'nonfinite = "error"\non_indivisible = "error"\nexclude = "*layers.0.*"\n\n'
        '[[override]]\nselect = ["*.down_proj", "*.v_proj"]\nformat = "nvfp4"\nscale_rounding = "te"\n\n'
        '[[override]]\nselect = "*layers.3.mlp.down_proj"\nkeep = true\n'
    )
    groups = strict_json((one / "config.json").read_text())["quantization_config"]["config_groups"]
    assert {group["format"]: group["targets"] for group in groups.values()} == {
        "mxfp4-pack-quantized": [
            r"re:(.*\.)?layers\.(1|2|3)\.mlp\.(gate_proj|gate_up_proj|up_proj)$",
            r"re:(.*\.)?layers\.(1|2|3)\.self_attn\.(k_proj|o_proj|q_proj)$",
        ],
        "nvfp4-pack-quantized": [
            r"re:(.*\.)?layers\.(1|2)\.mlp\.down_proj$",
            r"re:(.*\.)?layers\.(1|2|3)\.self_attn\.v_proj$",
        ],
    }


def test_a_dry_run_saves_the_recipe_too(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    saved = tmp_path / "saved.toml"
    words = ("quantize", SAMPLE, "--format", "nvfp4", "--dry-run", "--save-recipe", saved)
    assert mxcli(*words).code == 0
    assert 'scale_rounding = "te"' in saved.read_text()
    assert mxcli(*words).code == 4
    assert mxcli(*words, "--force").code == 0


def test_flags_override_a_recipe(mxcli: Callable[..., Any], recipe: Path) -> None:
    words = ("report", SAMPLE, "--recipe", recipe, "--json")
    report = strict_json(mxcli(*words).out)
    assert report["options"]["nonfinite"] == "saturate"
    assert {each["format"]: each["tensors"] for each in report["recipes"]} == {"mxfp4_e2m1": 15, "nvfp4": 5}
    report = strict_json(mxcli(*words, "--format", "mxfp6", "--scale-rounding", "ceil", "--include", "@lm_head").out)
    assert {each["format"]: each["scale_rounding"] for each in report["recipes"]} == {
        "mxfp6_e2m3": "ceil",
        "nvfp4": "te",
    }
    assert "lm_head.weight" in {layer["name"] for layer in report["layers"]}
    recipe.write_text('nonfinite = "nan-block"\n' + RECIPE)
    assert strict_json(mxcli(*words).out)["options"]["nonfinite"] == "nan-block"
    assert strict_json(mxcli(*words, "--nonfinite", "saturate").out)["options"]["nonfinite"] == "saturate"


def test_faults_come_with_their_lines(mxcli: Callable[..., Any], tmp_path: Path, recipe: Path) -> None:
    recipe.write_text(RECIPE.replace("mxfp4", "mxfp5").replace("keep", "kep"))
    code, out, err = mxcli("quantize", SAMPLE, "--recipe", recipe, "--dry-run")
    assert (code, out) == (2, "")
    assert f"{recipe}:1: unknown format 'mxfp5'" in err
    assert f"{recipe}:11: unknown key 'kep'; known are select, keep" in err
    recipe.write_text(RECIPE.replace("v_proj", "v_pro"))
    code, out, err = mxcli("quantize", SAMPLE, "--recipe", recipe, "-o", tmp_path / "out")
    assert (code, out) == (2, "")
    assert err == f"error: {recipe}:6: *.v_pro: matches no tensor. Did you mean *.v_proj (4 tensors)?\n"
    assert not (tmp_path / "out").exists()
    assert mxcli("quantize", SAMPLE, "--recipe", tmp_path / "none.toml", "--dry-run").code == 3


def test_a_format_has_to_come_from_somewhere(mxcli: Callable[..., Any], recipe: Path) -> None:
    code, out, err = mxcli("quantize", SAMPLE, "--dry-run")
    assert (code, out) == (2, "")
    assert err == "error: missing option '--format': name a format, or a --recipe that does.\n"
    recipe.write_text("exclude = 'lm_head'\n")
    assert mxcli("quantize", SAMPLE, "--recipe", recipe, "--dry-run").code == 2
    assert mxcli("quantize", SAMPLE, "--recipe", recipe, "--dry-run", "--format", "mxfp8").code == 0
    assert mxcli("report", SAMPLE, "--recipe", recipe, "--top", "0").code == 0
