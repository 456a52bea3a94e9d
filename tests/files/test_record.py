from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mxcli.errors import InputError
from mxcli.files.record import read_record, record_content, stated_record

HASH, OTHER = "0" * 32, "f" * 32
WHOLE = "0" * 64
ACCOUNTING: dict[str, Any] = {
    "files": 4,
    "bytes": 30,
    "read": {"files": 2, "bytes": 9},
    "carried": {"files": 1, "bytes": 1, "weights": ["2_Dense/model.safetensors"]},
    "left_out": {
        "files": 1,
        "bytes": 20,
        "listed": [{"name": "optimizer.pt", "files": 1, "bytes": 20, "reason": "training state"}],
    },
    "tensors": {"kept": {"tensors": 1, "bytes": 8}},
}
SOUND: dict[str, Any] = {
    "schema": "mxcli.quantized/3",
    "version": "0.1.0",
    "command": ["quantize", "m", "-o", "q"],
    "options": {"format": "nvfp4"},
    "input": {"model.safetensors": {"bytes": 9, "fingerprint": HASH}},
    "requantized_from": None,
    "layout": "compressed-tensors",
    "notes": [],
    "verified": True,
    "files": ["a.safetensors", "config.json"],
    "sha256": {"a.safetensors": WHOLE, "config.json": WHOLE},
    "headers": {"a.safetensors": HASH},
    "stored": {"a.safetensors": {"w": {"xxh3_128": HASH}}},
    "source_hashes": {"w": HASH},
    "tensors": {"w": {"decision": "kept", "dtype": "BF16", "shape": [2, 3]}},
    "accounting": ACCOUNTING,
}


def test_what_mxcli_writes_has_no_faults(tmp_path: Path) -> None:
    assert stated_record(SOUND).faults == {}
    (tmp_path / "mxcli.json").write_text(json.dumps(SOUND))
    record = read_record(tmp_path)
    assert record is not None
    assert (record.files, dict(record.headers)) == (("a.safetensors", "config.json"), {"a.safetensors": HASH})
    assert record.stored["a.safetensors"]["w"].xxh3 == HASH


@pytest.mark.parametrize(
    ("key", "value", "fault"),
    [
        ("files", "config.json", "must have a list of names"),
        ("files", ["a.safetensors", 7], "must have names of files in its folder, which '7' is not"),
        ("files", ["/etc/passwd"], "must have names of files in its folder, which '/etc/passwd' is not"),
        ("sha256", [], "must have names with their hashes"),
        ("sha256", {"config.json": HASH}, "must have names with their hashes"),
        ("sha256", {"../config.json": WHOLE}, "must have names of files in its folder, which '../config.json' is not"),
        ("headers", {"a.safetensors": "x"}, "must have names with their hashes"),
        ("headers", {"": HASH}, "must have names of files in its folder, which '' is not"),
        ("stored", {"a.safetensors": [HASH]}, "must have the hashes of the tensors of each file"),
        ("stored", {"a.safetensors": {"w": HASH}}, "must have the hashes of the tensors of each file"),
        ("stored", {"b/../a": {}}, "must have names of files in its folder, which 'b/../a' is not"),
        ("source_hashes", {"w": None}, "must have names with their hashes"),
        ("tensors", [], "must have an object for each tensor"),
        ("tensors", {"w": "kept"}, "must have an object for each tensor"),
    ],
)
def test_a_fault_is_stated_and_raised_in_the_same_words(tmp_path: Path, key: str, value: object, fault: str) -> None:
    record = {**SOUND, key: value}
    assert stated_record(record).faults == {key: fault}
    (tmp_path / "mxcli.json").write_text(json.dumps(record))
    with pytest.raises(InputError) as refused:
        read_record(tmp_path)
    assert f"'{key}' {fault}; it is not as mxcli writes it." in str(refused.value)


def test_what_is_in_form_is_kept_beside_what_is_not() -> None:
    record = stated_record({**SOUND, "sha256": {"config.json": WHOLE, "a.safetensors": 7}, "headers": 3})
    assert (dict(record.sha256), dict(record.headers)) == ({"config.json": WHOLE}, {})
    assert sorted(record.faults) == ["headers", "sha256"]


@pytest.mark.parametrize(
    ("key", "value", "fault"),
    [
        ("tensors", {"statistics": {"amax": 10**400}}, "must have numbers and counts as the statistics of w"),
        ("tensors", {"statistics": {"amax": float("inf")}}, "must have numbers and counts as the statistics of w"),
        ("tensors", {"statistics": {"max_abs_error": 2**1024}}, "must have numbers and counts as the statistics of w"),
        ("tensors", {"input_scale": {"amax": float("nan")}}, "must have finite numbers as the input_scale of w"),
        ("tensors", {"hadamard": {"size": 16, "seed": -(2**2000)}}, "must have finite numbers as the hadamard of w"),
        ("tensors", {"seed": float("-inf")}, "must have finite numbers as the seed of w"),
        ("tensors", {"statistics": {"amax": "3.5"}}, "must have numbers and counts as the statistics of w"),
        ("tensors", {"statistics": {"max_abs_error": True}}, "must have numbers and counts as the statistics of w"),
        ("tensors", {"statistics": {"amax": -1.0}}, "must have numbers and counts as the statistics of w"),
        ("tensors", {"statistics": {"scale_exponent_histogram": {"3": 1.5}}}, "numbers and counts"),
        ("tensors", {"statistics": {"element_exponent_histogram": [1, 2]}}, "numbers and counts"),
        ("tensors", {"statistics": [1.5]}, "must have numbers and counts as the statistics of w"),
        ("options", {"format": "nvfp4", "seed": 10**309}, "must have the options of the run"),
        ("options", {"format": "nvfp4", "hadamard": {"size": float("-inf")}}, "must have the options of the run"),
        ("options", {"format": "nvfp4", "overrides": [{"seed": 10**309}]}, "must have the options of the run"),
        ("input", {"a": {"bytes": 10**999}}, "must have the files of the source with their sizes"),
    ],
)
def test_numbers_are_finite_and_statistics_are_numbers(key: str, value: dict[str, Any], fault: str) -> None:
    changed = {"w": {**SOUND["tensors"]["w"], **value}} if key == "tensors" else value
    assert list(stated_record({**SOUND, key: changed}).faults) == [key]
    record = stated_record({**SOUND, key: changed})
    assert fault in record.faults[key]
    assert list(record.tensors) == ([] if key == "tensors" else ["w"])


