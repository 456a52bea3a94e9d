"""`mxcli capture` from the outside: what it records, what it refuses, and what a cut-short run ends as."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import SAMPLE, environment, strict_json
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mxcli.cli import capture
from mxcli.errors import RefusedError
from mxcli.files.capture_writer import CaptureFile
from mxcli.flows.capture.layers import Layer

transformers = pytest.importorskip("transformers")

TEXT = "The quick brown fox jumps over the lazy dog, and the dog does not mind.\n" * 4
TENSORS = "39 tensors are here; give the config.json that belongs to the weights.\n"
NOTE = f"note: {SAMPLE} has no tokenizer: every byte of the text is a token.\n"
Mxcli = Callable[..., Any]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tests run in parallel, and threads that wait for their turn cost more than they save."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def tree(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def words(folder: Path, text: Path, *more: object) -> tuple[object, ...]:
    return ("capture", SAMPLE, "-o", folder, "--text", text, "--tokens", "16", *more)


def by_hand(window: bytes) -> tuple[dict[str, torch.Tensor], float]:
    """What the layers of the sample are handed for a window, and the gradients that come back, by other means."""
    model = transformers.AutoModelForCausalLM.from_pretrained(SAMPLE, dtype=torch.float32)
    seen: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):

            def hook(_: Any, inputs: Any, output: torch.Tensor, name: str = name) -> None:
                output.retain_grad()
                seen[f"{name}.activation"], seen[f"{name}.gradient"] = inputs[0], output

            module.register_forward_hook(hook)
    ids = torch.tensor([list(window)])
    loss = torch.nn.functional.cross_entropy(model(input_ids=ids[:, :-1]).logits.flatten(0, 1), ids[0, 1:])
    loss.backward()
    values = {name: (x.grad if name.endswith("gradient") else x).detach().flatten(0, 1) for name, x in seen.items()}
    weights = {name: x.detach() for name, x in model.named_parameters() if f"{name[:-6]}activation" in values}
    return {**values, **weights}, loss.item()


def test_captures_are_what_autograd_says(mxcli: Mxcli, tmp_path: Path, text: Path) -> None:
    outcome = mxcli(*words(tmp_path / "out", text, "--steps", "2", "--dtype", "f32"))
    assert outcome == (0, f"{tmp_path / 'out'}\n", NOTE)
    assert sorted(tree(tmp_path / "out")) == ["step-000000.safetensors", "step-000001.safetensors"]
    for number in (0, 1):
        path = tmp_path / "out" / f"step-00000{number}.safetensors"
        expected, loss = by_hand(TEXT.encode()[16 * number : 16 * number + 17])
        captured = load_file(path)
        assert len(captured) == 3 * 29
        assert captured.keys() == expected.keys()
        assert not [name for name in expected if not torch.equal(captured[name], expected[name])]
        with safe_open(path, "pt") as file:
            record = json.loads(file.metadata()["mxcli.capture"])
        assert record["loss"]["value"] == pytest.approx(loss)
        assert record["text"]["offset"] == 16 * number
        assert record["tensors"]["lm_head.activation"]["step"] == number


def test_json_and_sampling(mxcli: Mxcli, tmp_path: Path, text: Path) -> None:
    more = ("--batch", "3", "--sample-rows", "5", "--layers", "*layers.1.*", "--layers", "lm_head", "--forward-only")
    summary = strict_json(mxcli(*words(tmp_path / "out", text, *more, "--json")).out)
    assert summary["schema"] == "mxcli.capture/1"
    assert summary["roles"] == ["activation", "weight"]
    assert (summary["tokens"], summary["tokens_per_window"], summary["batch"], summary["sample_rows"]) == (48, 16, 3, 5)
    assert summary["layers"][0] == "model.layers.1.self_attn.q_proj"
    assert summary["layers"][-1] == "lm_head"
    assert len(summary["layers"]) == 8
    path = tmp_path / "out" / "step-000000.safetensors"
    assert summary["steps"] == [{"step": 0, "file": str(path), "loss": summary["steps"][0]["loss"], "resumed": False}]
    assert 0 < summary["steps"][0]["loss"] < 8
    assert summary["bytes"] == path.stat().st_size
    shapes = {name: list(tensor.shape) for name, tensor in load_file(path).items()}
    assert shapes["model.layers.1.mlp.down_proj.activation"] == [5, 384]
    assert shapes["model.layers.1.mlp.down_proj.weight"] == [128, 384]
    assert len(shapes) == 16


def test_gradients_do_not_depend_on_what_else_is_requested(mxcli: Mxcli, tmp_path: Path, text: Path) -> None:
    """Neither on the rows that are kept nor on whether the gradients of weights are computed too."""
    mxcli(*words(tmp_path / "all", text))
    mxcli(*words(tmp_path / "some", text, "--learning-rate", "1e-3", "--sample-rows", "4", "--roles", "gradient"))
    whole, some = (load_file(tmp_path / name / "step-000000.safetensors") for name in ("all", "some"))
    assert len(some) == 29
    for name, rows in some.items():
        assert rows.dtype == torch.bfloat16
        assert len(rows) == 4
        assert {row.numpy().tobytes() for row in rows.view(torch.uint16)} <= {
            row.numpy().tobytes() for row in whole[name].view(torch.uint16)
        }


def test_dry_run(mxcli: Mxcli, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", None)
    argv = words(tmp_path / "out", text, "--steps", "2", "--layers", "*layers.1.mlp", "--sample-rows", "8", "--dry-run")
    code, out, _ = mxcli(*argv)
    lines = out.splitlines()
    assert code == 0
    assert lines[:7] == [
        f"{SAMPLE}: 3 linear layers, BF16; 2 steps of 1 x 16 tokens of {text}",
        "",
        "layer                         weight   activation  gradient   weight",
        "model.layers.1.mlp.gate_proj  384x128     2.05 kB   6.14 kB  98.3 kB",
        "model.layers.1.mlp.up_proj    384x128     2.05 kB   6.14 kB  98.3 kB",
        "model.layers.1.mlp.down_proj  128x384     6.14 kB   2.05 kB  98.3 kB",
        "--------------------------------------------------------------------",
    ]
    assert lines[7] == "all 3 layers                  -           10.2 kB   14.3 kB   295 kB"
    assert lines[9].startswith("disk: 319 kB a step, 639 kB in all; ")
    assert lines[10].endswith(", 1.71 MB of it weights")
    plan = strict_json(mxcli(*argv, "--json").out)
    assert plan["schema"] == "mxcli.capture.plan/1"
    assert (plan["disk_bytes_per_step"], plan["weight_bytes"], len(plan["tensors"])) == (319_488, 1_706_240, 9)
    assert not (tmp_path / "out").exists()


def test_text_from_stdin(mxcli: Mxcli, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode())))
    mxcli(*words(tmp_path / "a", Path("-"), "--roles", "activation"))
    mxcli(*words(tmp_path / "b", text, "--roles", "activation"))
    one, other = (load_file(tmp_path / name / "step-000000.safetensors") for name in "ab")
    assert all(torch.equal(one[name], other[name]) for name in other)


@pytest.fixture
def spelled(tmp_path: Path) -> Path:
    """The sample with a tokenizer of whole words, one of which its model does not know."""
    folder = tmp_path / "spelled"
    shutil.copytree(SAMPLE, folder)
    names = {"[UNK]": 0, "the": 1, "quick": 2, "fox": 255, "unknown": 256}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": names, "unk_token": "[UNK]"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


def test_a_tokenizer_is_used(mxcli: Mxcli, tmp_path: Path, spelled: Path) -> None:
    (tmp_path / "words.txt").write_text("the quick fox the fox the quick")
    argv = (
        "capture",
        spelled,
        "-o",
        tmp_path / "out",
        "--tokens",
        "6",
        "--forward-only",
        "--layers",
        "*.0.*.q_proj",
    )
    assert mxcli(*argv, "--text", tmp_path / "words.txt") == (0, f"{tmp_path / 'out'}\n", "")
    x = load_file(tmp_path / "out" / "step-000000.safetensors")["model.layers.0.self_attn.q_proj.activation"]
    assert [[bool(torch.equal(x[at], x[other])) for other in range(6)] for at in (0, 2)] == [
        [True, False, False, True, False, True],
        [False, False, True, False, True, False],
    ]
    (tmp_path / "words.txt").write_text("the quick unknown the fox the quick")
    code, out, err = mxcli(*argv, "--text", tmp_path / "words.txt", "--force")
    assert (code, out) == (4, "")
    assert err == (
        f"error: {tmp_path / 'words.txt'}: token 2 is 256, and the model's vocabulary has 256; use the model's own "
        "tokenizer, or another text.\n"
    )


def refusal(mxcli: Mxcli, *argv: object) -> tuple[int, str]:
    code, out, err = mxcli(*argv)
    assert out == ""
    return code, err.removeprefix(NOTE)


@pytest.mark.parametrize(
    ("data", "code", "sentence"),
    [
        (b"", 3, "is empty; give a text."),
        (b"caf\xe9 au lait", 3, "is not UTF-8 text: byte 0xe9 at 3; convert it first."),
        (
            b"x" * 48,
            3,
            "has 48 tokens, and 3 steps of 1 x 16 tokens and the one after need 49; give a longer text, or --steps 2.",
        ),
        (
            b"x" * 16,
            3,
            "has 16 tokens, and 3 steps of 1 x 16 tokens and the one after need 49; give a longer text, or fewer "
            "--tokens.",
        ),
    ],
)
def test_texts_that_will_not_do(mxcli: Mxcli, tmp_path: Path, data: bytes, code: int, sentence: str) -> None:
    (tmp_path / "text.txt").write_bytes(data)
    argv = words(tmp_path / "out", tmp_path / "text.txt", "--steps", "3")
    assert refusal(mxcli, *argv) == (code, f"error: {tmp_path / 'text.txt'}: {sentence}\n")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("more", "code", "sentence"),
    [
        (
            ("--layers", "q_proj"),
            2,
            "--layers q_proj: matches no linear layer. Did you mean *.q_proj (4 tensors)?",
        ),
        (("--forward-only", "--learning-rate", "0.1"), 2, "--learning-rate needs gradients, which --forward-only"),
        (("--forward-only", "--roles", "gradient"), 2, "--roles gradient with --forward-only leaves nothing to record"),
        (("--learning-rate", "inf"), 2, "--learning-rate inf: give a finite number, or 0 to leave the weights "),
        (("--text", ""), 2, "--text '': an empty name; give a file, or - for stdin."),
        (("--threads", "100000"), 6, "--threads 100000: more than "),
        (("--steps", "1000000000000", "--dry-run"), 6, "OUT: 1,000,000,000,000 steps of 1,961,984 bytes would take "),
        (("--roles", "grad"), 2, "role 'grad' is not recorded: there are activation, gradient, weight."),
        (("--dtype", "fp4"), 2, "unknown dtype 'fp4': f64, f32, f16, bf16 are supported."),
        (("--tokens", "129"), 4, f"{SAMPLE}: reads 128 tokens at a time, and --tokens is 129; use at most that"),
        (("--max-memory", "1M"), 6, f"{SAMPLE}: needs about "),
        (("--max-disk", "1M"), 6, "OUT: a step of 1,961,984 bytes would be 1,961,984 bytes on the disk, and "),
        (("--device", "cuda:99"), 6, "--device cuda:99: torch sees "),
    ],
)
def test_what_is_refused(
    mxcli: Mxcli, tmp_path: Path, text: Path, more: tuple[str, ...], code: int, sentence: str
) -> None:
    found, err = refusal(mxcli, *words(tmp_path / "out", text, *more))
    assert found == code
    assert err.startswith(f"error: {sentence.replace('OUT', str(tmp_path / 'out'))}")
    assert not (tmp_path / "out").exists()


def test_models_that_will_not_do(mxcli: Mxcli, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "model"

    def refused(**config: object) -> tuple[int, str]:
        settings = {**json.loads((SAMPLE / "config.json").read_text()), **config}
        (folder / "config.json").write_text(json.dumps(settings))
        code, err = refusal(mxcli, "capture", folder, "-o", tmp_path / "out", "--text", text, "--tokens", "8")
        return code, err.removeprefix(f"note: {folder} has no tokenizer: every byte of the text is a token.\n")

    shutil.copytree(SAMPLE, folder)
    assert refused(num_hidden_layers=5) == (
        3,
        f"error: {folder}: lacks 9 weights of a LlamaForCausalLM, such as model.layers.4.input_layernorm.weight; give "
        "a complete checkpoint.\n",
    )
    code, err = refused(model_type="nothing-known")
    assert code == 3
    assert err.startswith(f"error: {folder}: transformers cannot read its config.json: ")
    (folder / "config.json").unlink()
    assert refusal(mxcli, "capture", folder, "-o", tmp_path / "out", "--text", text) == (
        3,
        f"error: {folder}: has no config.json; give a transformers model directory.\n",
    )
    assert refusal(mxcli, "capture", tmp_path / "none", "-o", tmp_path / "out", "--text", text) == (
        3,
        f"error: {tmp_path / 'none'}: no such directory; give one with a model that transformers loads.\n",
    )
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert refusal(mxcli, *words(tmp_path / "out", text)) == (
        6,
        "error: capturing a model needs transformers, which is not installed: pip install 'mxcli[capture]'.\n",
    )
    assert not (tmp_path / "out").exists()


def test_where_the_output_may_go(mxcli: Mxcli, tmp_path: Path, text: Path) -> None:
    assert refusal(mxcli, "capture", SAMPLE, "--text", text)[0] == 2
    assert refusal(mxcli, "capture", SAMPLE, "-o", tmp_path / "out") == (
        2,
        "error: missing option '--text FILE': name the text that the model reads, or - for stdin.\n",
    )
    assert refusal(mxcli, *words(SAMPLE, text, "--force"))[0] == 4
    argv = words(tmp_path / "out", text, "--roles", "activation")
    mxcli(*argv, "--steps", "3")
    code, err = refusal(mxcli, *argv)
    assert code == 4
    assert err.startswith(f"error: {tmp_path / 'out'}: exists and holds 3 entries; give a new directory, or --force")
    assert mxcli(*argv, "--force").code == 0
    assert list(tree(tmp_path / "out")) == ["step-000000.safetensors"]
    shutil.copy(SAMPLE / "model.safetensors", tmp_path / "out")
    assert "weights of another checkpoint" in refusal(mxcli, *argv, "--force")[1]


@pytest.mark.slow
def test_a_killed_run_ends_with_the_same_bytes(mxcli: Mxcli, tmp_path: Path, text: Path) -> None:
    """Killed while it writes its second file."""
    argv = [str(word) for word in words(tmp_path / "cut", text, "--steps", "3", "--sample-rows", "3")]
    script = f"""
        import os, signal
        from mxcli.cli import app
        from mxcli.files.capture_writer import CaptureFile

        finish = CaptureFile.finish

        def killed(self, about, *, force):
            if "step-000001" in str(self.path):
                os.kill(os.getpid(), signal.SIGKILL)
            return finish(self, about, force=force)

        CaptureFile.finish = killed
        app.main({argv!r})
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], env=environment(OMP_NUM_THREADS="1"), check=False, timeout=120
    )
    assert done.returncode == -signal.SIGKILL
    assert sorted(tree(tmp_path / "cut")) == ["step-000000.safetensors", "step-000001.safetensors.partial"]
    assert mxcli(*argv, "--resume").err == f"{NOTE}note: Resumed: 1 of 3 steps were there before.\n"
    mxcli(*words(tmp_path / "whole", text, "--steps", "3", "--sample-rows", "3"))
    assert tree(tmp_path / "cut") == tree(tmp_path / "whole")


