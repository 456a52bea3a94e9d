from __future__ import annotations

import json
from pathlib import Path

import pytest

from mxcli.errors import InputError
from mxcli.files.layouts import LAYOUTS, OnDisk, Weight
from mxcli.files.layouts.in_memory import names_in_memory
from mxcli.files.layouts.layout import Misfits, Unread
from mxcli.files.tensors import TensorInfo
from mxcli.numerics.scheme import Rules, resolve

TORCHAO = LAYOUTS["torchao"]
FILE, MEMORY = "language_model.model.layers.{}.mlp.up_proj.weight", "model.language_model.layers.{}.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("named", "in_memory"),
    [
        ({"model.layers.0.mlp.up_proj.weight": "model.language_model.layers.0.mlp.up_proj.weight"}, ()),
        ({"visual.blocks.0.attn.qkv.weight": "model.visual.blocks.0.attn.qkv.weight"}, ()),
        ({"language_model.lm_head.weight": "lm_head.weight"}, ()),
        ({"language_model.model.layers.1.a.weight": "model.language_model.layers.1.a.weight"}, ("layers.0.a.weight",)),
        # The tower and the text model have layers of one name; each takes the nearer one.
        (
            {
                "vision_tower.vision_model.encoder.layers.0.q.weight": "model.vision_tower.encoder.layers.0.q.weight",
                "language_model.model.layers.0.q.weight": "model.language_model.layers.0.q.weight",
            },
            (),
        ),
        # One is as near as the other until the tower has taken its own.
        (
            {
                "tower.encoder.layers.0.q.weight": "model.tower.encoder.layers.0.q.weight",
                "model.layers.0.q.weight": "model.language_model.layers.0.q.weight",
            },
            (),
        ),
        ({"embed_out.weight": "lm_head.weight"}, ()),
        (
            {"transformer.h.1.attn.attention.out_proj.weight": "model.layers.1.self_attn.o_proj.weight"},
            ("model.layers.0.self_attn.o_proj.weight", "model.layers.1.self_attn.q_proj.weight"),
        ),
    ],
)
def test_the_nearest_name_in_memory(named: dict[str, str], in_memory: tuple[str, ...]) -> None:
    assert names_in_memory(named, [*named.values(), *in_memory]) == named


@pytest.mark.parametrize(
    ("names", "in_memory"),
    [
        (["model.layers.0.a.weight"], ["model.layers.1.a.weight"]),
        (["model.layers.0.a.weight"], ["model.layers.0.b.weight"]),
        (["layers.0.a.weight"], ["x.layers.0.a.weight", "y.layers.0.a.weight"]),
        (["x.layers.0.a.weight", "y.layers.0.a.weight"], ["z.layers.0.a.weight"]),
        (["a.weight"], ["b.weight"]),
        ([], ["a.weight"]),
    ],
)
def test_others_have_none(names: list[str], in_memory: list[str]) -> None:
    assert names_in_memory(names, in_memory) == {}


def exported(format: str, layers: int = 2, **changes: object) -> OnDisk:
    """Return what transformers saves of a model that it renames on load: tensors by their names in files, descriptions
    by those in memory, one of them with changes."""
    scheme = resolve(format, Rules(dialect="torchao"))
    stored = [Weight(FILE.format(layer), (32, 64), scheme, "BF16") for layer in range(layers)]
    described = [Weight(MEMORY.format(layer), (32, 64), scheme, "BF16") for layer in range(layers)]
    metadata = TORCHAO.metadata(described, ["model.language_model.norm.weight"])
    metadata[MEMORY.format(0)] = json.dumps({**json.loads(metadata[MEMORY.format(0)]), **changes})
    entries = [content.entry for weight in stored for content in TORCHAO.contents(weight)]
    tensors = {each.name: TensorInfo(each.name, each.dtype, each.shape, "codes", Path("m"), 0, 0) for each in entries}
    return OnDisk(tensors, {"dtype": "bfloat16"}, metadata=metadata)


@pytest.mark.parametrize("format", TORCHAO.formats)
def test_descriptions_by_names_in_memory_are_read(format: str) -> None:
    found = TORCHAO.weights(exported(format))
    assert [(weight.name, weight.shape) for weight in found] == [(FILE.format(layer), (32, 64)) for layer in (0, 1)]
    assert {weight.scheme.format.element.name for weight in found} == {resolve(format, Rules()).format.element.name}
    assert all(weight.variant.endswith(", described as in memory") for weight in found)
    (first, second) = (TORCHAO.contents(weight) for weight in found)
    assert {content.entry.name for content in (*first, *second)} == exported(format).tensors.keys()


def test_a_tensor_that_is_not_read_is_named_as_such() -> None:
    with pytest.raises(Unread, match="its header states torchao's Int8Tensor, which mxcli does not read") as raised:
        TORCHAO.weights(exported("mxfp8", _type="Int8Tensor"))
    assert [weight.name for weight in raised.value.sound] == [FILE.format(1)]


def test_a_description_of_other_codes_is_a_misfit() -> None:
    data = {"elem_dtype": {"_type": "torch.dtype", "_data": "float8_e4m3fn"}, "block_size": 64}
    with pytest.raises(Misfits, match=r"states MXTensor of float8_e4m3fn, block size 64") as raised:
        TORCHAO.weights(exported("mxfp8", _data=data))
    assert [*raised.value.faults] == [FILE.format(0).removesuffix("weight") + "_weight"]


def test_descriptions_that_are_lost_are_ambiguous() -> None:
    disk = exported("mxfp4", 1)
    with pytest.raises(InputError, match="torchao's metadata was lost"):
        TORCHAO.weights(OnDisk(disk.tensors, disk.config, metadata={}))


@pytest.mark.parametrize(
    ("module", "targeted"),
    [
        ("model.layers.0.mlp.up_proj", True),
        ("model.layers.0.mlp.experts.0.up_proj", False),
        ("model.layers.0.block_sparse_moe.experts.1.w1", False),
        ("model.layers.0.mlp.gate", False),
        ("lm_head", False),
        ("cls.predictions.decoder", False),
    ],
)
def test_layers_that_need_an_entry_of_the_list(module: str, targeted: bool) -> None:
    """Experts, routers, heads and tied layers, which have no tensor, are loaded as they are."""
    tensors = {
        f"{name}.weight": TensorInfo(f"{name}.weight", "BF16", (4, 4), "weight", Path("m"), 0, 32)
        for name in (module,)
        if "decoder" not in name
    }
    ignored = TORCHAO.ignored(OnDisk(tensors, {}))
    assert ignored is not None
    assert ignored.targeted(module) is targeted
