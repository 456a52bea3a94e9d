"""--include and --exclude: what each rule takes, which rule decides, and the answer to a typo."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from mxcli.errors import UsageError
from mxcli.files.roles import role_of
from mxcli.files.selection import Rule, glob_regex, select
from mxcli.files.tensors import TensorInfo

PARTS = {
    "input_layernorm.weight": (64,),
    "self_attn.q_proj.weight": (64, 64),
    "self_attn.q_proj.bias": (64,),
    "self_attn.o_proj.weight": (64, 64),
    "mlp.gate.weight": (8, 64),
    "mlp.up_proj.weight": (128, 64),
    "mlp.down_proj.weight": (64, 128),
}


def _info(name: str, shape: tuple[int, ...], dtype: str = "BF16", role: str | None = None) -> TensorInfo:
    return TensorInfo(name, dtype, shape, role or role_of(name, shape, dtype), Path("m.safetensors"), 0, 0)


def _model(layers: int = 20) -> dict[str, TensorInfo]:
    infos = [_info("model.embed_tokens.weight", (100, 64))]
    infos += [_info(f"model.layers.{n}.{part}", shape) for n in range(layers) for part, shape in PARTS.items()]
    infos += [_info("model.norm.weight", (64,)), _info("lm_head.weight", (100, 64))]
    return {info.name: info for info in infos}


def include(selector: str) -> Rule:
    return Rule(True, selector)


def exclude(selector: str) -> Rule:
    return Rule(False, selector)


@pytest.mark.parametrize(
    ("glob", "name", "matches"),
    [
        ("*.q_proj.weight", "model.layers.0.self_attn.q_proj.weight", True),
        ("*.q_proj", "model.layers.0.self_attn.q_proj.weight", True),
        ("*.q_proj", "model.layers.0.self_attn.q_proj_extra.weight", False),
        ("model.layers.*.mlp.*", "model.layers.3.mlp.experts.4.up_proj.weight", True),
        ("model.layers.*.mlp.*", "model.layers.3.self_attn.q_proj.weight", False),
        ("*layers.1.*", "model.layers.1.mlp.up_proj.weight", True),
        ("*layers.1.*", "model.layers.11.mlp.up_proj.weight", False),
        ("*layers.1", "model.layers.1.mlp.up_proj.weight", True),
        ("*layers.1", "model.layers.11.mlp.up_proj.weight", False),
        ("model.layers.1", "model.layers.1.mlp.up_proj.weight", True),
        ("model.layers.1", "model.layers.10.mlp.up_proj.weight", False),
        ("*layers.1?.*", "model.layers.11.mlp.up_proj.weight", True),
        ("*layers.[0-3].*", "model.layers.2.mlp.up_proj.weight", True),
        ("*layers.[!0-3].*", "model.layers.2.mlp.up_proj.weight", False),
        ("lm_head", "lm_head.weight", True),
        ("lm_head", "lm_head_norm.weight", False),
        ("lm_head", "model.lm_head.weight", False),
        ("q_proj", "model.layers.0.self_attn.q_proj.weight", False),
        ("*", "anything.at\nall", True),
        ("*.weight", "a.weight_scale", False),
        ("LM_HEAD", "lm_head.weight", False),
        ("a.b+(c)", "a.b+(c)", True),
    ],
)
def test_globs_match_whole_segments(glob: str, name: str, matches: bool) -> None:
    assert (glob_regex(glob).match(name) is not None) is matches


def test_without_rules_the_roles_decide() -> None:
    choices = select(_model(1), []).decisions
    assert {name: (choice.taken, choice.reason) for name, choice in choices.items()} == {
        "model.embed_tokens.weight": (False, "kept: embedding, embedding table"),
        "model.layers.0.input_layernorm.weight": (False, "kept: norm, normalization"),
        "model.layers.0.self_attn.q_proj.weight": (True, "weight, linear layer"),
        "model.layers.0.self_attn.q_proj.bias": (False, "kept: bias, bias"),
        "model.layers.0.self_attn.o_proj.weight": (True, "weight, linear layer"),
        "model.layers.0.mlp.gate.weight": (False, "kept: router, chooses experts"),
        "model.layers.0.mlp.up_proj.weight": (True, "weight, linear layer"),
        "model.layers.0.mlp.down_proj.weight": (True, "weight, linear layer"),
        "model.norm.weight": (False, "kept: norm, normalization"),
        "lm_head.weight": (False, "kept: lm_head, output head"),
    }


def test_include_restricts_to_what_it_matches() -> None:
    """Layer 1 of 20, and only its linear layers."""
    selection = select(_model(), [include("*layers.1.*")])
    assert selection.taken == tuple(
        f"model.layers.1.{part}"
        for part in (
            "self_attn.q_proj.weight",
            "self_attn.o_proj.weight",
            "mlp.up_proj.weight",
            "mlp.down_proj.weight",
        )
    )
    assert (selection.matched, selection.decided) == ((7,), (7,))
    assert selection.decisions["model.layers.11.mlp.up_proj.weight"].reason == "no --include takes it"
    norm = selection.decisions["model.layers.1.input_layernorm.weight"]
    assert norm.reason == (
        "kept: norm, normalization (--include *layers.1.* matches it; only its name or @norm takes it)"
    )


def test_exclude_removes_from_the_defaults() -> None:
    selection = select(_model(2), [exclude("*.down_proj"), exclude("model.layers.0")])
    assert selection.taken == tuple(
        f"model.layers.1.{part}"
        for part in ("self_attn.q_proj.weight", "self_attn.o_proj.weight", "mlp.up_proj.weight")
    )
    choice = selection.decisions["model.layers.0.mlp.down_proj.weight"]
    assert (choice.rule, choice.reason) == (exclude("model.layers.0"), "--exclude model.layers.0")


def test_the_last_matching_rule_wins() -> None:
    tensors = _model(3)
    name = "model.layers.1.mlp.up_proj.weight"
    first, second = exclude("@mlp"), include("*layers.1.*")
    assert select(tensors, [first, second]).decisions[name].rule == second
    assert select(tensors, [first, second]).decisions[name].taken
    assert select(tensors, [second, first]).decisions[name].rule == first
    assert not select(tensors, [second, first]).decisions[name].taken
    again = select(tensors, [second, first, second])
    assert again.decisions[name].taken
    assert (again.matched, again.decided) == ((7, 9, 7), (0, 6, 7))


@pytest.mark.parametrize("selector", ["lm_head", "lm_head.weight", "@lm_head"])
def test_a_protected_kind_is_taken_by_its_name_or_role(selector: str) -> None:
    tensors = _model(1)
    assert select(tensors, [include(selector)]).taken == ("lm_head.weight",)
    added = select(tensors, [include("@weight"), include(selector)])
    assert len(added.taken) == 5
    assert added.decisions["lm_head.weight"].reason == f"--include {selector}"


@pytest.mark.parametrize("selector", ["*lm_head*", "re:lm_head.*", "*"])
def test_a_protected_kind_is_not_taken_by_a_pattern(selector: str) -> None:
    assert "lm_head.weight" not in select(_model(1), [include(selector)]).taken


def test_regular_expressions_match_the_whole_name() -> None:
    selection = select(_model(20), [include(r"re:model\.layers\.1\.mlp\.(up|down)_proj\.weight")])
    assert selection.taken == ("model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.down_proj.weight")
    with pytest.raises(UsageError) as caught:
        select(_model(20), [exclude("re:layers.1")])
    assert str(caught.value) == (
        "--exclude re:layers.1: matches no tensor. It must match the whole name; re:.*(layers.1).* matches 77 tensors."
    )


@pytest.mark.parametrize(
    ("selector", "parts"),
    [
        ("@attn", ["self_attn.q_proj.weight", "self_attn.o_proj.weight"]),
        ("@mlp", ["mlp.up_proj.weight", "mlp.down_proj.weight"]),
        ("@router", ["mlp.gate.weight"]),
        ("@norm", ["input_layernorm.weight"]),
        ("@bias", ["self_attn.q_proj.bias"]),
    ],
)
def test_roles_and_tags_are_selectable(selector: str, parts: list[str]) -> None:
    """A role takes its kind; a tag takes the linear layers that carry it."""
    taken = select(_model(1), [include(selector)]).taken
    assert [name.removeprefix("model.layers.0.") for name in taken if ".layers." in name] == parts


@pytest.mark.parametrize("selector", ["@embed", "@embedding"])
def test_roles_have_aliases(selector: str) -> None:
    assert select(_model(1), [include(selector)]).taken == ("model.embed_tokens.weight",)


def test_captured_tensors_are_taken_by_default() -> None:
    infos = [_info("l.input", (4, 8), role="activation"), _info("l.grad", (4, 8), role="gradient")]
    tensors = {info.name: info for info in infos}
    assert select(tensors, []).taken == ("l.input", "l.grad")
    assert select(tensors, [include("@gradient")]).taken == ("l.grad",)


def test_codes_and_integers_are_never_taken() -> None:
    """Raw codes are not numbers."""
    infos = [
        _info("fc.weight", (8, 8), "F8_E4M3"),
        _info("fc.weight_packed", (8, 4), "U8"),
        _info("ids", (8, 8), "I64"),
    ]
    tensors = {info.name: info for info in infos}
    for rules in ([], [include("*")], [include("fc.weight"), include("@codes"), include("ids")]):
        assert select(tensors, rules).taken == ()
    reason = select(tensors, [include("fc.weight")]).decisions["fc.weight"].reason
    assert reason == "kept: F8_E4M3 is not a float of more than 8 bits (--include fc.weight matches it)"


@pytest.mark.parametrize(
    ("selector", "hint"),
    [
        ("q_proj", "Did you mean *.q_proj (40 tensors)?"),
        ("*.q_porj.weight", "Did you mean *.q_proj.weight (20 tensors)?"),
        ("*.self_atn.*", "Did you mean *.self_attn.* (60 tensors)?"),
        ("up_prj", "Did you mean *.up_proj (20 tensors)?"),
        ("LM_HEAD", "Did you mean lm_head (1 tensor)?"),
        ("*layers.40.*", "Names here look like model.embed_tokens.weight."),
        ("re:zzz", "Names here look like model.embed_tokens.weight."),
        ("@mtp", "Here are @attn, @bias, @embed, @embedding, @lm_head, @mlp, @norm, @router, @weight."),
    ],
)
def test_a_selector_without_match_is_an_error_with_a_hint(selector: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        select(_model(), [exclude(selector)])
    assert str(caught.value) == f"--exclude {selector}: matches no tensor. {hint}"
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("selector", "fault"),
    [
        ("@routr", "no role or tag is called routr. Did you mean router? Known: activation, attn, audio, bias, "),
        ("re:(", "not a valid regular expression: missing ), unterminated subpattern at position 0."),
        ("", "the selector is empty."),
    ],
)
def test_invalid_selectors(selector: str, fault: str) -> None:
    with pytest.raises(UsageError) as caught:
        select(_model(1), [include(selector)])
    assert fault in str(caught.value)


def test_all_bad_selectors_come_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        select(_model(1), [include("nothing"), include("*"), exclude("@mtp"), exclude("re:x")])
    assert [detail.split(":")[0] for detail in caught.value.details] == [
        "--include nothing",
        "--exclude @mtp",
        "--exclude re",
    ]


def test_other_verbs_may_take_other_roles() -> None:
    everything: Mapping[str, TensorInfo] = _model(1)
    roles = {info.role for info in everything.values()}
    assert select(everything, [], roles).taken == tuple(everything)
    assert select(everything, [include("*.bias")], roles).taken == ("model.layers.0.self_attn.q_proj.bias",)


def test_hostile_globs_do_not_hang() -> None:
    tensors = {"a" * 5000: _info("a" * 5000, (4, 4))}
    with pytest.raises(UsageError):
        select(tensors, [include("*a*a*a*a*a*a*a*a*b")])


@pytest.mark.parametrize("selector", ["[" * 100_000, "re:" + "(" * 100_000, "a" * 4097, "@" + "x" * 5000])
def test_selectors_of_many_characters_are_refused(selector: str) -> None:
    with pytest.raises(UsageError, match=rf"{len(selector):,} characters; a selector has at most 4,096\.$"):
        select({"a.weight": _info("a.weight", (4, 4))}, [include(selector)])


def test_the_longest_selector() -> None:
    name = "a" * 4096
    assert select({name: _info(name, (4, 4))}, [include(name)]).decisions[name].taken
