"""Products under training recipes, against binary64 products of what the kernel's codes stand for, computed here."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import bf16, floats, noise, read_raw, write_model

import mxcli
from mxcli.backends.cpu import Cpu, dequantize, quantize
from mxcli.errors import InputError
from mxcli.files.checkpoint import open_checkpoint
from mxcli.files.selection import Rule
from mxcli.flows.plan.plan import Options, make_plan
from mxcli.flows.products.trained_layers import TrainedModel, trained_model
from mxcli.flows.products.training import TrainingReport, Trial, report_training
from mxcli.numerics.hadamard import find_hadamard
from mxcli.numerics.scheme import Rules, resolve
from mxcli.numerics.streams import stream_of
from mxcli.numerics.training import TRAINING_RECIPES, High, Operand, TrainingRecipe

SAMPLES = Path(__file__).parents[3] / "samples"
MODEL, CAPTURES = SAMPLES / "tiny-llama", SAMPLES / "tiny-llama-captures.safetensors"
LAYER = "model.layers.1.mlp.down_proj"
SEED = 7


def model_of(source: Path, captures: Path | None = None, only: str | None = None) -> TrainedModel:
    checkpoint = open_checkpoint(source)
    rules = () if only is None else (Rule(True, only),)
    plan = make_plan(checkpoint, Options("mxfp8", on_indivisible="pad", selection=rules, analysis=True))
    return trained_model(checkpoint, checkpoint if captures is None else open_checkpoint(captures), plan)


def trained(model: TrainedModel, *recipes: TrainingRecipe, draws: int = 1, threads: int = 1) -> TrainingReport:
    return report_training("model", model, Trial(recipes, Cpu(threads), SEED, draws))


def rows(*names: str) -> list[TrainingRecipe]:
    return [TRAINING_RECIPES[name] for name in names]


@pytest.fixture(scope="module")
def layer() -> dict[str, np.ndarray]:
    """W, X and dY of LAYER."""
    return {
        "W": floats(read_raw(MODEL / "model.safetensors")[f"{LAYER}.weight"]),
        "X": floats(read_raw(CAPTURES)[f"{LAYER}.activation"]),
        "dY": floats(read_raw(CAPTURES)[f"{LAYER}.gradient"]),
    }


def sides(layer: dict[str, np.ndarray], passes: str) -> list[tuple[str, np.ndarray]]:
    """The operands of a product, [rows, k]."""
    w, x, dy = layer["W"], layer["X"], layer["dY"]
    return {
        "fprop": [("X", x), ("W", w)],
        "dgrad": [("dY", dy), ("W", w.T)],
        "wgrad": [("dY", dy.T), ("X", x.T)],
    }[passes]


PLAIN_RECIPES = {
    "mxfp8": dict.fromkeys(("X", "W", "dY"), ("mxfp8_e4m3", "rceil")),
    "mxfp8_floor": dict.fromkeys(("X", "W", "dY"), ("mxfp8_e4m3", "floor")),
    "fp8_current": {"X": ("fp8_e4m3", "amax"), "W": ("fp8_e4m3", "amax"), "dY": ("fp8_e5m2", "amax")},
}


def assert_products(report: TrainingReport, recipe: str, passes: str, exact: np.ndarray, found: np.ndarray) -> None:
    (product,) = (p for p in report.products if (p.recipe, p.passes) == (recipe, passes))
    off, metrics = found - exact, product.energies.metrics
    assert metrics["sqnr_db"] == pytest.approx(10 * math.log10((exact**2).sum() / (off**2).sum()), abs=1e-6)
    assert metrics["relative_error"] == pytest.approx(np.linalg.norm(off) / np.linalg.norm(exact), rel=1e-7)
    assert metrics["bias"] == pytest.approx(off.mean(), rel=1e-4, abs=1e-13)


@pytest.mark.parametrize("passes", ["fprop", "dgrad", "wgrad"])
def test_errors_are_those_of_binary64_products(layer: dict[str, np.ndarray], passes: str) -> None:
    report = trained(model_of(MODEL, CAPTURES, LAYER), *rows(*PLAIN_RECIPES))
    for name, formats in PLAIN_RECIPES.items():
        operands = sides(layer, passes)
        exact = operands[0][1].astype(np.float64) @ operands[1][1].T.astype(np.float64)
        a, b = (
            mxcli.quantize(np.ascontiguousarray(x), formats[letter][0], scale_rounding=formats[letter][1]).dequantize()
            for letter, x in operands
        )
        assert_products(report, name, passes, exact, a.astype(np.float64) @ b.astype(np.float64).T)


@pytest.mark.parametrize("passes", ["fprop", "dgrad", "wgrad"])
def test_nvfp4_rounds_gradients_with_draws_of_their_own(layer: dict[str, np.ndarray], passes: str) -> None:
    """The stream of a tensor's draws is named after its layer, letter, product, step and rank."""
    report = trained(model_of(MODEL, CAPTURES, LAYER), *rows("nvfp4"))
    transform = {"wgrad": find_hadamard(16)}.get(passes)
    values = []
    for letter, x in sides(layer, passes):
        recipe = resolve(
            "nvfp4_2d" if letter == "W" else "nvfp4",
            Rules(rounding="stochastic" if letter == "dY" else None, seed=SEED, hadamard=transform),
        )
        stream = stream_of(f"{LAYER}.{letter}.{passes}.1100.None")
        values.append(dequantize(quantize(np.ascontiguousarray(x), "F32", recipe, stream=stream)).astype(np.float64))
    (_, a), (_, b) = sides(layer, passes)
    assert_products(
        report, "nvfp4", passes, a.astype(np.float64) @ b.T.astype(np.float64), values[0] @ values[1].T
    )  # fmt: skip


