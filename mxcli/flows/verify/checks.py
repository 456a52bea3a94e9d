"""The table of all checks."""

from __future__ import annotations

from typing import Any

from mxcli.flows.verify.check import Check
from mxcli.flows.verify.check_against import JUDGED_CHECKS, ORIGINAL_CHECKS, SOURCE_CHECKS
from mxcli.flows.verify.check_config import CONFIG_CHECKS, DEVICE_CHECKS, LIST_CHECKS
from mxcli.flows.verify.check_files import FILE_CHECKS
from mxcli.flows.verify.check_foreign import FOREIGN_CHECKS
from mxcli.flows.verify.check_fused import FUSED_CHECKS
from mxcli.flows.verify.check_model import MODEL_CHECKS
from mxcli.flows.verify.check_model_config import MODEL_CONFIG_CHECKS
from mxcli.flows.verify.check_parameters import PARAMETER_CHECKS
from mxcli.flows.verify.check_plain import PLAIN_CHECKS
from mxcli.flows.verify.check_record import RECORD_CHECKS
from mxcli.flows.verify.check_rules import RULE_CHECKS
from mxcli.flows.verify.check_settings import SETTINGS_CHECKS
from mxcli.flows.verify.check_siblings import LAYER_CHECKS, PLAIN_SIBLING_CHECKS, SIBLING_CHECKS
from mxcli.flows.verify.check_statistics import STATISTICS_CHECKS
from mxcli.flows.verify.check_values import WEIGHT_CHECKS

CHECKPOINT_CHECKS = (*FILE_CHECKS, *RULE_CHECKS, *LIST_CHECKS, *CONFIG_CHECKS, *SETTINGS_CHECKS, *DEVICE_CHECKS)
CHECKS: tuple[Check[Any], ...] = (
    *CHECKPOINT_CHECKS,
    *RECORD_CHECKS,
    *MODEL_CHECKS,
    *PARAMETER_CHECKS,
    *LAYER_CHECKS,
    *PLAIN_CHECKS,
    *PLAIN_SIBLING_CHECKS,
    *WEIGHT_CHECKS,
    *STATISTICS_CHECKS,
    *SIBLING_CHECKS,
    *FUSED_CHECKS,
    *FOREIGN_CHECKS,
    *SOURCE_CHECKS,
    *MODEL_CONFIG_CHECKS,
    *ORIGINAL_CHECKS,
    *JUDGED_CHECKS,
)
