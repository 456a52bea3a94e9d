from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from planted import GATE, SHARD, UP, found, quantized, source, values, verified
from tiny_models import LLAMA, llama, noise, read_header

from mxcli.backends.cpu import Cpu
from mxcli.files.checkpoint import open_checkpoint
from mxcli.flows.plan.overrides import Override
from mxcli.flows.plan.plan import Options, make_plan
from mxcli.flows.verify.checks.record import Hashing
from mxcli.flows.verify.subject import subject_of
from mxcli.flows.verify.verify import verify_subject
from mxcli.flows.write.quantize import quantize_checkpoint
from mxcli.flows.write.restore import open_floats

CODES = f"{UP}_packed"
NORM = "model.layers.0.input_layernorm.weight"
WAY_OUT = "--against SOURCE --repair."


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in NVFP4, with its record."""
    folder = tmp_path_factory.mktemp("record")
    return quantized(source(folder / "m"), folder / "q", Options("nvfp4"))


def damaged(output: Path, folder: Path, name: str, *, byte: int = 0, flip: int = 1) -> Path:
    """A copy with bits of one byte of a tensor flipped."""
    shutil.copytree(output, folder)
    content = bytearray((folder / SHARD).read_bytes())
    begin = 8 + int.from_bytes(content[:8], "little") + read_header(folder / SHARD)[name]["data_offsets"][0]
    content[begin + byte] ^= flip
    (folder / SHARD).write_bytes(content)
    return folder


def changed_record(output: Path, folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A copy with another record."""
    shutil.copytree(output, folder)
    record = json.loads((folder / "mxcli.json").read_text())
    change(record)
    (folder / "mxcli.json").write_text(json.dumps(record))
    return folder


def test_every_byte_of_an_output_is_proven(output: Path) -> None:
    result = verified(output)
    assert found(result) == {}
    assert (result.coverage.by_record, result.coverage.by_values, result.coverage.unchecked) == (7, 0, 0)
    assert result.coverage.proof == "the bytes of all 26 tensors are as recorded"


@pytest.mark.parametrize(
    ("name", "byte", "value"),
    [
        (CODES, 70, "bytes 0 to 4,095 of 4,096 (rows 0 to 127) not as recorded"),
        (f"{UP}_scale", 3, "bytes 0 to 511 of 512 (rows 0 to 127) not as recorded"),
        (f"{GATE}_global_scale", 0, "bytes 0 to 3 of 4 not as recorded"),
        (NORM, 5, "bytes 0 to 127 of 128 not as recorded"),
        ("model.embed_tokens.weight", 4095, "bytes 0 to 4,095 of 4,096 (rows 0 to 31) not as recorded"),
        ("lm_head.weight", 9, "bytes 0 to 4,095 of 4,096 (rows 0 to 31) not as recorded"),
    ],
)
def test_a_flipped_bit_is_found_with_its_place(tmp_path: Path, output: Path, name: str, byte: int, value: str) -> None:
    result = verified(damaged(output, tmp_path / "q", name, byte=byte))
    assert found(result)["recorded_bytes"] == [name]
    assert values(result, "recorded_bytes") == [value]
    (finding,) = next(each.findings for each in result.results if each.name == "recorded_bytes")
    assert finding.way_out.endswith(WAY_OUT)
    assert not result.is_sound


def test_chunks_locate_a_change_in_a_large_tensor(tmp_path: Path) -> None:
    words = {**llama(), "model.embed_tokens.weight": noise(20_000, 64, seed=7)}
    folder = quantized(source(tmp_path / "m", words), tmp_path / "q", Options("mxfp4"))
    folder = damaged(folder, tmp_path / "d", "model.embed_tokens.weight", byte=1_500_000)
    (value,) = values(verified(folder), "recorded_bytes")
    assert value == "bytes 1,048,576 to 2,097,151 of 2,560,000 (rows 8,192 to 16,383) not as recorded"


def test_a_header_that_changed_is_found(tmp_path: Path, output: Path) -> None:
    folder = shutil.copytree(output, tmp_path / "q")
    content = (folder / SHARD).read_bytes()
    (folder / SHARD).write_bytes(content.replace(b'"format":"pt"', b'"format":"tf"'))
    assert found(verified(folder)) == {"recorded_bytes": [SHARD]}


def test_documents_are_proven_by_their_hash(tmp_path: Path, output: Path) -> None:
    folder = shutil.copytree(output, tmp_path / "q")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": 1.0}))
    assert found(verified(folder)) == {"recorded_file": ["config.json"]}


