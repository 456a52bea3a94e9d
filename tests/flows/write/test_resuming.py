"""Runs that are cut short anywhere, gone on with, or divided among machines: the bytes are those of one whole run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import LLAMA, noise, read_header, tree, write_model

from mxcli.backends.cpu import Cpu
from mxcli.errors import InputError, RefusedError
from mxcli.files import output_dir as writer
from mxcli.files.checkpoint import open_checkpoint
from mxcli.files.progress import Share
from mxcli.files.progress_lines import line_bytes
from mxcli.files.shard_file import ShardFile
from mxcli.flows.plan.plan import Options, make_plan
from mxcli.flows.write.dequantize import dequantize_checkpoint
from mxcli.flows.write.pipeline import WriteOptions
from mxcli.flows.write.quantize import Written, quantize_checkpoint
from mxcli.flows.write.records import merge_shares
from mxcli.numerics.blocks import Quantized
from mxcli.numerics.hadamard import Hadamard
from mxcli.numerics.scheme import Scheme
from mxcli.numerics.stats import Amax

MIXTRAL = {**LLAMA, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
SHARDS = {
    "model-00001-of-00002.safetensors": {
        "model.embed_tokens.weight": noise(8, 64),
        "model.layers.0.self_attn.q_proj.weight": noise(64, 64, seed=1),
        "model.layers.0.self_attn.k_proj.weight": noise(32, 64, seed=2),
        "model.layers.0.self_attn.v_proj.weight": noise(32, 64, seed=3),
    },
    "model-00002-of-00002.safetensors": {
        "model.layers.0.mlp.experts.gate_up_proj": noise(2, 192, 64, seed=4),
        "model.layers.0.mlp.experts.down_proj": noise(2, 64, 96, seed=5),
        "model.norm.weight": noise(64),
    },
}
SIZE = 4_000


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model of two files, one with stacks of experts; every tensor that is finished is recorded at once, and nothing
    waits for the disk, which is of no account while the system lives."""
    monkeypatch.setattr(writer, "SYNC_BYTES", 1)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    return write_model(tmp_path / "source", SHARDS, MIXTRAL, {"tokenizer.json": "{}", "1_Pooling/config.json": "{}"})


def quantized(
    source: Path, output: Path, format: str = "nvfp4", size: int | None = None, command: str = "", **manner: Any
) -> Written:
    checkpoint = open_checkpoint(source)
    plan = make_plan(checkpoint, Options(format))
    return quantize_checkpoint(
        checkpoint,
        plan,
        output,
        backend=Cpu(1),
        max_shard_bytes=size,
        options=WriteOptions(**manner),
        command=command.split(),
    )


def dequantized(source: Path, output: Path, **manner: Any) -> None:
    dequantize_checkpoint(open_checkpoint(source), output, backend=Cpu(1), options=WriteOptions(**manner))


class Killed(BaseException):
    """Nobody catches it."""


EFFECTS = ("fsync", "replace", "write", "ftruncate", "unlink", "rmdir", "mkdir")


