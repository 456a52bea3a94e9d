from __future__ import annotations

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from raw_checkpoint import safetensors_bytes, zeros

from mxcli.errors import EnvironmentFailure, InputError, RefusedError
from mxcli.files.checkpoint import Checkpoint, open_checkpoint
from mxcli.files.layouts import Entry
from mxcli.files.model_files import CarriedFile
from mxcli.files.output_dir import Output
from mxcli.files.output_folder import OutputFolder, check_output_folder
from mxcli.files.partials import json_bytes
from mxcli.files.progress import Draft
from mxcli.files.shard_file import Shard, ShardFile

BYTES = Entry("b", "U8", (3,))
WIDE = Entry("w", "F32", (2,))
HALVES = Entry("h", "BF16", (1, 3))


def write_shard(path: Path, shard: Shard, arrays: dict[str, np.ndarray]) -> None:
    with path.open("wb") as file:
        written = ShardFile(shard, file)
        for name, array in arrays.items():
            written.write(name, array)
        written.finish()


def test_a_shard_is_laid_out_widest_element_first_and_aligned(tmp_path: Path) -> None:
    shard = Shard("s", (BYTES, HALVES, WIDE), {"author": "x"})
    arrays = {
        "b": np.array([1, 2, 3], np.uint8),
        "h": np.array([[4, 5, 6]], np.uint16),
        "w": np.array([1.0, -2.0], np.float32),
    }
    write_shard(tmp_path / "s.safetensors", shard, arrays)
    content = (tmp_path / "s.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    assert length % 8 == 0
    assert json.loads(content[8 : 8 + length]) == {
        "__metadata__": {"format": "pt", "author": "x"},
        "w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        "h": {"dtype": "BF16", "shape": [1, 3], "data_offsets": [8, 14]},
        "b": {"dtype": "U8", "shape": [3], "data_offsets": [14, 17]},
    }
    assert content[8 + length :] == arrays["w"].tobytes() + arrays["h"].tobytes() + b"\1\2\3"
    assert len(content) == shard.nbytes
    assert shard.data_bytes == 17


def test_the_safetensors_library_reads_a_shard(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.numpy")
    write_shard(
        tmp_path / "s.safetensors",
        Shard("s", (BYTES, WIDE, Entry("none", "F32", (0, 4)), Entry("one", "I64", ()))),
        {
            "one": np.array(7, np.int64),
            "none": np.zeros((0, 4), np.float32),
            "w": np.array([1, 2], np.float32),
            "b": np.array([1, 2, 3], np.uint8),
        },
    )
    found = library.load_file(tmp_path / "s.safetensors")
    assert {name: (array.shape, array.tolist()) for name, array in found.items()} == {
        "one": ((), 7),
        "none": ((0, 4), []),
        "w": ((2,), [1.0, 2.0]),
        "b": ((3,), [1, 2, 3]),
    }


def test_a_shard_is_not_finished_before_every_tensor_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"described but not written: \['w'\]"):
        write_shard(tmp_path / "s", Shard("s", (BYTES, WIDE)), {"b": np.zeros(3, np.uint8)})
    with pytest.raises(ValueError, match="b: 4 bytes given, 3 described"):
        write_shard(tmp_path / "s", Shard("s", (BYTES,)), {"b": np.zeros(4, np.uint8)})


def test_json_is_sorted_readable_and_ends_with_a_newline() -> None:
    assert json_bytes({"b": 1, "a": "ä"}) == '{\n  "a": "ä",\n  "b": 1\n}\n'.encode()


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def names_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_an_output_appears_under_its_names_only_when_published(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("x")
    folder, shard = tmp_path / "deep" / "out", Shard("s.safetensors", (BYTES,))
    draft = Draft(
        (shard,), {"config.json": {"a": 1}}, {"sub/x.txt": CarriedFile.of(tmp_path / "x.txt")}, {"version": "1"}
    )
    with Output(OutputFolder(folder), draft) as output:
        output.begin_shard(shard)
        output.write("b", np.zeros(3, np.uint8))
        output.finish(("b",), "", {"of": "0" * 32})
        output.end_shard()
        assert names_in(folder) == {"s.safetensors.partial", "mxcli.progress.partial"}
        output.publish(output.record)
    assert names_in(folder) == {"s.safetensors", "config.json", "sub/x.txt", "mxcli.json"}
    content = (folder / "s.safetensors").read_bytes()
    assert json.loads((folder / "mxcli.json").read_text()) == {
        "version": "1",
        "files": ["config.json", "s.safetensors", "sub/x.txt"],
        "sha256": {name: sha256(folder / name) for name in ("config.json", "s.safetensors", "sub/x.txt")},
        "stored": {"s.safetensors": {"b": {"xxh3_128": xxhash.xxh3_128_hexdigest(bytes(3))}}},
        "headers": {"s.safetensors": xxhash.xxh3_128_hexdigest(content[:-3])},
        "source_hashes": {"of": "0" * 32},
        "verified": False,
    }
    assert (folder / "config.json").read_text() == '{\n  "a": 1\n}\n'


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RefusedError("no"), EnvironmentFailure("full")])
def test_an_exception_before_anything_is_finished_removes_all_that_was_begun(
    tmp_path: Path, error: BaseException
) -> None:
    def fail() -> None:
        shard = Shard("s", (BYTES,))
        with Output(OutputFolder(tmp_path / "deep" / "out"), Draft((shard,))) as output:
            output.begin_shard(shard)
            output.write("b", np.zeros(3, np.uint8))
            raise error

    with pytest.raises(type(error)):
        fail()
    assert list(tmp_path.iterdir()) == []


