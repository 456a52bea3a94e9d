"""Errors of products, against binary64 products of what the kernel's codes stand for, computed here."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from tiny_models import bf16, floats, noise, read_raw, safetensors_bytes, write_model

from mxcli.backends.cpu import Cpu, dequantize, quantize
from mxcli.errors import InputError
from mxcli.files.checkpoint import open_checkpoint
from mxcli.flows.plan import Options, make_plan
from mxcli.flows.products import DY, ProductReport, X, report_products
from mxcli.numerics.recipe import resolve

SAMPLES = Path(__file__).parents[2] / "samples"
MODEL, CAPTURES = SAMPLES / "tiny-llama", SAMPLES / "tiny-llama-captures.safetensors"


def products(model: Path, captures: Path, format: str, **more: str) -> ProductReport:
    checkpoint = open_checkpoint(model)
    plan = make_plan(checkpoint, Options(format, on_indivisible="pad", analysis=True, **more))
    recipe = resolve(format, **more)
    return report_products("model", checkpoint, open_checkpoint(captures), plan, {X: recipe, DY: recipe}, backend=Cpu())


def values(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def tensor(file: Path, name: str) -> np.ndarray:
    return floats(read_raw(file)[name])


def back(x: np.ndarray, format: str, rule: str | None) -> np.ndarray:
    """x [rows, k] scaled back from codes with blocks along k."""
    recipe = resolve(format, scale_rounding=rule)
    return dequantize(quantize(np.ascontiguousarray(x), "F32", recipe)).astype(np.float64)


@pytest.mark.parametrize(("format", "rule"), [("mxfp8", "floor"), ("mxfp8", "rceil"), ("nvfp4", None)])
def test_errors_are_those_of_binary64_products(format: str, rule: str | None) -> None:
    report = products(MODEL, CAPTURES, format, **({"scale_rounding": rule} if rule else {}))
    found = {(p.layer, p.passes): p for p in report.products}
    assert len(found) == 28 * 3
    layer = "model.layers.1.mlp.down_proj"
    w = tensor(MODEL / "model.safetensors", f"{layer}.weight")
    x, dy = (tensor(CAPTURES, f"{layer}.{role}") for role in ("activation", "gradient"))
    for passes, a, b in (("fprop", x, w), ("dgrad", dy, w.T), ("wgrad", dy.T, x.T)):
        exact = a.astype(np.float64) @ b.T.astype(np.float64)
        off = back(a, format, rule) @ back(b, format, rule).T - exact
        metrics = found[layer, passes].energies.metrics
        assert metrics["sqnr_db"] == pytest.approx(10 * math.log10((exact**2).sum() / (off**2).sum()), abs=1e-9)
        assert metrics["relative_error"] == pytest.approx(np.linalg.norm(off) / np.linalg.norm(exact), rel=1e-9)
        assert metrics["bias"] == pytest.approx(off.mean(), rel=1e-6, abs=1e-12)
        assert found[layer, passes].sizes == {
            "fprop": (64, 128, 384), "dgrad": (64, 384, 128), "wgrad": (128, 384, 64)
        }[passes]  # fmt: skip


def test_rounding_scales_down_costs_every_product() -> None:
    floor = products(MODEL, CAPTURES, "mxfp8", scale_rounding="floor").by_pass
    rceil = products(MODEL, CAPTURES, "mxfp8", scale_rounding="rceil").by_pass
    for passes in ("fprop", "dgrad", "wgrad"):
        better, worse = rceil[passes].metrics["sqnr_db"], floor[passes].metrics["sqnr_db"]
        assert better is not None
        assert worse is not None
        assert 1 < better - worse < 2.5


def captured(path: Path, **tensors: np.ndarray) -> Path:
    """A capture whose tensors are named as LAYER.ROLE, without a record."""
    return write_model(path, {name.replace("__", "."): bf16(x) for name, x in tensors.items()})


def test_products_without_a_gradient_are_left_out_and_said(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m", {"a.weight": noise(32, 64), "b.weight": noise(32, 64)})
    x = captured(tmp_path / "x", a__activation=values(8, 64))
    report = products(model, x, "mxfp8")
    assert [(p.layer, p.passes) for p in report.products] == [("a", "fprop")]
    assert report.notes == ("2 products are left out: their activation or gradient was not captured.",)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        (
            {"c__activation": (8, 64)},
            "no activations or gradients of the layers to be quantized; it holds those of c",
        ),
        ({"a__activation": (8, 63)}, r"a.activation \[8, 63\] is no input of a, which has 64 features there"),
        ({"a__gradient": (8, 64)}, r"a.gradient \[8, 64\] is no output gradient of a, which has 32 features there"),
        ({"a__activation": (8, 64), "a__gradient": (7, 32)}, "8 tokens of activations and 7 of gradients"),
    ],
)
def test_captures_that_do_not_fit_are_named(tmp_path: Path, tensors: dict[str, tuple[int, ...]], words: str) -> None:
    model = write_model(tmp_path / "m", {"a.weight": noise(32, 64)})
    x = captured(tmp_path / "x", **{name: values(*shape) for name, shape in tensors.items()})
    with pytest.raises(InputError, match=words):
        products(model, x, "mxfp8")


def test_several_steps_are_multiplied_by_themselves_and_added_up(tmp_path: Path) -> None:
    """One tensor of both steps has other blocks along the tokens, and a token of one step is none of the other's."""
    model = write_model(tmp_path / "m", {"a.weight": noise(32, 64)})
    single = {}
    for step, tokens in ((0, 8), (7, 24)):
        tensors = {
            "a.activation": noise(tokens, 64, seed=step),
            "a.gradient": noise(tokens, 32, seed=step, scale=1 + step),
        }
        for folder in (tmp_path / "both", tmp_path / f"only-{step}"):
            folder.mkdir(exist_ok=True)
            (folder / f"step-{step:06d}.safetensors").write_bytes(safetensors_bytes(tensors))
        single[step] = products(model, tmp_path / f"only-{step}", "mxfp8").by_pass
    report = products(model, tmp_path / "both", "mxfp8")
    assert [(p.passes, p.sizes) for p in report.products] == [
        ("fprop", (32, 32, 64)),
        ("dgrad", (32, 64, 32)),
        ("wgrad", (32, 64, 32)),
    ]
    assert {each.passes: each.energies for each in report.products} == {
        passes: single[0][passes] + single[7][passes] for passes in single[0]
    }
    assert report.notes == ("Products of 2 steps (0 to 7) are added up, each of its own tokens.",)