@contextmanager
def killed_at(number: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """From its `number`-th effect on the disk on a run has none any more, also on its way out; the effects
    are counted."""
    count = [0]

    def counting(effect: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **more: Any) -> Any:
            count[0] += 1
            if count[0] >= number:
                raise Killed
            return effect(*arguments, **more)

        return counted

    with monkeypatch.context() as patch:
        for name in EFFECTS:
            patch.setattr(os, name, counting(getattr(os, name)))
        patch.setattr(ShardFile, "write", counting(ShardFile.write))
        with suppress(Killed):
            yield count


@pytest.mark.parametrize("over", [None, pytest.param("mxfp8", marks=pytest.mark.slow)])
def test_a_run_killed_at_any_point_is_resumed_to_the_same_bytes(
    tmp_path: Path, source: Path, over: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also over an earlier output with other files, which is whole until the new one is."""
    before = tree(source)
    quantized(source, tmp_path / "whole")
    expected = tree(tmp_path / "whole")
    earlier: dict[str, bytes] = {}
    if over:
        quantized(source, tmp_path / "earlier", over, SIZE)
        earlier = tree(tmp_path / "earlier")
    with killed_at(10**9, monkeypatch) as effects:
        quantized(source, tmp_path / "counted")
    assert effects[0] > 50
    stages = set()
    for number in range(2, effects[0] + 20, 3 if over is None else 7):
        out = tmp_path / f"killed-{number}"
        if over:
            quantized(source, out, over, SIZE)
        with killed_at(number, monkeypatch):
            quantized(source, out, force=bool(over))
        left = tree(out) if out.exists() else {}
        finals = {name: content for name, content in left.items() if not name.endswith(".partial")}
        if "mxcli.json" in finals:
            assert finals in (earlier, expected), number
        stages.add(("mxcli.json" in finals, bool(finals), "mxcli.progress.partial" in left))
        if finals != expected or "mxcli.progress.partial" in left:
            with killed_at(1 + number * 7 % 23, monkeypatch):
                quantized(source, out, force=bool(over), resume=True)
        if tree(out) != expected:
            quantized(source, out, force=bool(over), resume=True)
        assert tree(out) == expected, number
    assert {(True, True, False), (False, True, True)} <= stages
    assert tree(source) == before


def test_dequantizing_killed_at_any_point_is_resumed_too(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantized(source, tmp_path / "q")
    with killed_at(10**9, monkeypatch) as effects:
        dequantized(tmp_path / "q", tmp_path / "whole")
    for number in range(1, effects[0], 7):
        with killed_at(number, monkeypatch):
            dequantized(tmp_path / "q", tmp_path / f"{number}")
        dequantized(tmp_path / "q", tmp_path / f"{number}", resume=True)
        assert tree(tmp_path / f"{number}") == tree(tmp_path / "whole"), number


class Counting:
    """The CPU, counting what it quantizes."""

    name = "cpu"

    def __init__(self) -> None:
        self.quantized = 0

    def amax(self, x: Any, dtype: str, hadamard: Hadamard | None = None) -> Amax:
        return Cpu(1).amax(x, dtype, hadamard)

    def quantize(self, x: Any, dtype: str, recipe: Scheme, **more: Any) -> Quantized:
        self.quantized += 1
        return Cpu(1).quantize(x, dtype, recipe, **more)

    def dequantize(self, q: Quantized, dtype: str = "F32") -> Any:
        return Cpu(1).dequantize(q, dtype)


def test_a_resumed_run_does_the_rest_only_and_reports_all(tmp_path: Path, source: Path) -> None:
    checkpoint = open_checkpoint(source)
    plan = make_plan(checkpoint, Options("nvfp4"))
    stops = iter([False] * 6 + [True])
    first, second = Counting(), Counting()
    stopped = quantize_checkpoint(
        checkpoint,
        plan,
        tmp_path / "out",
        backend=first,
        options=WriteOptions(stop=lambda: next(stops)),
        command=["first"],
    )
    assert not stopped.outcome.complete
    assert stopped.outcome.has_progress
    assert [stats is not None for step, stats in stopped.layers if step.scheme] == [True] * 3 + [False] * 2
    assert not [path for path in (tmp_path / "out").rglob("*") if path.is_file() and path.suffix != ".partial"]
    seen: list[tuple[int, int]] = []
    resumed = quantize_checkpoint(
        checkpoint,
        plan,
        tmp_path / "out",
        backend=second,
        options=WriteOptions(resume=True, on_progress=lambda done, total, name: seen.append((done, total))),
        command=["second"],
    )
    whole = quantized(source, tmp_path / "whole", command="first")
    assert first.quantized == 3 + 2
    assert second.quantized == 2 + 2
    assert resumed.outcome.complete
    assert resumed.outcome.kept == stopped.outcome.done
    assert resumed.outcome.done == stopped.outcome.left
    assert seen[-1] == (stopped.outcome.left, stopped.outcome.left)
    assert resumed.layers == whole.layers
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_a_run_stopped_before_anything_is_finished_leaves_nothing(tmp_path: Path, source: Path) -> None:
    stopped = quantized(source, tmp_path / "out", stop=lambda: True)
    assert (stopped.outcome.complete, stopped.outcome.has_progress, stopped.outcome.done) == (False, False, 0)
    assert not (tmp_path / "out").exists()


def stopped_run(source: Path, output: Path, most: int = 4, **more: Any) -> None:
    stops = iter([False] * most)
    quantized(source, output, stop=lambda: next(stops, True), **more)


def test_resuming_with_other_options_is_refused(tmp_path: Path, source: Path) -> None:
    stopped_run(source, tmp_path / "out")
    before = tree(tmp_path / "out")
    with pytest.raises(RefusedError) as refused:
        quantized(source, tmp_path / "out", "mxfp8", resume=True)
    assert str(refused.value) == (
        f"{tmp_path / 'out'}: cannot be resumed: options format was nvfp4 and is mxfp8. Give the same options and "
        "source, or --force without --resume to start again."
    )
    with pytest.raises(RefusedError, match=r"was divided into 2 files and is into 8 \(--max-shard-size\)"):
        quantized(source, tmp_path / "out", size=SIZE, resume=True)
    assert tree(tmp_path / "out") == before
    with pytest.raises(RefusedError, match="holds an unfinished run: --resume continues it"):
        quantized(source, tmp_path / "out", "mxfp8")
    assert tree(tmp_path / "out") == before
    quantized(source, tmp_path / "out", "mxfp8", force=True)
    quantized(source, tmp_path / "whole", "mxfp8")
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_resuming_from_another_source_is_refused(tmp_path: Path, source: Path) -> None:
    stopped_run(source, tmp_path / "out")
    first = source / "model-00001-of-00002.safetensors"
    content = first.read_bytes()
    first.write_bytes(content[:-1] + b"\0")
    with pytest.raises(
        RefusedError, match=r"model-00001-of-00002\.safetensors: tensor 'model\.layers\.0\..*' of the source"
    ):
        quantized(source, tmp_path / "out", resume=True)
    write_model(source, {**SHARDS, first.name: {**SHARDS[first.name], "model.more.weight": noise(4)}}, MIXTRAL)
    with pytest.raises(RefusedError) as refused:
        quantized(source, tmp_path / "out", resume=True)
    assert [detail.split(" was ")[0] for detail in refused.value.details] == [
        "input model-00001-of-00002.safetensors bytes",
        "input model-00001-of-00002.safetensors fingerprint",
    ]


def test_there_is_nothing_to_do_in_a_complete_output(tmp_path: Path, source: Path) -> None:
    first = quantized(source, tmp_path / "out", resume=True)
    assert not first.outcome.was_complete
    before = tree(tmp_path / "out")
    for _ in range(2):
        again = quantized(source, tmp_path / "out", resume=True, command="another")
        assert again.outcome.was_complete
        assert (again.outcome.complete, again.outcome.done, again.outcome.left) == (True, 0, 0)
        assert tree(tmp_path / "out") == before
    dequantized(tmp_path / "out", tmp_path / "back")
    before = tree(tmp_path / "back")
    dequantized(tmp_path / "out", tmp_path / "back", resume=True)
    assert tree(tmp_path / "back") == before


@pytest.mark.parametrize("size", [None, SIZE])
def test_a_complete_output_of_other_options_is_refused(tmp_path: Path, source: Path, size: int | None) -> None:
    quantized(source, tmp_path / "out", size=size)
    before = tree(tmp_path / "out")
    with pytest.raises(RefusedError, match=r"is complete, with other options .*: options format was nvfp4 and is"):
        quantized(source, tmp_path / "out", "mxfp8", size=size, resume=True)
    with pytest.raises(RefusedError, match=r"is complete, with other options .* \(--max-shard-size\)"):
        quantized(source, tmp_path / "out", size=None if size else SIZE, resume=True)
    assert tree(tmp_path / "out") == before


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        (
            "model-00001-of-00002.safetensors",
            "last",
            r"tensor 'model\.layers\.0\.self_attn\.[qkv]_proj\.weight_",
        ),
        ("model-00002-of-00002.safetensors", "last", r"tensor 'model\.layers\.0\.mlp\.experts\."),
        ("model-00001-of-00002.safetensors", "cut", "its content"),
        ("model-00001-of-00002.safetensors", "gone", "is missing"),
        ("config.json", "last", "its content"),
        ("tokenizer.json", "gone", "is missing"),
        ("1_Pooling/config.json", "cut", "its content"),
        ("model.safetensors.index.json", "cut", "its content"),
    ],
)
def test_a_damaged_complete_output_is_refused(tmp_path: Path, source: Path, name: str, damage: str, said: str) -> None:
    quantized(source, tmp_path / "out")
    path = tmp_path / "out" / name
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(content[:-1] + (bytes([content[-1] ^ 1]) if damage == "last" else b""))
    before = tree(tmp_path / "out")
    with pytest.raises(InputError, match=rf"{name}: .*{said}"):
        quantized(source, tmp_path / "out", resume=True)
    with pytest.raises(InputError, match=rf"{name}: .*{said}"):
        merge_shares(tmp_path / "out")
    assert tree(tmp_path / "out") == before
    quantized(source, tmp_path / "out", resume=True, force=True)
    quantized(source, tmp_path / "whole")
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


FIRST = "model-00001-of-00002.safetensors"


def replaced(path: Path, content: bytes, how: str) -> None:
    """Change a file, and put its time of modification back as `rsync -t`, `cp -p` and `tar` do."""
    status = path.stat()
    if how == "renamed":
        other = path.with_name("other")
        other.write_bytes(content)
        os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
        other.rename(path)
    else:
        path.write_bytes(content)
        if how == "in place":
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("how", ["in place", "renamed", "written"])
@pytest.mark.parametrize("at", [-1, -9000, -4096])
def test_a_source_that_changed_is_refused_though_its_time_is_the_same(
    tmp_path: Path, source: Path, how: str, at: int
) -> None:
    """In an unfinished run, a complete output and a complete share. Equal bytes are no change."""
    stopped_run(source, tmp_path / "unfinished", most=6)
    quantized(source, tmp_path / "complete")
    quantized(source, tmp_path / "share", share=Share(1, 2))
    quantized(source, tmp_path / "whole")
    content = (source / FIRST).read_bytes()
    changed = bytearray(content)
    changed[at] ^= 1
    replaced(source / FIRST, bytes(changed), how)
    for out, share in (("unfinished", None), ("complete", None), ("share", Share(1, 2))):
        before = tree(tmp_path / out)
        with pytest.raises(
            RefusedError,
            match=f"{FIRST}: tensor '.*' of the source is not what|of the source has other content",
        ):
            quantized(source, tmp_path / out, share=share, resume=True)
        assert tree(tmp_path / out) == before
    replaced(source / FIRST, content, how)
    quantized(source, tmp_path / "unfinished", resume=True)
    assert tree(tmp_path / "unfinished") == tree(tmp_path / "whole")


def test_a_source_is_compared_with_the_one_that_was_read_last(tmp_path: Path, source: Path) -> None:
    """One run on it, one on a changed copy of what was not read yet, and one on it again."""
    other = write_model(
        tmp_path / "other",
        {
            **SHARDS,
            "model-00002-of-00002.safetensors": {
                **SHARDS["model-00002-of-00002.safetensors"],
                "model.layers.0.mlp.experts.down_proj": noise(2, 64, 96, seed=9),
            },
        },
        MIXTRAL,
        {"tokenizer.json": "{}", "1_Pooling/config.json": "{}"},
    )
    link = tmp_path / "link"
    link.symlink_to(source)
    stopped_run(link, tmp_path / "out", most=3)
    link.unlink()
    link.symlink_to(other)
    stops = iter([False] * 8)
    quantized(link, tmp_path / "out", resume=True, stop=lambda: next(stops, True))
    link.unlink()
    link.symlink_to(source)
    with pytest.raises(
        RefusedError, match=r"tensor 'model\.layers\.0\.mlp\.experts\.down_proj' of the source is not what"
    ):
        quantized(link, tmp_path / "out", resume=True)
    link.unlink()
    link.symlink_to(other)
    quantized(link, tmp_path / "out", resume=True)
    quantized(other, tmp_path / "whole")
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


@pytest.mark.parametrize("how", ["in place", "renamed", "written"])
@pytest.mark.parametrize("after", [0, 1, 3, 6, 9])
def test_a_source_that_changes_during_a_run_ends_it(tmp_path: Path, source: Path, how: str, after: int) -> None:
    """Whether what changes was read before or is read later."""
    content = (source / FIRST).read_bytes()
    calls = iter(range(100))

    def stop() -> bool:
        if next(calls) == after:
            replaced(source / FIRST, content[:-4096] + bytes(4096), how)
        return False

    with pytest.raises(InputError, match=FIRST) as failed:
        quantized(source, tmp_path / "out", stop=stop)
    assert failed.value.exit_code == 3
    assert not (tmp_path / "out" / "mxcli.json").exists()


@pytest.mark.parametrize(
    "name", ["embed_tokens.weight", "q_proj.weight_packed", "v_proj.weight_scale", "k_proj.weight_global"]
)
@pytest.mark.parametrize("size", [1, 64])
def test_what_was_damaged_in_an_unfinished_output_is_written_again(
    tmp_path: Path, source: Path, name: str, size: int
) -> None:
    stopped_run(source, tmp_path / "out", most=6)
    partial = tmp_path / "out" / f"{FIRST}.partial"
    header = read_header(partial)
    entry = next(key for key in header if name in key)
    begin, end = header[entry]["data_offsets"]
    start = 8 + int.from_bytes(partial.read_bytes()[:8], "little")
    content = bytearray(partial.read_bytes())
    for at in range(begin, min(end, begin + size)):
        content[start + at] ^= 0xFF
    partial.write_bytes(content)
    counting = Counting()
    checkpoint = open_checkpoint(source)
    quantize_checkpoint(
        checkpoint,
        make_plan(checkpoint, Options("nvfp4")),
        tmp_path / "out",
        backend=counting,
        options=WriteOptions(resume=True),
    )
    quantized(source, tmp_path / "whole")
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")
    assert counting.quantized == 2 + 2 + (0 if "embed" in name else 1)


def test_shares_of_two_sources_are_not_merged(tmp_path: Path, source: Path) -> None:
    """Where both shares read a tensor, and where each reads tensors that the other does not."""
    for number, (file, name) in enumerate(
        [
            (FIRST, "model.layers.0.self_attn.k_proj.weight"),
            (FIRST, "model.embed_tokens.weight"),
            ("model-00002-of-00002.safetensors", "model.layers.0.mlp.experts.down_proj"),
            ("model-00002-of-00002.safetensors", "model.norm.weight"),
        ]
    ):
        changed = {**SHARDS, file: {**SHARDS[file], name: noise(*SHARDS[file][name][1].shape, seed=77)}}
        other = write_model(
            tmp_path / f"other-{number}", changed, MIXTRAL, {"tokenizer.json": "{}", "1_Pooling/config.json": "{}"}
        )
        out = tmp_path / f"out-{number}"
        quantized(source, out, share=Share(1, 2))
        with pytest.raises(RefusedError, match=rf"holds share 1/2 of another output or source: .*{name} of the source"):
            quantized(other, out, share=Share(2, 2))
        quantized(other, out, share=Share(2, 2), force=True)
        with pytest.raises(
            RefusedError, match=rf"share 2/2 is not of the same output as share 1: .*{name} of the source"
        ):
            merge_shares(out)
        assert not (out / "mxcli.json").exists()
        quantized(source, out, share=Share(2, 2), force=True)
        merge_shares(out)


def test_shares_that_read_different_bytes_of_a_tensor_are_not_merged(tmp_path: Path, source: Path) -> None:
    """Where the samples of both sources are equal: the change is in none of them."""
    model = {
        "a.safetensors": {"layers.0.q_proj.weight": noise(64, 8192, seed=5)},
        "b.safetensors": {"layers.0.k_proj.weight": noise(64, 8192, seed=6)},
    }
    one, two = (write_model(tmp_path / name, model, LLAMA) for name in ("one", "two"))
    content = bytearray((two / "a.safetensors").read_bytes())
    content[len(content) // 4] ^= 1
    (two / "a.safetensors").write_bytes(content)
    quantized(one, tmp_path / "out", share=Share(1, 2))
    quantized(two, tmp_path / "out", share=Share(2, 2))
    with pytest.raises(RefusedError) as refused:
        merge_shares(tmp_path / "out")
    assert str(refused.value) == (
        "tensor 'layers.0.q_proj.weight' of the source is another for share 2/2 than for share 1/2: write all shares "
        "from one source."
    )


def test_a_complete_share_has_nothing_left_to_do(tmp_path: Path, source: Path) -> None:
    out = tmp_path / "out"
    for share in (Share(1, 2), Share(2, 2)):
        quantized(source, out, share=share)
    before = {name: content for name, content in tree(out).items() if "progress" not in name}
    for share in (Share(1, 2), Share(2, 2)):
        again = quantized(source, out, share=share, resume=True)
        assert (again.outcome.complete, again.outcome.done) == (True, 0)
    assert {name: content for name, content in tree(out).items() if "progress" not in name} == before
    merge_shares(out)
    whole = tree(out)
    for share in (Share(1, 2), Share(2, 2), None):
        assert quantized(source, out, share=share, resume=True).outcome.was_complete
    assert merge_shares(out).shares == 0
    assert tree(out) == whole


@pytest.mark.parametrize(
    "line",
    [
        {"documents": {"../victim": {}}},
        {"carried": ["../victim"]},
        {"shards": {"../victim": [10, 5, "0" * 32]}, "own": ["../victim"]},
    ],
)
def test_names_in_a_log_that_lead_outside_are_not_followed(tmp_path: Path, source: Path, line: dict[str, Any]) -> None:
    (tmp_path / "victim").write_text("precious")

    def merging(folder: Path, share: Share | None) -> None:
        merge_shares(folder)

    def resuming(folder: Path, share: Share | None) -> None:
        quantized(source, folder, share=share, resume=True)

    for out, share in (("share", Share(1, 1)), ("run", None)):
        stopped_run(source, tmp_path / out, share=share)
        log = next((tmp_path / out).glob("mxcli.progress*"))
        header, *rest = log.read_bytes().splitlines(keepends=True)
        changed = json.loads(header)
        changed.pop("check")
        earlier = line_bytes({"publishing": True, "earlier": ["../victim"], "sha256": {}})
        for content in (line_bytes({**changed, **line}) + b"".join(rest), header + b"".join(rest) + earlier):
            log.write_bytes(content)
            for act in (merging, resuming):
                with pytest.raises((InputError, RefusedError)) as refused:
                    act(tmp_path / out, share)
                assert refused.value.exit_code == (4 if "one machine" in str(refused.value) else 3)
        assert (tmp_path / "victim").read_text() == "precious"


def test_other_files_in_the_directory_are_not_part_of_it(tmp_path: Path, source: Path) -> None:
    stopped_run(source, tmp_path / "out")
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(RefusedError, match="exists and holds 1 entries"):
        quantized(source, tmp_path / "out", resume=True)
    quantized(source, tmp_path / "out", resume=True, force=True)
    quantized(source, tmp_path / "whole")
    assert tree(tmp_path / "out") == {**tree(tmp_path / "whole"), "notes.txt": b"mine"}


def test_files_of_a_size_hold_weights_with_their_scales(tmp_path: Path, source: Path) -> None:
    written = quantized(source, tmp_path / "out", size=SIZE)
    quantized(source, tmp_path / "kept")
    names = [f"model-0000{number}-of-00008.safetensors" for number in range(1, 9)]
    assert [shard.name for shard in written.arrangement.shards] == names
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(names)
    sizes = [shard.data_bytes for shard in written.arrangement.shards]
    assert all(size <= SIZE for size in sizes)
    assert index["metadata"]["total_size"] == sum(sizes)
    for name in names:
        held = set(read_header(tmp_path / "out" / name))
        for codes in (each for each in held if each.endswith("_packed")):
            stem = codes.removesuffix("_packed")
            assert {f"{stem}_scale", f"{stem}_global_scale"} <= held
    kept, split = (json.loads((tmp_path / out / "mxcli.json").read_text()) for out in ("kept", "out"))
    assert kept["tensors"] == split["tensors"]


def test_files_are_joined_and_one_that_is_too_large_stands_alone(tmp_path: Path, source: Path) -> None:
    quantized(source, tmp_path / "one", size=10**9)
    assert {"model.safetensors", "config.json"} <= set(tree(tmp_path / "one"))
    assert "model.safetensors.index.json" not in tree(tmp_path / "one")
    large = write_model(tmp_path / "large", {"a.weight": noise(2), "b.weight": noise(64, 64), "c.weight": noise(2)})
    written = quantized(large, tmp_path / "three", size=100)
    assert [[entry.name for entry in shard.entries] for shard in written.arrangement.shards] == [
        ["a.weight"],
        ["b.weight_packed", "b.weight_scale", "b.weight_global_scale"],
        ["c.weight"],
    ]


@pytest.mark.parametrize("count", [1, 3, pytest.param(9, marks=pytest.mark.slow)])
def test_shares_make_up_the_output_of_one_machine(tmp_path: Path, source: Path, count: int) -> None:
    """Also of sets whose members, q, k and v, or gate and up of an expert, are in different shares."""
    quantized(source, tmp_path / "whole", size=SIZE, command="quantize it")
    (tmp_path / "out").mkdir()
    order = np.random.default_rng(count).permutation(count) + 1
    for number in order:
        with pytest.raises(RefusedError, match=r"is missing|no shares"):
            merge_shares(tmp_path / "out")
        share = Share(int(number), count)
        stopped_run(source, tmp_path / "out", size=SIZE, command="quantize it", share=share)
        quantized(source, tmp_path / "out", size=SIZE, command="another", share=share, resume=True)
    merged = merge_shares(tmp_path / "out")
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")
    assert merged.shares == count
    assert set(merged.files) == set(tree(tmp_path / "whole"))
    again = merge_shares(tmp_path / "out")
    assert again.shares == 0
    assert set(again.files) == set(merged.files)
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_shares_of_a_dequantized_checkpoint(tmp_path: Path, source: Path) -> None:
    quantized(source, tmp_path / "q", size=SIZE)
    dequantized(tmp_path / "q", tmp_path / "whole")
    for number in (1, 2):
        dequantized(tmp_path / "q", tmp_path / "out", share=Share(number, 2))
    merge_shares(tmp_path / "out")
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_merging_killed_at_any_point_is_done_again(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantized(source, tmp_path / "whole")
    for number in range(1, 40, 3):
        out = tmp_path / f"{number}"
        for share in (Share(1, 2), Share(2, 2)):
            quantized(source, out, share=share)
        with killed_at(number, monkeypatch):
            merge_shares(out)
        if (out / "mxcli.progress-1-of-2.partial").exists():
            merge_shares(out)
        assert {name: content for name, content in tree(out).items() if "progress" not in name} == tree(
            tmp_path / "whole"
        )


def test_a_finished_share_that_is_resumed_and_killed_is_not_merged_as_it_is(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantized(source, tmp_path / "whole")
    refused = 0
    for number in range(1, 20, 2):
        out = tmp_path / f"{number}"
        for share in (Share(1, 2), Share(2, 2)):
            quantized(source, out, share=share)
        with killed_at(number, monkeypatch):
            quantized(source, out, share=Share(1, 2), resume=True)
        try:
            merge_shares(out)
        except RefusedError:
            refused += 1
            quantized(source, out, share=Share(1, 2), resume=True)
            merge_shares(out)
        assert tree(out) == tree(tmp_path / "whole"), number
    assert refused > 3


def test_what_cannot_be_merged_is_reported_at_once(tmp_path: Path, source: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(InputError, match="no such directory"):
        merge_shares(out)
    quantized(source, out, size=SIZE, share=Share(1, 4))
    stopped_run(source, out, size=SIZE, share=Share(3, 4), most=1)
    with pytest.raises(RefusedError) as refused:
        merge_shares(out)
    assert refused.value.details == (
        "share 2/4 is missing: write it with --shard-range 2/4.",
        "share 3/4 is unfinished: run it again with --resume.",
        "share 4/4 is missing: write it with --shard-range 4/4.",
    )
    for number in (2, 4):
        quantized(source, out, size=SIZE, share=Share(number, 4))
    quantized(source, out, "mxfp8", size=SIZE, share=Share(3, 4), force=True)
    with pytest.raises(RefusedError) as refused:
        merge_shares(out)
    assert str(refused.value) == (
        "share 3/4 is not of the same output as share 1: options format was nvfp4 and is mxfp8."
    )
    before = tree(out)
    with pytest.raises(RefusedError) as refused:
        quantized(source, out, size=SIZE, share=Share(3, 4))
    assert str(refused.value) == (
        f"{out}: holds share 3/4, of which something is finished: --resume continues it if the options are the "
        "same, --force starts again."
    )
    assert tree(out) == before
    quantized(source, out, size=SIZE, share=Share(3, 4), force=True)
    name = "model-00002-of-00008.safetensors.partial"
    content = (out / name).read_bytes()
    for damage in (content[:-1], b"x" + content[1:]):
        (out / name).write_bytes(damage)
        with pytest.raises(RefusedError, match=f"{name} is not what its share wrote"):
            merge_shares(out)
    (out / name).unlink()
    (out / name).symlink_to(tmp_path / "source" / "config.json")
    with pytest.raises(RefusedError, match=f"{name}: a link, and is left as it is"):
        merge_shares(out)


def test_a_directory_is_divided_in_one_way(tmp_path: Path, source: Path) -> None:
    out = tmp_path / "out"
    quantized(source, out, share=Share(1, 2))
    for manner in ({}, {"share": Share(1, 3)}, {"resume": True}):
        with pytest.raises(RefusedError, match="holds share 1/2 of a run on 2 machines"):
            quantized(source, out, **manner)
    quantized(source, out, force=True)
    stopped_run(source, tmp_path / "new")
    with pytest.raises(RefusedError, match="holds an unfinished run of one machine"):
        quantized(source, tmp_path / "new", share=Share(1, 2))
    with pytest.raises(RefusedError, match="an unfinished run of one machine: --resume continues it"):
        merge_shares(tmp_path / "new")