def begun(folder: Path, draft: Draft, error: BaseException | None, **more: bool) -> None:
    """A run that finishes `b` of a shard that has more, and then ends."""
    with Output(OutputFolder(folder), draft, **more) as output:
        output.begin_shard(draft.shards[0])
        output.write("b", np.array([1, 2, 3], np.uint8))
        output.finish(("b",), "seen")
        if error is not None:
            raise error


TWO = Draft((Shard("s", (BYTES, WIDE)),), record={"version": "1", "options": {"format": "x"}})


@pytest.mark.parametrize("error", [KeyboardInterrupt(), EnvironmentFailure("full"), InputError("gone"), None])
def test_what_is_finished_is_kept_to_be_resumed(tmp_path: Path, error: BaseException | None) -> None:
    if error is None:
        begun(tmp_path, TWO, None)
    else:
        with pytest.raises(type(error)) as raised:
            begun(tmp_path, TWO, error)
        assert raised.value.__notes__ == [
            f"Finished work is kept in {tmp_path}; the same command with --resume continues it."
        ]
    assert names_in(tmp_path) == {"s.partial", "mxcli.progress.partial"}
    with Output(OutputFolder(tmp_path), TWO, resume=True) as output:
        assert output.finished == {"b": "seen"}
        output.begin_shard(TWO.shards[0])
        output.write("w", np.array([1, 2], np.float32))
        output.finish(("w",), "")
        output.end_shard()
        output.publish({})
    assert names_in(tmp_path) == {"s", "mxcli.json"}
    assert (tmp_path / "s").read_bytes().endswith(np.array([1, 2], np.float32).tobytes() + b"\1\2\3")


def test_a_refusal_keeps_nothing_as_it_could_not_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(RefusedError):
        begun(tmp_path / "out", TWO, RefusedError("no"))
    assert list(tmp_path.iterdir()) == []


def test_what_an_earlier_run_finished_is_replaced_by_force_alone(tmp_path: Path) -> None:
    begun(tmp_path, TWO, None)
    (tmp_path / "other.partial").write_text("not ours")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for other in (TWO, Draft((Shard("t", ()),))):
        with pytest.raises(RefusedError) as refused, Output(OutputFolder(tmp_path), other):
            pass
        assert str(refused.value) == (
            f"{tmp_path}: holds an unfinished run: --resume continues it if the options are the same, --force "
            "starts again."
        )
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    with Output(OutputFolder(tmp_path), Draft((Shard("t", ()),)), force=True) as output:
        assert output.finished == {}
        output.begin_shard(Shard("t", ()))
        output.end_shard()
        output.publish({})
    assert names_in(tmp_path) == {"t", "mxcli.json", "other.partial"}


def test_what_was_finished_is_done_again_where_it_is_not_there(tmp_path: Path) -> None:
    """A file that is gone, was cut, has another header, or other bytes."""
    for case in ("gone", "cut", "other", "flipped", "zeroed"):
        folder = tmp_path / case
        folder.mkdir()
        begun(folder, TWO, None)
        partial = folder / "s.partial"
        content = partial.read_bytes()
        damaged = {
            "cut": content[:-1],
            "other": content.replace(b"F32", b"I32"),
            "flipped": content[:-1] + bytes([content[-1] ^ 1]),
            "zeroed": content[:-3] + bytes(3),
        }
        partial.unlink()
        if case in damaged:
            partial.write_bytes(damaged[case])
        with Output(OutputFolder(folder), TWO, resume=True) as output:
            assert output.finished == {}, case
            output.begin_shard(TWO.shards[0])
            output.write("w", np.zeros(2, np.float32))
            output.finish(("w",), "")
        with Output(OutputFolder(folder), TWO, resume=True) as output:
            assert set(output.finished) == {"w"}, case


