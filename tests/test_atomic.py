"""Files are whole or absent, and nothing that exists is opened for writing."""

import errno
import os
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from mxcli.atomic import create_unique, name_new, whole_file


def test_a_file_appears_whole_with_the_mode_of_any_new_file(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with whole_file(tmp_path / "a.json", replace=False) as file:
            file.write(b"{}")
            assert not (tmp_path / "a.json").exists()
    finally:
        os.umask(before)
    assert (tmp_path / "a.json").read_bytes() == b"{}"
    assert (tmp_path / "a.json").stat().st_mode & 0o777 == 0o640
    assert os.listdir(tmp_path) == ["a.json"]


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("old")
    with suppress(RuntimeError), whole_file(tmp_path / "a.json", replace=True) as file:
        file.write(b"new")
        raise RuntimeError
    assert (tmp_path / "a.json").read_text() == "old"
    assert os.listdir(tmp_path) == ["a.json"]


def test_what_appeared_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    with ExitStack() as stack:
        stack.enter_context(whole_file(tmp_path / "a.json", replace=False)).write(b"ours")
        (tmp_path / "a.json").write_text("theirs")
        with pytest.raises(FileExistsError):
            stack.close()
    assert (tmp_path / "a.json").read_text() == "theirs"
    assert os.listdir(tmp_path) == ["a.json"]


@pytest.mark.parametrize("replace", [True, False])
def test_the_target_of_a_link_is_never_written(tmp_path: Path, replace: bool) -> None:
    (tmp_path / "target").write_text("mine")
    (tmp_path / "link").symlink_to("target")
    if replace:
        with whole_file(tmp_path / "link", replace=True) as file:
            file.write(b"new")
        assert (tmp_path / "link").read_text() == "new"
        assert not (tmp_path / "link").is_symlink()
    else:
        with pytest.raises(FileExistsError), whole_file(tmp_path / "link", replace=False):
            pass
    assert (tmp_path / "target").read_text() == "mine"


def test_a_users_own_partial_file_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "a.json.partial").write_text("mine")
    with whole_file(tmp_path / "a.json", replace=True) as file:
        file.write(b"{}")
    assert (tmp_path / "a.json.partial").read_text() == "mine"


def test_without_hard_links_a_name_is_still_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*paths: object, **options: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    file, temporary = create_unique(tmp_path)
    file.close()
    name_new(temporary, tmp_path / "a")
    file, temporary = create_unique(tmp_path)
    file.close()
    with pytest.raises(FileExistsError):
        name_new(temporary, tmp_path / "a")
    assert {path.name for path in tmp_path.iterdir()} == {"a", temporary.name}
