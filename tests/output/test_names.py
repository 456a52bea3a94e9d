"""Columns of CSV files and keys of plans, spelled out: scripts rely on them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
from test_schema import SAMPLE, printed

COLUMNS = {
    "verification.RECORD_KEYS": """
        name format shape problems warnings notes amax tensor_scale sqnr_db relative_error mse max_abs_error
        bytes_of findings
    """,
    "difference.RECORD_KEYS": """
        name in_a in_b shape_a shape_b differs elements blocks codes codes_percent codes_sign_of_zero codes_one_step
        blocks_with_codes scales scales_percent scale_steps tensor_scale_a tensor_scale_b relative_difference
        max_abs_difference nan_scales axis_a axis_b hadamard_signs_a hadamard_signs_b
        by_record
    """,
    "recommendation.RECORD_KEYS": """
        name group role dtype shape elements option bits_per_element harm sqnr_db chosen
    """,
    "products.RECORD_NAMES": """
        layer pass m n k format_a format_b sqnr_db relative_error cosine bias
    """,
    "training.RECORD_NAMES": """
        layer step rank recipe pass m n k high sqnr_db relative_error cosine bias shrunk_percent
        averaged_relative_error x_saturated_percent x_underflowed_percent x_sqnr_db x_bias w_saturated_percent
        w_underflowed_percent w_sqnr_db w_bias dy_saturated_percent dy_underflowed_percent dy_sqnr_db dy_bias
    """,
    "bench.RECORD_NAMES": """
        name format scale_rounding threads statistics seconds_median seconds_p10 seconds_p90 rounds
        elements_per_second bytes_per_second copy_percent bytes_equal problem
    """,
    "bench.GPU_RECORD_NAMES": """
        name format scale_rounding work seconds_median seconds_p10 seconds_p90 rounds elements_per_second
        bytes_per_second limit_seconds limit_percent bytes_equal problem
    """,
    "bench_gemm.RECORD_NAMES": """
        kernel format_a format_b m n k pass layer layers tflops speedup sqnr_db deviation inexact seconds_median
        seconds_p10 seconds_p90 rounds drift_percent quantize_seconds_median includes_quantize peak_percent problem
    """,
}
MEASURING = (
    "schema source elements bytes by_dtype options {rules} counts {sizes} measurements bytes_read {site} notes tensors"
)
SITE = "peak_memory_bytes max_memory_bytes device"
TENSOR = "name dtype shape role decision reason bytes"


@pytest.mark.parametrize("constant", COLUMNS)
def test_columns_of_csv(constant: str) -> None:
    module, name = constant.split(".")
    assert getattr(import_module(f"mxcli.output.{module}"), name) == tuple(COLUMNS[constant].split())


def plan(*words: object) -> dict[str, Any]:
    found: dict[str, Any] = printed(*words, "--dry-run")
    return found


def test_plan_of_a_report() -> None:
    found = plan("report", SAMPLE, "--format", "nvfp4")
    assert " ".join(found) == MEASURING.format(rules="recipes", sizes="quantized_bytes", site=SITE)
    assert " ".join(found["tensors"][0]) == TENSOR
    assert (found["measurements"], found["bytes_read"], found["quantized_bytes"]) == (28, 1_572_864, 442_480)


def test_plan_of_a_comparison() -> None:
    found = plan("compare", SAMPLE, "--formats", "mxfp4,nvfp4")
    assert " ".join(found) == " ".join(MEASURING.format(rules="combinations", sizes="", site=SITE).split())
    assert " ".join(found["combinations"][0]) == "name format scale_rounding rounding dialect quantized_bytes"
    assert " ".join(found["tensors"][0]) == TENSOR
    assert (found["measurements"], found["bytes_read"]) == (56, 1_572_864)


def test_plan_of_a_recommendation() -> None:
    found = plan("recommend", SAMPLE, "--formats", "mxfp4,nvfp4", "--bits", "5")
    assert " ".join(found) == (
        "schema source elements bytes by_dtype target objective formats chosen_for_elements least_bits_per_element "
        f"kept_bits_per_element measurements bytes_read {SITE} notes groups"
    )
    assert " ".join(found["groups"][0]) == "name tensors elements options"
    assert found["groups"][0]["options"]["keep"] == {"bits_per_element": 16.0}


def test_plan_of_an_output() -> None:
    found = plan("quantize", SAMPLE, "--format", "nvfp4")
    assert " ".join(found) == (
        f"schema source model model_source layout counts source_bytes output_bytes {SITE} free_disk_bytes output files "
        "notes ignored loaders tensors"
    )
    assert " ".join(found["tensors"][0]) == "name dtype shape role decision reason format bytes output_bytes"
    assert sum(each["output_bytes"] for each in found["tensors"]) == 575_856 < found["output_bytes"]  # with headers