@contextmanager
def interrupting(*_: object) -> Iterator[Callable[[int, int, str], None]]:
    """Progress that sends this process a signal after the first step."""

    def show(done: int, total: int, name: str) -> None:
        if name == "step 0":
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)

    yield show


@pytest.mark.parametrize("rate", [(), ("--learning-rate", "0.05", "--dtype", "f32")])
def test_a_signal_ends_a_run_after_the_step_and_resume_continues(
    mxcli: Mxcli, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch, rate: tuple[str, ...]
) -> None:
    argv = words(tmp_path / "cut", text, "--steps", "3", *rate)
    with monkeypatch.context() as patch:
        patch.setattr(capture, "progress", interrupting)
        code, out, err = mxcli(*argv)
    assert (code, out) == (130, "")
    assert err.splitlines()[1:] == [
        "interrupted: finishing the current step; a second signal stops at once",
        f"{tmp_path / 'cut'}: 1 of 3 steps are written; the same command with --resume continues from there.",
        "interrupted",
    ]
    summary = strict_json(mxcli(*argv, "--resume", "--json").out)
    assert [step["resumed"] for step in summary["steps"]] == [True, False, False]
    whole = strict_json(mxcli(*words(tmp_path / "whole", text, "--steps", "3", *rate), "--json").out)
    assert tree(tmp_path / "cut") == tree(tmp_path / "whole")
    assert [step["loss"] for step in summary["steps"]] == [step["loss"] for step in whole["steps"]]
    weights = [load_file(path)["lm_head.weight"] for path in sorted((tmp_path / "whole").iterdir())]
    assert torch.equal(weights[0], weights[1]) == (not rate)


