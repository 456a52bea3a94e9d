"""Interruption of a large quantization: a command killed again and again (`python tests/interruption/check.py`).

A synthetic checkpoint (--size 20G) is quantized once undisturbed, once with a SIGKILL at each of --kills random points,
resumed every time, and once by two machines of which one is killed and one interrupted; all files are compared. Prints
times next to those of `cp` and of measuring alone, and the peak memory next to the figure of --dry-run; exits 1 if
anything differs. Needs room for two copies of the source and half of a third.

With --storm N, N signals (KILL, TERM, INT, HUP) hit quantize, dequantize, merge and capture instead, up to three in a
row, at random moments, sometimes with a bit of an unfinished file flipped in between. Each run is then resumed: it ends
with the same bytes, or, after a flipped bit, refuses, and a new start without the unfinished files has them. Anything
else is WRONG. Prints the counts.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import mxcli as tested
from mxcli.cli.machine import memory_size

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(tested.__file__).parents[1])}
COLUMNS = 4096
NORM = "model.layers.{}.input_layernorm.weight"
WEIGHTS = tuple(f"self_attn.{each}_proj" for each in "qkvo") + tuple(
    f"mlp.{each}_proj" for each in ("gate", "up", "down")
)
CONFIG = {"model_type": "made_up", "dtype": "bfloat16"}
"""Of no model: the shapes are those that files of a size need."""
POLL_SECONDS = 0.002
MIB = 1 << 20
RSS_UNIT = 1 if sys.platform == "darwin" else 1 << 10


@dataclass(frozen=True)
class Ended:
    """The end of a command: its exit code (negative: the signal), seconds, and peak resident memory in bytes (0: not
    measured)."""

    code: int
    seconds: float
    peak_bytes: int


@dataclass(frozen=True)
class Line:
    """A line of the table: the check, its outcome, and whether that is right."""

    what: str
    outcome: str
    right: bool = True


def make_checkpoint(folder: Path, size: int, tensor_bytes: int, shards: int) -> None:
    """Write a checkpoint of about `size` bytes in `shards` files: random BF16, different values in every tensor."""
    rows = max(16, tensor_bytes // (2 * COLUMNS) // 16 * 16)
    tile = (np.random.default_rng(0).standard_normal((rows, COLUMNS), np.float32).view(np.uint32) >> 16).astype(
        np.uint16
    )
    layers = max(1, shards // len(WEIGHTS), round(size / (len(WEIGHTS) * tile.nbytes)))
    count = layers * len(WEIGHTS)
    names = [f"model.layers.{at // len(WEIGHTS)}.{WEIGHTS[at % len(WEIGHTS)]}.weight" for at in range(count)]
    weight_map: dict[str, str] = {}
    folder.mkdir(parents=True)
    for shard in range(shards):
        mine = range(shard * count // shards, (shard + 1) * count // shards)
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        norms = sorted({NORM.format(at // len(WEIGHTS)) for at in mine if at % len(WEIGHTS) == 0})
        with (folder / file).open("wb") as out:
            out.write(_header([(names[at], [rows, COLUMNS]) for at in mine] + [(norm, [COLUMNS]) for norm in norms]))
            for at in mine:
                out.write(np.roll(tile, 1 + at % (rows - 1), axis=0).data)
            for _ in norms:
                out.write(tile[0].data)
        weight_map |= dict.fromkeys([*(names[at] for at in mine), *norms], file)
    index = {"metadata": {"total_size": count * tile.nbytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text("{}")


def _header(tensors: Sequence[tuple[str, list[int]]]) -> bytes:
    described, begin = {}, 0
    for name, shape in tensors:
        end = begin + 2 * int(np.prod(shape))
        described[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(described).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


# A separate process reports the peak memory: the system's counter starts with that of the parent process.
MEASURED = """
import resource, subprocess, sys
code = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL).returncode
sys.stdout.write(str(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss))
sys.exit(code)
"""


def mxcli(*words: object) -> Ended:
    """Run a command to its end."""
    began = time.monotonic()
    command = [sys.executable, "-m", "mxcli", *map(str, words)]
    measured = [sys.executable, "-S", "-c", MEASURED, *command]
    done = subprocess.run(measured, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stderr, file=sys.stderr)
    return Ended(done.returncode, time.monotonic() - began, int(done.stdout) * RSS_UNIT)


def signalled(*words: object, sent: signal.Signals, folder: Path, size: int) -> Ended:
    """Run a command and send it a signal once the partial files of a directory occupy `size` bytes."""
    began = time.monotonic()
    command = [sys.executable, "-m", "mxcli", *map(str, words)]
    nowhere = subprocess.DEVNULL
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=nowhere, stderr=nowhere) as process:
        while process.poll() is None:
            if occupied(folder) >= size:
                process.send_signal(sent)
                break
            time.sleep(POLL_SECONDS)
    return Ended(process.returncode, time.monotonic() - began, 0)


def occupied(folder: Path) -> int:
    """Return the bytes that partial files occupy."""
    total = 0
    for path in folder.glob("model*.partial"):
        try:
            total += path.stat().st_blocks * 512
        except FileNotFoundError:  # it was just renamed
            continue
    return total


def digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file; of the record without the command, which differs."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.name == "mxcli.json":
            record = {**json.loads(path.read_bytes()), "command": None}
            found[path.name] = hashlib.sha256(json.dumps(record).encode()).hexdigest()
        elif path.is_file():
            with path.open("rb") as file:
                found[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def killed_run(
    words: Sequence[object], folder: Path, points: Sequence[int], expected: dict[str, str]
) -> Iterator[Line]:
    """Run with a SIGKILL at each point, in bytes written, and resume until complete."""
    for at, later in enumerate(sorted(points), 1):
        # Later than the previous kill, so that each has work to lose and work to keep.
        point = max(later, occupied(folder) + max(points) // 50)
        ended = signalled(*words, "-o", folder, "--resume", sent=signal.SIGKILL, folder=folder, size=point)
        final = {path.name for path in folder.iterdir()} & set(expected)
        if ended.code == 0:
            yield Line(f"kill {at}", f"it was complete before {size_text(point)} were written")
            break
        yield Line(
            f"kill {at}",
            f"at {size_text(point)} of output, after {ended.seconds:.1f} s; {len(final)} files under final names",
            ended.code == -signal.SIGKILL and not final,
        )
    ended = mxcli(*words, "-o", folder, "--resume") if not (folder / "mxcli.json").exists() else ended
    same = ended.code == 0 and digests(folder) == expected
    yield Line("resumed", f"{ended.seconds:.1f} s; {'every byte the same' if same else 'DIFFERENT BYTES'}", same)


def shared_run(words: Sequence[object], folder: Path, point: int, expected: dict[str, str]) -> Iterator[Line]:
    """Run two shares, one killed and one interrupted, resume both and merge them."""
    for number, sent in ((1, signal.SIGKILL), (2, signal.SIGINT)):
        share = [*words, "-o", folder, "--shard-range", f"{number}/2", "--resume"]
        before = occupied(folder)
        ended = signalled(*share, sent=sent, folder=folder, size=before + point)
        resumed = mxcli(*share)
        right = ended.code in (0, 130 if sent == signal.SIGINT else -sent) and resumed.code == 0
        yield Line(f"share {number}/2", f"{sent.name}: exit {ended.code}; resumed: exit {resumed.code}", right)
    merged = mxcli("merge", folder)
    same = merged.code == 0 and digests(folder) == expected
    yield Line("merge", f"{merged.seconds:.1f} s; {'every byte the same' if same else 'DIFFERENT BYTES'}", same)


def run(options: argparse.Namespace, folder: Path) -> Iterator[Line]:
    """Run all checks in turn."""
    source, whole, copy = folder / "source", folder / "whole", folder / "copy"
    make_checkpoint(source, memory_size(options.size), memory_size(options.tensor_size), options.shards)
    size = sum(path.stat().st_size for path in source.iterdir())
    words = ["quantize", source, "--format", options.format, "--device", "cpu", "-q"]
    yield Line(
        "source", f"{size_text(size)} in {options.shards} files, {size_text(memory_size(options.tensor_size))} a tensor"
    )
    planned = folder / "plan.json"
    mxcli(*words, "-o", whole, "--dry-run", "--json", planned)
    need = json.loads(planned.read_text())["peak_memory_bytes"]
    if not options.short:
        drop_cached(source)
        began = time.monotonic()
        subprocess.run(["cp", "-r", source, copy], check=True)
        os.sync()
        yield Line("cp, synced", rate(size, time.monotonic() - began))
        shutil.rmtree(copy)
        drop_cached(source)
        measured = mxcli("report", source, "--format", options.format, "--device", "cpu", "-q")
        yield Line("report (reads and measures)", rate(size, measured.seconds), measured.code == 0)
        drop_cached(source)
    ended = mxcli(*words, "-o", whole, "--max-memory", need)
    yield Line("quantize", rate(size, ended.seconds), ended.code == 0)
    yield Line(
        "peak memory",
        f"{size_text(ended.peak_bytes)} of {size_text(need)} according to --dry-run",
        ended.peak_bytes <= need,
    )
    expected = digests(whole)
    output = sum(path.stat().st_size for path in whole.glob("*.safetensors"))
    shutil.rmtree(whole)
    random.seed(options.seed)
    points = [round(output * random.uniform(0.02, 0.98)) for _ in range(options.kills)]
    yield from killed_run(words, folder / "killed", points, expected)
    shutil.rmtree(folder / "killed")
    if not options.short:
        yield from shared_run(words, folder / "shared", round(output * random.uniform(0.05, 0.45)), expected)


SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
FLIPS = 1 / 3
"""The share of interruptions after which a bit is flipped."""
VERBS = ("quantize", "dequantize", "merge", "capture")
SAMPLE = Path(__file__).parents[2] / "samples" / "tiny-llama"
# Tensors are synced and logged one by one, as large ones are, so that an interruption of a small run leaves work.
OFTEN = """
import runpy, sys
try:
    from mxcli.files import output_dir