def test_a_gradient_of_another_step_is_no_partner(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m", {"a.weight": noise(32, 64)})
    (tmp_path / "x").mkdir()
    for step, tensors in enumerate(({"a.activation": noise(8, 64)}, {"a.gradient": noise(8, 32)})):
        (tmp_path / "x" / f"step-{step}.safetensors").write_bytes(safetensors_bytes(tensors))
    report = products(model, tmp_path / "x", "mxfp8")
    assert [p.passes for p in report.products] == ["fprop", "dgrad"]
    assert report.notes[1] == "4 products are left out: their activation or gradient was not captured."


def test_an_input_with_a_batch_dimension(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m", {"a.weight": noise(32, 64)})
    x, dy = values(8, 64), values(8, 32)
    flat = products(model, captured(tmp_path / "flat", a__activation=x, a__gradient=dy), "nvfp4")
    batch = captured(tmp_path / "batch", a__activation=x.reshape(2, 4, 64), a__gradient=dy.reshape(2, 4, 32))
    assert products(model, batch, "nvfp4").products == flat.products


def test_a_gradient_that_is_not_finite_is_named(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m", {"a.weight": noise(32, 64)})
    dy = values(8, 32)
    dy[3, 4] = np.nan
    with pytest.raises(InputError, match="dY of a is not finite"):
        products(model, captured(tmp_path / "x", a__gradient=dy), "mxfp8")


def test_metrics_of_nothing_are_none(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m", {"a.weight": noise(32, 64)})
    report = products(model, captured(tmp_path / "x", a__activation=np.zeros((8, 64))), "mxfp8")
    assert report.by_pass["fprop"].metrics == {"sqnr_db": None, "relative_error": None, "cosine": None, "bias": 0.0}
    json.dumps(report.by_pass["fprop"].metrics, allow_nan=False)