def test_a_link_or_second_name_in_place_of_a_partial_file_is_left_as_it_is(tmp_path: Path) -> None:
    for case in ("link", "second name"):
        folder = tmp_path / case
        folder.mkdir()
        begun(folder, TWO, None)
        (folder / "s.partial").rename(tmp_path / f"outside {case}")
        if case == "link":
            (folder / "s.partial").symlink_to(tmp_path / f"outside {case}")
        else:
            (folder / "s.partial").hardlink_to(tmp_path / f"outside {case}")
        before = (folder / "s.partial").read_bytes()
        for more in ({"resume": True}, {"force": True}):
            with pytest.raises(RefusedError, match=r"s\.partial: .* is left as it is; move it away"):
                Output(OutputFolder(folder), TWO, **more).__enter__()
            assert (folder / "s.partial").read_bytes() == before
            assert (folder / "s.partial").samefile(tmp_path / f"outside {case}")


@pytest.mark.parametrize("name", ["s.partial", "mxcli.json.partial", "mxcli.progress.partial"])
@pytest.mark.parametrize("force", [False, True])
def test_a_users_own_partial_file_is_left_as_it_is(tmp_path: Path, name: str, force: bool) -> None:
    (tmp_path / name).write_text("mine")
    if name == "mxcli.progress.partial" and force:
        return  # our own name, and --force replaces it
    error = InputError if name == "mxcli.progress.partial" else RefusedError
    with pytest.raises(error, match=r"move it away"):
        Output(OutputFolder(tmp_path), TWO, force=force).__enter__()
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {name: "mine"}


def test_a_file_that_appears_under_a_final_or_partial_name_is_not_replaced(tmp_path: Path) -> None:
    def run(name: str) -> None:
        with Output(OutputFolder(tmp_path / "out"), TWO) as output:
            (tmp_path / "out" / name).write_text("mine")
            output.begin_shard(TWO.shards[0])
            output.write("b", np.zeros(3, np.uint8))
            output.write("w", np.zeros(2, np.float32))
            output.finish(("b", "w"), "")
            output.end_shard()
            output.publish({})

    for name in ("s", "mxcli.json"):
        with pytest.raises(RefusedError, match="appeared meanwhile"):
            run(name)
        assert (tmp_path / "out" / name).read_text() == "mine"
        (tmp_path / "out" / name).unlink()
        for path in (tmp_path / "out").iterdir():
            path.unlink()
    with pytest.raises(EnvironmentFailure):
        run("s.partial")
    assert (tmp_path / "out" / "s.partial").read_text() == "mine"


def test_a_line_that_a_crash_cut_off_is_not_counted(tmp_path: Path) -> None:
    begun(tmp_path, TWO, None)
    record = tmp_path / "mxcli.progress.partial"
    whole = record.read_bytes()
    record.write_bytes(whole + b'{"shard":"s","entr')
    with Output(OutputFolder(tmp_path), TWO, resume=True) as output:
        assert set(output.finished) == {"b"}
    assert record.read_bytes() == whole
    record.write_bytes(whole[:-1])
    with Output(OutputFolder(tmp_path), TWO, resume=True) as output:
        assert output.finished == {}


