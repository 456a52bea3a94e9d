from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mxcli.errors import InputError
from mxcli.files.layouts import LAYOUTS, Layout, OnDisk, Weight, layout_of_dialect
from mxcli.files.packing import pack_sixes, spread_sixes
from mxcli.files.tensors import TensorInfo
from mxcli.numerics.scheme import Rules, resolve

SWIZZLED, PLAIN = LAYOUTS["torchao"], LAYOUTS["torchao-plain"]
BFLOAT16 = '{"_type": "torch.dtype", "_data": "bfloat16"}'


def weight(format: str, shape: tuple[int, int] = (130, 192), name: str = "a.b.weight", **more: str) -> Weight:
    return Weight(name, shape, resolve(format, Rules(dialect="torchao", **more)), "BF16")


def entries(layout: Layout, described: Weight) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {each.entry.name: (each.entry.dtype, each.entry.shape) for each in layout.contents(described)}


def on_disk(layout: Layout, described: Weight, metadata: dict[str, str] | None = None) -> OnDisk:
    tensors = {
        name: TensorInfo(name, dtype, shape, "codes", Path("m"), 0, 0)
        for name, (dtype, shape) in entries(layout, described).items()
    }
    return OnDisk(tensors, {}, metadata=layout.metadata([described], []) if metadata is None else metadata)


@pytest.mark.parametrize(
    ("format", "dtypes", "columns", "plain", "swizzled"),
    [
        ("mxfp8", ("F8_E4M3", "F8_E8M0"), 192, (130, 6), (64, 32)),
        ("mxfp8_e5m2", ("F8_E5M2", "F8_E8M0"), 192, (130, 6), (64, 32)),
        ("mxfp6_e2m3", ("U8", "F8_E8M0"), 192, (130, 6), (64, 32)),
        ("mxfp6_e3m2", ("U8", "F8_E8M0"), 192, (130, 6), (64, 32)),
        ("mxfp4", ("U8", "F8_E8M0"), 96, (130, 6), (64, 32)),
        ("nvfp4", ("U8", "F8_E4M3"), 96, (130, 12), (64, 48)),
        ("fp8_e4m3", ("F8_E4M3", "F32"), 192, (1, 1), (1, 1)),
        ("fp8_e5m2_channel", ("F8_E5M2", "F32"), 192, (130, 1), (130, 1)),
    ],
)
def test_what_is_stored(
    format: str, dtypes: tuple[str, str], columns: int, plain: tuple[int, int], swizzled: tuple[int, int]
) -> None:
    for layout, shape in ((PLAIN, plain), (SWIZZLED, swizzled)):
        stored = {"a.b._weight_qdata": (dtypes[0], (130, columns)), "a.b._weight_scale": (dtypes[1], shape)}
        if format == "nvfp4":
            stored["a.b._weight_per_tensor_scale"] = ("F32", ())
        assert entries(layout, weight(format)) == stored


@pytest.mark.parametrize(
    ("described", "why"),
    [
        (weight("mxint8"), "it has no mxint8"),
        (weight("fp8_e4m3_128x128"), "it has no fp8_e4m3_128x128"),
        (replace(weight("mxfp8"), dtype="F16"), "torchao quantizes the inputs of MX layers too, but no F16 ones"),
        (replace(weight("nvfp4"), dtype="F16"), None),
        (
            weight("nvfp4", name="m.experts.3.up_proj.weight"),
            "transformers stacks experts, and cannot stack them when torchao has quantized each",
        ),
        (weight("nvfp4", (4, 100)), "it stores no padding, and 100 is not a multiple of 16"),
    ],
)
def test_what_it_cannot_hold(described: Weight, why: str | None) -> None:
    assert SWIZZLED.refusal(described) == why


def test_codes_of_six_bits_have_a_byte_each() -> None:
    codes = np.array([[1, 2, 3, 63], [32, 0, 31, 48]], np.uint8)
    packed = np.array([[0x81, 0x30, 0xFC], [0x20, 0xF0, 0xC1]], np.uint8)
    np.testing.assert_array_equal(spread_sixes(packed), codes)
    np.testing.assert_array_equal(pack_sixes(codes), packed)


def test_the_header_describes_every_parameter() -> None:
    said = SWIZZLED.metadata([weight("nvfp4")], ["norm.weight", "a.bias", "scalar"])
    assert said == {
        "tensor_names": '["a.b.weight", "norm.weight", "a.bias", "scalar"]',
        "a.b.weight": '{"_type": "NVFP4Tensor", "_data": {"is_swizzled_scales": true, "use_triton_kernel": false, '
        f'"act_quant_kwargs": null, "block_size": 16, "orig_dtype": {BFLOAT16}}}, '
        '"_tensor_data_names": ["per_tensor_scale", "qdata", "scale"]}',
        "norm.weight": '{"_type": "Tensor"}',
        "a.bias": '{"_type": "Tensor"}',
        "scalar": '{"_type": "Tensor"}',
    }
    assert PLAIN.metadata([weight("fp8_e4m3_channel")], [])["a.b.weight"] == (
        '{"_type": "Float8Tensor", "_data": {"block_size": [1, 192], "mm_config": null, "act_quant_kwargs": null, '
        f'"kernel_preference": {{"_type": "KernelPreference", "_data": "AUTO"}}, "dtype": {BFLOAT16}}}, '
        '"_tensor_data_names": ["qdata", "scale"]}'
    )


