"""Train the sample checkpoint and capture the activations and gradients that go with it.

Writes, under the output directory:

* ``tiny-llama/``: a byte-level Llama-shaped language model (token id = byte value) in BF16;
* ``tiny-llama-captures.safetensors``: for every linear layer, its input and the gradient of the loss
  with respect to its output, for one batch of training text run through that checkpoint.

The training text is the English reference text inside the running CPython (``pydoc_data.topics``); it is
read from the interpreter and never written. One machine, one set of versions and one number of steps
give the same bytes on every run.
"""

import argparse
import hashlib
import json
import math
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

MODEL_NAME = "tiny-llama"
CAPTURES_FILE = f"{MODEL_NAME}-captures.safetensors"
CAPTURE_KEY = "mxcli.capture"
CAPTURE_VERSION = 1

SEED = 0
THREADS = 2
STEPS = 1100
WARMUP_STEPS = 100
PEAK_LEARNING_RATE = 3e-3
BATCH = 8
CONTEXT = 128
CAPTURE_TOKENS = 64
HELD_OUT_FRACTION = 0.05
REPORT_EVERY = 100


@dataclass(frozen=True)
class Corpus:
    """Token ids of the training text and of the text held out from it (1-D, int64, one id per byte)."""

    train: Tensor
    held_out: Tensor
    sha256: str


@dataclass(frozen=True)
class Capture:
    """What one forward and backward pass left at the linear layers, and where its batch came from.

    ``tensors`` maps ``<module>.activation`` and ``<module>.gradient`` to [tokens, features] in BF16;
    ``loss`` is in nats per byte; ``offset`` is the batch's first byte in the training text.
    """

    tensors: dict[str, Tensor]
    loss: float
    offset: int


def load_corpus() -> Corpus:
    """Return CPython's reference text, each distinct paragraph once, with its tail held out.

    Topics quote one another, so repeated paragraphs are dropped before the split; otherwise the
    held-out figure would partly measure text seen in training.
    """
    text = "\n\n".join(topics[name] for name in sorted(topics))
    data = "\n\n".join(dict.fromkeys(text.split("\n\n"))).encode()
    ids = torch.tensor(list(data), dtype=torch.int64)
    split = len(ids) - int(len(ids) * HELD_OUT_FRACTION)
    return Corpus(ids[:split], ids[split:], hashlib.sha256(data).hexdigest())


def new_model() -> LlamaForCausalLM:
    """Return a freshly initialised FP32 model; every weight's last dimension is a multiple of 128."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def batch_loss(model: LlamaForCausalLM, windows: Tensor) -> Tensor:
    """Return the mean cross-entropy, in nats, of predicting each window's bytes after the first.

    ``windows`` is [batch, length + 1]: the model reads all bytes but the last of each window.
    """
    logits = model(input_ids=windows[:, :-1]).logits
    return cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def bits_per_byte(model: LlamaForCausalLM, ids: Tensor) -> float:
    """Return the model's mean loss in bits over ``ids`` cut into consecutive windows (a tail is dropped)."""
    windows = ids.unfold(0, CONTEXT + 1, CONTEXT)
    total = 0.0
    with torch.no_grad():
        for chunk in windows.split(BATCH):
            total += batch_loss(model, chunk).item() * len(chunk)
    return total / len(windows) / math.log(2)


def draw_offsets(ids: Tensor, count: int, length: int, generator: torch.Generator) -> Tensor:
    """Return ``count`` random starts of windows of ``length + 1`` bytes that lie within ``ids``."""
    return torch.randint(len(ids) - length, (count,), generator=generator)


def windows_at(ids: Tensor, offsets: Tensor, length: int) -> Tensor:
    """Return the windows of ``length + 1`` bytes that start at ``offsets``: [len(offsets), length + 1]."""
    return ids[offsets[:, None] + torch.arange(length + 1)]


def learning_rate_factor(step: int, steps: int) -> float:
    """Return the fraction of the peak learning rate at ``step``: a cosine to zero under a linear warm-up."""
    warmup = min(1.0, (step + 1) / WARMUP_STEPS)
    return warmup * 0.5 * (1 + math.cos(math.pi * step / steps))