def test_whatever_is_in_place_of_the_progress_log_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "out").mkdir()
    log = tmp_path / "out" / "mxcli.progress.partial"
    makers = (
        lambda: log.symlink_to(tmp_path / "precious"),
        lambda: log.hardlink_to(tmp_path / "precious"),
        lambda: os.mkfifo(log),
    )
    for make in makers:
        make()
        for more in ({}, {"resume": True}, {"force": True}):
            with pytest.raises(RefusedError, match="where progress is logged; move it away"):
                begun(tmp_path / "out", TWO, None, **more)
        assert (tmp_path / "precious").read_text() == "precious"
        assert log.exists()
        log.unlink()


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"record": {"version": "2", "options": {"format": "x"}}}, "version was 1 and is 2"),
        ({"record": {"version": "1", "options": {"format": "y"}}}, "options format was x and is y"),
        ({"record": {"version": "1", "options": {}}}, "options format was x and is none"),
        ({"sampled": {"a.weight": "0" * 32}}, "a.weight of the source has other content"),
        ({"documents": {"config.json": {"a": 1}}}, 'documents config.json was none and is {"a": 1}'),
        ({"shards": (Shard("s", (BYTES, HALVES)),)}, "s holds other tensors"),
        ({"shards": (Shard("s", (BYTES,)), Shard("t", (WIDE,)))}, "it was divided into 1 files and is into 2"),
    ],
)
def test_a_run_that_made_something_else_is_not_resumed(tmp_path: Path, other: dict[str, Any], told: str) -> None:
    begun(tmp_path, TWO, None)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(RefusedError) as refused, Output(OutputFolder(tmp_path), replace(TWO, **other), resume=True):
        pass
    assert str(refused.value).startswith(f"{tmp_path}: cannot be resumed: {told}")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_all_differences_are_reported_but_not_what_follows_from_them(tmp_path: Path) -> None:
    begun(tmp_path, TWO, None)
    other = replace(
        TWO, record={"version": "2", "options": {"format": "y"}, "tensors": {"a": 1}}, documents={"config.json": {}}
    )
    with pytest.raises(RefusedError) as refused, Output(OutputFolder(tmp_path), other, resume=True):
        pass
    assert refused.value.details == ("version was 1 and is 2", "options format was x and is y")


def test_two_runs_do_not_write_one_directory(tmp_path: Path) -> None:
    with Output(OutputFolder(tmp_path), TWO) as output:
        output.begin_shard(TWO.shards[0])
        for more in ({}, {"resume": True}, {"force": True}):
            with pytest.raises(RefusedError, match="another run is writing it"):
                Output(OutputFolder(tmp_path), TWO, **more).__enter__()
        assert names_in(tmp_path) == {"s.partial", "mxcli.progress.partial"}
    assert names_in(tmp_path) == set()


def test_too_small_a_disk_is_refused_before_the_first_byte(tmp_path: Path) -> None:
    draft = Draft((Shard("s", (Entry("b", "U8", (10**18,)),)),))
    with pytest.raises(
        EnvironmentFailure, match=r"disk full: the output needs 1,\d{3},\d{3},\d{3},\d{3},\d{3},\d{3}"
    ) as no:
        Output(OutputFolder(tmp_path / "out"), draft).__enter__()
    assert "are available; free some space" in str(no.value)
    assert no.value.exit_code == 6
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def source(tmp_path: Path) -> Checkpoint:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(safetensors_bytes({"a.weight": zeros("F32", 2, 32)}))
    (folder / "config.json").write_text('{"hidden_size": 32}')
    return open_checkpoint(folder)


NAMES = ["model.safetensors", "config.json"]


@pytest.mark.parametrize(
    ("where", "why"),
    [
        ("source", "holds the source itself"),
        ("source/out", "is inside the source"),
        ("other/../source", "holds the source itself"),
        ("link", "holds the source itself"),
        ("link/out", "is inside the source"),
        ("models--org--name/snapshots/abc", "is in the download cache"),
        ("cached", "is in the download cache"),
        ("full", "exists and holds 1 entries; give a new directory, or --force"),
        ("source/config.json", "is inside the source"),
        ("a-file", "not a directory"),
    ],
)
def test_where_an_output_may_not_go(tmp_path: Path, source: Checkpoint, where: str, why: str) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "source")
    (tmp_path / "models--org--name" / "blobs").mkdir(parents=True)
    (tmp_path / "cached").symlink_to(tmp_path / "models--org--name" / "blobs")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("x")
    (tmp_path / "a-file").write_text("x")
    with pytest.raises(RefusedError, match=why) as refused:
        check_output_folder(tmp_path / where, source, NAMES, force=False)
    assert refused.value.exit_code == 4


def test_force_never_permits_the_source(tmp_path: Path, source: Checkpoint) -> None:
    for where in ("source", "source/out"):
        with pytest.raises(RefusedError):
            check_output_folder(tmp_path / where, source, NAMES, force=True)


def test_an_output_whose_folders_hold_the_source_is_refused(tmp_path: Path, source: Checkpoint) -> None:
    with pytest.raises(RefusedError, match="holds the source itself"):
        check_output_folder(tmp_path, source, [*NAMES, "source/tokenizer.json"], force=True)


