"""Outputs are refused before their first byte, for everything that would end their writing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from mxcli.cli.app import run
from mxcli.files.model_files import permissions
from mxcli.files.model_folder import side_files
from mxcli.files.preflight import needed_bytes
from mxcli.files.progress import Draft, ProgressRecord
from mxcli.flows.plan.memory import need_of

SAMPLE = Path(__file__).parents[2] / "samples" / "tiny-llama"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a model in it, which is the current one."""
    shutil.copytree(SAMPLE, tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, str]:
    """Return code and message of a run that leaves nothing, the same with --dry-run."""
    before = sorted(os.listdir())
    words = ["quantize", "model", "--format", "nvfp4", "-q", "-o", "out", *more]
    code = run(words)
    message = capsys.readouterr().err
    assert sorted(os.listdir()) == before
    assert (run([*words, "--dry-run"]), capsys.readouterr().err) == (code, message)
    return code, message


@pytest.mark.parametrize(
    ("config", "place"),
    [
        ({"x": "\ud800"}, "x holds '\\ud800'"),
        ({"x": {"y": ["a", "\udfff"]}}, "x.y.1 holds '\\udfff'"),
        ({"a\ud800": 1}, "a\\ud800 holds 'a\\ud800'"),
    ],
)
def test_documents_that_cannot_be_encoded(
    config: dict[str, object], place: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = json.loads((home / "model/config.json").read_text())
    (home / "model/config.json").write_text(json.dumps(known | config))
    code, message = refused(capsys)
    assert code == 3
    assert message == f"error: config.json: {place}, which UTF-8 cannot encode; correct it.\n"


@pytest.mark.skipif(sys.platform != "linux", reason="needs names of any bytes")
def test_names_of_files_to_copy_all_at_once(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "model" / os.fsdecode(b"a\xff.txt")).touch()
    (home / "model" / ("b" * 250)).touch()
    code, message = refused(capsys)
    assert code == 3
    assert message.splitlines() == [
        "error: out: 2 problems.",
        "  a\\udcff.txt: its name is not UTF-8, which the record needs; rename it.",
        f"  {'b' * 100}…{'b' * 100}: a name of 258 bytes while it is written; the most there is 255.",
    ]


@pytest.mark.parametrize("name", ["o" * 256, "a/" + "ö" * 128])
def test_a_directory_whose_name_is_too_long(name: str, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["quantize", "model", "--format", "nvfp4", "-o", name]) == 2
    assert "a name of 256 bytes; the most there is 255." in capsys.readouterr().err


def test_a_file_above_the_directory(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "file").touch()
    assert run(["quantize", "model", "--format", "nvfp4", "-o", "file/out"]) == 4
    assert "file is not a directory" in capsys.readouterr().err


needs_setpriv = pytest.mark.skipif(
    shutil.which("setpriv") is None and os.geteuid() == 0, reason="root may read everything"
)


def unprivileged(*commands: tuple[str, ...]) -> list[tuple[int, str]]:
    """Return code and stderr of some commands, in one process of a user whom permissions concern."""
    dropped = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.geteuid() == 0 else []
    program = (
        "import contextlib, io, json, sys; from mxcli.cli.app import run\n"
        "for words in json.loads(sys.argv[1]):\n"
        "    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as err:\n"
        "        code = run(words)\n"
        "    print(json.dumps([code, err.getvalue()]))"
    )
    command = [*dropped, sys.executable, "-c", program, json.dumps(commands)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    assert done.stderr == ""
    return [(code, message) for code, message in map(json.loads, done.stdout.splitlines())]


@needs_setpriv
def test_permissions_of_files_and_directories(home: Path) -> None:
    for name in ("tokenizer.json", "vocab.txt"):
        (home / "model" / name).write_text("{}")
        (home / "model" / name).chmod(0)
    (home / "closed").mkdir(mode=0o500)
    (home / "model/1_Pooling").mkdir(mode=0)
    words = ("quantize", "model", "--format", "nvfp4", "-o")
    try:
        for code, message in unprivileged((*words, "closed/out"), (*words, "closed/out", "--dry-run")):
            assert code == 3
            assert message.splitlines()[-4:] == [
                "error: closed/out: 3 problems.",
                "  model/tokenizer.json: cannot be read: Permission denied; an output needs it: change its permissions,"
                " or move it away.",
                "  model/vocab.txt: cannot be read: Permission denied; an output needs it: change its permissions, or "
                "move it away.",
                f"  closed/out: cannot be written: no permission for {home / 'closed'}.",
            ]
        for name in ("tokenizer.json", "vocab.txt"):
            (home / "model" / name).unlink()
        (code, message), written, *reports = unprivileged(
            (*words, "closed/out"),
            (*words, "out"),
            *(
                ("report", "model", form)
                for form in ("--json=closed/r.json", "--html=closed/r.html", "--per-block=closed/r.safetensors")
            ),
        )
        assert (code, "cannot be written: no permission for" in message) == (6, True)
        code, message = written
        assert code == 0
        assert "note: Not carried to an output, cannot be listed (Permission denied): 1_Pooling." in message
        assert len(reports) == 3
        for code, message in reports:
            assert (code, "cannot be written: no permission for closed." in message) == (6, True)
    finally:
        (home / "closed").chmod(0o700)
        (home / "model/1_Pooling").chmod(0o700)


def test_links_out_of_the_source_are_left(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "secret.txt").write_text("secret")
    (home / "model/README.md").symlink_to(home / "secret.txt")
    (home / "model/up.txt").symlink_to("../secret.txt")
    (home / "model/folder").symlink_to("..")
    (home / "model/same.json").symlink_to("generation_config.json")
    assert run(["quantize", "model", "--format", "nvfp4", "-o", "out"]) == 0
    notes = capsys.readouterr().err
    assert f"links out of the source: README.md -> {home / 'secret.txt'}, up.txt -> ../secret.txt." in notes
    assert "links to directories: folder -> ..." in notes
    assert not {"README.md", "up.txt", "folder"} & set(os.listdir("out"))
    assert (home / "out/same.json").read_text() == (home / "model/generation_config.json").read_text()
    assert not (home / "out/same.json").is_symlink()


def test_links_of_a_download_cache_stay(tmp_path: Path) -> None:
    for model in ("models--a--b", "models--c--d"):
        (tmp_path / model / "blobs").mkdir(parents=True)
        (tmp_path / model / "blobs" / "f00d").write_text("{}")
    snapshot = tmp_path / "models--a--b/snapshots/0123"
    snapshot.mkdir(parents=True)
    (snapshot / "tokenizer.json").symlink_to("../../blobs/f00d")
    (snapshot / "other.json").symlink_to("../../../models--c--d/blobs/f00d")
    carried, left_out = side_files(snapshot, {})
    assert carried == (snapshot / "tokenizer.json",)
    assert left_out == {"links out of the source": ["other.json -> ../../../models--c--d/blobs/f00d"]}


def modes(folder: str) -> dict[str, int]:
    return {path.name: path.stat().st_mode & 0o7777 for path in Path(folder).iterdir() if path.is_file()}


def test_permissions_are_kept(home: Path) -> None:
    (home / "model/tokenizer.json").write_text("{}")
    (home / "model/run.sh").write_text("true")
    for name, mode in (("tokenizer.json", 0o600), ("run.sh", 0o4755), ("generation_config.json", 0o640)):
        (home / "model" / name).chmod(mode)
    (home / "model/model.safetensors").chmod(0o600)
    before = os.umask(0o022)
    try:
        assert run(["quantize", "model", "--format", "nvfp4", "-o", "out", "-q"]) == 0
        words = ["quantize", "model", "--format", "nvfp4", "-o", "shared", "-q", "--max-shard-size", "200K"]
        for share in ("1/2", "2/2"):
            assert run([*words, "--shard-range", share]) == 0
        assert run(["merge", "shared"]) == 0
    finally:
        os.umask(before)
    carried = {"tokenizer.json": 0o600, "run.sh": 0o644, "generation_config.json": 0o640}
    own = {"model.safetensors": 0o600, "config.json": 0o600, "mxcli.json": 0o600}
    assert modes("out") == {**carried, **own}
    assert {name: mode for name, mode in modes("shared").items() if name in carried} == carried
    assert {mode for name, mode in modes("shared").items() if name not in carried} == {0o600}


def test_permissions_of_a_file_made_from_others(tmp_path: Path) -> None:
    for at, mode in enumerate((0o644, 0o640, 0o7777, 0o400)):
        (tmp_path / str(at)).touch()
        (tmp_path / str(at)).chmod(mode)
    files = [tmp_path / str(at) for at in range(4)]
    assert [permissions(files[:count]) for count in range(5)] == [0o666, 0o644, 0o640, 0o640, 0o600]
    assert permissions([files[2]]) == 0o666


def test_memory_grows_with_the_tensors() -> None:
    tensors = [(f"{at}", 2048) for at in range(50_000)]
    assert need_of(tensors, recorded=50_000).peak_bytes == (1 << 26) + 50_000 * 35 * 1024 + 2048
    assert need_of(tensors).peak_bytes == (1 << 26) + 50_000 * 6 * 1024 + 2048


def tiny(folder: Path, count: int) -> Path:
    """A model of many small tensors, whose record takes more than its weights."""
    folder.mkdir()
    rng = np.random.default_rng(count)
    save_file(
        {f"layers.{at}.weight": rng.standard_normal((32, 64)).astype(np.float32) for at in range(count)},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    return folder


@pytest.mark.parametrize(
    "more",
    [
        ["--format", "nvfp4", "--layout", "modelopt"],
        ["--format", "mxfp8"],
        ["--format", "mxfp4", "--max-shard-size", "100K"],
    ],
)
@pytest.mark.parametrize("count", [0, 300])
def test_the_estimate_of_disk_space(count: int, more: list[str], home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = str(tiny(home / "many", count)) if count else "model"
    estimates: list[int] = []

    def noting(draft: Draft) -> int:
        estimates.append(needed_bytes(draft))
        return estimates[-1]

    remove, most = ProgressRecord.remove, list[int]()

    def weighing(log: ProgressRecord) -> None:
        most.append(sum(path.stat().st_blocks * 512 for path in Path("out").rglob("*") if path.is_file()))
        remove(log)

    monkeypatch.setattr("mxcli.files.preflight.needed_bytes", noting)
    monkeypatch.setattr(ProgressRecord, "remove", weighing)
    assert run(["quantize", source, "-o", "out", "-q", *more]) == 0
    assert len(most) == 1
    assert 1.0 <= estimates[0] / most[0] <= 1.25


@pytest.mark.parametrize("inodes", [4, 5, 6])
def test_a_file_system_without_inodes(inodes: int, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of which one is that of the file system's own root; an output of five files needs seven more."""
    (home / "disk").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"nr_inodes={inodes}", "tmpfs", "disk"]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small file system cannot be mounted here")
    try:
        words = ["quantize", "model", "--format", "nvfp4", "-q", "-o", "disk/out"]
        for command in (words, [*words, "--dry-run"]):
            assert run(command) == 6
            assert capsys.readouterr().err == (
                "error: disk/out: no free inodes: the output needs 7 files and folders, and the file system takes "
                f"{inodes - 1} more; remove some, or give another -o/--output.\n"
            )
        assert os.listdir("disk") == []
    finally:
        subprocess.run(["umount", "disk"], check=True)