def hadamard_of(size: int) -> np.ndarray:
    """diag(signs) H / sqrt(size), in binary64."""
    h = np.ones((1, 1))
    while len(h) < size:
        h = np.block([[h, h], [h, -h]])
    return np.diag(np.array(find_hadamard(size).signs, np.float64)) @ h / math.sqrt(size)


@pytest.mark.parametrize(("name", "size", "format"), [("nvfp4_nearest", 16, "nvfp4"), ("mxfp4", 32, "mxfp4_e2m1")])
def test_a_transform_cancels_in_the_product(layer: dict[str, np.ndarray], name: str, size: int, format: str) -> None:
    """Its own operands are those that are quantized, and without quantizing they leave the product as it is."""
    operand = Operand(format, hadamard=size)
    recipe = replace(TRAINING_RECIPES[name], wgrad=(operand, operand))
    report = trained(model_of(MODEL, CAPTURES, LAYER), recipe)
    (_, dy), (_, x) = sides(layer, "wgrad")
    h = np.kron(np.eye(64 // size), hadamard_of(size))
    a, b = dy.astype(np.float64) @ h, x.astype(np.float64) @ h
    exact = dy.astype(np.float64) @ x.T.astype(np.float64)
    assert np.linalg.norm(a @ b.T - exact) < 1e-6 * np.linalg.norm(exact)
    found = [mxcli.quantize(side.astype(np.float32), format).dequantize().astype(np.float64) for side in (a, b)]
    noise = ((found[0] @ found[1].T - exact) ** 2).sum()
    (product,) = (p for p in report.products if p.passes == "wgrad")
    # Another order of binary32 operations in the transform moves a few codes.
    assert product.energies.noise == pytest.approx(noise, rel=0.02)


def test_weights_in_square_blocks_have_the_same_values_in_both_products(layer: dict[str, np.ndarray]) -> None:
    w = layer["W"]
    straight = mxcli.quantize(w, "nvfp4_2d").dequantize()
    assert (straight == mxcli.quantize(np.ascontiguousarray(w.T), "nvfp4_2d").dequantize().T).all()
    sums = trained(model_of(MODEL, CAPTURES, LAYER), *rows("nvfp4", "nvfp4_1d_weights")).sums()
    same, other = (
        [sums[name, passes].operands["W"].metrics["sqnr_db"] for passes in ("fprop", "dgrad")]
        for name in ("nvfp4", "nvfp4_1d_weights")
    )
    assert same[0] == pytest.approx(same[1], rel=1e-8)
    assert other[0] != pytest.approx(other[1], rel=1e-3)


def test_what_is_not_quantized_has_no_error() -> None:
    plain = TrainingRecipe("plain", (None, None), (None, None), (None, None), High(), "", "")
    report = trained(model_of(MODEL, CAPTURES, "*layers.1"), plain)
    assert len(report.products) == 7 * 3
    for product in report.products:
        assert product.energies.noise == product.energies.error == product.averaged.noise == 0
        assert product.energies.metrics["relative_error"] == 0
        assert not product.operands


def test_blocks_that_stay_high_are_exact_and_reported() -> None:
    report = trained(model_of(MODEL, CAPTURES, "*.[qk]_proj"), *rows("mxfp8", "nvfp4", "fp8_current"))
    high = {
        name: {p.layer.split(".")[2] for p in report.products if p.recipe == name and p.energies.noise == 0}
        for name in ("mxfp8", "nvfp4", "fp8_current")
    }
    assert high == {"mxfp8": set(), "nvfp4": {"3"}, "fp8_current": {"0", "3"}}
    assert report.high["fp8_current"] == ("model.layers.0", "model.layers.3")
    sums = report.sums()["fp8_current", "wgrad"]
    assert (sums.products, sums.high) == (8, 4)
    assert sums.quantized is not None
    assert sums.quantized.metrics["sqnr_db"] < sums.energies.metrics["sqnr_db"]  # type: ignore[operator]
    assert report.notes == (
        "21 captured layers are left out ('lm_head', …): no linear layer of SOURCE, or not taken.",
        "nvfp4: 1 of 4 blocks stay high (the last 15 % of blocks, rounded up: model.layers.3); the products of 2 "
        "layers there are exact.",
        "fp8_current: 2 of 4 blocks stay high (the first block and the last block: model.layers.0, model.layers.3); "
        "the products of 4 layers there are exact.",
    )


def test_rounding_scales_down_saturates_gradients_and_costs_every_product() -> None:
    sums = trained(model_of(MODEL, CAPTURES, "*layers.[02]"), *rows("mxfp8", "mxfp8_floor")).sums()
    for passes in ("fprop", "dgrad", "wgrad"):
        up, down = sums["mxfp8", passes], sums["mxfp8_floor", passes]
        assert 1 < up.energies.metrics["sqnr_db"] - down.energies.metrics["sqnr_db"] < 2.5  # type: ignore[operator]
        assert all(counts.saturated == 0 for counts in up.operands.values())
        assert all(0.4 < counts.metrics["saturated_percent"] < 1.2 for counts in down.operands.values())  # type: ignore[operator]


def test_order_and_threads_do_not_change_a_digit() -> None:
    model = model_of(MODEL, CAPTURES, "*layers.1")
    recipes = rows("nvfp4", "mxfp8")
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = trained(model, *recipes, draws=2)
        torch.set_num_threads(2)
        turned = trained(replace(model, layers=model.layers[::-1]), *recipes[::-1], draws=2, threads=3)
    finally:
        torch.set_num_threads(before)

    def key(product: object) -> tuple[str, ...]:
        return product.layer, product.recipe, product.passes  # type: ignore[attr-defined]

    assert sorted(one.products, key=key) == sorted(turned.products, key=key)


def test_draws_average_out_what_is_drawn_and_nothing_else() -> None:
    drawn = (Operand("mxfp4", "rceil", "stochastic"), None)
    recipe = replace(TRAINING_RECIPES["mxfp8"], name="drawn", fprop=drawn, high=High())
    report = trained(model_of(MODEL, CAPTURES, LAYER), recipe, draws=16)
    energies = {p.passes: (p.energies, p.averaged) for p in report.products}
    each, mean = energies["fprop"]
    assert each.noise / mean.noise == pytest.approx(16, rel=0.1)
    assert energies["dgrad"][0] == energies["dgrad"][1]
    alone = {p.passes: p.energies for p in trained(model_of(MODEL, CAPTURES, LAYER), recipe).products}
    assert each.signal == alone["fprop"].signal
    assert each.noise == pytest.approx(alone["fprop"].noise, rel=0.05)


def captured(
    folder: Path, tensors: dict[str, tuple[str, int | None, np.ndarray]], layers_of_model: Sequence[str] = ()
) -> Path:
    """A capture of tensors `name: (role, step, values)` of layers called as their names begin."""
    records = {
        name: {"role": role, "layer": name.rpartition(".")[0], **({} if step is None else {"step": step})}
        for name, (role, step, _) in tensors.items()
    }
    more = {"layers_of_model": list(layers_of_model)} if layers_of_model else {}
    entry = json.dumps({"version": 1, "tensors": records, **more})
    return write_model(folder, {n: bf16(x) for n, (*_, x) in tensors.items()}, metadata={"mxcli.capture": entry})


def values(*shape: int, amax: float = 1.0, seed: int = 0) -> np.ndarray:
    """Noise whose largest magnitude is `amax`."""
    x = np.random.default_rng(seed).uniform(-amax, amax, shape).astype(np.float32)
    x.flat[0] = amax
    return x


def steps_of(folder: Path, amaxes: list[float]) -> Path:
    """A capture of one layer whose inputs have these largest magnitudes at steps 0, 10, 20, …"""
    tensors: dict[str, tuple[str, int | None, np.ndarray]] = {"layers.0.fc.weight": ("weight", None, values(32, 64))}
    for at, amax in enumerate(amaxes):
        tensors[f"layers.0.fc.{at}activation"] = ("activation", 10 * at, values(32, 64, amax=amax))
        tensors[f"layers.0.fc.{at}gradient"] = ("gradient", 10 * at, values(32, 32, amax=2.0**-8))
    return captured(folder, tensors)


def test_delayed_scales_saturate_what_has_grown(tmp_path: Path) -> None:
    recipe = replace(TRAINING_RECIPES["fp8_delayed"], high=High())
    report = trained(model_of(steps_of(tmp_path / "x", [1, 2, 2, 0.5])), recipe)
    saturated = {p.step: p.operands["X"].saturated for p in report.products if p.passes == "fprop"}
    assert saturated[0] == saturated[20] == saturated[30] == 0
    assert 900 < saturated[10] < 1150, "about half of the elements are above what was seen"
    assert report.steps == (0, 10, 20, 30)
    errors = {step: report.sums(step)["fp8_delayed", "fprop"].energies.metrics["sqnr_db"] for step in report.steps}
    assert errors[10] < 15 < 25 < errors[20]  # type: ignore[operator]
    assert report.notes[-1] == (
        "fp8_delayed: the history of a scale is the captured steps before, 3 at most; at step 0 there is none, and "
        "scales are 1."
    )


def test_one_step_has_no_history(tmp_path: Path) -> None:
    report = trained(model_of(steps_of(tmp_path / "x", [1])), replace(TRAINING_RECIPES["fp8_delayed"], high=High()))
    assert report.notes == (
        "fp8_delayed: one step was captured, so that scales have no history and are 1, as in the first step of a "
        "training; capture several steps to see delayed scales at work.",
    )
    (wgrad,) = (p for p in report.products if p.passes == "wgrad")
    dy = mxcli.quantize(values(32, 32, amax=2.0**-8).T.copy() * 1.0, "fp8_e5m2").dequantize()
    assert wgrad.operands["dY"].saturated == 0
    assert wgrad.operands["dY"].underflowed >= int((dy == 0).sum())


def test_captured_weights_serve_as_the_model_of_their_step(tmp_path: Path) -> None:
    model = captured(
        tmp_path / "x",
        {
            "a.x1": ("activation", 1, values(16, 64)),
            "a.x2": ("activation", 2, values(16, 64)),
            "a.w1": ("weight", 1, values(32, 64, amax=1)),
            "a.w2": ("weight", 2, values(32, 64, amax=2)),
        },
    )
    report = trained(model_of(model), *rows("mxfp8"))
    signal = {p.step: p.energies.signal for p in report.products}
    assert signal[2] == pytest.approx(4 * signal[1], rel=0.02)
    assert report.notes == (
        "4 products are left out, as at a, step 1: its activation or gradient was not captured at that step and rank.",
    )
    again = captured(tmp_path / "w", {"a.x2": ("activation", 2, values(16, 64))})
    source = write_model(tmp_path / "m", {"a.weight": bf16(values(32, 64, amax=2))})
    assert trained(model_of(source, again), *rows("mxfp8")).products[0].energies.signal == signal[2]


def test_a_weight_of_another_step_is_reported(tmp_path: Path) -> None:
    tensors = {
        "a.w": ("weight", 1, values(32, 64)),
        "a.x": ("activation", 3, values(16, 64)),
        "a.dy": ("gradient", 3, values(16, 32)),
    }
    report = trained(model_of(captured(tmp_path / "x", tensors)), *rows("mxfp8"))  # type: ignore[arg-type]
    assert report.notes == ("At 1 place the weight is that of another step, 1 at a, step 3: none was captured there.",)


def test_output_heads_are_left_out(tmp_path: Path) -> None:
    tensors = {
        f"{layer}.{role}": (role, None, values(*shape))
        for layer in ("lm_head", "layers.0.fc")
        for role, shape in (("weight", (32, 64)), ("activation", (16, 64)), ("gradient", (16, 32)))
    }
    report = trained(model_of(captured(tmp_path / "x", tensors)), *rows("mxfp8"))  # type: ignore[arg-type]
    assert {p.layer for p in report.products} == {"layers.0.fc"}
    assert "1 captured layer is left out ('lm_head')" in report.notes[0]


def test_tokens_are_cut_to_what_transforms_take(tmp_path: Path) -> None:
    source = write_model(tmp_path / "m", {"a.weight": noise(32, 64)})
    tensors = {"a.x": ("activation", None, values(70, 64)), "a.dy": ("gradient", None, values(70, 32))}
    report = trained(model_of(source, captured(tmp_path / "x", tensors)), *rows("nvfp4"))  # type: ignore[arg-type]
    assert {p.passes: p.sizes for p in report.products} == {
        "fprop": (64, 32, 64), "dgrad": (64, 64, 32), "wgrad": (32, 64, 64)
    }  # fmt: skip
    assert "The first tokens alone are used at 1 place, 64 of 70 at a" in report.notes[0]


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"c.x": ("activation", 1, (16, 64))}, "but there is no weight of a linear layer for any of its layers"),
        ({"a.x": ("activation", 1, (16, 63))}, r"a.x \[16, 63\] is not an input of a, which has 64 features there"),
        (
            {"a.x": ("activation", 1, (16, 64)), "a.dy": ("gradient", 1, (15, 32))},
            "16 tokens of activations and 15 of gradients",
        ),
        ({"a.x": ("activation", 1, (8, 64))}, "a, step 1 has 8 tokens; nvfp4 transforms groups of 16 tokens"),
        ({"a.x": ("activation", 1, (16, 64)), "a.y": ("activation", 1, (16, 64))}, "are both the activation of a"),
    ],
)
def test_captures_that_do_not_fit_are_named(
    tmp_path: Path, tensors: dict[str, tuple[str, int, tuple[int, int]]], words: str
) -> None:
    source = write_model(tmp_path / "m", {"a.weight": noise(32, 64)})
    made = {name: (role, step, values(*shape)) for name, (role, step, shape) in tensors.items()}
    with pytest.raises(InputError, match=words):
        trained(model_of(source, captured(tmp_path / "x", made)), *rows("nvfp4"))


