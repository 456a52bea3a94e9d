from __future__ import annotations

import pytest

from mxcli.cli.arguments import normalized


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("inspect x --json", "inspect x --json=-"),
        ("inspect --json x", "inspect --json=- x"),
        ("inspect --json out.json x", "inspect --json=out.json x"),
        ("inspect --json model.safetensors.index.json", "inspect --json=- model.safetensors.index.json"),
        ("inspect --json=any.txt x", "inspect --json=any.txt x"),
        ("inspect --json - x", "inspect --json=- x"),
        ("report x --jsonl --json", "report x --jsonl=- --json=-"),
        ("report x --jsonl out.jsonl", "report x --jsonl=out.jsonl"),
        ("report x --jsonl out.json", "report x --jsonl=- out.json"),
        ("report --include a --exclude b x", "report --include=+a --exclude=-b x"),
        ("report --include=a=b --exclude=b x", "report --include=+a=b --exclude=-b x"),
        ("report x --exclude", "report x --exclude"),
        ("report -- --json --include x", "report -- --json --include x"),
    ],
)
def test_optional_files_and_the_order_of_selectors(typed: str, meant: str) -> None:
    assert normalized(typed.split()) == meant.split()
