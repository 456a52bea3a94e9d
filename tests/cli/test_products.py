"""`mxcli products` from the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import strict_json

SAMPLE, CAPTURES = "samples/tiny-llama", "samples/tiny-llama-captures.safetensors"
PRODUCTS = ("products", SAMPLE, CAPTURES, "--format", "nvfp4")


def test_the_table_has_the_worst_products_and_sums_by_pass(mxcli: Callable[..., Any]) -> None:
    code, out, _ = mxcli(*PRODUCTS, "--top", "3")
    lines = out.splitlines()
    assert code == 0
    assert lines[0] == f"{SAMPLE} with {CAPTURES}: 84 products of 28 layers"
    assert lines[1] == "X: nvfp4, scale rounding te, element rounding nearest-even, as mxcli"
    assert [line.split()[-4] for line in lines if line.startswith("all of")] == ["fprop", "dgrad", "wgrad"]
    assert lines[-1] == "3 of 84 products shown, worst sqnr_db first"


def test_records_have_each_product_and_the_rules_of_each_operand(mxcli: Callable[..., Any]) -> None:
    record = strict_json(mxcli(*PRODUCTS, "--gradient-format", "mxfp8_e5m2", "--json").out)
    assert record["schema"] == "mxcli.products/1"
    assert record["rules"]["W"]["format"] == record["rules"]["X"]["format"] == "nvfp4"
    assert record["rules"]["dY"] == {
        "format": "mxfp8_e5m2", "scale_rounding": "rceil", "rounding": "nearest-even", "dialect": "mxcli"
    }  # fmt: skip
    assert len(record["products"]) == 84
    by_pass = {name: metrics["sqnr_db"] for name, metrics in record["by_pass"].items()}
    assert by_pass["fprop"] == pytest.approx(23.89, abs=0.01)
    assert by_pass["dgrad"] == pytest.approx(23.2, abs=0.2)
    assert {(p["format_a"], p["format_b"]) for p in record["products"] if p["pass"] == "wgrad"} == {
        ("mxfp8_e5m2", "nvfp4")
    }


def test_csv_has_the_names_of_the_json(mxcli: Callable[..., Any]) -> None:
    lines = mxcli(*PRODUCTS, "--csv", "-").out.splitlines()
    assert lines[0] == "layer,pass,m,n,k,format_a,format_b,sqnr_db,relative_error,cosine,bias"
    assert len(lines) == 85


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--fail-on", "sqnr_db<1"), 2, "no such option: --fail-on"),
        (("--axis", "row"), 2, "no such option: --axis"),
        (("--seed", "3"), 2, "--seed 3"),
        (("--html", "no/such.html"), 3, "its directory does not exist"),
        (("--sort", "amax"), 2, "amax"),
        (("--gradient-format", "mxfp99"), 2, "unknown format 'mxfp99'"),
    ],
)
def test_what_products_do_not_have_is_refused(
    mxcli: Callable[..., Any], arguments: tuple[str, ...], code: int, words: str
) -> None:
    found, _, err = mxcli(*PRODUCTS, *arguments)
    assert found == code
    assert words in err


def test_captures_without_the_layers_are_refused(mxcli: Callable[..., Any]) -> None:
    code, _, err = mxcli("products", SAMPLE, f"{SAMPLE}/model.safetensors")
    assert code == 3
    assert "holds no activations or gradients of the layers to be quantized" in err


def test_a_recipe_file_and_reasons(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text('format = "mxfp4"\n[[override]]\nselect = "*.down_proj"\nkeep = true\n')
    code, out, err = mxcli("products", SAMPLE, CAPTURES, "--recipe", recipe, "--json", "-v")
    assert code == 0
    record = strict_json(out)
    assert {product["format_a"] for product in record["products"]} == {"mxfp4_e2m1"}
    assert not [product for product in record["products"] if "down_proj" in product["layer"]]
    assert "model.layers.0.mlp.down_proj.weight: " in err
    assert mxcli("products", SAMPLE, CAPTURES, "--recipe", recipe, "--csv", f"{recipe}", "--force").code == 4


def test_a_page_and_plots(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    page, plots = tmp_path / "products.html", tmp_path / "plots"
    assert mxcli(*PRODUCTS, "--html", page, "--plots", plots).code == 0
    text = page.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>\n")
    assert "mxcli products samples/tiny-llama" in text
    assert {file.suffix for file in plots.iterdir()} == {".png", ".svg"}


def test_the_rules_state_the_transform_and_the_seed(mxcli: Callable[..., Any]) -> None:
    words = (*PRODUCTS, "--include", "*layers.1.*.down_proj", "--hadamard", "16", "--rounding", "stochastic", "--seed")
    record = strict_json(mxcli(*words, "7", "--json").out)
    for letter in ("X", "W", "dY"):
        assert record["rules"][letter] == {
            "format": "nvfp4", "scale_rounding": "te", "rounding": "stochastic", "dialect": "mxcli", "seed": 7,
            "hadamard": {"size": 16, "seed": None, "signs": "+++-+------+-+--"},
        }  # fmt: skip
    assert record["by_pass"] != strict_json(mxcli(*words, "8", "--json").out)["by_pass"]
    assert (
        "X: nvfp4, scale rounding te, element rounding stochastic (seed 7) after hadamard-16, as mxcli"
        in mxcli(*words, "7").out
    )


def test_more_memory_than_is_allowed_is_refused(mxcli: Callable[..., Any]) -> None:
    code, out, err = mxcli(*PRODUCTS, "--device", "cpu", "--max-memory", "64M")
    assert (code, out) == (6, "")
    assert "model.layers.0.mlp.down_proj: needs about 339,206,144 bytes of memory" in err
    assert "and --max-memory allows 67,108,864" in err
    assert mxcli(*PRODUCTS, "--device", "cpu", "--max-memory", "400M").code == 0