def test_a_run_is_resumed_as_it_was(mxcli: Mxcli, tmp_path: Path, text: Path) -> None:
    argv = words(tmp_path / "out", text, "--roles", "activation")
    mxcli(*argv)
    first = tree(tmp_path / "out")
    assert refusal(mxcli, *argv, "--resume", "--seed", "1", "--sample-rows", "2") == (
        4,
        f"error: {tmp_path / 'out' / 'step-000000.safetensors'}: cannot be resumed: sample_rows was None and is 2; "
        "seed was 0 and is 1. Give the same options, --force to replace the files, or another -o/--output.\n",
    )
    assert mxcli(*argv, "--resume").code == 0
    assert tree(tmp_path / "out") == first
    assert mxcli(*argv, "--resume", "--steps", "2").code == 0
    assert sorted(tree(tmp_path / "out")) == ["step-000000.safetensors", "step-000001.safetensors"]
    assert tree(tmp_path / "out").items() >= first.items()


def test_a_resumed_run_counts_what_is_there(
    mxcli: Mxcli, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a disk with room for one more step, and on one that is full when all is there."""
    argv = words(tmp_path / "out", text, "--roles", "activation", "--layers", "lm_head")
    mxcli(*argv, "--steps", "2")
    nbytes = 16 * 128 * 2

    def disk(free: int) -> None:
        monkeypatch.setattr("mxcli.flows.capture.budget.shutil.disk_usage", lambda path: Disk(0, 0, free))

    Disk = namedtuple("Disk", "total used free")
    monkeypatch.setattr("mxcli.files.partials.Partials.check_space", lambda self: None)
    disk(0)
    assert mxcli(*argv, "--steps", "2", "--resume").code == 0
    disk(nbytes - 1)
    assert refusal(mxcli, *argv, "--steps", "3", "--resume") == (
        6,
        f"error: {tmp_path / 'out'}: a step of 4,096 bytes would take 4,096 more bytes on the disk, and 4,095 are "
        "available: record fewer rows (--sample-rows), fewer layers (--layers) or fewer roles (--roles), or fewer "
        "steps (--steps), or free some space.\n",
    )
    disk(nbytes)
    assert mxcli(*argv, "--steps", "3", "--resume").code == 0
    first = (tmp_path / "out" / "step-000000.safetensors").stat().st_size
    most = ("--max-disk", str(3 * first + nbytes))
    assert mxcli(*argv, "--steps", "4", "--resume", *most).code == 0
    assert len(tree(tmp_path / "out")) == 4


def test_more_rows_than_a_step_has_change_nothing(mxcli: Mxcli, tmp_path: Path, text: Path) -> None:
    argv = words(tmp_path / "out", text, "--roles", "activation", "--layers", "lm_head")
    assert mxcli(*argv, "--sample-rows", "1000000000000").code == 0
    assert len(load_file(tmp_path / "out" / "step-000000.safetensors")["lm_head.activation"]) == 16


def test_what_is_forced_is_replaced_at_the_end(
    mxcli: Mxcli, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that cannot be loaded loses nothing, and a run that is cut short no step that it did not make."""
    few = ("--roles", "activation", "--layers", "lm_head")
    argv = words(tmp_path / "out", text, *few, "--steps", "3")
    mxcli(*argv)
    shutil.copy(tmp_path / "out" / "step-000000.safetensors", tmp_path / "out" / "step-000000-rank-1.safetensors")
    before = tree(tmp_path / "out")
    other = words(tmp_path / "out", text, *few, "--steps", "2", "--seed", "1", "--force")
    with monkeypatch.context() as patch:
        patch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", None)
        assert mxcli(*other).code == 3
    assert tree(tmp_path / "out") == before
    with monkeypatch.context() as patch:
        patch.setattr(capture, "progress", interrupting)
        assert mxcli(*other).code == 130
    assert {name for name, data in tree(tmp_path / "out").items() if data != before[name]} == {
        "step-000000.safetensors"
    }
    assert refusal(mxcli, *other[:-1], "--resume")[0] == 4
    summary = strict_json(mxcli(*other, "--resume", "--json").out)
    assert [step["resumed"] for step in summary["steps"]] == [True, False]
    assert summary["bytes"] == sum(
        (tmp_path / "out" / f"step-00000{step}.safetensors").stat().st_size for step in (0, 1)
    )
    assert summary["notes"][1] == (
        f"{tmp_path / 'out'} holds captures of other commands, which stay: step-000000-rank-1.safetensors."
    )
    assert sorted(tree(tmp_path / "out")) == [
        "step-000000-rank-1.safetensors",
        "step-000000.safetensors",
        "step-000001.safetensors",
    ]
    mxcli(*words(tmp_path / "whole", text, *few, "--steps", "2", "--seed", "1"))
    assert tree(tmp_path / "out").items() >= tree(tmp_path / "whole").items()


def test_steps_of_another_run_beyond_the_last_are_not_part_of_this(mxcli: Mxcli, tmp_path: Path, text: Path) -> None:
    few = ("--roles", "activation", "--layers", "lm_head")
    mxcli(*words(tmp_path / "out", text, *few, "--steps", "2", "--seed", "1"))
    (tmp_path / "out" / "step-000000.safetensors").unlink()
    argv = words(tmp_path / "out", text, *few, "--resume")
    code, err = refusal(mxcli, *argv)
    assert code == 4
    assert err.startswith(
        f"error: {tmp_path / 'out' / 'step-000001.safetensors'}: cannot be resumed: seed was 1 and is 0. "
    )
    assert mxcli(*argv, "--force").code == 0
    assert list(tree(tmp_path / "out")) == ["step-000000.safetensors"]


def test_a_file_names_all_linear_layers_of_the_model(mxcli: Mxcli, tmp_path: Path, text: Path) -> None:
    mxcli(*words(tmp_path / "out", text, "--roles", "activation", "--layers", "*layers.1.mlp"))
    with safe_open(tmp_path / "out" / "step-000000.safetensors", "pt") as file:
        named = json.loads(file.metadata()["mxcli.capture"])["layers_of_model"]
    assert len(named) == 29
    assert named[:2] == ["model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"]
    assert named[-1] == "lm_head"


def test_one_step_is_one(mxcli: Mxcli, tmp_path: Path, text: Path) -> None:
    assert refusal(mxcli, *words(tmp_path / "out", text, "--batch", "30")) == (
        3,
        f"error: {text}: has 288 tokens, and 1 step of 30 x 16 tokens and the one after need 481; give a longer text, "
        "or fewer --tokens.\n",
    )


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (
            {"num_hidden_layers": "four"},
            "transformers cannot read its config.json: Validation error for field 'num_hidden_layers': TypeError: "
            "Field 'num_hidden_layers' expected int, got str (value: 'four')",
        ),
        ({"num_attention_heads": 0}, "transformers cannot read its config.json: integer modulo by zero"),
        ({"num_key_value_heads": 0}, "transformers cannot make a causal language model of it: integer division or "),
        ({"num_hidden_layers": 10**500}, f"its config.json states num_hidden_layers more than 2^64, and {TENSORS}"),
        ({"num_hidden_layers": 300}, f"its config.json states num_hidden_layers 300, and {TENSORS}"),
        ({"num_attention_heads": 2**31}, f"its config.json states num_attention_heads 2,147,483,648, and {TENSORS}"),
        ({"num_labels": 10**9}, f"its config.json states num_labels 1,000,000,000, and {TENSORS}"),
        ({"pad_token_id": 9999}, "transformers cannot make a causal language model of it: Padding_idx must be within "),
    ],
)
def test_configurations_of_no_model(
    mxcli: Mxcli, tmp_path: Path, text: Path, config: dict[str, object], sentence: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(SAMPLE, folder)
    known = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps({**known, **config}))
    code, out, err = mxcli("capture", folder, "-o", tmp_path / "out", "--text", text, "--dry-run")
    assert (code, out) == (3, "")
    assert err.startswith(f"error: {folder}: {sentence}")


