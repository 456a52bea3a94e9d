from __future__ import annotations

import math
import time

import pytest

from mxcli.files.patterns import stated_expression, ways_to_match

NAME = "model.language_model.layers.17.mlp.experts.203.gate_up_proj"


@pytest.mark.parametrize(
    ("expression", "ways"),
    [
        ("lm_head", 0),
        (r".*lm_head$", 2),
        (r".*\.mlp\.(gate|shared_expert_gate)$", 2),
        (r"^(?!.*\.experts\.).*$", 4),
        (r".*(self_attn|mlp).*proj", 4),
        (r"(.*\.)?layers\.\d+\.(q_proj|k_proj|v_proj)(\.base_layer)?$", 6),
        (r"(q_proj.*|k_proj.*|v_proj.*|o_proj.*)", 2),
        (r"model\.layers\.[0-9]{1,2}\..*", 3),
        (r"(?:[*+]|\*\+){2}", 0),
        (r"[]*+?{2,}]", 0),
        (r"a{}", 0),
        (r"(?P<of>a)(?P=of)(?#a*)(?i:b)(?<=c)", 0),
        (r".*.*", 10),
        (r"(.*)(.*)", 10),
        (r"(a.*b){3}", 6),
        (r"(.*.*.*.*.*)*x", math.inf),
        (r"(a*)*b", math.inf),
        (r"(a+)+$", math.inf),
        (r"(a|a)*b", math.inf),
        (r"(?:.|.)+x", math.inf),
        (r"(a?)*b", math.inf),
        (r"((a*b)?c){1,}", math.inf),
        (r"(.{0,50}){40}", 80),
    ],
)
def test_ways_to_match(expression: str, ways: float) -> None:
    assert ways_to_match(expression) == ways


@pytest.mark.parametrize(
    ("expression", "fault"),
    [
        ("re:(", r"'re:\(' is not a regular expression: missing \)"),
        ("a{99999999999999999999}", "is not a regular expression: the repetition number is too large"),
        ("(" * 2000 + ")" * 2000, "is not a regular expression: maximum recursion depth"),
        ("x" * 70_000, "'xxxxxxxxxxxxxxxxxxxx…' is not read: it has 70,000 characters"),
        ("(.*.*.*.*.*)*x", "repeats what is repeated, so that matching a name may not end"),
        (".*.*.*.*x", "repeats what is repeated"),
        ("(.*)(.*)(.*)(.*)x", "repeats what is repeated"),
        ("a?" * 30 + "a" * 30, "repeats what is repeated"),
        (".*a" * 13, "repeats what is repeated"),
    ],
)
def test_what_is_not_matched(expression: str, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        stated_expression(expression)


@pytest.mark.parametrize(
    ("expression", "name"),
    [
        (".*.*.*!", NAME),
        (r"(.*\.)?layers\.(.*\.)?mlp\.experts\.\d+\.(.*\.)?!", NAME),
        (r"(?!(.*\.)?(audio)\.)(.*\.)?lead\.(.*\.)?layers\.\d+\.experts\.\d+\.gate(\.base_layer)?$", NAME),
        (".*e.*e.*e.*e.*e.*e.*!", NAME),
        ("a?" * 20 + "!", "a" * 40),
        ("(a|b)(.*.*)!", "a" * 200),
    ],
)
def test_what_is_matched_ends(expression: str, name: str) -> None:
    began = time.process_time()
    assert stated_expression(expression).match(name) is None
    assert time.process_time() - began < 1