def test_a_snapshot_of_links_guards_what_it_links_to(tmp_path: Path) -> None:
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    (blobs / "abc").write_bytes(safetensors_bytes({"a.weight": zeros("F32", 2, 32)}))
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "model.safetensors").symlink_to(blobs / "abc")
    checkpoint = open_checkpoint(tmp_path / "snapshot")
    with pytest.raises(RefusedError, match="holds the source itself"):
        check_output_folder(blobs, checkpoint, NAMES, force=True)


def test_next_to_a_file_opened_by_itself_is_allowed(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(safetensors_bytes({"a.weight": zeros("F32", 2, 32)}))
    place = check_output_folder(tmp_path / "out", open_checkpoint(tmp_path / "a.safetensors"), NAMES, force=False)
    assert place == OutputFolder(tmp_path / "out")


def test_weights_of_another_checkpoint_are_never_left_next_to_ours(tmp_path: Path, source: Checkpoint) -> None:
    (tmp_path / "out").mkdir()
    for name in ("model.safetensors.index.json", "model-00001-of-00002.safetensors", "config.json", "notes.txt"):
        (tmp_path / "out" / name).write_text("x")
    with pytest.raises(RefusedError) as refused:
        check_output_folder(tmp_path / "out", source, NAMES, force=True)
    assert [detail.split(": ")[1] for detail in refused.value.details] == [
        "weights of another checkpoint, which could be taken for this one; move them away."
    ] * 2


def test_links_and_folders_in_the_way_are_refused(tmp_path: Path, source: Checkpoint) -> None:
    (tmp_path / "out" / "config.json").mkdir(parents=True)
    (tmp_path / "out" / "sub").symlink_to(tmp_path)
    with pytest.raises(RefusedError) as refused:
        check_output_folder(tmp_path / "out", source, [*NAMES, "sub/x.json"], force=True)
    assert [detail.split(": ")[1] for detail in refused.value.details] == [
        "a link or file where the output needs a folder; remove it.",
        "a folder where the output needs a file; remove it.",
    ]


EARLIER = {
    "schema": "mxcli.quantized/1",
    "version": "0.1.0",
    "command": ["quantize"],
    "options": {"format": "nvfp4"},
    "input": {"model.safetensors": {"bytes": 9}},
    "requantized_from": None,
    "layout": "mxcli",
    "notes": [],
    "tensors": {"w": {"decision": "kept", "dtype": "BF16", "shape": [2]}},
}
"""A record without files."""


def test_files_an_earlier_output_lists_are_known_only_if_they_are_in_it(tmp_path: Path, source: Checkpoint) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "elsewhere").symlink_to(tmp_path)
    listed = ["model-00001-of-00002.safetensors", "config.json", "old.safetensors", "README.md", "elsewhere/model.gguf"]
    (out / "mxcli.json").write_text(json.dumps({**EARLIER, "files": listed}))
    assert check_output_folder(out, source, NAMES, force=True).earlier == {
        "model-00001-of-00002.safetensors": frozenset(),
        "config.json": frozenset(),
        "mxcli.json": frozenset(),
    }
    hashes = {"README.md": "a" * 64, "elsewhere/x": "b" * 64}
    stated = {"stored": {"README.md": {}}, "headers": {"a": "c" * 32}, "source_hashes": {"w": "d" * 32}}
    proven = {"sha256": hashes, **stated, "verified": True}
    (out / "mxcli.json").write_text(json.dumps({**EARLIER, **proven, "files": [*listed, *hashes]}))
    assert check_output_folder(out, source, NAMES, force=True).earlier == {
        "README.md": frozenset({"a" * 64}),
        "mxcli.json": frozenset(),
    }


@pytest.mark.parametrize(
    "record",
    [
        *(
            {"files": [name]}
            for name in ("../x", "/etc/passwd", "", "a/../../x", "a\0", ".", "mxcli.json", 7, None, "a//b")
        ),
        *({"files": files} for files in ("x", {"a": 1}, 7, None)),
        *({"files": [], "sha256": hashes} for hashes in ([], {"a": 7}, {"a": "00"}, {"../a": "0" * 64})),
        *(
            {"files": [], "stored": stored}
            for stored in ([], {"a": 1}, {"a": {"b": {}}}, {"a": {"b": {"xxh3_128": 7}}})
        ),
        *({"files": [], key: {"a": "x"}} for key in ("headers", "source_hashes")),
    ],
)
def test_a_record_that_mxcli_did_not_write_is_refused(tmp_path: Path, source: Checkpoint, record: Any) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mxcli.json").write_text(json.dumps(record))
    with pytest.raises(InputError, match=r"mxcli\.json: '.*' must have"):
        check_output_folder(out, source, NAMES, force=True)
