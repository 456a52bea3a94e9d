"""Recipes: read with all faults at once, written so that they say the same, and carried out."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tiny_models import LLAMA, llama, noise, read_raw, write_model

from mxcli.backends.cpu import Cpu
from mxcli.errors import InputError, UsageError
from mxcli.files.checkpoint import Checkpoint, open_checkpoint
from mxcli.files.selection import Rule
from mxcli.flows.measure.report import make_report
from mxcli.flows.plan.overrides import Override
from mxcli.flows.plan.plan import Options, make_plan
from mxcli.flows.plan.recipe_file import check_selectors, options_from, parse_recipe, read_recipe
from mxcli.flows.plan.recipe_text import quoted_selector, recipe_text, resolved
from mxcli.flows.write.quantize import quantize_checkpoint
from mxcli.numerics.hadamard import find_hadamard
from mxcli.numerics.scheme import Rules

FULL = """
format = "mxfp4"
scale_rounding = "floor"
rounding = "half-away"
as = "torchao"
nonfinite = "saturate"
on_indivisible = "keep"
layout = "ct"
axis = "row"
seed = 7
hadamard = 32
hadamard_seed = 1
exclude = ["*layers.0.*", "@lm_head"]
include = "*layers.0.mlp.*"

[[override]]
select = ["*.down_proj", 're:.*\\.v_proj\\.weight']
format = "nvfp4"
as = "te"

