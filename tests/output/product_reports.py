"""Reports of products of the sample's captures, for pages and plots."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from mxcli.backends.cpu import Cpu
from mxcli.files.checkpoint import open_checkpoint
from mxcli.files.selection import Rule
from mxcli.flows.plan.plan import Options, make_plan
from mxcli.flows.products.report import ProductReport, plan_products, report_products
from mxcli.flows.products.trained_layers import trained_model
from mxcli.flows.products.training import TrainingReport, Trial, report_training
from mxcli.numerics.scheme import resolve
from mxcli.numerics.training import find_training

SAMPLES = Path(__file__).parents[2] / "samples"
MODEL, CAPTURES = SAMPLES / "tiny-llama", SAMPLES / "tiny-llama-captures.safetensors"


def training_report(names: str, layers: str, draws: int = 1) -> TrainingReport:
    """Products of the layers that match, under training recipes."""
    checkpoint = open_checkpoint(MODEL)
    selection = (Rule(True, layers),)
    plan = make_plan(checkpoint, Options("mxfp8", on_indivisible="pad", selection=selection, analysis=True))
    model = trained_model(checkpoint, open_checkpoint(CAPTURES), plan)
    return report_training("samples/tiny-llama", model, Trial(tuple(find_training(names)), Cpu(1), 0, draws))


def product_report(fmt: str, layers: str) -> ProductReport:
    """Products of the layers that match, all operands in one format."""
    checkpoint = open_checkpoint(MODEL)
    plan = make_plan(checkpoint, Options(fmt, selection=(Rule(True, layers),)))
    scheme = resolve(fmt)
    planned = plan_products(checkpoint, open_checkpoint(CAPTURES), plan, {"X": scheme, "dY": scheme})
    return report_products("samples/tiny-llama", planned, Cpu(1))


def at_steps(report: TrainingReport, noise: dict[int, float]) -> TrainingReport:
    """The same products at several steps, with so many dB less SQNR."""
    products = []
    for product in report.products:
        for step, decibels in noise.items():
            energies = replace(product.energies, noise=product.energies.noise * math.pow(10.0, decibels / 10))
            products.append(replace(product, step=step, energies=energies))
    return replace(report, products=tuple(products))
