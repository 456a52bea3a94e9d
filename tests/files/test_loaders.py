from __future__ import annotations

import pytest

from mxcli.files.layouts.loaders import (
    Ignored,
    Names,
    by_glob_or_part,
    by_glob_or_regex,
    by_name_or_regex,
    by_path,
    exactly,
    listed,
    unmatched,
    unread,
)

Q1, Q11 = "model.layers.1.self_attn.q_proj", "model.layers.11.self_attn.q_proj"
CASES: list[tuple[Names, str, str, bool]] = [
    (exactly, "lm_head", "lm_head", True),
    (exactly, "lm_head", "model.lm_head", False),
    (by_name_or_regex, "lm_head", "lm_head", True),
    (by_name_or_regex, "lm_*", "lm_head", False),
    (by_name_or_regex, "re:.*q_proj", Q1, True),
    (by_name_or_regex, "re:q_proj", Q1, False),
    (by_name_or_regex, "re:model.layers.1", Q11, True),
    (by_glob_or_part, "model.layers.1", Q11, True),
    (by_glob_or_part, "model.layers.1.*", Q11, False),
    (by_glob_or_part, "model.layers.1.*", Q1, True),
    (by_glob_or_part, "*.q_proj", Q1, True),
    (by_glob_or_part, "lm_head", "lm_head", True),
    (by_glob_or_regex, "*.q_proj", Q1, True),
    (by_glob_or_regex, "model.layers.1", Q11, False),
    (by_glob_or_regex, "re:model.layers.1.", Q11, True),
    (by_path, "model.layers.1", Q1, True),
    (by_path, "model.layers.1", Q11, False),
    (by_path, "model.layers.*.self_attn", Q11, True),
    (by_path, "model.layers.*.mlp", Q11, False),
    (by_path, "self_attn", Q1, False),
]


@pytest.mark.parametrize(("names", "entry", "module", "expected"), CASES)
def test_entries_name_what_loaders_take_them_for(names: Names, entry: str, module: str, expected: bool) -> None:
    assert names(entry, module) is expected


def test_the_entry_that_names_a_module_is_reported() -> None:
    told = Ignored("ignore", ("lm_head", "re:.*gate$"), by_name_or_regex, "")
    assert told.by("model.layers.0.mlp.gate") == "re:.*gate$"
    assert told.by("model.layers.0.mlp.gate_proj") is None
    assert unmatched(told, ["a.gate", "b"]) == ["lm_head"]


def test_entries_that_are_not_patterns_are_reported() -> None:
    told = Ignored("ignore", ("lm_head", "re:["), by_name_or_regex, "")
    assert list(unread(told)) == ["re:["]
    assert unread(told)["re:["].startswith("'re:[' is not a regular expression")


@pytest.mark.parametrize("value", [None, "lm_head", 7, {"a": 1}])
def test_only_a_list_has_entries(value: object) -> None:
    assert listed(value) == ()
    assert listed(["a", 1]) == ("a", "1")


@pytest.mark.parametrize(
    ("entry", "module", "names_it"),
    [
        ("model.*.mlp", "model.layers.3.mlp", True),
        ("model.*.mlp", "model.layers.3.mlp.up_proj", True),
        ("model.*.mlp", "model.layers.3.mlp2", False),
        ("*", "lm_head", True),
        ("layers.[0]*", "layers.[0].mlp", True),
        ("layers.[0]*", "layers.0.mlp", False),
        ("layers.?.*", "layers.0.mlp", False),
        ("*" * 40 + "x", "y" * 60, False),
        ("*y" * 30 + "x", "y" * 60, False),
    ],
)
def test_a_star_in_a_path_stands_for_anything_and_matching_ends(entry: str, module: str, names_it: bool) -> None:
    assert by_path(entry, module) is names_it


def test_an_expression_that_may_not_end_is_reported_and_not_matched() -> None:
    ignored = Ignored("ignore", ("lm_head", "re:(.*.*.*.*.*)*x", "re:.*mlp.*"), by_name_or_regex, "")
    assert unread(ignored) == {
        "re:(.*.*.*.*.*)*x": "'re:(.*.*.*.*.*)*x' repeats what is repeated, so that matching a name may not end"
    }