def test_an_invalid_tokenizer(mxcli: Mxcli, tmp_path: Path, spelled: Path, text: Path) -> None:
    (spelled / "tokenizer.json").write_text("{}")
    code, err = refusal(mxcli, "capture", spelled, "-o", tmp_path / "out", "--text", text)
    assert code == 3
    assert err.startswith(
        f"error: {spelled}: transformers cannot load its tokenizer (tokenizer.json, tokenizer_config.json): "
    )


def altered(folder: Path, changes: dict[str, torch.Tensor]) -> Path:
    """The sample with other tensors."""
    shutil.copytree(SAMPLE, folder)
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, **changes}, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_weights_that_do_not_fit(mxcli: Mxcli, tmp_path: Path, text: Path) -> None:
    few = ("-o", tmp_path / "out", "--text", text, "--tokens", "8", "--roles", "activation", "--layers", "lm_head")
    more = altered(tmp_path / "more", {"extra.weight": torch.zeros(3), "another.weight": torch.zeros(3)})
    summary = strict_json(mxcli("capture", more, *few, "--json").out)
    assert summary["notes"][1:] == [
        f"{more}: 2 of its tensors are not weights of a LlamaForCausalLM and are not used, such as another.weight."
    ]
    other = altered(tmp_path / "other", {"model.layers.0.mlp.up_proj.weight": torch.zeros(4, 4)})
    code, err = refusal(mxcli, "capture", other, *few, "--force")
    assert (code, err.splitlines()[-1]) == (
        3,
        f"error: {other}: model.layers.0.mlp.up_proj.weight is [4, 4], and a LlamaForCausalLM of its config.json needs "
        "[384, 128] (1 of its weights have another shape); give the config.json that belongs to the weights.",
    )


