"""The Engine row: a program that loads checkpoints, with the version that its rules are of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mxcli.errors import UsageError, did_you_mean, printable


@dataclass(frozen=True, slots=True)
class Engine:
    """A loader: its name on the command line, its own spelling, and the version that its rules are of ("": rules of it
    are of its documents, without a version). `of_diffusion`: it loads models of diffusers only, or (False) all others
    only. `joins`: it joins fused sets into one matrix."""

    name: str
    title: str
    version: str = ""
    aliases: tuple[str, ...] = ()
    of_diffusion: bool | None = None
    joins: bool = False

    def __str__(self) -> str:
        return f"{self.title} {self.version}".rstrip()


ENGINES: dict[str, Engine] = {
    engine.name: engine
    for engine in (
        Engine("vllm", "vLLM", "0.33.0", joins=True),
        Engine("sglang", "SGLang", "0.5.23", aliases=("sgl",), joins=True),
        Engine("transformers", "transformers", "5.24.0", aliases=("hf",), of_diffusion=False),
        Engine("tensorrt-llm", "TensorRT-LLM", aliases=("trtllm", "trt-llm", "tensorrt"), joins=True),
        Engine("llama.cpp", "llama.cpp", "b11549", aliases=("llamacpp", "llama-cpp")),
        Engine("mlx", "mlx-lm", "0.32.2", aliases=("mlx-lm",)),
        Engine("torchao", "torchao", "0.18.0", aliases=("ao",)),
        Engine("comfyui", "ComfyUI", aliases=("comfy",)),
        Engine("diffusers", "diffusers", "0.42.1", of_diffusion=True),
    )
}
_BY_NAME = {name: engine for engine in ENGINES.values() for name in (engine.name, *engine.aliases)}


def find_engine(name: str) -> Engine:
    """Return the engine called `name`. Raises UsageError for an unknown name."""
    engine = _BY_NAME.get(name.strip().lower())
    if engine is None:
        raise UsageError(
            f"--for: unknown engine '{printable(name.strip())}': known are {', '.join(ENGINES)}."
            f"{did_you_mean(name, _BY_NAME)}"
        )
    return engine


def engines_of(text: str | None) -> tuple[str, ...]:
    """Return the names of engines in a list separated by commas, each once; none for None. Raises UsageError for an
    unknown name and an empty list."""
    if text is None:
        return ()
    return tuple(dict.fromkeys(find_engine(name).name for name in text.split(",")))


def listed_engines(names: Sequence[str]) -> str:
    """Return engines in words: `vLLM and transformers`."""
    titles = [ENGINES[name].title for name in names]
    return " and ".join([", ".join(titles[:-1]), titles[-1]] if titles[1:] else titles)
