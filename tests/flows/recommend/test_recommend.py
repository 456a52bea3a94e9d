"""Recommendations: the best of all choices, predicted to the last bit."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
from command_line import CAPTURES, SAMPLE
from tiny_models import LLAMA, bf16, layer, llama, noise, write_model

from mxcli.backends.cpu import Cpu
from mxcli.errors import InputError, RefusedError, UsageError
from mxcli.files.checkpoint import Checkpoint, open_checkpoint, read
from mxcli.files.selection import Rule
from mxcli.flows.measure import measure as measuring
from mxcli.flows.measure.report import make_report
from mxcli.flows.plan.plan import Options, make_plan
from mxcli.flows.plan.recipe_file import options_from, parse_recipe
from mxcli.flows.plan.recipe_text import recipe_text
from mxcli.flows.products.output_error import MOST_ROWS, CapturedInputs, binary64
from mxcli.flows.recommend.candidates import BITS, KEEP, KEEP_PERCENT, MIN_SQNR, Target, group_name, stated_target
from mxcli.flows.recommend.recommend import Recommendation, memory_to_recommend, plan_candidates, recommend
from mxcli.flows.write.quantize import quantize_checkpoint, report_from_stats
from mxcli.numerics.metrics import OUTPUT_ERROR
from mxcli.numerics.scheme import Rules

FORMATS = ["mxfp4", "nvfp4", "mxfp8"]


def recommended(
    checkpoint: Checkpoint,
    formats: list[str],
    target: Target,
    options: Options | None = None,
    captures: Path | None = None,
) -> Recommendation:
    asked = options or Options(formats[0], on_indivisible="keep")
    inputs = None if captures is None else CapturedInputs(open_checkpoint(captures))
    candidates = plan_candidates(checkpoint, formats, asked, target)
    return recommend("x", checkpoint, candidates, backend=Cpu(1), inputs=inputs)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    """A layer in whose down_proj one value of each block sends most of the others to zero."""
    tensors = layer("model.layers.0")
    dtype, bits = tensors["model.layers.0.mlp.down_proj.weight"]
    values = (bits.astype(np.uint32) << 16).view(np.float32).copy()
    values[:, ::32] = 13
    assert dtype == "BF16"
    tensors["model.layers.0.mlp.down_proj.weight"] = bf16(values)
    return open_checkpoint(write_model(tmp_path / "m", tensors | {"lm_head.weight": noise(32, 64)}, LLAMA))


def chosen(result: Recommendation) -> dict[str, str]:
    return {choice.group.name.removeprefix("model.layers.0."): choice.option.name for choice in result.choices}


@pytest.mark.parametrize("bits", [4.25, 4.3, 4.6, 5.0, 6.5, 8.25, 9.0, 12.0, 15.9])
def test_no_other_choice_does_less_harm(checkpoint: Checkpoint, bits: float) -> None:
    result = recommended(checkpoint, FORMATS, Target(BITS, bits))
    assert [choice.group.name for choice in result.choices] == [
        "model.layers.0.self_attn.q_proj+k_proj+v_proj",
        "model.layers.0.self_attn.o_proj.weight",
        "model.layers.0.mlp.gate_proj+up_proj",
        "model.layers.0.mlp.down_proj.weight",
    ]
    assert result.exact
    assert result.bits_per_element <= bits
    every = itertools.product(*(choice.options for choice in result.choices))
    fitting = (each for each in every if sum(option.bits for option in each) <= bits * result.elements)
    best = min(math.fsum(option.harm for option in each) for each in fitting)
    assert result.harm == pytest.approx(best, rel=1e-12)


def test_the_layer_that_hurts_most_is_kept(checkpoint: Checkpoint) -> None:
    result = recommended(checkpoint, ["mxfp4"], Target(KEEP_PERCENT, 25.0))
    assert chosen(result)["mlp.down_proj.weight"] == KEEP
    assert sum(choice.group.elements for choice in result.kept) <= result.elements // 4


def test_what_is_predicted_is_what_quantize_does(tmp_path: Path, checkpoint: Checkpoint) -> None:
    for number, target in enumerate([Target(BITS, 5.2), Target(BITS, 9.5), Target(MIN_SQNR, 19.0)]):
        result = recommended(checkpoint, [*FORMATS, "fp8_e4m3"], target)
        recipe = options_from(parse_recipe(recipe_text(result.recipe), "r"), {}, (), defaults={})
        assert recipe == result.recipe
        plan = make_plan(checkpoint, recipe)
        written = quantize_checkpoint(checkpoint, plan, tmp_path / str(number), backend=Cpu())
        report = report_from_stats("x", checkpoint, plan, written.arrangement, written.layers)
        assert result.report is not None
        assert result.report.sum == report.sum
        assert make_report("x", checkpoint, plan, backend=Cpu()).sum == report.sum
        layers = {each.name: each.metrics for each in report.layers}
        for choice in result.choices:
            for info, effect in zip(choice.group.tensors, choice.option.effects, strict=True):
                if choice.option.name == KEEP:
                    assert info.name not in layers
                    continue
                assert effect.bits == layers[info.name]["bits_per_element"] * info.elements  # type: ignore[operator]
                assert effect.sqnr_db == layers[info.name]["sqnr_db"]
        kept = sum(16 * choice.group.elements for choice in result.kept)
        assert report.sum is not None
        quantized = report.sum["bits_per_element"] * report.sum["elements"]  # type: ignore[operator]
        assert result.bits_per_element * result.elements == pytest.approx(quantized + kept, rel=1e-12)


@pytest.mark.parametrize("decibels", [10.0, 18.0, 20.0, 25.0, 31.0, 60.0])
def test_the_fewest_bits_that_are_good_enough(checkpoint: Checkpoint, decibels: float) -> None:
    result = recommended(checkpoint, FORMATS, Target(MIN_SQNR, decibels))
    for choice in result.choices:
        enough = [option.bits for option in choice.options if min(e.sqnr_db for e in option.effects) >= decibels]
        assert choice.option.bits == min(enough)


def test_each_tensor_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = llama(2) | {
        "model.layers.0.mlp.odd.weight": noise(32, 48),
        "model.layers.0.mlp.odder.weight": noise(32, 40),
    }
    checkpoint, seen = open_checkpoint(write_model(tmp_path / "m", tensors, LLAMA)), list[str]()
    monkeypatch.setattr(measuring, "read", lambda c, info: (seen.append(info.name), read(c, info))[1])
    result = recommended(checkpoint, ["mxfp4", "nvfp4", "fp8_e4m3"], Target(BITS, 6.0))
    names = [info.name for choice in result.choices for info in choice.group.tensors]
    assert sorted(seen) == sorted(names)
    options = {choice.group.name: [option.name for option in choice.options] for choice in result.choices}
    assert options["model.layers.0.mlp.odd.weight"] == ["nvfp4", "fp8_e4m3", KEEP]
    assert options["model.layers.0.mlp.odder.weight"] == ["fp8_e4m3", KEEP]
    make_plan(checkpoint, result.recipe)


def test_experts_of_a_module_move_together(tmp_path: Path) -> None:
    experts = {
        f"model.layers.{at}.mlp.experts.{number}.{name}.weight": noise(32, 32, seed=10 * at + number)
        for at in range(2)
        for number in range(3)
        for name in ("gate_proj", "up_proj", "down_proj")
    }
    checkpoint = open_checkpoint(
        write_model(tmp_path / "m", experts | {"model.layers.0.mlp.gate.weight": noise(8, 32)})
    )
    result = recommended(checkpoint, ["mxfp4", "mxfp8"], Target(BITS, 6.5))
    assert [choice.group.name for choice in result.choices] == [f"model.layers.{at}.mlp.experts" for at in range(2)]
    assert [override.selector for override in result.recipe.overrides] in (
        ["model.layers.0.mlp.experts"],
        ["model.layers.1.mlp.experts"],
    )
    keys = {"m.query_key.weight": "m.query_key+value"}
    assert group_name("m.experts.gate_up_proj", keys) == group_name("m.experts.down_proj", keys) == "m.experts"
    assert group_name("m.experts.fc1.weight", keys) == group_name("m.experts.mlp.v1", keys) == "m.experts"
    assert group_name("m.shared_experts.down_proj.weight", keys) == "m.shared_experts.down_proj.weight"
    assert group_name("m.query_key.weight", keys) == "m.query_key+value"


def test_options_go_into_the_recipe(checkpoint: Checkpoint) -> None:
    asked = Options(
        "mxfp4",
        Rules(scale_rounding="even", dialect="torchao", nonfinite="saturate"),
        selection=(Rule(False, "*.o_proj"),),
        layout="mxcli",
    )
    result = recommended(checkpoint, ["nvfp4", "mxfp4", "mxfp8"], Target(BITS, 6.0), asked)
    assert "self_attn.o_proj.weight" not in chosen(result)
    rules = result.recipe.rules
    assert (rules.dialect, rules.nonfinite, result.recipe.layout) == ("torchao", "saturate", "mxcli")
    rules = {(s.scheme.format.name, s.scheme.scale_rule.name) for s in result.plan.quantized if s.scheme}
    assert rules <= {("nvfp4", "torchao"), ("mxfp4_e2m1", "even"), ("mxfp8_e4m3", "even")}
    steps = make_plan(checkpoint, result.recipe).tensors
    assert {s.tensor.name: s.scheme for s in steps} == {s.tensor.name: s.scheme for s in result.plan.tensors}


def test_what_the_layout_cannot_hold_is_not_chosen(tmp_path: Path) -> None:
    tensors = layer("model.layers.0") | {
        "model.layers.0.mlp.odd": noise(32, 64),
        "model.layers.0.attn.lone": noise(8, 64),
    }
    checkpoint = open_checkpoint(write_model(tmp_path / "m", tensors, LLAMA))
    asked = Options("nvfp4", selection=(Rule(True, "*"), Rule(True, "model.layers.0.mlp.odd")))
    held = recommended(checkpoint, ["nvfp4", "mxfp8"], Target(BITS, 6.0), asked)
    assert "mlp.odd" not in chosen(held)
    assert any("since compressed-tensors cannot hold" in note for note in held.notes)
    own = recommended(checkpoint, ["nvfp4", "mxfp6_e3m2"], Target(BITS, 6.0), asked)
    assert "mlp.odd" in chosen(own)
    assert own.recipe.layout == "mxcli"
    for number, result in enumerate((held, own)):
        plan = make_plan(checkpoint, result.recipe)
        written = quantize_checkpoint(checkpoint, plan, tmp_path / str(number), backend=Cpu())
        report = report_from_stats("x", checkpoint, plan, written.arrangement, written.layers)
        assert result.report is not None
        assert result.report.sum == report.sum


def test_targets_out_of_reach_are_refused_before_anything_is_read(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "read", lambda *_: pytest.fail("read"))
    with pytest.raises(RefusedError, match=r"--bits 4: these formats need 4\.25 bits .* \(mxfp4_e2m1; scales included"):
        recommended(checkpoint, FORMATS, Target(BITS, 4.0))
    with pytest.raises(RefusedError, match="take 16 bits per element as they are"):
        recommended(checkpoint, FORMATS, Target(BITS, 16.0))
    with pytest.raises(UsageError, match="Did you mean floor"):
        recommended(
            checkpoint, FORMATS, Target(BITS, 6.0), Options("mxfp4", Rules(scale_rounding="flor", nonfinite="error"))
        )


@pytest.mark.parametrize(
    ("targets", "formats", "words"),
    [
        ((None, None, None), 1, "state one target"),
        ((4.5, 20.0, None), 1, "state one target"),
        ((0.0, None, None), 1, "--bits 0: it takes"),
        ((math.nan, None, None), 1, "--bits nan"),
        ((None, math.inf, None), 1, "--min-sqnr inf"),
        ((None, None, 101.0), 1, "--keep-percent 101"),
        ((None, None, 10.0), 2, "name one in --formats, not 2"),
    ],
)
def test_targets_that_mean_nothing(targets: tuple[float | None, ...], formats: int, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        stated_target(targets[0], targets[1], targets[2], formats)


def test_everything_may_have_to_be_kept(checkpoint: Checkpoint) -> None:
    result = recommended(checkpoint, ["mxfp4"], Target(MIN_SQNR, 100.0))
    assert set(chosen(result).values()) == {KEEP}
    assert result.report is None
    assert not result.plan.quantized
    assert {override.keep for override in result.recipe.overrides} == {True}


def test_zeros_do_no_harm_and_values_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    tensors = {"model.a.weight": bf16(np.zeros((32, 32))), "model.b.weight": noise(32, 32)}
    result = recommended(open_checkpoint(write_model(tmp_path / "z", tensors)), ["mxfp4"], Target(BITS, 10.5))
    assert [choice.option.name for choice in result.choices] == ["mxfp4_e2m1", KEEP]
    assert result.choices[0].option.harm == 0
    tensors["model.c.weight"] = bf16(np.full((32, 32), np.nan))
    broken = open_checkpoint(write_model(tmp_path / "n", tensors))
    with pytest.raises(RefusedError, match="values are NaN"):
        recommended(broken, ["mxfp4"], Target(BITS, 10.5))


def test_the_error_of_outputs_is_that_of_the_plain_formula(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    checkpoint, captures = open_checkpoint(SAMPLE), open_checkpoint(CAPTURES)
    result = recommended(checkpoint, ["nvfp4", "mxfp4"], Target(BITS, 6.0), captures=CAPTURES)
    assert result.objective is OUTPUT_ERROR
    quantize_checkpoint(checkpoint, make_plan(checkpoint, Options("nvfp4")), tmp_path / "q", backend=Cpu())
    from mxcli.flows.write.dequantize import dequantize_checkpoint

    dequantize_checkpoint(open_checkpoint(tmp_path / "q"), tmp_path / "d", backend=Cpu(), dtype="F32")
    plain = open_checkpoint(tmp_path / "d")
    for choice in result.choices:
        option = choice.of("nvfp4")
        assert option is not None
        for info, effect in zip(choice.group.tensors, option.effects, strict=True):
            layer_name = info.name.removesuffix(".weight")
            inputs = captures.tensors[f"{layer_name}.activation"]
            x = torch.from_numpy(binary64(read(captures, inputs), inputs.dtype))
            w = torch.from_numpy(binary64(read(checkpoint, info), info.dtype))
            y = torch.from_numpy(binary64(read(plain, plain.tensors[info.name]), "F32"))
            harm = ((x @ (w - y).T) ** 2).sum() / ((x @ w.T) ** 2).sum()
            assert effect.harm == pytest.approx(float(harm), rel=1e-5)
            assert effect.sqnr_db == pytest.approx(-10 * math.log10(float(harm)), abs=1e-4)


def captured(folder: Path, tensors: dict[str, tuple[str, np.ndarray]]) -> Path:
    return write_model(folder, tensors) / "model.safetensors"


def test_captures_without_metadata_serve_by_name_and_what_is_missing_is_reported(
    tmp_path: Path, checkpoint: Checkpoint
) -> None:
    name = "model.layers.0.mlp.down_proj.activation"
    captures = captured(tmp_path / "c", {name: noise(2 * MOST_ROWS, 128)})
    result = recommended(checkpoint, ["mxfp4"], Target(BITS, 8.0), captures=captures)
    assert any(
        note.startswith("6 tensors ('model.layers.0.self_attn.q_proj.weight', …) without") for note in result.notes
    )
    assert any("1,024 were drawn" in note for note in result.notes)
    alone = recommended(checkpoint, ["mxfp4"], Target(BITS, 8.0))
    for choice, weights in zip(result.choices, alone.choices, strict=True):
        same = choice.options[0].harm == weights.options[0].harm
        assert same == (choice.group.name != "model.layers.0.mlp.down_proj.weight")
    again = recommended(checkpoint, ["mxfp4"], Target(BITS, 8.0), captures=captures)
    assert [choice.options for choice in again.choices] == [choice.options for choice in result.choices]


def test_inputs_of_several_steps_are_one_sample_and_it_is_said(tmp_path: Path, checkpoint: Checkpoint) -> None:
    for step in (0, 30):
        held = captured(tmp_path / "c", {"model.layers.0.mlp.down_proj.activation": noise(4, 128, seed=step)})
        held.rename(tmp_path / "c" / f"step-{step}.safetensors")
    result = recommended(checkpoint, ["mxfp4"], Target(BITS, 8.0), captures=tmp_path / "c")
    assert "Inputs of 2 steps (0 to 30) count alike, as one sample." in result.notes


def test_captures_that_do_not_fit_are_refused(tmp_path: Path, checkpoint: Checkpoint) -> None:
    with pytest.raises(InputError, match="holds no activations of the layers"):
        recommended(
            checkpoint, ["mxfp4"], Target(BITS, 8.0), captures=captured(tmp_path / "a", {"x.activation": noise(4, 8)})
        )
    name = "model.layers.0.mlp.down_proj.activation"
    empty = captured(tmp_path / "e", {name: noise(0, 128)})
    with pytest.raises(InputError, match=r"holds no activations of the layers to be quantized\. Capture the input"):
        recommended(checkpoint, ["mxfp4"], Target(BITS, 8.0), captures=empty)
    with pytest.raises(InputError, match=r"down_proj\.activation \[4, 64\] does not fit .* takes 128 features"):
        recommended(checkpoint, ["mxfp4"], Target(BITS, 8.0), captures=captured(tmp_path / "b", {name: noise(4, 64)}))
    broken = captured(tmp_path / "c", {name: bf16(np.full((4, 128), np.inf))})
    with pytest.raises(InputError, match="holds NaN or infinities"):
        recommended(checkpoint, ["mxfp4"], Target(BITS, 8.0), captures=broken)
    with pytest.raises(RefusedError, match="--captures"):
        recommended(open_checkpoint(CAPTURES), ["mxfp4"], Target(BITS, 8.0))


def test_captures_take_memory(checkpoint: Checkpoint) -> None:
    candidates = plan_candidates(checkpoint, ["mxfp4"], Options("mxfp4"), Target(BITS, 8.0))
    inputs = CapturedInputs(open_checkpoint(CAPTURES))
    assert memory_to_recommend(candidates, inputs).peak_bytes > memory_to_recommend(candidates, None).peak_bytes
