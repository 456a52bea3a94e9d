from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from planted import GATE, SHARD, UP, quantized, source
from tiny_models import LLAMA, llama, noise, read_raw, write_model

from mxcli.backends.cpu import Cpu
from mxcli.errors import InputError, RefusedError
from mxcli.files.checkpoint import open_checkpoint
from mxcli.files.layouts import InputScale
from mxcli.files.model_files import RECORD
from mxcli.flows.plan.overrides import Override
from mxcli.flows.plan.plan import Options, make_plan
from mxcli.flows.verify.repair import Repair, repair
from mxcli.flows.write.quantize import quantize_checkpoint
from mxcli.numerics.hadamard import find_hadamard
from mxcli.numerics.scheme import Rules

PACKED = f"{UP}_packed"
NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def nvfp4(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A plain model, and it in NVFP4."""
    folder = tmp_path_factory.mktemp("nvfp4")
    model = source(folder / "m")
    (model / "tokenizer_config.json").write_text('{"a": 1}\n')
    return model, quantized(model, folder / "q", Options("nvfp4"))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def poke(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def begin_of(folder: Path, name: str, file: str = SHARD) -> int:
    """The position of a tensor in a file."""
    content = (folder / file).read_bytes()
    length = int.from_bytes(content[:8], "little")
    begin: int = json.loads(content[8 : 8 + length])[name]["data_offsets"][0]
    return 8 + length + begin


def in_tensor(name: str, size: int = 1) -> Callable[[Path], None]:
    return lambda folder: poke(folder / SHARD, begin_of(folder, name) + 5, b"\xa5" * size)


def truncated(folder: Path) -> None:
    os.truncate(folder / SHARD, (folder / SHARD).stat().st_size // 2)


DAMAGE: dict[str, tuple[Callable[[Path], object], tuple[str, ...] | None]] = {
    "a code": (in_tensor(PACKED), (PACKED,)),
    "a run of codes": (in_tensor(PACKED, 700), (PACKED,)),
    "a scale": (in_tensor(f"{UP}_scale"), (f"{UP}_scale",)),
    "a tensor scale": (lambda folder: poke(folder / SHARD, begin_of(folder, f"{GATE}_global_scale"), b"\0\0"), None),
    "a norm": (in_tensor(NORM, 4), (NORM,)),
    "the header": (lambda folder: poke(folder / SHARD, 20, b"}}}"), ()),
    "the length of the header": (lambda folder: poke(folder / SHARD, 0, b"\xff" * 8), ()),
    "a half": (truncated, None),
    "bytes at the end": (lambda folder: (folder / SHARD).open("ab").write(b"more"), ()),
    "no shard": (lambda folder: (folder / SHARD).unlink(), None),
    "an empty shard": (lambda folder: (folder / SHARD).write_bytes(b""), None),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_shard_is_again_what_it_was(tmp_path: Path, nvfp4: tuple[Path, Path], damage: str) -> None:
    change, tensors = DAMAGE[damage]
    model, sound = nvfp4
    folder = Path(shutil.copytree(sound, tmp_path / "q"))
    change(folder)
    (found,) = repair(folder, model, Cpu())
    assert found.file == SHARD
    assert tensors is None or found.tensors == tensors
    assert contents(folder) == contents(sound)
    assert repair(folder, model, Cpu()) == ()


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("text", [None, "{}", "not JSON"])
def test_documents_are_written_and_copied_again(
    tmp_path: Path, nvfp4: tuple[Path, Path], name: str, text: str | None
) -> None:
    model, sound = nvfp4
    folder = Path(shutil.copytree(sound, tmp_path / "q"))
    if text is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(text)
    assert repair(folder, model, Cpu()) == (Repair(name),)
    assert contents(folder) == contents(sound)


@pytest.mark.parametrize("name", [SHARD, "config.json", "tokenizer_config.json"])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path: Path, nvfp4: tuple[Path, Path], name: str) -> None:
    model, sound = nvfp4
    folder = Path(shutil.copytree(sound, tmp_path / "q"))
    (folder / name).unlink()
    os.mkfifo(folder / name)
    try:
        repair(folder, model, Cpu())
    except (InputError, RefusedError):
        assert (folder / name).is_fifo()
    else:
        assert contents(folder) == contents(sound)


SIGNS = find_hadamard(16)
OPTIONS = {
    "stochastic rounding": Options("mxfp8", Rules(rounding="stochastic", seed=3, nonfinite="error"), layout="mxcli"),
    "a transform along columns": Options(
        "nvfp4", Rules(hadamard=SIGNS, nonfinite="error"), axis="column", layout="mxcli"
    ),
    "a dialect": Options("mxfp4", Rules(dialect="torchao", nonfinite="error")),
    "overrides": Options(
        "nvfp4", overrides=(Override("*.down_proj", "mxfp8"), Override("*.o_proj", keep=True)), layout="mxcli"
    ),
    "modelopt": Options("nvfp4", layout="modelopt"),
    "torchao": Options("mxfp8", layout="torchao"),
    "blocks": Options("fp8_e4m3_128x128", layout="fp8"),
}


@pytest.mark.parametrize("options", OPTIONS)
def test_recorded_options_make_the_same_bytes(tmp_path: Path, options: str) -> None:
    model = source(tmp_path / "m")
    folder = quantized(model, tmp_path / "q", OPTIONS[options])
    sound = contents(folder)
    size = (folder / SHARD).stat().st_size
    poke(folder / SHARD, size - 2000, bytes(1500))
    truncated(folder)
    repair(folder, model, Cpu())
    assert contents(folder) == sound


def test_shards_of_another_size_are_repaired_one_by_one(tmp_path: Path) -> None:
    model = source(tmp_path / "m")
    checkpoint = open_checkpoint(model)
    folder = tmp_path / "q"
    plan = make_plan(checkpoint, Options("nvfp4"))
    quantize_checkpoint(checkpoint, plan, folder, backend=Cpu(), max_shard_bytes=10_000)
    sound = contents(folder)
    first, *others = [name for name in sound if name.endswith(".safetensors")]
    assert len(others) > 1
    kept = (folder / others[-1]).stat()
    os.truncate(folder / first, 100)
    (folder / others[0]).unlink()
    (folder / "model.safetensors.index.json").write_text("{}")
    found = repair(folder, model, Cpu())
    assert sorted(each.file for each in found) == sorted([first, others[0], "model.safetensors.index.json"])
    assert contents(folder) == sound
    assert (folder / others[-1]).stat() == kept


def test_experts_of_a_stack_are_made_one_by_one(tmp_path: Path) -> None:
    stacks = {
        "model.layers.0.mlp.experts.gate_up_proj": noise(2, 96, 32, seed=1),
        "model.layers.0.mlp.experts.down_proj": noise(2, 32, 48, seed=2),
        "model.layers.0.mlp.gate.weight": noise(2, 32, seed=3),
    }
    config = {"model_type": "qwen3_moe", "hidden_size": 32, "moe_intermediate_size": 48}
    model = source(tmp_path / "m", stacks, config)
    folder = quantized(model, tmp_path / "q", Options("nvfp4", layout="ct"))
    sound = contents(folder)
    name = "model.layers.0.mlp.experts.1.up_proj.weight_packed"
    in_tensor(name, 9)(folder)
    assert repair(folder, model, Cpu()) == (Repair(SHARD, (name,)),)
    assert contents(folder) == sound


def test_a_source_that_is_quantized_itself_is_dequantized(tmp_path: Path) -> None:
    from mxcli.flows.write.restore import open_floats

    first = quantized(source(tmp_path / "m"), tmp_path / "first", Options("mxfp8"))
    checkpoint = open_floats(first, requantize=True)
    folder = tmp_path / "q"
    quantize_checkpoint(checkpoint, make_plan(checkpoint, Options("nvfp4")), folder, backend=Cpu())
    sound = contents(folder)
    in_tensor(PACKED, 30)(folder)
    assert repair(folder, first, Cpu()) == (Repair(SHARD, (PACKED,)),)
    assert contents(folder) == sound


def test_input_scales_are_those_of_the_record(tmp_path: Path) -> None:
    from dataclasses import replace

    model = source(tmp_path / "m")
    checkpoint = open_checkpoint(model)
    plan = make_plan(checkpoint, Options("nvfp4"))
    scale = InputScale(3.0, 3.0 / 2688, 2688 / 3.0)
    plan = replace(
        plan, tensors=tuple(replace(each, input_scale=scale if each.scheme else None) for each in plan.tensors)
    )
    folder = tmp_path / "q"
    quantize_checkpoint(checkpoint, plan, folder, backend=Cpu())
    sound = contents(folder)
    truncated(folder)
    repair(folder, model, Cpu())
    assert contents(folder) == sound


def test_another_source_is_refused_and_nothing_is_written(tmp_path: Path, nvfp4: tuple[Path, Path]) -> None:
    folder = Path(shutil.copytree(nvfp4[1], tmp_path / "q"))
    in_tensor(PACKED)(folder)
    damaged = contents(folder)
    tensors = llama()
    tensors[UP] = noise(128, 64, seed=99)
    other = write_model(tmp_path / "other", tensors, LLAMA)
    with pytest.raises(RefusedError, match=rf"'{UP}' is not the tensor that this output was made from"):
        repair(folder, other, Cpu())
    assert contents(folder) == damaged
    fewer = write_model(tmp_path / "fewer", {UP: tensors[UP]}, LLAMA)
    with pytest.raises(RefusedError, match=r"model.safetensors: the recorded options arrange other tensors"):
        repair(folder, fewer, Cpu())
    assert contents(folder) == damaged


def test_a_file_that_does_not_follow_is_refused(tmp_path: Path, nvfp4: tuple[Path, Path]) -> None:
    model, sound = nvfp4
    folder = Path(shutil.copytree(sound, tmp_path / "q"))
    other = Path(shutil.copytree(model, tmp_path / "m"))
    (other / "tokenizer_config.json").write_text('{"a": 2}\n')
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(RefusedError, match=r"tokenizer_config.json: its recorded content does not follow"):
        repair(folder, other, Cpu())


def test_without_a_record_that_proves_it_there_is_no_repair(tmp_path: Path, nvfp4: tuple[Path, Path]) -> None:
    model, sound = nvfp4
    folder = Path(shutil.copytree(sound, tmp_path / "q"))
    in_tensor(PACKED)(folder)
    record = json.loads((folder / RECORD).read_text())
    hashes = ("sha256", "stored", "headers", "source_hashes", "verified")
    for key in hashes:
        (folder / RECORD).write_text(json.dumps({name: part for name, part in record.items() if name != key}))
        with pytest.raises(InputError, match=f"'{key}' is missing"):
            repair(folder, model, Cpu())
    older = {name: part for name, part in record.items() if name not in hashes} | {"schema": "mxcli.quantized/1"}
    (folder / RECORD).write_text(json.dumps(older))
    with pytest.raises(RefusedError, match="no repair can be proven"):
        repair(folder, model, Cpu())
    (folder / RECORD).write_text(json.dumps({**record, "schema": "mxcli.dequantized/3", "dtypes": {"w": "BF16"}}))
    with pytest.raises(RefusedError, match=r"only mxcli.quantized/3 can be repaired"):
        repair(folder, model, Cpu())
    (folder / RECORD).write_text(json.dumps({**record, "options": {"format": 3}}))
    with pytest.raises(InputError, match="'options' is not what mxcli writes"):
        repair(folder, model, Cpu())
    (folder / RECORD).unlink()
    with pytest.raises(RefusedError, match=r"has no mxcli.json, and only an output of mxcli can be repaired"):
        repair(folder, model, Cpu())


@pytest.mark.parametrize("name", [PACKED, f"{UP}_scale", NORM])
def test_a_tensor_without_a_recorded_hash_is_not_repaired(tmp_path: Path, nvfp4: tuple[Path, Path], name: str) -> None:
    model, sound = nvfp4
    folder = Path(shutil.copytree(sound, tmp_path / "q"))
    in_tensor(PACKED)(folder)
    record = json.loads((folder / RECORD).read_text())
    del record["stored"][SHARD][name]
    (folder / RECORD).write_text(json.dumps(record))
    damaged = contents(folder)
    with pytest.raises(RefusedError, match=f"{SHARD}: mxcli.json lacks the hash of {name}. Quantize the source again"):
        repair(folder, model, Cpu())
    assert contents(folder) == damaged


def test_bytes_that_are_not_proven_leave_the_file_as_it_is(tmp_path: Path, nvfp4: tuple[Path, Path]) -> None:
    model, sound = nvfp4
    folder = Path(shutil.copytree(sound, tmp_path / "q"))
    record = json.loads((folder / RECORD).read_text())
    record["stored"][SHARD][PACKED]["xxh3_128"] = "0" * 32
    record["sha256"][SHARD] = "0" * 64
    (folder / RECORD).write_text(json.dumps(record))
    damaged = contents(folder)
    with pytest.raises(RefusedError, match=r"does not have the hash in mxcli.json; the file stays as it is"):
        repair(folder, model, Cpu())
    assert contents(folder) == damaged


def test_a_link_is_replaced_and_its_target_stays(tmp_path: Path, nvfp4: tuple[Path, Path]) -> None:
    model, sound = nvfp4
    folder = Path(shutil.copytree(sound, tmp_path / "q"))
    elsewhere = tmp_path / "elsewhere.safetensors"
    shutil.copy(folder / SHARD, elsewhere)
    poke(elsewhere, begin_of(folder, PACKED), b"\0\0\0")
    kept = elsewhere.read_bytes()
    (folder / SHARD).unlink()
    (folder / SHARD).symlink_to(elsewhere)
    assert repair(folder, model, Cpu()) == (Repair(SHARD, (PACKED,)),)
    assert elsewhere.read_bytes() == kept
    assert not (folder / SHARD).is_symlink()
    assert contents(folder) == contents(sound)


@pytest.mark.skipif(not os.access("/proc/kmsg", os.R_OK), reason="there is no file that never ends")
def test_a_file_that_never_ends_is_replaced(tmp_path: Path, nvfp4: tuple[Path, Path]) -> None:
    model, sound = nvfp4
    folder = Path(shutil.copytree(sound, tmp_path / "q"))
    (folder / SHARD).unlink()
    (folder / SHARD).symlink_to("/proc/kmsg")
    assert [each.file for each in repair(folder, model, Cpu())] == [SHARD]
    assert contents(folder) == contents(sound)


def test_permissions_are_kept(tmp_path: Path, nvfp4: tuple[Path, Path]) -> None:
    model, sound = nvfp4
    folder = Path(shutil.copytree(sound, tmp_path / "q"))
    (folder / SHARD).chmod(0o600)
    in_tensor(PACKED)(folder)
    repair(folder, model, Cpu())
    assert (folder / SHARD).stat().st_mode & 0o777 == 0o600
    assert read_raw(folder / SHARD) == read_raw(sound / SHARD)


def test_the_command_line_repairs_and_then_verifies(
    tmp_path: Path, nvfp4: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    from mxcli.cli.app import run

    model, sound = nvfp4
    folder = Path(shutil.copytree(sound, tmp_path / "q"))
    in_tensor(PACKED)(folder)
    assert run(["verify", str(folder), "--repair"]) == 2
    assert "--repair needs --against SOURCE" in capsys.readouterr().err
    assert run(["verify", str(folder), "--against", str(model)]) == 5
    capsys.readouterr()
    assert run(["verify", str(folder), "--against", str(model), "--repair", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["repaired"] == [{"file": SHARD, "tensors": [PACKED]}]
    assert result["sound"] is True
    truncated(folder)
    assert run(["verify", str(folder), "--against", str(model), "--repair"]) == 0
    assert f"repaired {SHARD}: " in capsys.readouterr().out
    assert contents(folder) == contents(sound)
    assert run(["verify", str(folder), "--against", str(model), "--repair", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["repaired"] == []