@pytest.mark.parametrize(
    ("name", "error", "code", "sentence"),
    [
        (
            "transformers.AutoModelForCausalLM.from_pretrained",
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."),
            6,
            f"{SAMPLE}: out of memory to load 1,706,240 bytes of weights; free some, or take a smaller model.",
        ),
        (
            "transformers.AutoModelForCausalLM.from_pretrained",
            torch.OutOfMemoryError("CUDA out of memory."),
            6,
            f"{SAMPLE}: out of memory to load 1,706,240 bytes of weights; free some, or take a smaller model.",
        ),
        (
            "transformers.AutoConfig.from_pretrained",
            ImportError("needs the package tiktoken.\nInstall it."),
            6,
            f"{SAMPLE}: transformers cannot read its config.json here: needs the package tiktoken.",
        ),
        (
            "transformers.AutoModelForCausalLM.from_pretrained",
            OSError(24, "Too many open files", "model.safetensors"),
            6,
            "model.safetensors: Too many open files",
        ),
        (
            "transformers.AutoModelForCausalLM.from_pretrained",
            OSError("no file named model.safetensors."),
            3,
            f"{SAMPLE}: transformers cannot load 1,706,240 bytes of weights: no file named model.safetensors.",
        ),
        (
            "mxcli.flows.capture.model._own_dtype",
            KeyError("ours"),
            1,
            "KeyError: 'ours'. This is a bug: please report it with the output of `mxcli doctor` and of this command "
            "with --debug.",
        ),
        (
            "torch.nn.functional.cross_entropy",
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."),
            6,
            "cpu: out of memory for a step of 16 tokens; use fewer --tokens or a smaller --batch.",
        ),
    ],
)
def test_whose_fault_a_failure_is(
    mxcli: Mxcli,
    tmp_path: Path,
    text: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    error: Exception,
    code: int,
    sentence: str,
) -> None:
    def failing(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(name, failing)
    found, err = refusal(mxcli, *words(tmp_path / "out", text, "--device", "cpu"))
    assert (found, err) == (code, f"error: {sentence}\n")
    assert not (tmp_path / "out").exists()


def test_rows_of_experts_are_counted_when_they_come(
    mxcli: Mxcli, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 20,480 bytes 12,288 are of a layer of which nobody knows how many tokens it will see."""
    monkeypatch.setattr(Layer, "is_routed", property(lambda layer: layer.name.endswith("down_proj")))
    few = ("--roles", "activation", "--layers", "*layers.1.mlp")
    note = "note: 1 layers belong to experts, which see part of the tokens: their sizes are upper bounds.\n"
    argv = words(tmp_path / "out", text, *few, "--max-disk", "8K")
    code, out, err = mxcli(*argv, "--dry-run")
    assert (code, err) == (0, NOTE + note)
    assert "disk: 20.5 kB a step" in out
    code, err = refusal(mxcli, *argv)
    assert code == 6
    assert err.startswith(
        f"{note}error: {tmp_path / 'out'}: a step of 20,480 bytes would be 20,480 bytes on the disk, and 8,192 are "
    )
    assert not (tmp_path / "out").exists()


def test_an_error_of_the_recording_ends_the_run_and_the_steps_before_it_stay(
    mxcli: Mxcli, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = CaptureFile.finish

    def failing(file: CaptureFile, about: Any, *, force: bool) -> int:
        if file.path.name == "step-000001.safetensors":
            raise RefusedError("the second step is refused.")
        return finish(file, about, force=force)

    folder = tmp_path / "out"
    run = words(folder, text, "--steps", "3", "--roles", "activation")
    with monkeypatch.context() as patched:
        patched.setattr(CaptureFile, "finish", failing)
        code, out, err = mxcli(*run, "--json")
    assert code == 6
    assert err.splitlines()[1:] == [
        "error: the second step is refused.",
        f"{folder}: 1 of 3 steps are written; the same command with --resume continues from there.",
    ]
    found = strict_json(out)
    assert (found["complete"], found["stopped"]) == (False, "the second step is refused")
    assert [each["step"] for each in found["steps"]] == [0]
    assert sorted(path.name for path in folder.iterdir()) == ["mxcli-incomplete.json", "step-000000.safetensors"]
    code, out, err = mxcli(*run, "--resume", "--json")
    assert code == 0
    found = strict_json(out)
    assert (found["complete"], found["stopped"]) == (True, None)
    assert sorted(path.name for path in folder.iterdir()) == [f"step-00000{step}.safetensors" for step in range(3)]
    with monkeypatch.context() as patched:
        patched.setattr(CaptureFile, "finish", failing)
        code, err = refusal(
            mxcli, *words(tmp_path / "raised", text, "--steps", "3", "--roles", "activation", "--on-error", "raise")
        )
    assert (code, err.splitlines()[-1]) == (4, "error: the second step is refused.")
    code, err = refusal(mxcli, *words(tmp_path / "no", text, "--on-error", "ignore"))
    assert (code, err) == (2, "error: --on-error ignore: give warn or raise.\n")


def test_a_limit_on_file_sizes_ends_the_run(tmp_path: Path, text: Path) -> None:
    run = [sys.executable, "-m", "mxcli", *map(str, words(tmp_path / "out", text, "--steps", "2"))]
    program = (
        "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (50000, 50000)); "
        f"sys.argv = {run[2:]!r}; runpy.run_module('mxcli', run_name='__main__', alter_sys=True)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment(), check=False
    )
    assert done.returncode == 6
    assert "exceeds the limit on file sizes; record less of a step, or raise the limit (ulimit -f).\n" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


FEW = ("--roles", "activation", "--layers", "lm_head")


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("step-000000.safetensors", b"precious"),
        ("step-000007.safetensors", b""),
        ("step-000000.safetensors", (SAMPLE / "model.safetensors").read_bytes()),
        ("mxcli-incomplete.json", b"{}"),
        ("mxcli-incomplete.json", b"my notes"),
        ("mxcli-incomplete-rank-1.json", b'{"schema": "mine"}'),
        ("step-000000.safetensors.partial", b"precious"),
        ("step-000000.safetensors.partial", b"\0" * 9999),
        ("step-000003-rank-2.safetensors.partial", (SAMPLE / "model.safetensors").read_bytes()),
    ],
)
@pytest.mark.parametrize("way", [(), ("--force",), ("--resume",)])
def test_files_that_no_recording_wrote_are_left(
    mxcli: Mxcli, tmp_path: Path, text: Path, name: str, data: bytes, way: tuple[str, ...]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_bytes(data)
    code, err = refusal(mxcli, *words(tmp_path / "out", text, *FEW, *way))
    assert (code, tree(tmp_path / "out")) == (4, {name: data})
    if way == ("--force",):
        assert err.startswith(f"error: {tmp_path / 'out' / name}: ")
        assert err.endswith(", and is left as it is; move it away.\n")


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("damage", ["flipped", "cut", "header"])
def test_a_damaged_step_is_written_again(mxcli: Mxcli, tmp_path: Path, text: Path, number: int, damage: str) -> None:
    argv = words(tmp_path / "out", text, *FEW, "--steps", "3")
    mxcli(*argv)
    before = tree(tmp_path / "out")
    path = tmp_path / "out" / f"step-00000{number}.safetensors"
    data = bytearray(path.read_bytes())
    if damage == "flipped":
        data[-5] ^= 16
    elif damage == "cut":
        del data[-7:]
    else:
        at = data.index(b'"loss')
        data[data.index(b"0.", at) if b"0." in data[at : at + 60] else data.index(b".", at)] = ord("1")
    path.write_bytes(data)
    code, out, err = mxcli(*argv, "--resume")
    assert (code, out) == (0, f"{tmp_path / 'out'}\n")
    assert f"note: Not as they were written, and written again: {path}.\n" in err
    assert tree(tmp_path / "out") == before


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/urandom", "/dev/null"])
def test_devices_are_no_texts(mxcli: Mxcli, tmp_path: Path, device: str) -> None:
    assert refusal(mxcli, *words(tmp_path / "out", Path(device))) == (
        3,
        f"error: {device}: a device; a text file or a pipe is needed.\n",
    )


@pytest.mark.parametrize("linked", [False, True])
def test_a_named_pipe_is_no_text(mxcli: Mxcli, tmp_path: Path, linked: bool) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    path = tmp_path / ("link" if linked else "pipe")
    assert refusal(mxcli, *words(tmp_path / "out", path)) == (
        3,
        f"error: {path}: a named pipe, which may never end; use --text - to read it.\n",
    )


def test_a_pipe_of_the_process_is_a_text(mxcli: Mxcli, tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.write(writing, TEXT.encode())
    os.close(writing)
    try:
        assert mxcli(*words(tmp_path / "out", Path(f"/dev/fd/{reading}"), *FEW)).code == 0
    finally:
        os.close(reading)