def test_a_tensor_that_is_not_finite_is_named(tmp_path: Path) -> None:
    x = values(16, 64)
    x[3, 4] = np.nan
    source = write_model(tmp_path / "m", {"a.weight": noise(32, 64)})
    with pytest.raises(InputError, match=r"a\.x holds NaN or infinities"):
        trained(model_of(source, captured(tmp_path / "x", {"a.x": ("activation", 1, x)})), *rows("mxfp8"))


def layers(*names: str) -> dict[str, tuple[str, int | None, np.ndarray]]:
    return {
        f"{name}.{role}": (role, None, values(*shape))
        for name in names
        for role, shape in (("weight", (32, 64)), ("activation", (16, 64)), ("gradient", (16, 32)))
    }


def test_blocks_are_those_of_the_captured_model(tmp_path: Path) -> None:
    some = layers("h.0.fc", "h.5.fc", "h.11.fc")
    alone = trained(model_of(captured(tmp_path / "x", some)), *rows("nvfp4"))
    assert alone.high == {"nvfp4": ("h.11",)}
    assert alone.notes[0].startswith("nvfp4: 1 of 3 blocks stay high")
    assert alone.notes[1].startswith("Blocks were counted among the captured layers")
    told = captured(tmp_path / "y", some, [*(f"h.{number}.fc" for number in range(16)), "lm_head"])
    whole = trained(model_of(told), *rows("nvfp4"))
    assert whole.high == {"nvfp4": ("h.13", "h.14", "h.15")}
    assert whole.notes == (
        "nvfp4: 3 of 16 blocks stay high (the last 15 % of blocks, rounded up: h.13, h.14, h.15); the products of 0 "
        "layers there are exact.",
    )


