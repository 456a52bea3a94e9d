"""Charts as files through matplotlib."""

from __future__ import annotations

import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from studies import HOSTILE, study
from test_charts import ALL, BLOCK

from mxcli.errors import EnvironmentFailure
from mxcli.output.plots import DRAW, write_plots
from mxcli.output.study_charts import study_charts
from mxcli.output.svg import DRAW as DRAW_SVG


def written(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def test_two_files_for_each_chart_with_the_same_bytes_each_time(tmp_path: Path) -> None:
    charts = study_charts(replace(study(), worst_blocks=(BLOCK,)))
    for name in ("once", "again"):
        (tmp_path / name).mkdir()
        write_plots(charts, tmp_path / name)
    once = written(tmp_path / "once")
    assert set(once) == {f"{chart.key}.{form}" for chart in charts for form in ("png", "svg")}
    assert once == written(tmp_path / "again")
    assert all(content.startswith(b"\x89PNG") for name, content in once.items() if name.endswith(".png"))
    assert not [name for name, content in once.items() if b"<dc:date>" in content]


def test_nobodys_settings_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib

    charts = study_charts(study(1))[:1]
    for name in ("plain", "changed"):
        (tmp_path / name).mkdir()
        write_plots(charts, tmp_path / name)
        monkeypatch.setitem(matplotlib.rcParams, "font.size", 30.0)
    assert written(tmp_path / "plain") == written(tmp_path / "changed")


@pytest.mark.parametrize("at", range(len(ALL)))
def test_odd_charts_are_drawn(tmp_path: Path, at: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write_plots([ALL[at]], tmp_path)


def test_names_are_text(tmp_path: Path) -> None:
    names = [*HOSTILE, "layers.0.$x^{2$.weight", "layers.0._under.weight"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write_plots(study_charts(study(1, names=names)), tmp_path)


def test_a_missing_matplotlib_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(EnvironmentFailure, match=r"--plots needs matplotlib, .*pip install 'mxcli\[plots\]'"):
        write_plots([ALL[0]], tmp_path)


def test_every_chart_can_be_drawn_in_both_ways() -> None:
    assert set(DRAW) == set(DRAW_SVG)
