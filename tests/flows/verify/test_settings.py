from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from planted import found, quantized, source, values, verified
from tiny_models import LLAMA, llama

from mxcli.flows.plan.plan import Options

FORMATS = {
    "modelopt": "nvfp4",
    "compressed-tensors": "nvfp4",
    "torchao": "mxfp8_e4m3",
    "quark": "mxfp4_e2m1",
    "fp8": "fp8_e4m3_128x128",
}
CT_FP8 = "compressed-tensors:fp8_e4m3_channel"
Config = dict[str, Any]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Outputs of one model by layout, without their records."""
    home = tmp_path_factory.mktemp("settings")
    model = source(home / "m", llama(), LLAMA)

    def output(layout: str) -> Path:
        name, _, format = layout.partition(":")
        folder = home / layout.replace(":", "-")
        if not folder.exists():
            quantized(model, folder, Options(format or FORMATS[name], layout=name))
            (folder / "mxcli.json").unlink()
        return folder

    return output


def edited(output: Path, folder: Path, change: Callable[[Config], object], document: str = "config.json") -> Path:
    """A copy whose configuration is another one."""
    shutil.copytree(output, folder)
    content = json.loads((folder / document).read_text())
    change(content if document == "config.json" else content["quantization"])
    (folder / document).write_text(json.dumps(content))
    return folder


def put(value: object, *path: str) -> Callable[[Config], object]:
    """A change of the quantization_config: a setting is given a value."""

    def change(config: Config) -> None:
        part = config["quantization_config"]
        for key in path[:-1]:
            part = part[key]
        part[path[-1]] = value

    return change


def drop(*path: str) -> Callable[[Config], object]:
    """A change of the quantization_config: a setting is gone."""

    def change(config: Config) -> None:
        part = config["quantization_config"]
        for key in path[:-1]:
            part = part[key]
        del part[path[-1]]

    return change


GROUP = ("config_groups", "group_0")
MADE_BY = ("quant_type", "default", "_data")
QUARK_WEIGHT = ("global_quant_config", "weight")


@pytest.mark.parametrize(
    ("layout", "change", "setting"),
    [
        ("modelopt", put("xyz", "quant_algo"), 'quant_algo is "xyz"'),
        ("modelopt", put("MXFP8", "quant_algo"), 'quant_algo is "MXFP8"'),
        ("modelopt", put(None, "quant_algo"), "quant_algo is null"),
        ("modelopt", drop("quant_algo"), "quant_algo is missing"),
        ("modelopt", drop("quant_method"), "quant_method is missing"),
        ("modelopt", put(33, *GROUP, "weights", "group_size"), "config_groups.group_0.weights.group_size is 33"),
        ("modelopt", put(32, *GROUP, "weights", "group_size"), "config_groups.group_0.weights.group_size is 32"),
        ("modelopt", put(9, *GROUP, "weights", "num_bits"), "config_groups.group_0.weights.num_bits is 9"),
        ("modelopt", put(8, *GROUP, "weights", "num_bits"), "config_groups.group_0.weights.num_bits is 8"),
        ("modelopt", put("4", *GROUP, "weights", "num_bits"), 'config_groups.group_0.weights.num_bits is "4"'),
        ("modelopt", put(3, "kv_cache_scheme"), "kv_cache_scheme is 3"),
        ("torchao", put("xyz", *MADE_BY, "weight_dtype", "_data"), 'weight_dtype._data is "xyz"'),
        ("torchao", put("float8_e5m2", *MADE_BY, "weight_dtype", "_data"), 'weight_dtype._data is "float8_e5m2"'),
        ("torchao", put("xyz", *MADE_BY, "activation_dtype", "_data"), 'activation_dtype._data is "xyz"'),
        ("torchao", put(33, *MADE_BY, "block_size"), "block_size is 33"),
        ("torchao", put("HALF", *MADE_BY, "scaling_mode", "_data"), 'scaling_mode._data is "HALF"'),
        ("torchao", put("xyz", "quant_type", "default", "_type"), 'quant_type.default._type is "xyz"'),
        ("torchao", drop("modules_to_not_convert"), "modules_to_not_convert is missing"),
        ("torchao", drop("quant_method"), "quant_method is missing"),
        ("torchao", put("no", "untie_embedding_weights"), 'untie_embedding_weights is "no"'),
        ("quark", put("xyz", *QUARK_WEIGHT, "mx_element_dtype"), 'mx_element_dtype is "xyz"'),
        ("quark", put("fp4", *QUARK_WEIGHT, "mx_element_dtype"), 'mx_element_dtype is "fp4"'),
        ("quark", put("xyz", "export", "pack_method"), 'export.pack_method is "xyz"'),
        ("quark", put("order", "export", "pack_method"), 'export.pack_method is "order"'),
        ("quark", put(False, *QUARK_WEIGHT, "symmetric"), "global_quant_config.weight.symmetric is false"),
        ("quark", put("yes", *QUARK_WEIGHT, "symmetric"), 'global_quant_config.weight.symmetric is "yes"'),
        ("quark", put("fake_quantized", "export", "weight_format"), 'weight_format is "fake_quantized"'),
        ("quark", drop("quant_method"), "quant_method is missing"),
        (CT_FP8, put(17, *GROUP, "input_activations", "num_bits"), "input_activations.num_bits is 17"),
        (CT_FP8, put(4, *GROUP, "input_activations", "num_bits"), "input_activations.num_bits is 4"),
        (CT_FP8, put("xyz", *GROUP, "input_activations", "strategy"), 'input_activations.strategy is "xyz"'),
        (CT_FP8, put(False, *GROUP, "input_activations", "symmetric"), "input_activations.symmetric is false"),
        (CT_FP8, put("maybe", *GROUP, "input_activations", "dynamic"), 'input_activations.dynamic is "maybe"'),
        (CT_FP8, put("bits", *GROUP, "input_activations", "type"), 'input_activations.type is "bits"'),
        ("compressed-tensors", put(False, *GROUP, "weights", "symmetric"), "weights.symmetric is false"),
        ("compressed-tensors", put(3, "kv_cache_scheme"), "kv_cache_scheme is 3"),
        ("compressed-tensors", put({"num_bits": 17}, "kv_cache_scheme"), "kv_cache_scheme.num_bits is 17"),
        ("compressed-tensors", drop("quant_method"), "quant_method is missing"),
        ("fp8", put("xyz", "activation_scheme"), 'activation_scheme is "xyz"'),
        ("fp8", put("e9m9", "fmt"), 'fmt is "e9m9"'),
        ("fp8", put("ue9", "scale_fmt"), 'scale_fmt is "ue9"'),
    ],
)
def test_a_value_that_no_loader_knows_is_a_problem(
    tmp_path: Path, outputs: Callable[[str], Path], layout: str, change: Callable[[Config], object], setting: str
) -> None:
    result = verified(edited(outputs(layout), tmp_path / "q", change))
    assert any(setting in each for each in values(result, "setting")), values(result, "setting")
    assert not result.is_sound


@pytest.mark.parametrize("layout", [*FORMATS, CT_FP8])
def test_what_mxcli_writes_and_keys_of_others_are_sound(
    tmp_path: Path, outputs: Callable[[str], Path], layout: str
) -> None:
    folder = edited(outputs(layout), tmp_path / "q", put({"num_bits": 99, "xyz": None}, "of_another_program"))
    assert "setting" not in found(verified(outputs(layout)))
    assert "setting" not in found(verified(folder))


@pytest.mark.parametrize(
    ("key", "value"), [("quant_algo", "xyz"), ("group_size", 33), ("group_size", 32), ("kv_cache_quant_algo", "xyz")]
)
def test_the_second_document_is_checked_too(
    tmp_path: Path, outputs: Callable[[str], Path], key: str, value: object
) -> None:
    def change(quantization: Config) -> None:
        quantization[key] = value

    result = verified(edited(outputs("modelopt"), tmp_path / "q", change, "hf_quant_config.json"))
    assert found(result)["setting"] == ["hf_quant_config.json"]


@pytest.mark.parametrize(
    ("change", "value"),
    [
        (lambda config: config.pop("quantization_config"), "quant_algo is none and some"),
        (put("NVFP4", "quant_algo"), "quant_algo is NVFP4 and W4A16_NVFP4"),
    ],
)
def test_documents_that_contradict_each_other_are_a_problem(
    tmp_path: Path, outputs: Callable[[str], Path], change: Callable[[Config], object], value: str
) -> None:
    result = verified(edited(outputs("modelopt"), tmp_path / "q", change))
    assert value in values(result, "silent_misreading")


def test_one_document_is_what_early_versions_of_modelopt_wrote(tmp_path: Path, outputs: Callable[[str], Path]) -> None:
    folder = edited(outputs("modelopt"), tmp_path / "q", lambda config: config.pop("quantization_config"))
    content = json.loads((folder / "hf_quant_config.json").read_text())
    content["producer"]["version"] = "0.23.0"
    (folder / "hf_quant_config.json").write_text(json.dumps(content))
    assert "silent_misreading" not in found(verified(folder))