def test_blocks_of_names_whose_dots_became_underscores(tmp_path: Path) -> None:
    report = trained(model_of(captured(tmp_path / "x", layers("h_0_fc", "h_1_fc"))), *rows("nvfp4"))
    assert {p.layer for p in report.products if p.high} == {"h_1_fc"}


def test_the_history_is_that_of_all_tokens(tmp_path: Path) -> None:
    """The largest value of the step before is in a token that no product uses."""
    tensors = layers("h.0.fc")
    far = values(1100, 64)
    far[1090, 3] = 4.0
    of_steps = {f"h.0.fc.{step}activation": ("activation", step, x) for step, x in enumerate((far, 2 * values(32, 64)))}
    model = captured(tmp_path / "x", {"h.0.fc.weight": tensors["h.0.fc.weight"], **of_steps})
    report = trained(model_of(model), replace(TRAINING_RECIPES["fp8_delayed"], high=High()))
    assert {p.step: p.operands["X"].saturated for p in report.products} == {0: 0, 1: 0}


def test_what_binary32_does_not_hold_is_named(tmp_path: Path) -> None:
    source = write_model(tmp_path / "m", {"a.weight": noise(32, 64)})
    x = np.ones((16, 64))
    x[3, 4] = -1e39
    with pytest.raises(InputError, match=r"a\.activation reaches 1e\+39"):
        trained(model_of(source, write_model(tmp_path / "x", {"a.activation": ("F64", x)})), *rows("mxfp8"))
    x[3, 4] = -3.4e38
    with pytest.raises(InputError, match="X of a: under mxfp8_e4m3 the codes of its largest values stand for more"):
        trained(model_of(source, write_model(tmp_path / "y", {"a.activation": ("F64", x)})), *rows("mxfp8"))