[[override]]
select = "*.up_proj"
keep = true
"""


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return open_checkpoint(write_model(tmp_path / "m", llama(2), LLAMA))


def options(text: str, **named: str) -> Options:
    return options_from(parse_recipe(text, "r.toml"), named, (), defaults={})


def test_every_key_is_the_option_of_its_name() -> None:
    assert options(FULL) == Options(
        "mxfp4",
        Rules(
            scale_rounding="floor",
            rounding="half-away",
            dialect="torchao",
            nonfinite="saturate",
            seed=7,
            hadamard=find_hadamard(32, 1),
        ),
        on_indivisible="keep",
        selection=(Rule(False, "*layers.0.*"), Rule(False, "@lm_head"), Rule(True, "*layers.0.mlp.*")),
        overrides=(
            Override("*.down_proj", "nvfp4", rules=Rules(dialect="te")),
            Override(r"re:.*\.v_proj\.weight", "nvfp4", rules=Rules(dialect="te")),
            Override("*.up_proj", keep=True),
        ),
        layout="ct",
        axis="row",
    )


def test_rules_can_stand_in_any_order() -> None:
    text = 'format = "mxfp8"\nselection = [{ include = "@attn" }, { exclude = ["a", "b"] }, { include = "c" }]'
    expected = (Rule(True, "@attn"), Rule(False, "a"), Rule(False, "b"), Rule(True, "c"))
    assert options(text).selection == expected
    assert options(recipe_text(options(text))).selection == expected


def test_the_command_line_overrides_a_recipe_and_a_recipe_the_defaults() -> None:
    recipe = parse_recipe('format = "mxfp4"\nnonfinite = "saturate"\nexclude = "a"', "r.toml")
    flags = {"format": "mxfp8", "rounding": None}
    found = options_from(recipe, flags, (Rule(True, "b"),), defaults={"nonfinite": "error", "on_indivisible": "pad"})
    assert (found.format, found.rules.nonfinite, found.on_indivisible) == ("mxfp8", "saturate", "pad")
    assert found.selection == (Rule(False, "a"), Rule(True, "b"))


def test_a_format_is_needed_from_somewhere() -> None:
    with pytest.raises(UsageError, match=r"--format.*r\.toml names none"):
        options('rounding = "nearest-even"')


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ('formt = "mxfp4"', 1, "unknown key 'formt'; known are .* Did you mean format?"),
        ('\n\nscale-rounding = "floor"', 3, "Did you mean scale_rounding?"),
        ('format = "mxpf4"', 1, "unknown format 'mxpf4'.* Did you mean mxfp4"),
        ("format = 4", 1, "'format' takes a name in quotes, not 4"),
        ('format = "nvfp4"\nscale_rounding = "floor"', 2, "floor does not serve nvfp4"),
        ('format = "mxfp4"\nscale_rounding = "flor"', 2, "unknown scale rounding 'flor'.* Did you mean floor?"),
        ('rounding = "up"', 1, "unknown element rounding 'up': known are nearest-even"),
        ('as = "torcha"', 1, "torchao"),
        ('nonfinite = "never"', 1, "nonfinite takes error, saturate, nan-block"),
        ('on_indivisible = "kep"', 1, "Did you mean keep?"),
        ('layout = "compressed"', 1, "unknown layout 'compressed'"),
        ('axis = "rows"', 1, "axis takes row, column"),
        ('seed = "7"', 1, "'seed' takes a whole number from 0 on, not \"7\""),
        ("seed = true", 1, "'seed' takes a whole number from 0 on, not true"),
        ("hadamard = 8", 1, "a Hadamard transform of 8: --hadamard takes 16, 32, 64, 128"),
        ("\nhadamard_seed = 3", 2, "has no effect without a transform: add --hadamard"),
        ('exclude = ["a",\n 3]', 2, "'exclude' takes selectors in quotes, not 3"),
        ('include = "a"\nselection = []', 2, "'selection' holds all rules in order: leave out include"),
        ('selection = [{ include = "a" },\n { both = 1 }]', 2, "each of 'selection' has one key"),
        ('selection = "a"', 1, "'selection' is a list of tables"),
        ('override = "a"', 1, r"'override' is written \[\[override\]\]"),
        ('[[override]]\nformat = "mxfp4"', 1, "an override needs 'select'"),
        ('[[override]]\nselect = "a"', 1, "an override names at least one of keep, format"),
        ('[[override]]\nselect = "a"\nkeep = false', 3, "'keep' is true or left out, not false"),
        ('[[override]]\nselect = "a"\nkeep = true\nformat = "mxfp4"', 3, "tensors that are kept have no format"),
        ('[[override]]\nselect = "a"\nformt = "mxfp4"', 3, "unknown key 'formt'"),
        ('[[override]]\nselect = "a"\nformat = "nvfp4"\nscale_rounding = "floor"', 4, "floor does not serve nvfp4"),
    ],
)
def test_a_fault_is_reported_with_its_line(text: str, line: int, words: str) -> None:
    with pytest.raises(UsageError, match=words) as refused:
        parse_recipe(text, "r.toml")
    assert f"r.toml:{line}: " in str(refused.value)
    assert refused.value.exit_code == 2


def test_all_faults_come_at_once_in_order_of_lines() -> None:
    with pytest.raises(UsageError) as refused:
        parse_recipe('[[override]]\nselect = 1\nformt = "x"\n[[override]]\nkeep = 3\n', "r.toml")
    assert [detail.split(" ")[0] for detail in refused.value.details] == [
        "r.toml:1:", "r.toml:2:", "r.toml:3:", "r.toml:4:", "r.toml:5:",
    ]  # fmt: skip


def test_files_that_are_not_recipes(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text("format = \n")
    with pytest.raises(UsageError, match=r"r\.toml: not valid TOML: .*line 1"):
        read_recipe(tmp_path / "r.toml")
    (tmp_path / "r.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="UTF-8"):
        read_recipe(tmp_path / "r.toml")
    with pytest.raises(InputError, match="no such file"):
        read_recipe(tmp_path / "none.toml")
    (tmp_path / "r.toml").write_text('format = "mxfp4"\n')
    os.truncate(tmp_path / "r.toml", 100 << 30)
    with pytest.raises(InputError, match=r"107,374,182,400 bytes; a recipe has at most 67,108,864\.$"):
        read_recipe(tmp_path / "r.toml")


@pytest.mark.parametrize(
    "text",
    [
        f"seed = {'9' * 5000}",
        f"seed = [1, {'9' * 5000}]",
        f"a.b = {{c = -{'1' * 4301}}}",
        "a = " + "[" * 100_000,
        "a = " + "{a = " * 50_000,
        "format = 1979-05-27T07:32:00Z0",
        "\0",
    ],
    ids=["digits", "digits in a list", "digits in a table", "lists", "tables", "time", "NUL"],
)
def test_what_no_parser_takes_is_not_valid(text: str) -> None:
    with pytest.raises(UsageError, match=r"^r\.toml: not valid TOML: "):
        parse_recipe(text, "r.toml")


def test_selectors_that_take_nothing_are_reported_with_their_lines(checkpoint: Checkpoint) -> None:
    text = 'format = "mxfp4"\nexclude = [\n"*.q_proj",\n"*.qproj"]\n[[override]]\nselect = "*.dwn_proj"\nkeep = true'
    with pytest.raises(UsageError) as refused:
        check_selectors(parse_recipe(text, "r.toml"), checkpoint)
    assert refused.value.details == (
        "r.toml:4: *.qproj: matches no tensor. Did you mean *.q_proj (2 tensors)?",
        "r.toml:6: *.dwn_proj: matches no tensor. Did you mean *.down_proj (2 tensors)?",
    )


def test_an_override_starts_from_the_options_of_all_tensors(checkpoint: Checkpoint) -> None:
    overrides = (
        Override("*.mlp.*", "mxfp8", rules=Rules(scale_rounding="ceil")),
        Override("*.down_proj", "mxfp6"),
        Override("*.up_proj", "nvfp4"),
        Override("*.up_proj", rules=Rules(scale_rounding="paper")),
        Override("*.o_proj", rules=Rules(rounding="half-away")),
        Override("*layers.1.mlp.gate_proj", rules=Rules(dialect="torchao")),
    )
    plan = make_plan(
        checkpoint, Options("mxfp4", Rules(scale_rounding="floor", nonfinite="error"), overrides=overrides)
    )
    found = {
        step.tensor.name.removeprefix("model.layers.1.").removesuffix(".weight"): step.scheme
        for step in plan.quantized
        if ".1." in step.tensor.name and step.scheme
    }
    rules = {name: f"{r.format.name} {r.scale_rule.name} {r.rounding.name}" for name, r in found.items()}
    assert rules == {
        "self_attn.q_proj": "mxfp4_e2m1 floor nearest-even",
        "self_attn.k_proj": "mxfp4_e2m1 floor nearest-even",
        "self_attn.v_proj": "mxfp4_e2m1 floor nearest-even",
        "self_attn.o_proj": "mxfp4_e2m1 floor half-away",
        "mlp.gate_proj": "mxfp8_e4m3 rceil nearest-even",
        "mlp.up_proj": "nvfp4 paper nearest-even",
        "mlp.down_proj": "mxfp6_e2m3 floor nearest-even",
    }
    assert found["mlp.gate_proj"].dialect.name == "torchao"
    assert any(note.startswith("nvfp4 takes no floor") for note in plan.notes)


def test_an_override_that_changes_nothing_is_noted(checkpoint: Checkpoint) -> None:
    plan = make_plan(checkpoint, Options("mxfp4", overrides=(Override("lm_head", "mxfp8"),)))
    assert "changes nothing: 'lm_head.weight' is kept: lm_head, output head. Use --include." in plan.notes[-1]


def test_overrides_that_mean_nothing_are_named_together(checkpoint: Checkpoint) -> None:
    overrides = (
        Override("*.q_proj", "mxfp5"),
        Override("nothing", keep=True),
        Override("*.o_proj", "nvfp4", False, rules=Rules(scale_rounding="floor")),
    )
    with pytest.raises(UsageError) as refused:
        make_plan(checkpoint, Options("mxfp4", overrides=overrides))
    assert [detail.split(":")[0] for detail in refused.value.details] == [
        "override *.q_proj", "override nothing", "override *.o_proj",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "asked",
    [
        Options("mxfp4"),
        Options("fp8_e4m3"),
        Options(
            "nvfp4",
            Rules(dialect="modelopt", nonfinite="error"),
            overrides=(Override("*.down_proj", "mxfp4"), Override("*.o_proj", keep=True)),
        ),
        Options(
            "mxfp8",
            Rules(scale_rounding="floor", nonfinite="error"),
            overrides=(Override("*.q_proj", "nvfp4"), Override("*.q_proj", rules=Rules(scale_rounding="ct"))),
        ),
        Options("e3m2:e8m0:1x16", selection=(Rule(True, "@lm_head"), Rule(True, "@weight"), Rule(False, "*.k_proj"))),
        Options(
            "fp8_e4m3_channel", overrides=(Override("*.mlp.*", "fp8_e4m3", rules=Rules(dialect="compressed-tensors")),)
        ),
        Options(
            "mxfp4",
            Rules(dialect="quark", nonfinite="error"),
            overrides=(Override("*.mlp.*", "mxfp6"), Override("*.up_proj", keep=True)),
        ),
    ],
)
def test_a_resolved_recipe_makes_the_same_plan_and_bytes(
    tmp_path: Path, checkpoint: Checkpoint, asked: Options
) -> None:
    plan = make_plan(checkpoint, asked)
    text = recipe_text(resolved(checkpoint, plan), ["a comment"])
    (tmp_path / "r.toml").write_text(text)
    again = options_from(read_recipe(tmp_path / "r.toml"), {}, (), defaults={})
    assert again.rules.scale_rounding is not None
    assert again == resolved(checkpoint, plan)
    repeated = make_plan(checkpoint, again)
    assert repeated.tensors == plan.tensors
    for name, each in (("one", plan), ("two", repeated)):
        quantize_checkpoint(checkpoint, each, tmp_path / name, backend=Cpu())
    assert read_raw(tmp_path / "one" / "model.safetensors") == read_raw(tmp_path / "two" / "model.safetensors")
    assert (tmp_path / "one" / "config.json").read_bytes() == (tmp_path / "two" / "config.json").read_bytes()


def test_rules_that_differ_from_tensor_to_tensor_stay_open(tmp_path: Path) -> None:
    tensors = llama() | {"model.extra.weight": ("F32", noise(32, 64)[1].astype("float32"))}
    checkpoint = open_checkpoint(write_model(tmp_path / "m", tensors, LLAMA))
    plan = make_plan(checkpoint, Options("fp8_e4m3"))
    found = resolved(checkpoint, plan)
    assert found.rules.scale_rounding is None
    assert make_plan(checkpoint, found).tensors == plan.tensors


def test_any_name_can_be_selected(tmp_path: Path) -> None:
    names = ["a[0].*.weight", "@b.weight", "re:c.weight", 'd"\\\x7fé.weight', "plain.weight"]
    checkpoint = open_checkpoint(write_model(tmp_path / "m", {name: noise(32, 64) for name in names}))
    for name in names[:-1]:
        asked = Options("mxfp4", overrides=(Override(quoted_selector(name), "mxfp8"),))
        assert options(recipe_text(asked)) == asked
        plan = make_plan(checkpoint, asked)
        assert [s.tensor.name for s in plan.quantized if s.scheme and s.scheme.format.name == "mxfp8_e4m3"] == [name]


def test_totals_of_several_formats_are_those_of_the_parts(checkpoint: Checkpoint) -> None:
    plan = make_plan(checkpoint, Options("nvfp4", overrides=(Override("*.mlp.*", "mxfp8"),)))
    report = make_report("x", checkpoint, plan, backend=Cpu())
    assert report.sum is not None
    bits = sum(layer.metrics["bits_per_element"] * layer.metrics["elements"] for layer in report.layers)  # type: ignore[operator]
    assert report.sum["bits_per_element"] == pytest.approx(bits / report.sum["elements"], rel=1e-12)  # type: ignore[operator]
    assert report.sum["tensors"] == 14
    assert report.sum["binades_available"] is None
    for name in ("scale_exponent_histogram", "element_exponent_histogram"):
        counted = [layer.metrics[name] for layer in report.layers]
        total = report.sum[name]
        assert isinstance(total, dict)
        assert sum(total.values()) == sum(sum(each.values()) for each in counted if isinstance(each, dict))  # type: ignore[misc]
    assert report.by_role["weight"] == report.sum


def test_chance_and_transforms_are_written_and_read_again() -> None:
    for asked in (
        Options("nvfp4", Rules(rounding="stochastic", seed=3, hadamard=find_hadamard(16), nonfinite="error")),
        Options("nvfp4", Rules(hadamard=find_hadamard(64, 9), nonfinite="error")),
    ):
        assert options(recipe_text(asked)) == asked
