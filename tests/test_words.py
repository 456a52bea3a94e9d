"""The language of mxcli: words that do not come back, and how docstrings begin."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = sorted((ROOT / "mxcli").rglob("*.py"))
SOURCES = [
    *MODULES,
    *sorted(path for path in (ROOT / "kernels").iterdir() if path.suffix in (".h", ".cpp", ".cu", ".txt")),
    *sorted((ROOT / "docs").glob("*.md")),
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "samples/README.md", "pyproject.toml")),
]

NOT_WORDS = {
    r"tell(s|ing)?|told": "say, report, distinguish, inform",
    r"ask(s|ed|ing)?": "request, need, query",
    r"(?<!-)\blies?": "be, be stored, start",
    r"hangs?": "depend on",
    r"beside": "next to, with",
    r"anew": "again, from scratch",
    r"of account": "used by, relevant to",
    r"by chance": "randomly",
    r"mend(s|ed|ing|able)?": "fix",
    r"(?<!there )(?<!There )is no(?! longer)|(?<!there )(?<!There )are no(?! longer)": "is not a, must be",
    r"what is none": "anything else",
    r"held against": "compared with",
    r"(gone|goes|going|go) on with": "continue",
    r"becomes? of": "happen to",
    r"all the same": "anyway",
    r"so many": "that many, the number of",
    r"whatever": "any, regardless of",
}
"""Words and phrases that engineers of the field do not use for this, and what they say instead."""

NO_BEGINNING = {"What", "Whether", "How", "Which", "Why", "One", "Where", "Everything", "All", "Who", "That", "Those"}
VERBS = frozenset(
    """
    Accept Add Adjust Answer Append Apply Arrange Assert Assign Attach Await Begin Bind Bracket Break Bring Build
    Cache Call Cancel Cap Carry Check Choose Clamp Clear Close Collect Combine Compare Compile Complete Compose
    Compute Concatenate Convert Copy Count Create Cut Deal Decide Declare Decode Decompress Default Define Delete
    Deliver Dequantize Describe Detach Detect Discard Divide Download Draw Drop Emit Encode End Enforce Ensure Enter
    Enumerate Escape Estimate Evaluate Examine Exchange Exclude Execute Exit Expand Explain Export Extend Fail Feed
    Fill Filter Find Finish Fit Fix Flatten Fold Follow Forget Format Free Gather Generate Get Give Group Guess Handle
    Hash Hide Hold Implement Import Include Index Infer Initialize Insert Inspect Install Interleave Interpret Invert
    Iterate Join Judge Keep Label Launch Lay Leave Let Limit Link List Load Locate Lock Log Look Make Map Mark Match
    Measure Merge Move Multiply Name Narrow Normalize Note Number Offer Omit Open Order Pack Pad Pair Parse Pass
    Permute Pick Place Plan Plot Point Pool Predict Prefix Prepare Preserve Print Process Profile Prove Put Quantize
    Query Quote Raise Range Rank Read Rebuild Recall Receive Recompute Record Reduce Reencode Refuse Register Reject
    Release Remember Remove Rename Render Reorder Repeat Replace Report Represent Requantize Request Require Reserve
    Reset Reshape Resolve Restore Restrict Resume Return Reuse Reverse Round Run Sample Save Say Scale Scan Search
    Select Send Separate Serve Set Share Shift Shorten Show Shuffle Silence Simulate Size Skip Slice Solve Sort Spell
    Split Spread Stack Start State Stop Store Stream Strip Subtract Suggest Sum Summarize Swap Swizzle Sync Take Test
    Tie Time Trace Track Train Transform Translate Transpose Truncate Try Turn Undo Unfold Unify Unpack Unpickle
    Unswizzle Unwrap Update Upload Use Validate Verify View Visit Wait Walk Warm Warn Weigh Widen Wrap Write Yield
    Zero
    """.split()  # noqa: SIM905 - a page of words, not a column
)
"""Imperatives that a function's docstring may begin with; another verb is added here."""


@cache
def prose(path: Path) -> list[tuple[int, str]]:
    """The lines of a file in which words are read: identifiers count too, split at underscores."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [(number, line.replace(".tell(", "").replace("_", " ")) for number, line in enumerate(lines, 1)]


@cache
def documented(path: Path) -> list[tuple[ast.AST, str]]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [
        (node, text)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node))
    ]


def is_property(node: ast.AST) -> bool:
    names = {ast.unparse(each).split(".")[-1] for each in getattr(node, "decorator_list", ())}
    return bool(names & {"property", "cached_property", "setter"})


def place(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"


@pytest.mark.parametrize("pattern", NOT_WORDS)
def test_words_do_not_come_back(pattern: str) -> None:
    word = re.compile(rf"\b(?:{pattern})\b", re.IGNORECASE)
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match[0]}"
        for path in SOURCES
        for number, line in prose(path)
        if (match := word.search(line))
    ]
    assert not found, f"write instead: {NOT_WORDS[pattern]}"


def test_docstrings_of_functions_begin_with_a_verb() -> None:
    wrong = [
        f"{place(path, node)}: {text.split()[0]}"
        for path in MODULES
        for node, text in documented(path)
        if isinstance(node, ast.FunctionDef) and not is_property(node)
        if text.split()[0].strip("`,.:;") not in VERBS
    ]
    assert not wrong


def test_docstrings_of_types_modules_and_properties_begin_with_a_noun() -> None:
    wrong = [
        f"{place(path, node)}: {text.split()[0]}"
        for path in MODULES
        for node, text in documented(path)
        if not isinstance(node, ast.FunctionDef) or is_property(node)
        if text.split()[0].strip("`,.:;")
        in (NO_BEGINNING | (set() if is_property(node) else VERBS - {"List", "Plan", "Range", "Scale"}))
    ]
    assert not wrong