def train(model: LlamaForCausalLM, ids: Tensor, steps: int, generator: torch.Generator) -> None:
    """Train ``model`` in place for ``steps`` AdamW steps on random windows of ``ids``, reporting the loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, steps))
    for step in range(1, steps + 1):
        loss = batch_loss(model, windows_at(ids, draw_offsets(ids, BATCH, CONTEXT, generator), CONTEXT))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % REPORT_EVERY == 0:
            print(f"step {step}: batch loss {loss.item() / math.log(2):.3f} bits per byte", flush=True)


@contextmanager
def recorded_linears(model: nn.Module) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """Yield a dict that fills, at each forward pass, with every linear layer's (input, output).

    The outputs keep their gradients, so a backward pass leaves those in ``output.grad``.
    """
    records: dict[str, tuple[Tensor, Tensor]] = {}

    def record(name: str, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        output.retain_grad()
        records[name] = (inputs[0].detach(), output)

    linears = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    handles = [
        module.register_forward_hook(lambda _, inputs, output, name=name: record(name, inputs, output))
        for name, module in linears
    ]
    try:
        yield records
    finally:
        for handle in handles:
            handle.remove()


def stored(tensor: Tensor) -> Tensor:
    """Return ``tensor`` as an independent [tokens, features] copy in BF16."""
    return tensor.flatten(0, -2).to(torch.bfloat16, copy=True)


def capture(model: LlamaForCausalLM, ids: Tensor, generator: torch.Generator) -> Capture:
    """Run one batch of ``CAPTURE_TOKENS`` bytes of ``ids`` forward and backward; keep what the layers saw.

    The loss is the mean over those bytes and is not scaled; nothing is clipped.
    """
    offsets = draw_offsets(ids, 1, CAPTURE_TOKENS, generator)
    with recorded_linears(model) as records:
        loss = batch_loss(model, windows_at(ids, offsets, CAPTURE_TOKENS))
        loss.backward()
    tensors: dict[str, Tensor] = {}
    for name, (activation, output) in records.items():
        assert output.grad is not None, f"no gradient reached {name}"
        tensors[f"{name}.activation"] = stored(activation)
        tensors[f"{name}.gradient"] = stored(output.grad)
    return Capture(tensors, loss.item(), int(offsets))


def capture_metadata(captured: Capture, corpus: Corpus, steps: int) -> str:
    """Return the JSON text that describes ``captured`` to its readers (see samples/README.md)."""
    entries = {}
    for name, tensor in captured.tensors.items():
        layer, role = name.rsplit(".", 1)
        entries[name] = {"role": role, "layer": layer, "axis": "row", "tokens": len(tensor), "step": steps}
    document = {
        "version": CAPTURE_VERSION,
        "model": MODEL_NAME,
        "loss": {"kind": "mean cross-entropy over the tokens", "unit": "nats", "value": captured.loss},
        "gradient_scale": 1.0,
        "compute_dtype": "float32",
        "text": {"sha256": corpus.sha256, "offset": captured.offset},
        "tensors": entries,
    }
    return json.dumps(document, sort_keys=True)


@contextmanager
def replaced_on_exit(target: Path) -> Iterator[Path]:
    """Yield an empty directory inside ``target``; on success move the files written there into ``target``.

    Each file appears under its final name complete and readable by all, or not at all; if the body
    raises, none does.
    """
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target, prefix=".tmp-") as name:
        scratch = Path(name)
        yield scratch
        for path in sorted(scratch.iterdir()):
            path.chmod(0o644)
            os.replace(path, target / path.name)


def write_model(model: LlamaForCausalLM, directory: Path) -> None:
    """Write the checkpoint (weights, config, generation config) to ``directory``."""
    with replaced_on_exit(directory) as scratch:
        model.save_pretrained(scratch)


def write_captures(captured: Capture, metadata: str, directory: Path) -> None:
    """Write the capture file into ``directory``, its description under ``CAPTURE_KEY``."""
    with replaced_on_exit(directory) as scratch:
        save_file(captured.tensors, scratch / CAPTURES_FILE, metadata={CAPTURE_KEY: metadata})


def report_loss(moment: str, model: LlamaForCausalLM, corpus: Corpus) -> None:
    """Print the bits per byte on the held-out text and on as much training text."""
    seen = bits_per_byte(model, corpus.train[: len(corpus.held_out)])
    held_out = bits_per_byte(model, corpus.held_out)
    print(f"{moment}: {seen:.3f} bits per byte on training text, {held_out:.3f} held out", flush=True)


def report_files(paths: list[Path]) -> None:
    """Print each file's size and SHA-256."""
    for path in paths:
        data = path.read_bytes()
        print(f"{path.name}: {len(data)} bytes, sha256 {hashlib.sha256(data).hexdigest()}")


def make_sample(out: Path, steps: int) -> None:
    """Train for ``steps`` steps, write the checkpoint in BF16, and capture from it as read back."""
    torch.set_num_threads(THREADS)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(SEED)
    generator = torch.Generator().manual_seed(SEED)
    corpus = load_corpus()
    model = new_model()
    print(f"{model.num_parameters()} parameters; text: {len(corpus.train)} + {len(corpus.held_out)} bytes")

    report_loss("before training", model, corpus)
    start = time.monotonic()
    train(model, corpus.train, steps, generator)
    print(f"{steps} steps in {time.monotonic() - start:.0f} s")
    write_model(model.to(torch.bfloat16), out / MODEL_NAME)

    checkpoint = LlamaForCausalLM.from_pretrained(out / MODEL_NAME, dtype=torch.float32)
    report_loss("after training, weights in BF16", checkpoint, corpus)
    captured = capture(checkpoint, corpus.train, generator)
    write_captures(captured, capture_metadata(captured, corpus, steps), out)
    report_files([*sorted((out / MODEL_NAME).iterdir()), out / CAPTURES_FILE])


def main() -> None:
    """Parse the command line and make the sample."""
    parser = argparse.ArgumentParser(description="Train the sample checkpoint and capture its tensors.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="directory to write to")
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps (default: %(default)s)")
    arguments = parser.parse_args()
    make_sample(arguments.out, arguments.steps)


if __name__ == "__main__":
    main()