def test_the_record_of_another_model_is_one_finding(tmp_path: Path, output: Path) -> None:
    other = {name: noise(*array.shape, seed=place) for place, (name, (_, array)) in enumerate(llama().items(), 500)}
    folder = quantized(source(tmp_path / "m", other), tmp_path / "q", Options("nvfp4"))
    shutil.copy(output / "mxcli.json", folder / "mxcli.json")
    assert found(verified(folder)) == {"recorded_bytes": [SHARD]}


@pytest.mark.parametrize(
    ("change", "places"),
    [
        (lambda record: record["stored"][SHARD].pop(CODES), {"recorded_tensor": [CODES]}),
        (lambda record: record["stored"][SHARD].update({"x": {"xxh3_128": "0" * 32}}), {"recorded_tensor": ["x"]}),
        (lambda record: record["files"].append("tokenizer.json"), {"record": ["mxcli.json"]}),
        (lambda record: record["tensors"].pop(NORM), {"record": ["mxcli.json"]}),
        (lambda record: record["tensors"][UP].update(scale_rounding="ct"), {"record": ["mxcli.json"]}),
        (lambda record: record["tensors"][NORM].update(dtype="F32"), {"recorded_decision": [NORM]}),
        (lambda record: record["tensors"][NORM].update(shape=[65]), {"recorded_decision": [NORM]}),
        (lambda record: record["headers"].update({SHARD: "0" * 32}), {"recorded_bytes": [SHARD]}),
    ],
)
def test_a_record_that_contradicts_itself_or_the_files_is_found(
    tmp_path: Path, output: Path, change: Callable[[dict[str, Any]], object], places: dict[str, list[str]]
) -> None:
    result = found(verified(changed_record(output, tmp_path / "q", change)))
    assert places.items() <= result.items()


@pytest.mark.parametrize(
    ("statistics", "shown"),
    [
        ({"amax": 10**400}, "'tensors' must have numbers and counts as the statistics of"),
        ({"max_abs_error": "0.5"}, "'tensors' must have numbers and counts as the statistics of"),
        ({"scale_exponent_histogram": {"3": None}}, "'tensors' must have numbers and counts as the statistics of"),
    ],
)
def test_statistics_that_are_not_numbers_are_a_problem(
    tmp_path: Path, output: Path, statistics: dict[str, object], shown: str
) -> None:
    result = verified(
        changed_record(output, tmp_path / "q", lambda record: record["tensors"][UP]["statistics"].update(statistics))
    )
    assert found(result) == {"record": ["mxcli.json"]}
    assert values(result, "record") == [f"{shown} {UP}"]


FORMATS_BY_LAYOUT = {
    "compressed-tensors": ("nvfp4", "mxfp4", "mxfp8", "fp8_e4m3_channel"),
    "modelopt": ("nvfp4", "fp8_e4m3_channel"),
    "fp8": ("fp8_e4m3_128x128",),
    "quark": ("mxfp4", "mxfp6_e3m2"),
    "torchao": ("mxfp4", "nvfp4"),
    "torchao-plain": ("mxfp4",),
    "mxcli": ("mxfp4", "mxint8", "e3m2:e8m0:1x16", "nvfp4_2d"),
}


@pytest.mark.parametrize(
    ("layout", "fmt"), [(layout, fmt) for layout, formats in FORMATS_BY_LAYOUT.items() for fmt in formats]
)
def test_layout_and_format_of_the_record_are_those_of_the_files(tmp_path: Path, layout: str, fmt: str) -> None:
    folder = quantized(source(tmp_path / "m"), tmp_path / "q", Options(fmt, layout=layout))
    sound = found(verified(folder))
    assert "record" not in sound
    assert "recorded_layout" not in sound
    other = "mxcli" if layout != "mxcli" else "compressed-tensors"
    layouts = verified(changed_record(folder, tmp_path / "a", lambda record: record.update(layout=other)))
    assert values(layouts, "recorded_layout") == [f"'layout' is {other}"]
    formats = verified(
        changed_record(folder, tmp_path / "b", lambda record: record["options"].update(format="fp8_e5m2"))
    )
    assert values(formats, "record")[0].startswith("'options' has no format ")
    assert not formats.is_sound


@pytest.mark.parametrize("layout", ["compressed-tensors", "mxcli"])
def test_the_record_of_an_output_of_a_quantized_source_is_sound(tmp_path: Path, layout: str) -> None:
    first = quantized(source(tmp_path / "m"), tmp_path / "first", Options("mxfp8", layout=layout))
    checkpoint = open_floats(first, requantize=True)
    plan = make_plan(checkpoint, Options("nvfp4"))
    quantize_checkpoint(checkpoint, plan, tmp_path / "second", backend=Cpu())
    assert found(verified(tmp_path / "second")) == {}
    assert found(verified(tmp_path / "second", first)) == {}