@pytest.mark.parametrize("statistics", [{"amax": 1.5, "max_abs_error": None}, {"amax": 0}, {}, {"other": "text"}])
def test_statistics_as_they_are_written_are_no_fault(statistics: dict[str, Any]) -> None:
    tensor = {**SOUND["tensors"]["w"], "decision": "quantized", "statistics": statistics}
    assert stated_record({**SOUND, "tensors": {"w": tensor}}).faults == {}


HASH_KEYS = ("headers", "sha256", "source_hashes", "stored")


@pytest.mark.parametrize("key", [key for key in SOUND if key != "schema"])
def test_a_record_without_a_key_is_not_one(tmp_path: Path, key: str) -> None:
    record = {name: value for name, value in SOUND.items() if name != key}
    (fault,) = stated_record(record).faults.items()
    assert fault[0] == key
    assert fault[1].startswith("is missing; it must have ")
    (tmp_path / "mxcli.json").write_text(json.dumps(record))
    with pytest.raises(InputError, match=f"'{key}' is missing"):
        read_record(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, value) for key in SOUND for value in (7, True, "", [[]], {"x": {"x": "x"}}, {}) if SOUND[key] != value),
        *((key, None) for key in SOUND if key != "requantized_from"),
        ("tensors", {"w": {"decision": "plain", "dtype": "BF16", "shape": [2, 3]}}),
        ("tensors", {"w": {"decision": "kept", "dtype": "F7", "shape": [2, 3]}}),
        ("tensors", {"w": {"decision": "kept", "dtype": "BF16", "shape": "2x3"}}),
        ("tensors", {"w": {"decision": "kept", "dtype": "BF16"}}),
        ("schema", "mxcli.quantized/99"),
        ("schema", "mxcli.report/1"),
    ],
)
def test_a_key_of_another_form_is_named(key: str, value: object) -> None:
    assert list(stated_record({**SOUND, key: value}).faults) == [key]


def test_an_empty_record_is_not_one() -> None:
    assert stated_record({}).faults == {
        "schema": "is missing; it must be one of mxcli.quantized/3, mxcli.dequantized/3, mxcli.converted/1, "
        "mxcli.quantized/2, mxcli.dequantized/2, mxcli.quantized/1, mxcli.dequantized/1"
    }


def test_records_of_earlier_versions_have_all_hashes_or_none() -> None:
    earlier = {**SOUND, "schema": "mxcli.quantized/1"}
    assert stated_record(earlier).faults == {}
    without = {key: value for key, value in earlier.items() if key not in (*HASH_KEYS, "verified")}
    assert stated_record(without).faults == {}
    for key in HASH_KEYS:
        assert list(stated_record({name: value for name, value in earlier.items() if name != key}).faults) == [key]


def test_a_record_that_is_written_again_is_parsed_again(tmp_path: Path) -> None:
    path = tmp_path / "mxcli.json"
    path.write_text(json.dumps(SOUND))
    assert record_content(tmp_path) is record_content(tmp_path)
    path.write_text(json.dumps({**SOUND, "source_hashes": {"w": OTHER}}))
    record = read_record(tmp_path)
    assert record is not None
    assert record.source_hashes == {"w": OTHER}
    path.unlink()
    assert record_content(tmp_path) is None


@pytest.mark.parametrize(
    "change",
    [
        {"bytes": 31},
        {"files": 3},
        {"read": {"files": 2}},
        {"read": {"files": 2, "bytes": -9}},
        {"carried": {"files": 1, "bytes": 1}},
        {"carried": {"files": 1, "bytes": 1, "weights": [3]}},
        {"left_out": {"files": 1, "bytes": 20, "listed": []}},
        {"left_out": {"files": 1, "bytes": 20, "listed": [{"name": "a", "files": 1, "bytes": 20}]}},
        {"left_out": {"files": 1, "bytes": 20, "listed": [{"name": "a", "files": 1, "bytes": 19, "reason": "hidden"}]}},
        {"tensors": {"kept": 1}},
        {"tensors": None},
    ],
)
def test_an_accounting_whose_sums_do_not_agree_proves_nothing(change: dict[str, Any]) -> None:
    record = stated_record({**SOUND, "accounting": {**ACCOUNTING, **change}})
    assert record.faults == {"accounting": "must have the files of the source with sums that agree"}


@pytest.mark.parametrize("version", [1, 2])
def test_records_of_earlier_versions_need_no_accounting(version: int) -> None:
    earlier = {key: value for key, value in SOUND.items() if key != "accounting"}
    assert stated_record({**earlier, "schema": f"mxcli.quantized/{version}"}).faults == {}
