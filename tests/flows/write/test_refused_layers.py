"""Single layers that an engine named by --for does not load in a layout stay plain, and that is said; rules of the
whole model refuse."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_models import LLAMA, noise, write_model

from mxcli.backends.cpu import Cpu
from mxcli.errors import RefusedError
from mxcli.files.checkpoint import open_checkpoint
from mxcli.flows.plan.plan import Options, make_plan
from mxcli.flows.verify.subject import subject_of
from mxcli.flows.verify.verify import verify_subject
from mxcli.flows.write.arrange import Arrangement, arrange
from mxcli.flows.write.layout_choice import layout_for
from mxcli.flows.write.quantize import quantize_checkpoint

BLOCKS = "fp8_e4m3_128x128"
ATTENTION, MLP = "model.layers.0.self_attn", "model.layers.0.mlp"
MOE = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 128, "dtype": "bfloat16"}


def folder(path: Path, config: dict[str, object] = LLAMA, *, keys: int = 128, wide: int = 256) -> Path:
    shapes = {"q_proj": (128, 128), "k_proj": (keys, 128), "v_proj": (keys, 128), "o_proj": (128, 128)}
    tensors = {f"{ATTENTION}.{part}.weight": noise(*shape) for part, shape in shapes.items()}
    for part, shape in {"gate_proj": (wide, 128), "up_proj": (wide, 128), "down_proj": (128, wide)}.items():
        tensors[f"{MLP}.{part}.weight"] = noise(*shape)
    return write_model(path, tensors, config)


def moe(path: Path, wide: int) -> Path:
    experts = {
        f"{MLP}.experts.{expert}.{part}_proj.weight": noise(wide, 128) if part != "down" else noise(128, wide)
        for expert in range(2)
        for part in ("gate", "up", "down")
    }
    attention = {f"{ATTENTION}.{part}_proj.weight": noise(128, 128) for part in "qkvo"}
    return write_model(path, experts | attention, MOE)


def arranged(source: Path, format: str, layout: str, *engines: str) -> Arrangement:
    checkpoint = open_checkpoint(source)
    return arrange(checkpoint, make_plan(checkpoint, Options(format, layout=layout)), engines=engines)


def plain(arrangement: Arrangement) -> dict[str, str]:
    """The reasons of layers that stay plain for an engine, by their last name."""
    return {
        each.tensor.name.split(".")[-2]: each.reason for each in arrangement.tensors if each.reason.startswith("kept: ")
    }


@pytest.mark.parametrize(
    ("layout", "engine", "sizes", "names", "reason"),
    [
        (
            *("compressed-tensors", "transformers", {"wide": 160}, {"down_proj"}),
            "kept: transformers 5.24.0 refuses it in compressed-tensors: compressed-tensors quantizes a layer's inputs "
            "in groups of 128 (160 inputs in groups of 128)",
        ),
        (
            *("compressed-tensors", "sglang", {"wide": 160}, {"gate_proj", "up_proj", "down_proj"}),
            "kept: SGLang 0.5.23 refuses it in compressed-tensors: its kernels quantize a layer's inputs in groups of "
            "128 (160 inputs in groups of 128)",
        ),
        (
            *("compressed-tensors", "vllm", {"keys": 64}, {"q_proj", "k_proj", "v_proj"}),
            "kept: vLLM 0.32.0 refuses it in compressed-tensors: it joins fused layers, whose blocks of 128 rows must "
            "be whole in all but the last (64 rows in blocks of 128)",
        ),
        (
            *("fp8", "transformers", {"wide": 161}, {"gate_proj", "up_proj", "down_proj"}),
            "kept: transformers 5.24.0 refuses it in fp8: it dequantizes as if all blocks were equally long, unless a "
            "GPU multiplies FP8 blocks as they are (compute capability 8.9 or later) ([128, 161] ends in a partial "
            "block of 128x128)",
        ),
        (
            *("fp8", "transformers", {"wide": 160}, {"gate_proj", "up_proj", "down_proj"}),
            "kept: transformers 5.24.0 loads it wrongly in fp8: it dequantizes as if all blocks were equally long, and "
            "scales some values by the scale of another block, without an error, unless a GPU multiplies FP8 blocks as "
            "they are (compute capability 8.9 or later) ([128, 160] ends in a partial block of 128x128)",
        ),
    ],
)
def test_layers_that_an_engine_refuses_stay_plain(
    tmp_path: Path, layout: str, engine: str, sizes: dict[str, int], names: set[str], reason: str
) -> None:
    source = folder(tmp_path / "m", **sizes)
    found = plain(arranged(source, BLOCKS, layout, engine))
    assert found.keys() == names
    assert reason in found.values()
    assert plain(arranged(source, BLOCKS, layout)) == {}


def test_members_of_a_set_stay_plain_together_and_a_note_says_so(tmp_path: Path) -> None:
    arrangement = arranged(folder(tmp_path / "m", keys=64), BLOCKS, "compressed-tensors", "vllm")
    assert plain(arrangement)["q_proj"] == (
        f"kept: joined with '{ATTENTION}.k_proj.weight': vLLM 0.32.0 refuses it in compressed-tensors: it joins fused "
        "layers, whose blocks of 128 rows must be whole in all but the last (64 rows in blocks of 128)"
    )
    (note,) = (note for note in arrangement.notes if "are not quantized" in note)
    assert note.startswith("32,768 parameters (22.2 % of the model, 3 tensors) are not quantized, ")
    assert "and others: " in note
    assert {f"{ATTENTION}.{part}_proj" for part in "qkv"} <= set(arrangement.ignored)


def test_the_output_is_loaded_by_the_engine_as_verify_says(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(folder(tmp_path / "m", keys=64))
    plan = make_plan(checkpoint, Options(BLOCKS, layout="ct"))
    quantize_checkpoint(checkpoint, plan, tmp_path / "q", backend=Cpu(), engines=("vllm",))
    subject = subject_of(open_checkpoint(tmp_path / "q"), engines=("vllm",))
    verified = verify_subject("q", subject, backend=Cpu())
    assert "named_loader" not in {result.name for result in verified.results if result.findings}


def test_few_experts_stay_plain_and_many_are_refused(tmp_path: Path) -> None:
    found = arranged(moe(tmp_path / "few", 64), "mxfp8", "compressed-tensors", "transformers")
    assert {weight.name.split(".")[3] for weight in found.weights} == {"self_attn"}
    assert len(plain(found)) == 3
    sentence = "it fails to stack experts with their block scales .*Use --layout fp8"
    with pytest.raises(RefusedError, match=sentence):
        arranged(moe(tmp_path / "many", 128), "mxfp8", "compressed-tensors", "transformers")


def test_an_engine_that_does_not_load_the_rest_refuses_with_the_first_reason(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="it stacks experts and drops their tensor scales"):
        arranged(moe(tmp_path / "m", 64), "nvfp4", "compressed-tensors", "transformers")


@pytest.mark.parametrize(
    ("config", "format", "layout", "sentence"),
    [
        ({"model_type": "nomic_bert"}, "nvfp4", "compressed-tensors", "it divides a layer of this model"),
        ({"model_type": "dinov2"}, "mxfp8", "torchao", "it fails to split a layer of this model"),
        ({"model_type": "falcon"}, "mxfp8", "torchao", "it multiplies weights of this model outside"),
        ({"model_type": "vit"}, "mxfp8", "torchao", "it looks layers up by their names in memory"),
        (dict[str, object](), "mxfp8", "modelopt", "it does not know ModelOpt's checkpoints"),
    ],
)
def test_rules_of_the_whole_model_refuse(
    tmp_path: Path, config: dict[str, object], format: str, layout: str, sentence: str
) -> None:
    source = folder(tmp_path / "m", {**LLAMA, **config})
    with pytest.raises(RefusedError, match=sentence):
        arranged(source, format, layout, "transformers")


def test_a_layout_is_chosen_in_which_single_layers_stay_plain(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(folder(tmp_path / "m", keys=64))
    plan = make_plan(checkpoint, Options(BLOCKS))
    assert layout_for(checkpoint, plan, ("vllm", "sglang")).name == "compressed-tensors"
