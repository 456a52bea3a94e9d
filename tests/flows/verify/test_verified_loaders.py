"""Engines in `verify`: a problem for all of the layout or a named one, a warning for some."""

from __future__ import annotations

from pathlib import Path

import pytest
from planted import found, quantized, source, values
from tiny_models import LLAMA, layer, noise

from mxcli.backends.cpu import Cpu
from mxcli.files.checkpoint import open_checkpoint
from mxcli.flows.plan.overrides import Override
from mxcli.flows.plan.plan import Options
from mxcli.flows.verify.subject import subject_of
from mxcli.flows.verify.verify import Verification, verify_subject

MOE = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 64, "dtype": "bfloat16"}
EXPERTS = {
    f"model.layers.0.mlp.experts.{expert}.{part}_proj.weight": noise(64, 64, seed=3 * expert + place)
    for expert in range(2)
    for place, part in enumerate(("gate", "up", "down"))
}


def verified(folder: Path, *engines: str) -> Verification:
    return verify_subject(folder.name, subject_of(open_checkpoint(folder), engines=engines), backend=Cpu())


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return source(tmp_path_factory.mktemp("loaders") / "m")


def test_what_no_engine_loads_is_a_problem(dense: Path, tmp_path: Path) -> None:
    """q and k have 64 and 32 rows, of blocks of 128, and all layers 64 or 128 inputs."""
    result = verified(quantized(dense, tmp_path / "q", Options("fp8_e4m3_128x128", layout="ct")))
    assert found(result).keys() == {"no_loader"}
    assert not result.is_sound
    (check,) = (each for each in result.results if each.findings)
    assert {finding.need.split()[0] for finding in check.findings} == {"vLLM", "SGLang", "transformers"}
    assert "64 inputs in groups of 128" in values(result, "no_loader")
    assert "32 rows in blocks of 128" in values(result, "no_loader")


def test_what_vllm_loads_on_a_cpu_is_not_condemned(tmp_path: Path) -> None:
    tensors = {"model.layers.0.mlp.down_proj.weight": noise(128, 192)}
    model = source(tmp_path / "m", tensors, {**LLAMA, "hidden_size": 128})
    result = verified(quantized(model, tmp_path / "q", Options("fp8_e4m3_128x128", layout="ct")))
    assert found(result).keys() == {"some_loader"}
    assert values(result, "some_loader") == ["192 inputs in groups of 128"] * 3
    assert result.is_sound
    assert not verified(tmp_path / "q", "vllm").is_sound


def test_what_one_engine_loads_right_is_not_condemned(dense: Path, tmp_path: Path) -> None:
    """transformers dequantizes a weight of one partial block."""
    result = verified(quantized(dense, tmp_path / "q", Options("fp8_e4m3_128x128", layout="fp8")))
    assert found(result).keys() == {"some_loader"}
    assert result.is_sound


def test_a_format_that_one_engine_lacks_is_no_finding(dense: Path, tmp_path: Path) -> None:
    result = verified(quantized(dense, tmp_path / "q", Options("mxfp6", layout="ct")))
    assert found(result) == {}
    assert [(each.engine.name, each.outcome) for each in result.loaders] == [
        ("vllm", "refuses"),
        ("sglang", "refuses"),
        ("transformers", "loads"),
        ("llama.cpp", "refuses"),
        ("mlx", "refuses"),
        ("diffusers", "refuses"),
    ]


def test_a_named_engine_makes_it_a_problem(dense: Path, tmp_path: Path) -> None:
    folder = quantized(dense, tmp_path / "q", Options("mxfp6", layout="ct"))
    assert found(verified(folder, "transformers")) == {}
    result = verified(folder, "vllm")
    assert found(result) == {"named_loader": ["config.json"]}
    assert values(result, "named_loader") == ["mxfp6_e2m3 in the layout"]
    assert not result.is_sound


def test_experts_that_transformers_loads_wrongly_are_a_warning(tmp_path: Path) -> None:
    folder = quantized(source(tmp_path / "m", EXPERTS, MOE), tmp_path / "q", Options("nvfp4", layout="ct"))
    result = verified(folder)
    assert found(result).keys() == {"some_loader"}
    (check,) = (each for each in result.results if each.findings)
    assert (check.severity, len(check.findings), result.is_sound) == ("warning", 6, True)
    assert check.findings[0].need.startswith("transformers 5.24.0 loads it wrongly: it stacks experts and drops")
    assert found(verified(folder, "vllm", "sglang")).keys() == {"some_loader"}
    named = verified(folder, "transformers")
    assert found(named).keys() == {"named_loader"}
    assert not named.is_sound


def test_scales_of_other_lengths_than_transformers_takes(tmp_path: Path) -> None:
    """192 rows have two scales: transformers takes 96 rows for each, without an error."""
    tensors = {"model.layers.0.mlp.up_proj.weight": noise(192, 128)}
    model = source(tmp_path / "m", tensors, {**LLAMA, "hidden_size": 128})
    folder = quantized(model, tmp_path / "q", Options("fp8_e4m3_128x128", layout="fp8"))
    result = verified(folder)
    assert found(result) == {"some_loader": ["model.layers.0.mlp.up_proj.weight"]}
    assert values(result, "some_loader") == ["[192, 128] ends in a partial block of 128x128"]
    assert found(verified(folder, "vllm", "sglang")).keys() == {"some_loader"}
    assert found(verified(folder, "transformers")).keys() == {"named_loader"}


def test_torn_sets_have_one_finding(dense: Path, tmp_path: Path) -> None:
    folder = quantized(dense, tmp_path / "q", Options("mxfp8", overrides=(Override("*.up_proj", "nvfp4"),)))
    assert found(verified(folder)) == {"fused_in_part": ["model.layers.0.mlp.gate_proj+up_proj"]}


def test_a_configuration_without_an_architecture_is_judged_by_no_engine(tmp_path: Path) -> None:
    config = {key: value for key, value in LLAMA.items() if key != "architectures"}
    folder = quantized(
        source(tmp_path / "m", layer(), config), tmp_path / "q", Options("fp8_e4m3_128x128", layout="ct")
    )
    result = verified(folder)
    assert found(result).keys() == {"some_loader"}
    assert result.is_sound


def test_our_own_layout_is_loaded_by_no_engine_and_sound(dense: Path, tmp_path: Path) -> None:
    result = verified(quantized(dense, tmp_path / "q", Options("mxint8")))
    assert found(result) == {}
    assert {each.outcome for each in result.loaders} == {"refuses", "loads wrongly"}
    assert found(verified(tmp_path / "q", "transformers")) == {"named_loader": ["config.json"]}


def test_torn_sets_are_a_problem_of_engines_that_join_them(dense: Path, tmp_path: Path) -> None:
    folder = quantized(dense, tmp_path / "q", Options("mxfp8", overrides=(Override("*.up_proj", keep=True),)))
    assert verified(folder).is_sound
    assert verified(folder, "transformers").is_sound
    assert not verified(folder, "vllm").is_sound
    assert "named_loader" in found(verified(folder, "vllm"))
