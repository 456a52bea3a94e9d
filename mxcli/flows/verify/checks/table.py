"""The table of all checks."""

from __future__ import annotations

from typing import Any

from mxcli.flows.verify.against.checks import JUDGED_CHECKS, ORIGINAL_CHECKS, SOURCE_CHECKS
from mxcli.flows.verify.checks.accounting import ACCOUNTING_CHECKS
from mxcli.flows.verify.checks.check import Check
from mxcli.flows.verify.checks.config import CONFIG_CHECKS, DEVICE_CHECKS, LIST_CHECKS
from mxcli.flows.verify.checks.files import FILE_CHECKS
from mxcli.flows.verify.checks.foreign import FOREIGN_CHECKS
from mxcli.flows.verify.checks.fused import FUSED_CHECKS
from mxcli.flows.verify.checks.layers import LAYER_CHECKS
from mxcli.flows.verify.checks.loaders import LOADER_CHECKS
from mxcli.flows.verify.checks.model import MODEL_CHECKS
from mxcli.flows.verify.checks.model_config import MODEL_CONFIG_CHECKS
from mxcli.flows.verify.checks.parameters import PARAMETER_CHECKS
from mxcli.flows.verify.checks.plain import COPIED_CHECKS, PLAIN_CHECKS
from mxcli.flows.verify.checks.record import RECORD_CHECKS
from mxcli.flows.verify.checks.rules import RULE_CHECKS
from mxcli.flows.verify.checks.settings import SETTINGS_CHECKS
from mxcli.flows.verify.checks.siblings import PLAIN_SIBLING_CHECKS, SIBLING_CHECKS
from mxcli.flows.verify.checks.statistics import STATISTICS_CHECKS
from mxcli.flows.verify.checks.unread import UNREAD_CHECKS
from mxcli.flows.verify.checks.values import WEIGHT_CHECKS

CHECKPOINT_CHECKS = (
    *FILE_CHECKS,
    *UNREAD_CHECKS,
    *RULE_CHECKS,
    *LIST_CHECKS,
    *CONFIG_CHECKS,
    *SETTINGS_CHECKS,
    *DEVICE_CHECKS,
)
CHECKS: tuple[Check[Any], ...] = (
    *CHECKPOINT_CHECKS,
    *LOADER_CHECKS,
    *RECORD_CHECKS,
    *MODEL_CHECKS,
    *PARAMETER_CHECKS,
    *LAYER_CHECKS,
    *PLAIN_CHECKS,
    *COPIED_CHECKS,
    *PLAIN_SIBLING_CHECKS,
    *WEIGHT_CHECKS,
    *STATISTICS_CHECKS,
    *SIBLING_CHECKS,
    *FUSED_CHECKS,
    *FOREIGN_CHECKS,
    *SOURCE_CHECKS,
    *ACCOUNTING_CHECKS,
    *MODEL_CONFIG_CHECKS,
    *ORIGINAL_CHECKS,
    *JUDGED_CHECKS,
)
