"""What `mxcli verify` must find of damage planted at random, and that sound outputs stay sound."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from mutations.damage import DAMAGE
from mutations.outputs import Output
from mutations.score import (
    FOREIGN,
    FOREIGN_AGAINST,
    OWN,
    OWN_AGAINST,
    Tried,
    crashes,
    false_alarms,
    missed,
    missed_line,
    names,
    score,
    share,
)
from mutations.subjects import SUBJECTS, VARIANTS, called

REQUIRED = {OWN: 1.0, OWN_AGAINST: 1.0, FOREIGN_AGAINST: 1.0, FOREIGN: 0.8}
"""The least share of the damage to an output that is found."""
FAST = ("ct-nvfp4", "fp8-128x128", "ct-w4a4")
PORTION = 0.06
SAMPLES = Path(__file__).parents[1] / "data" / "layouts"
PRODUCED = sorted(
    path
    for path in SAMPLES.iterdir()
    if (path / "model.safetensors").is_file() and not path.name.startswith("gguf-") and path.name != "llama64-original"
)


def assert_found(results: Sequence[Tried]) -> None:
    listed = "\n".join(map(missed_line, missed(results)))
    assert not [missed_line(each) for each in false_alarms(results)]
    assert not [missed_line(each) for each in crashes(results)]
    short = {mode: share(results, mode) for mode, least in REQUIRED.items() if share(results, mode) < least}
    assert not short, f"found too little: {short}\n{listed}"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0])
def test_a_random_portion_of_all_damage_is_found(tmp_path: Path, seed: int) -> None:
    subjects = [SUBJECTS[name] for name in FAST]
    assert_found(score(subjects, list(DAMAGE.values()), tmp_path, seed=seed, portion=PORTION))


@pytest.mark.slow
@pytest.mark.parametrize("name", SUBJECTS)
def test_damage_of_every_output_is_found(tmp_path: Path, name: str) -> None:
    """A quarter of all kinds; `python tests/mutations/score.py` plants all of them."""
    assert_found(score([SUBJECTS[name]], list(DAMAGE.values()), tmp_path, seed=1, portion=0.25))


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_sound_outputs_of_other_rules_and_models_are_sound(tmp_path: Path, name: str) -> None:
    assert_found(score([VARIANTS[name]], [], tmp_path))


@pytest.mark.parametrize("sample", [path.name for path in PRODUCED])
def test_outputs_of_other_producers_are_sound(sample: str) -> None:
    code, _, said = called("verify", SAMPLES / sample, "--device", "cpu", "--threads", "1")
    assert code == 0, said


@pytest.mark.parametrize("sample", [path.name for path in PRODUCED if path.name.startswith("llama64-")])
def test_outputs_of_other_producers_are_sound_against_their_source(sample: str) -> None:
    words = ("verify", SAMPLES / sample, "--against", SAMPLES / "llama64-original", "--device", "cpu", "--threads", "1")
    code, _, said = called(*words)
    assert code == 0, said


@pytest.mark.parametrize("name", ["modelopt-nvfp4", "gguf-nvfp4", "gpt-oss"])
def test_tables_are_written_as_they_were_read(tmp_path: Path, name: str) -> None:
    output = SUBJECTS[name].build(tmp_path, 0)
    for shard in output.shards:
        before = (output.folder / shard).read_bytes()
        output.write_table(shard, output.table(shard))
        assert (output.folder / shard).read_bytes() == before


def test_parts_of_a_weight_are_where_its_layout_has_them(tmp_path: Path) -> None:
    output = SUBJECTS["gguf-nvfp4"].build(tmp_path, 0)
    query = next(weight for weight in output.stored if weight.name == "blk.0.attn_q.weight")
    assert query.scales is not None
    assert query.tensor_scale is not None
    assert query.tensor_scale.name == "blk.0.attn_q.scale"
    # A block of 64 values: four scales, then 32 bytes of codes.
    assert (query.codes.at[:2] - query.scales.at[0]).tolist() == [4, 5]
    assert query.codes.at[32] - query.scales.at[0] == 40
    assert (query.codes.shape, query.scales.shape) == ((128, 64), (128, 8))


def test_a_kind_of_damage_is_planted_by_its_seed(tmp_path: Path) -> None:
    results = [
        score(
            [SUBJECTS["ct-mxfp4"]], [DAMAGE["bit of a code"]], tmp_path / str(run), seed=seed, modes=[FOREIGN_AGAINST]
        )
        for run, seed in enumerate((3, 3, 4))
    ]
    first, same, other = (each[-1].what for each in results)
    assert first == same
    assert first != other


@pytest.mark.parametrize(
    ("text", "name", "is_named"),
    [
        ("model.layers.1.mlp.up_proj.weight: 3 scales NaN", "model.layers.1.mlp.up_proj.weight", True),
        ("model.layers.11.mlp.up_proj.weight: 3 scales NaN", "model.layers.1", False),
        ("model.layers.1.mlp.up_proj.weight_scale", "model.layers.1.mlp.up_proj.weight", False),
        ("'model.layers.1.mlp.up_proj', quantized", "model.layers.1.mlp.up_proj", True),
        ("a.mlp.gate_proj+up_proj: tensor scales differ", "a.mlp.up_proj", True),
        ("a.mlp.gate_proj+up_proj: tensor scales differ", "a.mlp.down_proj", False),
        ("a.layers.1 lacks mlp.up_proj.weight, which 2 of 3 layers have", "a.layers.1.mlp.up_proj.weight", True),
        ("a.layers.1 lacks mlp.up_proj.weight, which 2 of 3 layers have", "a.layers.2.mlp.up_proj.weight", False),
        ("b/model.safetensors: truncated", "model.safetensors", True),
        ("model.safetensors.index.json: no such file", "model.safetensors", False),
    ],
)
def test_what_counts_as_naming(text: str, name: str, is_named: bool) -> None:
    assert names(text, name) is is_named


def test_copies_of_an_output_know_its_parts(tmp_path: Path) -> None:
    output = SUBJECTS["mxcli-mxint8"].build(tmp_path, 0)
    copy: Output = output.copied(tmp_path / "elsewhere")
    assert copy.stored is output.stored
