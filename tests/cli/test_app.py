"""What holds for every verb: exit codes, streams, one place for errors, and a quick start."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import CAPTURES, SAMPLE, command, environment, strict_json
from odd_files import many_tensors, odd_checkpoint, one_tensor

from mxcli.cli.app import run
from mxcli.errors import LimitError

VERBS = ("inspect", "quantize", "report", "compare", "convert", "dequantize", "formats", "explain", "doctor")


def test_help_and_version(mxcli: Callable[..., Any]) -> None:
    code, out, err = mxcli("--help")
    assert (code, err) == (0, "")
    assert all(verb in out for verb in VERBS)
    assert mxcli("-h") == (code, out, err)
    assert mxcli("--version") == (0, "mxcli 0.1.0\n", "")
    record = strict_json(mxcli("--version", "--json").out)
    assert record["schema"] == "mxcli.version/1"
    assert record["version"] == "0.1.0"


def test_without_a_verb_help_goes_to_stderr(mxcli: Callable[..., Any]) -> None:
    code, out, err = mxcli()
    assert (code, out) == (2, "")
    assert "Commands:" in err


def test_help_and_usage_errors_import_nothing_heavy() -> None:
    lines = [
        "--help",
        "report --help",
        "reprot",
        "report x --device tpu",
        "report x --max-memory much",
        "report x --format mxfp9",
        "report x --sort snr",
        "report x --fail-on snr<3",
        "compare x --formats mxfp8,mxfp9",
        "compare x --formats mxfp8 --fail-on sqnr_db<",
        "quantize x --format mxfp8 --scale-rounding flor -o y",
        "training x --recipes mxfp9",
        "dequantize x",
        "formats",
    ]
    heavy = {"numpy", "torch", "rich", "cupy", "matplotlib", "safetensors"}
    program = (
        "import sys; from mxcli.cli.app import run\n"
        f"for line in {lines}:\n    run(line.split()); print('found', line, {heavy} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(), capture_output=True, text=True, check=False
    )
    found = [line for line in done.stdout.splitlines() if line.startswith("found")]
    assert found == [f"found {line} set()" for line in lines]


def test_torch_is_not_imported_for_safetensors(tmp_path: Path) -> None:
    lines = [
        ["inspect", str(SAMPLE)],
        ["report", str(SAMPLE), "--json"],
        ["compare", str(SAMPLE), "--formats", "mxfp8"],
        ["quantize", str(SAMPLE), "--format", "nvfp4", "-o", "out"],
    ]
    program = (
        "import sys; from mxcli.cli.app import run\n"
        f"for line in {lines}:\n    print('found', run(line), 'torch' in sys.modules)"
    )
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, env=environment(), cwd=tmp_path, capture_output=True, text=True, check=False)
    assert [line for line in done.stdout.splitlines() if line.startswith("found")] == ["found 0 False"] * len(lines)


def test_help_is_quick() -> None:
    seconds = []
    for _ in range(3):
        before = os.times()
        assert command("--help").returncode == 0
        after = os.times()
        seconds.append(after.children_user + after.children_system - before.children_user - before.children_system)
    assert min(seconds) < 0.15


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["reprot"], 2, "Did you mean 'report'?"),
        (["report"], 2, "missing argument 'SOURCE'"),
        (["report", SAMPLE, "--formt", "mxfp8"], 2, "or --format"),
        (["report", SAMPLE, "--format", "mxfp9"], 2, "Did you mean mxfp8"),
        (["report", SAMPLE, "--format", "e9m9:e8m0:1x32"], 2, "element 'e9m9'"),
        (["report", SAMPLE, "--scale-rounding", "flor"], 2, "Did you mean floor?"),
        (["report", SAMPLE, "--rounding", "nearest"], 2, "Did you mean nearest-even?"),
        (["report", SAMPLE, "--as", "torcao"], 2, "Did you mean torchao?"),
        (["report", SAMPLE, "--include", "*.qproj"], 2, "matches no tensor. Did you mean *.q_proj"),
        (["report", SAMPLE, "--exclude", "@wieght"], 2, "Did you mean weight?"),
        (["report", SAMPLE, "--sort", "snr_db"], 2, "Did you mean sqnr_db?"),
        (["report", SAMPLE, "--nonfinite", "ignore"], 2, "--nonfinite takes error, saturate, nan-block"),
        (["report", SAMPLE, "--on-indivisible", "skip"], 2, "--on-indivisible takes error, pad, keep"),
        (["report", SAMPLE, "--threads", "0"], 2, "--threads"),
        (["report", SAMPLE, "--device", "tpu"], 2, "--device takes auto, cpu, cuda or cuda:N"),
        (["report", SAMPLE, "--device", "cpu:1"], 2, "--device takes auto, cpu, cuda or cuda:N"),
        (["report", SAMPLE, "--max-memory", "8X"], 2, "--max-memory '8X' is not a size"),
        (["report", SAMPLE, "--device", "cpu", "--max-memory", "1K"], 6, "--max-memory allows 1,024. Use --max-memory"),
        (["report", SAMPLE, "--json", "--csv", "-"], 2, "--json and --csv both write to stdout"),
        (["report", SAMPLE, "extra"], 2, "unexpected extra argument"),
        (["report", f"{SAMPLE}x"], 3, "no such file or directory. Did you mean tiny-llama?"),
        (["report", SAMPLE, "--fail-on", "sqnr_bd<20"], 2, "Did you mean sqnr_db"),
        (["compare", SAMPLE], 2, "missing option '--formats'"),
        (["compare", SAMPLE, "--formats", "mxfp8,mxpf4"], 2, "Did you mean mxfp4"),
        (["compare", SAMPLE, "--formats", "mxfp8,"], 2, "a name is missing; give names separated by single commas"),
        (
            ["compare", SAMPLE, "--formats", "mxfp8", "--scale-roundings", "rceil"],
            2,
            "is one combination. Name another",
        ),
        (
            ["compare", SAMPLE, "--formats", "mxfp8", "--scale-roundings", "rceil,te"],
            2,
            "te serves none of the formats",
        ),
        (["compare", SAMPLE, "--formats", "mxfp8", "--scale-roundings", "flor,rceil"], 2, "Did you mean floor?"),
        (["compare", SAMPLE, "--formats", "mxfp8", "--roundings", "nearest"], 2, "Did you mean nearest-even?"),
        (["compare", SAMPLE, "--formats", "mxfp8", "--by", "layers"], 2, "Did you mean layer?"),
        (
            ["compare", SAMPLE, "--formats", "mxfp8", "--dry-run", "--csv", "-"],
            2,
            "so there is no --csv",
        ),
        (["quantize", SAMPLE, "--format", "nvfp4"], 2, "missing option '-o/--output DIR'"),
        (["quantize", SAMPLE, "-o", "x"], 2, "missing option '--format'"),
        (["quantize", SAMPLE, "--format", "nvfp4", "-o", SAMPLE], 4, "holds the source itself"),
        (["quantize", SAMPLE, "--format", "nvfp4", "--layout", "vllm", "-o", "x"], 2, "unknown layout 'vllm'"),
        (["dequantize", SAMPLE, "-o", "x"], 4, "not quantized"),
        (["dequantize", SAMPLE, "-o", "x", "--dtype", "f8"], 2, "unknown dtype 'F8': BF16, F16, F32, F64"),
        (["formats", "nvpf4"], 2, "Did you mean nvfp4"),
        (["explain", "rceill"], 2, "Did you mean rceil"),
    ],
)
def test_an_error_is_one_sentence_with_its_code(
    mxcli: Callable[..., Any], arguments: list[object], code: int, words: str
) -> None:
    outcome = mxcli(*arguments)
    assert outcome.code == code
    assert outcome.out == ""
    assert outcome.err.startswith("error: ")
    assert words in outcome.err
    assert outcome.err.count("\n") == 1
    assert "Traceback" not in outcome.err


def test_all_refusals_come_at_once(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    code, out, err = mxcli("report", SAMPLE, "--format", "e4m3:e8m0:1x100", "--on-indivisible", "error")
    assert (code, out) == (4, "")
    assert "28 problems" in err
    assert "and 18 more" in err


@pytest.mark.parametrize(
    ("raised", "code", "words"),
    [
        (ZeroDivisionError("division by zero"), 1, "ZeroDivisionError: division by zero. This is a bug"),
        (LimitError("saturated_percent is 3"), 5, "saturated_percent is 3"),
        (MemoryError(), 6, "out of memory"),
        (OSError(errno.ENOSPC, "No space left on device", "/x"), 6, "/x: No space left on device"),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), 3, "/x: Permission denied"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_every_exception_has_a_code(
    mxcli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, raised: BaseException, code: int, words: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise raised

    monkeypatch.setattr("mxcli.files.checkpoint.open_checkpoint", fail)
    outcome = mxcli("inspect", SAMPLE)
    assert (outcome.code, outcome.out) == (code, "")
    assert words in outcome.err
    assert "Traceback" not in outcome.err
    if code == 1:
        assert "Traceback" in mxcli("inspect", SAMPLE, "--debug").err
        monkeypatch.setenv("MXCLI_DEBUG", "1")
        assert "Traceback" in mxcli("inspect", SAMPLE).err


@pytest.mark.parametrize(
    "arguments",
    [
        ["report", SAMPLE, "--jsonl"],
        pytest.param(["report", SAMPLE], marks=pytest.mark.slow),
        pytest.param(["inspect", SAMPLE], marks=pytest.mark.slow),
        pytest.param(["compare", SAMPLE, "--formats", "mxfp8", "--jsonl"], marks=pytest.mark.slow),
        pytest.param(["explain"], marks=pytest.mark.slow),
    ],
)
def test_a_closed_pipe_is_silent(arguments: list[object]) -> None:
    words = [
        sys.executable,
        "-m",
        "mxcli",
        *map(str, arguments),
        *(["-q"] if "report" in arguments or "compare" in arguments else []),
    ]
    with subprocess.Popen(words, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_on_stdout() -> None:
    with Path("/dev/full").open("w") as full:
        words = [sys.executable, "-m", "mxcli", "formats"]
        done = subprocess.run(words, env=environment(), stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 6
    assert done.stderr == "error: standard output cannot be written: No space left on device.\n"
    done = command("report", SAMPLE, "-q", "--csv", "/dev/full")
    assert (done.returncode, done.stderr) == (6, "error: /dev/full: cannot be written: No space left on device.\n")


def test_interrupted_report_still_has_its_table(tmp_path: Path) -> None:
    source, arrays = many_tensors(tmp_path, 5_000), tmp_path / "blocks.safetensors"
    words = [sys.executable, "-m", "mxcli", "report", str(source), "--jsonl", "--per-block", str(arrays)]
    with subprocess.Popen(
        words,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background job, such as a test run may be, hands on that interrupts are ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        first = process.stdout.readline()
        time.sleep(0.3)  # by now it waits for a reader, in the middle of a line
        process.send_signal(signal.SIGINT)
        out, err = process.stdout.read(), process.stderr.read()
    assert process.returncode == 130
    assert strict_json(first)["decision"] == "quantized"
    assert all(strict_json(line) for line in out.splitlines())
    assert len(out.splitlines()) < 4_500
    assert err.endswith("interrupted\n")
    assert [path.name for path in tmp_path.iterdir()] == [source.name]


@pytest.mark.parametrize(
    "arguments",
    [
        ["report", SAMPLE, "--top", "3"],
        ["compare", SAMPLE, "--formats", "mxfp8,nvfp4", "--top", "3"],
        ["inspect", SAMPLE],
        ["formats"],
        ["doctor"],
    ],
)
@pytest.mark.parametrize(
    "env", [{}, {"NO_COLOR": "1"}, {"TERM": "dumb"}, {"LC_ALL": "C"}, {"COLUMNS": "40"}, {"COLUMNS": "0"}]
)
def test_no_control_characters_in_a_pipe(
    mxcli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, arguments: list[object], env: dict[str, str]
) -> None:
    for key, value in env.items():
        monkeypatch.setenv(key, value)
    code, out, err = mxcli(*arguments)
    assert code == 0
    assert all(character.isprintable() or character == "\n" for character in out + err)
    if env.get("LC_ALL") == "C":
        assert (out + err).isascii()


def test_a_process_in_a_plain_locale_writes_ascii(tmp_path: Path) -> None:
    done = command("report", odd_checkpoint(tmp_path), env={"LC_ALL": "C"})
    assert done.returncode == 0
    assert (done.stdout + done.stderr).isascii()
    assert "k\\xf6.\\u5c42.weight" in done.stdout
    assert all(character.isprintable() or character == "\n" for character in done.stdout + done.stderr)


@pytest.mark.parametrize("arguments", [["report", CAPTURES, "--top", "9"], ["inspect", CAPTURES], ["report", SAMPLE]])
def test_lines_follow_the_width(
    mxcli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, arguments: list[object]
) -> None:
    unlimited = mxcli(*arguments).out
    monkeypatch.setenv("COLUMNS", "64")
    narrow = mxcli(*arguments).out.splitlines()
    assert max(map(len, narrow)) <= 64
    wide = mxcli(*arguments, "--wide").out
    assert wide == unlimited
    assert "\nmodel.layers.3." in wide


def test_hostile_names_are_shown_escaped(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    source = odd_checkpoint(tmp_path)
    for verb in ("inspect", "report"):
        code, out, err = mxcli(verb, source)
        assert code == 0
        assert "evil\\x1b[31m.weight" in out
        assert "\x1b" not in out + err
        assert "kö.层.weight" in out


@pytest.mark.parametrize("form", [["--json", "r.json"], ["--jsonl", "r.jsonl"], ["--csv", "r.csv"]])
def test_files_are_not_replaced_unasked(
    mxcli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    source = one_tensor(tmp_path, 1.0)
    assert mxcli("report", source, *form).code == 0
    first = Path(form[1]).read_bytes()
    Path(form[1]).write_text("mine")
    code, out, err = mxcli("report", source, *form)
    assert (code, out) == (4, "")
    assert "use --force to replace it" in err
    assert Path(form[1]).read_text() == "mine"
    assert mxcli("report", source, *form, "--force").code == 0
    assert Path(form[1]).read_bytes() == first
    assert mxcli("report", source, form[0], f"missing/{form[1]}").code == 3


@pytest.mark.skipif(sys.platform == "win32", reason="needs pseudo-terminals")
@pytest.mark.parametrize(
    ("env", "drawn"),
    [({"TERM": "xterm"}, True), pytest.param({"TERM": "dumb"}, False, marks=pytest.mark.slow)],
)
def test_a_terminal_gets_a_bar_and_stdout_stays_clean(env: dict[str, str], drawn: bool, tmp_path: Path) -> None:
    import pty

    source = odd_checkpoint(tmp_path)
    terminal, end = pty.openpty()
    words = [sys.executable, "-m", "mxcli", "report", str(source)]
    done = subprocess.run(words, env=environment(**env), stdout=subprocess.PIPE, stderr=end, text=True, check=False)
    os.close(end)
    shown = b""
    with contextlib.suppress(OSError):
        while chunk := os.read(terminal, 65536):
            shown += chunk
    os.close(terminal)
    assert done.returncode == 0
    assert done.stdout == command("report", source).stdout
    assert (b"\x1b[" in shown) == drawn
    assert b"evil\x1b" not in shown


def test_names_complete(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def completed(*words: str) -> list[str]:
        for key, value in completion_of(*words).items():
            monkeypatch.setenv(key, value)
        with pytest.raises(SystemExit):
            run([])
        return capsys.readouterr().out.split()

    assert completed("mxcli", "report", "--format", "nv") == ["nvfp4", "nvfp4_2d"]
    assert completed("mxcli", "report", "--as", "modelopt") == ["modelopt", "modelopt-bf16"]
    assert completed("mxcli", "report", "--sort", "cos") == ["cosine"]
    assert completed("mxcli", "compare", "--formats", "mxfp8,nv") == ["mxfp8,nvfp4", "mxfp8,nvfp4_2d"]
    assert completed("mxcli", "training", "--recipes", "mxfp8,al") == ["mxfp8,all"]
    assert completed("mxcli", "explain", "rc") == ["rceil"]
    assert completed("mxcli", "quantize", "--layout", "comp") == ["compressed-tensors"]


def completion_of(*words: str) -> dict[str, str]:
    """What a shell sets to complete the last word."""
    return {"_MXCLI_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}


def test_names_complete_in_a_shell() -> None:
    assert command(env=completion_of("mxcli", "report", "--format", "nv")).stdout.split() == ["nvfp4", "nvfp4_2d"]


def test_progress_is_plain_and_seldom_in_a_pipe(
    mxcli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert mxcli("report", SAMPLE, "-q").err == ""
    monkeypatch.setattr("mxcli.cli.progress.SECONDS_BETWEEN_LINES", 0.0)
    lines = [line for line in mxcli("report", SAMPLE).err.splitlines() if line.startswith("report: ")]
    assert len(lines) == 27
    assert " of 1.57 MB, " in lines[20]
    assert "/s, " in lines[20]
    assert " left, model.layers." in lines[20]