def test_formats_of_overrides_are_formats_of_the_options(tmp_path: Path) -> None:
    options = Options("mxfp4", overrides=(Override("*.down_proj.weight", "mxfp8"),))
    folder = quantized(source(tmp_path / "m"), tmp_path / "q", options)
    assert "record" not in found(verified(folder))
    changed = changed_record(folder, tmp_path / "d", lambda record: record["options"]["overrides"][0].pop("format"))
    assert values(verified(changed), "record") == [
        "'options' has no format mxfp8_e4m3, which 'tensors' has for model.layers.0.mlp.down_proj.weight"
    ]


@pytest.mark.parametrize("value", [None, 7, [], "x", {"a": 3}, {"../../x": "0" * 64}, {"a\0": {}}, [3], {"": {"": 1}}])
@pytest.mark.parametrize("key", ["stored", "sha256", "headers", "tensors", "files", "source_hashes", "options"])
def test_a_record_of_any_form_is_a_problem_with_its_key(tmp_path: Path, output: Path, key: str, value: object) -> None:
    result = verified(changed_record(output, tmp_path / "q", lambda record: record.update({key: value})))
    assert any(f"'{key}'" in each for each in values(result, "record"))
    assert not result.is_sound


@pytest.mark.parametrize(
    "key",
    [
        *("schema", "version", "command", "options", "input", "layout", "notes", "tensors", "files", "sha256"),
        *("stored", "headers", "source_hashes", "verified", "requantized_from"),
    ],
)
def test_a_record_without_a_key_is_a_problem(tmp_path: Path, output: Path, key: str) -> None:
    result = verified(changed_record(output, tmp_path / "q", lambda record: record.pop(key)))
    assert found(result)["record"] == ["mxcli.json"]
    assert values(result, "record")[0].startswith(f"'{key}' is missing")


@pytest.mark.parametrize("content", ["{}", "[]", "null", "7", "{", '{"schema": "mxcli.quantized/99"}', ""])
def test_a_file_that_is_not_a_record_is_a_problem(tmp_path: Path, output: Path, content: str) -> None:
    folder = shutil.copytree(output, tmp_path / "q")
    (folder / "mxcli.json").write_text(content)
    assert found(verified(folder))["record"] == ["mxcli.json"]


@pytest.mark.parametrize("name", [UP, GATE, "model.layers.0.self_attn.o_proj.weight"])
def test_codes_of_a_tensor_that_the_record_keeps_are_a_problem(tmp_path: Path, output: Path, name: str) -> None:
    folder = changed_record(output, tmp_path / "q", lambda record: record["tensors"][name].update(decision="kept"))
    assert found(verified(folder))["recorded_decision"] == [name]


def test_an_output_without_hashes_is_checked_by_its_values(tmp_path: Path, output: Path) -> None:
    def older(record: dict[str, Any]) -> None:
        record["schema"] = "mxcli.quantized/1"
        for key in ("stored", "sha256", "headers", "source_hashes", "verified"):
            del record[key]

    result = verified(changed_record(output, tmp_path / "q", older))
    assert found(result) == {}
    assert (result.coverage.by_record, result.coverage.by_values) == (0, 7)
    assert result.coverage.proof == "not proven: mxcli.json has no hashes"


def test_a_tensor_that_is_gone_is_found_by_the_record(tmp_path: Path) -> None:
    model = source(tmp_path / "m", llama(2), {**LLAMA, "num_hidden_layers": 2})
    folder = quantized(model, tmp_path / "q", Options("mxfp8"))
    lost = source(tmp_path / "lost", {k: v for k, v in llama(2).items() if ".1." not in k}, LLAMA)
    (folder / SHARD).write_bytes((quantized(lost, tmp_path / "l", Options("mxfp8")) / SHARD).read_bytes())
    result = found(verified(folder))
    assert "model.layers.1.mlp.up_proj.weight" in result["recorded_tensor"]
    assert result["layers"] == ["config.json"]
    assert result["recorded_bytes"] == [SHARD]


def test_method_of_another_package_is_a_changed_config(tmp_path: Path, output: Path) -> None:
    folder = shutil.copytree(output, tmp_path / "q")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["quant_method"] = "gptq"
    (folder / "config.json").write_text(json.dumps(config))
    assert found(verified(folder)) == {"recorded_file": ["config.json"]}


def test_whole_files_are_hashed_before_the_checks_begin(output: Path) -> None:
    subject = subject_of(open_checkpoint(output))
    with Hashing(subject) as hashing:
        assert verify_subject("q", subject, backend=Cpu(), hashing=hashing).is_sound
        recorded = hashing.result()
    assert recorded.files == subject.record.sha256
    assert recorded.tensors == recorded.expected
    with Hashing(subject) as hashing:
        alone = hashing.result()
    assert (alone.files, alone.tensors, alone.headers) == (subject.record.sha256, {}, {})