# torchao multiplies no MX weights by plain inputs: without these settings a loaded layer could not run.
@pytest.mark.parametrize(("layout", "swizzled"), [(SWIZZLED, True), (PLAIN, False)])
@pytest.mark.parametrize(("rule", "mode"), [("floor", "FLOOR"), ("even", "EVEN"), ("best", "RCEIL")])
def test_inputs_of_mx_layers_are_quantized_as_their_weights(
    layout: Layout, swizzled: bool, rule: str, mode: str
) -> None:
    said = json.loads(layout.metadata([weight("mxfp6", scale_rounding=rule)], [])["a.b.weight"])
    assert said["_data"]["is_swizzled_scales"] is swizzled
    assert said["_data"]["act_quant_kwargs"] == {
        "_type": "QuantizeTensorToMXKwargs",
        "_data": {
            "elem_dtype": "fp6_e2m3",
            "block_size": 32,
            "scaling_mode": {"_type": "ScaleCalculationMode", "_data": mode},
            "kernel_preference": {"_type": "KernelPreference", "_data": "EMULATED"},
            "is_swizzled_scales": swizzled,
        },
    }


def test_the_configuration_names_what_made_the_layers() -> None:
    settings = SWIZZLED.settings([weight("nvfp4"), weight("nvfp4", name="c.weight")], ["lm_head", "a.gate"])
    nvfp4 = {"_type": "NVFP4WeightOnlyConfig", "_version": 1, "_data": {"use_dynamic_per_tensor_scale": True}}
    assert settings == {
        "quant_method": "torchao",
        "quant_type": {"default": nvfp4},
        "modules_to_not_convert": ["a.gate", "lm_head"],
        "include_input_output_embeddings": False,
        "untie_embedding_weights": False,
    }
    mixed = SWIZZLED.settings([weight("nvfp4"), weight("fp8_e5m2", name="c.weight")], [])
    fp8 = {
        "_type": "Float8WeightOnlyConfig",
        "_version": 2,
        "_data": {
            "weight_dtype": {"_type": "torch.dtype", "_data": "float8_e5m2"},
            "set_inductor_config": True,
            "granularity": {"_type": "PerTensor", "_version": 1, "_data": {}},
        },
    }
    assert mixed["quant_type"] == {
        "default": {"_type": "FqnToConfig", "_version": 1, "_data": {"fqn_to_config": {"a.b": nvfp4, "c": fp8}}}
    }


def test_either_order_is_read_back() -> None:
    reader = layout_of_dialect("torchao")
    assert reader is SWIZZLED
    for layout, order in ((SWIZZLED, "swizzled"), (PLAIN, "plain")):
        (found,) = reader.weights(on_disk(layout, weight("mxfp6_e3m2")))
        assert (found.format.name, found.shape, found.variant) == ("mxfp6_e3m2", (130, 192), order)
        assert entries(reader, found) == entries(layout, weight("mxfp6_e3m2"))


@pytest.mark.parametrize("format", ["mxfp8_e5m2", "mxfp4_e2m1", "nvfp4", "e2m1:e4m3:1x16", "fp8_e4m3_channel"])
@pytest.mark.parametrize("layout", [SWIZZLED, PLAIN])
def test_without_a_header_dtypes_and_shapes_decide(layout: Layout, format: str) -> None:
    (found,) = SWIZZLED.weights(on_disk(layout, weight(format), {}))
    assert (found.format.name, found.shape) == (format, (130, 192))
    assert entries(SWIZZLED, found) == entries(layout, weight(format))


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(InputError) as caught:
        SWIZZLED.weights(on_disk(PLAIN, weight("mxfp6"), {}))
    assert str(caught.value).splitlines()[-1].strip() == (
        "a.b._weight: the file's header does not describe it (torchao's metadata was lost), and its dtypes and shapes "
        "fit mxfp6_e2m3 (plain), mxfp6_e3m2 (plain); use the checkpoint as torchao wrote it."
    )


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("[]", "the file's header does not describe it as a torchao tensor"),
        ("{", "the file's header does not describe it as a torchao tensor"),
        (
            '{"_type": "Int8Tensor", "_data": {"block_size": [1, 32]}, "_tensor_data_names": ["qdata", "scale"]}',
            "its header states torchao's Int8Tensor, which mxcli does not read",
        ),
        (
            '{"_type": "MXTensor", "_data": {"elem_dtype": "fp6_e2m3", "block_size": 16}, "_tensor_data_names": []}',
            "its header states MXTensor of fp6_e2m3, block size 16",
        ),
        (
            '{"_type": "NVFP4Tensor", "_data": {"block_size": 16}, "_tensor_data_names": ["qdata", "scale"]}',
            r"has a\.b\._weight_per_tensor_scale, which e2m1:e4m3:1x16 does not use",
        ),
        (
            '{"_type": "NVFP4Tensor", "_data": {"block_size": 16, "is_swizzled_scales": true}, '
            '"_tensor_data_names": ["qdata", "scale", "per_tensor_scale"]}',
            r"a\.b\._weight_scale is F8_E4M3 \[130, 12\]; nvfp4 needs F8_E4M3 \[64, 48\]",
        ),
    ],
)
def test_headers_that_do_not_fit_are_refused(said: str, why: str) -> None:
    with pytest.raises(InputError, match=why):
        SWIZZLED.weights(on_disk(PLAIN, weight("nvfp4"), {"a.b.weight": said}))