except KeyboardInterrupt:
    sys.exit(130)
output_dir.SYNC_BYTES = 1
sys.argv[0] = "mxcli"
runpy.run_module("mxcli", run_name="__main__")
"""


@dataclass(frozen=True)
class Storm:
    """A command to interrupt: its name, its words without the output, how its directory is prepared, and how it is
    resumed."""

    verb: str
    words: tuple[object, ...]
    prepare: Callable[[Path], None]
    resume: tuple[str, ...] = ("--resume",)
    names_output: bool = True

    def line(self, folder: Path, *more: str) -> list[object]:
        """Return the whole command."""
        return [*self.words, *(["-o", folder] if self.names_output else [folder]), *more]


def storms(work: Path, source: Path, format: str, verbs: Sequence[str]) -> list[Storm]:
    """Return the commands, with what they need."""
    quantize = ("quantize", source, "--format", format, "--device", "cpu", "-q")
    quantized, shares = work / "quantized", work / "shares"
    mxcli(*quantize, "-o", quantized)
    for number in (1, 2):
        mxcli(*quantize, "-o", shares, "--shard-range", f"{number}/2")
    (work / "text").write_text("a text that the model reads in windows " * 40)
    few = ("--steps", 8, "--tokens", 16, "--device", "cpu", "--threads", 1)
    capture = ("capture", SAMPLE, "--text", work / "text", *few, "-q")
    found = [
        Storm("quantize", quantize, lambda folder: None),
        Storm("dequantize", ("dequantize", quantized, "--device", "cpu", "-q"), lambda folder: None),
        Storm("merge", ("merge",), lambda folder: copied(shares, folder), (), names_output=False),
        Storm("capture", capture, lambda folder: None),
    ]
    return [storm for storm in found if storm.verb in verbs]


def copied(shares: Path, folder: Path) -> None:
    """Copy the shares of an output."""
    shutil.copytree(shares, folder)


def hit(words: Sequence[object], sent: signal.Signals, after: float, *, often: bool) -> tuple[int, bool]:
    """Run a command, send it a signal after some seconds, and return its exit code, and whether it still ran."""
    program = ["-c", OFTEN] if often else ["-m", "mxcli"]
    nowhere = subprocess.DEVNULL
    command = [sys.executable, *program, *map(str, words)]
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=nowhere, stderr=nowhere) as process:
        try:
            return process.wait(after), False
        except subprocess.TimeoutExpired:
            process.send_signal(sent)
        return process.wait(), True


def flip(folder: Path, draw: random.Random) -> bool:
    """Flip a bit of one unfinished file; return whether there is one."""
    partial = [path for path in sorted(folder.rglob("*.partial")) if path.is_file() and path.stat().st_size]
    if not partial:
        return False
    path = draw.choice(partial)
    with path.open("r+b") as file:
        at = draw.randrange(path.stat().st_size)
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << draw.randrange(8)]))
    return True


def is_logged(folder: Path) -> bool:
    """Return whether anything is there that a resumed run keeps: a tensor in a log, or a finished step."""
    logs = [path.read_bytes() for path in folder.glob("mxcli.progress*.partial")]
    return any(b'{"entries":' in log for log in logs) or any(folder.glob("step-*.safetensors"))


def interrupted(
    storm: Storm, folder: Path, seconds: float, expected: dict[str, str], draw: random.Random, counts: Counter[str]
) -> Iterator[str]:
    """Interrupt a command one to three times, resume it, and yield everything that is wrong."""
    storm.prepare(folder)
    flipped, often = False, draw.random() < 0.75
    for at in range(draw.choice((1, 1, 2, 3))):
        sent, after = draw.choice(SIGNALS), seconds * draw.uniform(0.3, 1.0)
        code, ran = hit(storm.line(folder, *(storm.resume if at else ())), sent, after, often=often)
        counts[f"{sent.name} while it ran: exit code {code}" if ran else "ended before the signal"] += 1
        counts["signals"] += ran
        counts["of these, with work to resume"] += ran and is_logged(folder)
        if code not in (0, 130, -sent) and not (flipped and code in (3, 4)):
            yield f"exit code {code} after {sent.name}"
        if folder.is_dir() and draw.random() < FLIPS and flip(folder, draw):
            flipped = True
            counts["bits flipped"] += 1
    done = plain(storm.line(folder, *storm.resume))
    how = " after a flipped bit" if flipped else ""
    if done.returncode in (3, 4) and flipped and done.stderr.startswith("error: "):
        counts[f"ended: refused{how}"] += 1
        if storm.verb == "merge":
            return
        for path in folder.rglob("*.partial"):  # as the refusal says
            path.unlink()
        done, how = plain(storm.line(folder)), f"{how}, a refusal, and a new start"
    if done.returncode != 0:
        yield f"exit code {done.returncode}: {done.stderr}"
    elif digests(folder) != expected:
        yield f"other bytes{how}"
    else:
        counts[f"ended: the same bytes{how}"] += 1


def plain(words: Sequence[object]) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    command = [sys.executable, "-m", "mxcli", *map(str, words)]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)


def storm_run(options: argparse.Namespace, work: Path) -> Iterator[Line]:
    """Interrupt all commands in turn until each has had its part of the signals."""
    source = work / "source"
    make_checkpoint(source, memory_size(options.size), memory_size(options.tensor_size), options.shards)
    draw = random.Random(options.seed)
    all_storms = storms(work, source, options.format, options.verbs.split(","))
    for storm in all_storms:
        whole, folder, counts = work / f"whole-{storm.verb}", work / "storm", Counter[str]()
        storm.prepare(whole)
        ended = mxcli(*storm.line(whole))
        yield Line(storm.verb, f"{ended.seconds:.1f} s undisturbed", ended.code == 0)
        expected = digests(whole)
        while counts["signals"] * len(all_storms) < options.storm:
            for wrong in interrupted(storm, folder, ended.seconds, expected, draw, counts):
                yield Line(storm.verb, wrong, right=False)
            shutil.rmtree(folder, ignore_errors=True)
        for what, count in sorted(counts.items()):
            yield Line(storm.verb, f"{count:4} {what}")


def drop_cached(folder: Path) -> None:
    """Drop files from the page cache, as far as the system allows."""
    os.sync()
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def rate(size: int, seconds: float) -> str:
    """Return seconds and throughput."""
    return f"{seconds:.1f} s, {size / seconds / 1e6:,.0f} MB/s of the source"


def size_text(size: int) -> str:
    """Return bytes in MiB."""
    return f"{size / MIB:,.1f} MiB"


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--size", default="1G", help="bytes of the checkpoint, such as 20G")
    parser.add_argument("--tensor-size", default="32M", help="bytes of a weight")
    parser.add_argument("--shards", type=int, default=4, help="files of the checkpoint")
    parser.add_argument("--format", default="nvfp4")
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0, help="seed of the kill points")
    parser.add_argument("--folder", help="directory to work in")
    parser.add_argument("--storm", type=int, default=0, help="signals to send to all commands, such as 300")
    parser.add_argument("--verbs", default=",".join(VERBS), help="the commands that --storm interrupts")
    parser.add_argument("--short", action="store_true", help="only the killed run")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 if all went right."""
    parsed = options(arguments)
    # A shell's background commands ignore SIGINT, and so would the commands started here.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    wrong = 0
    with tempfile.TemporaryDirectory(dir=parsed.folder, prefix="mxcli-interruption-") as folder:
        for line in (storm_run if parsed.storm else run)(parsed, Path(folder)):
            wrong += not line.right
            print(f"{'ok   ' if line.right else 'WRONG'}  {line.what:28} {line.outcome}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
