"""Engines that an output is written for: the layout they load, refusals before anything is written, and notes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_models import LLAMA, llama, noise, write_model

from mxcli.backends.cpu import Cpu
from mxcli.errors import RefusedError
from mxcli.files.checkpoint import open_checkpoint
from mxcli.flows.plan.overrides import Override
from mxcli.flows.plan.plan import Options, Plan, make_plan
from mxcli.flows.write.arrange import Arrangement, arrange
from mxcli.flows.write.layout_choice import layout_for
from mxcli.flows.write.quantize import quantize_checkpoint

MOE = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 64, "dtype": "bfloat16"}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("dense"), llama(), LLAMA)


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    experts = {
        f"model.layers.0.mlp.experts.{expert}.{part}_proj.weight": noise(64, 64, seed=expert)
        for expert in range(2)
        for part in ("gate", "up", "down")
    }
    return write_model(tmp_path_factory.mktemp("moe"), experts, MOE)


def planned(source: Path, format: str, **options: object) -> Plan:
    return make_plan(open_checkpoint(source), Options(format, **options))  # type: ignore[arg-type]


def chosen(source: Path, format: str, *engines: str) -> str:
    return layout_for(open_checkpoint(source), planned(source, format), engines).name


def arranged(source: Path, format: str, *engines: str, devices: int | None = None, **options: object) -> Arrangement:
    plan = planned(source, format, **options)
    return arrange(open_checkpoint(source), plan, engines=engines, devices=devices)


@pytest.mark.parametrize(
    ("format", "engines", "layout"),
    [
        ("mxfp8", ["vllm"], "compressed-tensors"),
        ("mxfp8", ["vllm", "transformers"], "compressed-tensors"),
        ("mxfp8", ["sglang"], "fp8"),
        ("mxfp8", ["sglang", "transformers"], "fp8"),
        ("mxfp6", ["vllm"], "quark"),
        ("mxfp6", ["transformers"], "compressed-tensors"),
        ("nvfp4", ["vllm", "sglang", "transformers"], "compressed-tensors"),
        ("nvfp4", ["torchao"], "torchao"),
        ("fp8_e4m3", ["vllm"], "compressed-tensors"),
    ],
)
def test_the_first_layout_that_all_load(dense: Path, format: str, engines: list[str], layout: str) -> None:
    assert chosen(dense, format, *engines) == layout


@pytest.mark.parametrize(
    ("format", "engines", "layout"),
    [("mxfp8", ["transformers"], "fp8"), ("mxfp4", ["transformers"], "compressed-tensors"), ("nvfp4", ["vllm"], None)],
)
def test_experts_decide_the_layout(moe: Path, format: str, engines: list[str], layout: str | None) -> None:
    assert chosen(moe, format, *engines) == (layout or "compressed-tensors")


def test_without_a_common_layout_every_reason_is_given(dense: Path, moe: Path) -> None:
    with pytest.raises(RefusedError, match=r"no layout of mxfp8_e4m3 is loaded by vLLM and llama\.cpp") as refused:
        chosen(dense, "mxfp8", "vllm", "llama.cpp")
    assert "compressed-tensors: llama.cpp refuses this (read, not run): mxfp8_e4m3: it reads GGUF files only" in (
        refused.value.details
    )
    with pytest.raises(RefusedError, match="no layout of nvfp4 is loaded by transformers") as refused:
        chosen(moe, "nvfp4", "transformers")
    reason = next(each for each in refused.value.details if each.startswith("compressed-tensors: "))
    assert "transformers 5.24.0 loads this wrongly (run 2026-11): it stacks experts and drops their tensor" in reason


@pytest.mark.parametrize(
    ("format", "layout", "engine", "reason"),
    [
        (
            *("mxfp6", "compressed-tensors", "vllm"),
            "vLLM 0.32.0 refuses compressed-tensors of this model: mxfp6_e2m3: it has no scheme for "
            "mxfp6-pack-quantized. Use --layout quark, which vLLM reads MXFP6 from.",
        ),
        (
            *("mxfp8", "modelopt", "transformers"),
            "transformers 5.24.0 loads wrongly modelopt of this model: mxfp8_e4m3: it does not know ModelOpt's "
            "checkpoints and takes codes as values, without an error. Use --layout compressed-tensors.",
        ),
        (
            *("mxfp8", "fp8", "vllm"),
            "vLLM 0.32.0 refuses fp8 of this model: mxfp8_e4m3: it takes the quant_method mxfp8 for ModelOpt's, whose "
            "scales have other names. Use --layout modelopt or compressed-tensors.",
        ),
    ],
)
def test_a_named_layout_that_a_named_engine_does_not_load(
    dense: Path, format: str, layout: str, engine: str, reason: str
) -> None:
    with pytest.raises(RefusedError) as refused:
        arranged(dense, format, engine, layout=layout)
    assert str(refused.value) == reason


def test_all_refusals_come_at_once_and_before_the_first_byte(dense: Path, tmp_path: Path) -> None:
    checkpoint, plan = open_checkpoint(dense), planned(dense, "mxfp6", layout="compressed-tensors")
    with pytest.raises(RefusedError, match="Not loaded by vLLM and SGLang: 2 problems") as refused:
        quantize_checkpoint(checkpoint, plan, tmp_path / "q", backend=Cpu(), engines=("vllm", "sglang"))
    assert [each.split(" refuses")[0] for each in refused.value.details] == ["vLLM 0.32.0", "SGLang 0.5.23"]
    assert not (tmp_path / "q").exists()


def test_torn_fused_layers_are_refused_for_engines_that_join_them(dense: Path) -> None:
    torn = {"overrides": (Override("*.up_proj", "mxfp4"),)}
    assert arranged(dense, "mxfp8", "transformers", **torn).layout.name == "compressed-tensors"
    with pytest.raises(RefusedError, match="it joins fused layers, which must have one format"):
        arranged(dense, "mxfp8", "vllm", **torn)


def test_devices_that_do_not_divide_it_are_refused(dense: Path) -> None:
    assert arranged(dense, "mxfp8", devices=2).devices == 2
    with pytest.raises(RefusedError) as refused:
        arranged(dense, "mxfp8", devices=4)
    assert str(refused.value) == (
        "model.layers.0.self_attn.o_proj.weight: 64 columns over 4 devices are 16 each, not whole blocks of 32 of "
        "columns for each device: vLLM and SGLang cannot divide it. Use fewer devices (--tp), or a format with smaller "
        "blocks."
    )
    assert arranged(dense, "mxfp8", "transformers", devices=4).notes[-1] == (
        "--tp 4: it is not known how weights of the layout compressed-tensors divide over devices."
    )


def test_notes_name_engines_that_do_not_load_an_output(dense: Path, moe: Path) -> None:
    assert arranged(dense, "nvfp4").notes == (
        "2 fused sets (such as q, k, v or gate, up): one tensor scale each.",
    )  # fmt: skip
    assert arranged(dense, "mxfp8").notes == (
        "SGLang 0.5.23 refuses this (read, not run): mxfp8_e4m3: it has no scheme for this format. Use --layout fp8, "
        "which SGLang reads MXFP8 from.",
    )
    assert arranged(dense, "mxfp8", "vllm").notes == ()
    (note,) = (each for each in arranged(moe, "nvfp4").notes if each.startswith("transformers"))
    assert note == (
        "transformers 5.24.0 loads this wrongly (run 2026-11): it stacks experts and drops their tensor scales, "
        "without an error ('model.layers.0.mlp.experts.0.gate_proj.weight': an expert, and 5 more). Use --format "
        "mxfp4, or vLLM or SGLang for NVFP4 experts; --layout torchao leaves experts plain."
    )
    assert arranged(dense, "mxfp6", "tensorrt-llm").notes == (
        "TensorRT-LLM may or may not load this, which is not known: mxfp6_e2m3: no rule is known.",
    )


def test_the_record_names_the_engines(dense: Path, tmp_path: Path) -> None:
    checkpoint, plan = open_checkpoint(dense), planned(dense, "mxfp8")
    engines = ("vllm", "transformers")
    quantize_checkpoint(checkpoint, plan, tmp_path / "q", backend=Cpu(), engines=engines, devices=2)
    record = json.loads((tmp_path / "q" / "mxcli.json").read_text())
    assert (record["engines"], record["tensor_parallel"]) == (["vllm", "transformers"], 2)


@pytest.mark.parametrize("format", ["fp8_e4m3", "fp8_e5m2"])
def test_fused_layers_share_the_one_scale_of_a_tensor(dense: Path, format: str) -> None:
    plan = planned(dense, format)
    assert sorted(plan.groups) == [
        "model.layers.0.mlp.gate_proj+up_proj",
        "model.layers.0.self_attn.q_proj+k_proj+v_proj",
    ]
    assert "2 fused sets (such as q, k, v or gate, up): one tensor scale each." in plan.notes
    assert planned(dense, f"{format}_channel").groups == {}


def test_a_layout_that_leaves_experts_plain_is_better_than_none(tmp_path: Path) -> None:
    experts = {f"model.layers.0.mlp.experts.{expert}.down_proj.weight": noise(64, 64) for expert in range(8)}
    attention = {"model.layers.0.self_attn.o_proj.weight": noise(64, 64)}
    source = write_model(tmp_path / "m", experts | attention, MOE)
    assert chosen(source, "nvfp4", "transformers") == "torchao"
    written = arranged(source, "nvfp4", "transformers", layout="torchao")
    assert [weight.name for weight in written.weights] == ["model.layers.0.self_attn.o_proj.weight"]
    assert any("32,768 parameters (88.9 % of the model, 8 tensors) are not quantized" in note for note in written.notes)
