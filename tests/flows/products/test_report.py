"""Errors of products, against binary64 products of what the kernel's codes stand for, computed here."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import bf16, floats, noise, read_raw, safetensors_bytes, write_model

from mxcli.backends.cpu import Cpu, dequantize, quantize
from mxcli.errors import InputError, RefusedError
from mxcli.files.checkpoint import open_checkpoint
from mxcli.files.selection import Rule
from mxcli.flows.plan.plan import Options, make_plan
from mxcli.flows.products.report import (
    Extent,
    ProductReport,
    memory_of_products,
    memory_to_multiply,
    plan_products,
    report_products,
)
from mxcli.flows.products.shapes import DY, X
from mxcli.flows.products.trained_layers import trained_model
from mxcli.flows.products.training import Trial, report_training
from mxcli.numerics.hadamard import find_hadamard
from mxcli.numerics.scheme import Rules, resolve
from mxcli.numerics.streams import stream_of
from mxcli.numerics.training import TRAINING_RECIPES

SAMPLES = Path(__file__).parents[3] / "samples"
MODEL, CAPTURES = SAMPLES / "tiny-llama", SAMPLES / "tiny-llama-captures.safetensors"


def products(
    model: Path,
    captures: Path,
    format: str,
    *,
    on_indivisible: str = "pad",
    selection: tuple[Rule, ...] = (),
    **more: Any,
) -> ProductReport:
    checkpoint = open_checkpoint(model)
    options = Options(format, Rules(**{"nonfinite": "error", **more}), on_indivisible, selection, analysis=True)
    plan = make_plan(checkpoint, options)
    recipe = resolve(format, Rules(**more))
    planned = plan_products(checkpoint, open_checkpoint(captures), plan, {X: recipe, DY: recipe})
    return report_products("model", planned, Cpu())


def values(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def tensor(file: Path, name: str) -> np.ndarray:
    return floats(read_raw(file)[name])


def back(x: np.ndarray, format: str, rule: str | None) -> np.ndarray:
    """x [rows, k] scaled back from codes with blocks along k."""
    recipe = resolve(format, Rules(scale_rounding=rule))
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


@pytest.mark.parametrize("passes", ["fprop", "dgrad", "wgrad"])
def test_every_operand_is_transformed_and_drawn_by_the_seed(passes: str) -> None:
    """Both operands of a product go through the same transform, which cancels in it."""
    layer = "model.layers.1.mlp.down_proj"
    rules: dict[str, Any] = {"rounding": "stochastic", "seed": 7, "hadamard": find_hadamard(16)}
    report = products(MODEL, CAPTURES, "nvfp4", selection=(Rule(True, layer),), **rules)
    assert {name: (r.hadamard.size, r.seed) for name, r in report.recipes.items() if r.hadamard} == dict.fromkeys(
        ("X", "dY", "W"), (16, 7)
    )
    w = tensor(MODEL / "model.safetensors", f"{layer}.weight")
    x, dy = (tensor(CAPTURES, f"{layer}.{role}") for role in ("activation", "gradient"))
    sides = {
        "fprop": [("X", x), ("W", w)],
        "dgrad": [("dY", dy), ("W", w.T)],
        "wgrad": [("dY", dy.T), ("X", x.T)],
    }[passes]
    recipe = resolve("nvfp4", Rules(**rules))
    found = []
    for letter, side in sides:
        stream = stream_of(f"{layer}.{letter}.{passes}.1100.None")
        made = quantize(np.ascontiguousarray(side), "F32", recipe, stream=stream)
        found.append(dequantize(made).astype(np.float64))
    (_, a), (_, b) = sides
    exact = a.astype(np.float64) @ b.T.astype(np.float64)
    off = found[0] @ found[1].T - exact
    (energies,) = (p.energies for p in report.products if p.passes == passes)
    assert energies.metrics["sqnr_db"] == pytest.approx(10 * math.log10((exact**2).sum() / (off**2).sum()), abs=1e-9)


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
        ({"a__activation": (8, 63)}, r"a.activation \[8, 63\] is not an input of a, which has 64 features there"),
        ({"a__gradient": (8, 64)}, r"a.gradient \[8, 64\] is not an output gradient of a, which has 32 features there"),
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
    for step, tokens in ((0, 16), (7, 32)):
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
        ("fprop", (48, 32, 64)),
        ("dgrad", (48, 64, 32)),
        ("wgrad", (32, 64, 48)),
    ]
    assert {each.passes: each.energies for each in report.products} == {
        passes: single[0][passes] + single[7][passes] for passes in single[0]
    }
    assert report.notes == ("Products of 2 steps (0 to 7) are added up, each of its own tokens.",)


def test_a_gradient_of_another_step_is_not_a_partner(tmp_path: Path) -> None:
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
    with pytest.raises(InputError, match=r"a\.gradient holds NaN or infinities, so its products do too"):
        products(model, captured(tmp_path / "x", a__gradient=dy), "mxfp8")


def test_metrics_of_nothing_are_none(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m", {"a.weight": noise(32, 64)})
    report = products(model, captured(tmp_path / "x", a__activation=np.zeros((8, 64))), "mxfp8")
    assert report.by_pass["fprop"].metrics == {"sqnr_db": None, "relative_error": None, "cosine": None, "bias": 0.0}
    json.dumps(report.by_pass["fprop"].metrics, allow_nan=False)


@pytest.mark.parametrize(
    ("shapes", "more", "words"),
    [
        (
            {"a__activation": (16, 64), "a__gradient": (16, 40)},
            {"hadamard": find_hadamard(16)},
            r"a: W in dgrad, \[64, 40\]: the Hadamard transform takes multiples of 16 along the sum; use a smaller",
        ),
        (
            {"a__activation": (16, 64), "a__gradient": (16, 40)},
            {"hadamard": find_hadamard(32)},
            r"a: dY in wgrad, \[40, 16\]: the Hadamard transform takes multiples of 32 along the sum",
        ),
        (
            {"a__activation": (8, 64), "a__gradient": (8, 40)},
            {"on_indivisible": "error"},
            r"a: X in wgrad, \[64, 8\]: mxfp8_e4m3 takes whole blocks; use --on-indivisible pad",
        ),
    ],
)
def test_lengths_along_the_sum_of_a_product_are_checked(
    tmp_path: Path, shapes: dict[str, tuple[int, ...]], more: dict[str, Any], words: str
) -> None:
    model = write_model(tmp_path / "m", {"a.weight": noise(40, 64)})
    x = captured(tmp_path / "x", **{name: values(*shape) for name, shape in shapes.items()})
    with pytest.raises(RefusedError) as error:
        products(model, x, "mxfp8", **more)
    assert any(re.match(words, reason) for reason in error.value.reasons)
    assert products(model, x, "mxfp8").products


def test_the_first_tokens_are_used(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m", {"a.weight": noise(32, 64)})
    x = values(1100, 64)
    long = products(model, captured(tmp_path / "long", a__activation=x), "mxfp8")
    assert [p.sizes for p in long.products] == [(1024, 32, 64)]
    assert long.products == products(model, captured(tmp_path / "cut", a__activation=x[:1024]), "mxfp8").products
    assert long.notes[0] == (
        "The first tokens alone are used at 1 place, 1,024 of 1,100 at a: 1,024 at most, and a multiple of what "
        "Hadamard transforms take."
    )
    assert [p.sizes for p in products(model, captured(tmp_path / "70", a__activation=x[:70]), "mxfp8").products] == [
        (64, 32, 64)
    ]


def test_the_same_tokens_give_the_figures_of_a_training_recipe() -> None:
    """`mxfp8` of training is `mxfp8` under `rceil` for every operand."""
    checkpoint, captures = open_checkpoint(MODEL), open_checkpoint(CAPTURES)
    plan = make_plan(checkpoint, Options("mxfp8", on_indivisible="pad", analysis=True))
    trial = Trial((TRAINING_RECIPES["mxfp8"],), Cpu())
    trained = report_training("model", trained_model(checkpoint, captures, plan), trial)
    found = products(MODEL, CAPTURES, "mxfp8", scale_rounding="rceil")
    assert {(p.layer, p.passes): p.energies for p in found.products} == {
        (p.layer, p.passes): p.energies for p in trained.products
    }


@pytest.mark.parametrize(
    ("largest", "words"),
    [
        (1e39, r"a\.activation reaches 1e\+39, and operands are quantized as binary32, which ends at 3\.4e38"),
        (3.4e38, r"X of a: under mxfp8_e4m3 the codes of its largest values stand for more than binary32 holds"),
        (math.inf, r"a\.activation holds NaN or infinities, so its products do too"),
    ],
)
def test_what_binary32_does_not_hold_is_named(tmp_path: Path, largest: float, words: str) -> None:
    model = write_model(tmp_path / "m", {"a.weight": noise(32, 64)})
    x = values(8, 64).astype(np.float64)
    x[3, 4] = largest
    with pytest.raises(InputError, match=words):
        products(model, write_model(tmp_path / "x", {"a.activation": ("F64", x)}), "mxfp8")


def test_a_weight_that_is_not_finite_is_named(tmp_path: Path) -> None:
    w = values(32, 64)
    w[3, 4] = np.inf
    model = write_model(tmp_path / "m", {"a.weight": bf16(w)})
    with pytest.raises(InputError, match=r"a\.weight holds NaN or infinities"):
        products(model, captured(tmp_path / "x", a__activation=values(8, 64)), "mxfp8")


def test_the_memory_that_products_need(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_model(tmp_path / "m", {"a.weight": noise(32, 64)}))
    captures = open_checkpoint(captured(tmp_path / "x", a__activation=values(16, 64)))
    plan = make_plan(checkpoint, Options("mxfp8", on_indivisible="pad", analysis=True))
    recipe = resolve("mxfp8")
    need = memory_to_multiply(plan_products(checkpoint, captures, plan, {X: recipe, DY: recipe}))
    assert need == memory_of_products([Extent("a", 16, 32, 64, 4096)])
