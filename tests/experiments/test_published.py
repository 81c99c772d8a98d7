"""What the paper reports: beside the right rows by name, and as the paper's source has it."""

import os
import re
from collections import Counter
from pathlib import Path

import pytest

from builders import results, row, teacher_result
from cdeq.evaluation import STYLES
from cdeq_experiments.pages.frame import beside, published, with_published

VALUES = published()["values"]


def value(dataset, experiment, method, steps, **fields):
    """The published values of one row of ours."""
    teacher = teacher_result(dataset, **fields)
    made = results(row(method, steps, dataset=dataset), teachers=[teacher], experiment=experiment)
    return with_published(made).rows[0].published


def test_values_are_found_by_name():
    assert value("CIFAR-10", "table2", "paper", 8) == {
        "metric": 0.7404,
        "top5": 0.9145,
        "seconds": 0.87,
    }
    perplexity = {"metric_name": "perplexity", "metric": 200.0, "higher_is_better": False}
    assert value("WikiText-2", "table1", "tcn", None, **perplexity)["metric"] == 45.2
    assert value("WikiText-2", "window", "m = 7", 8, **perplexity)["seconds"] == 2.96


def test_one_data_set_alone_has_its_own_values():
    """As with --only: the place of a data set among others does not matter."""
    assert value("Amazon Computers", "table3", "paper", 1)["metric"] == 0.6015
    assert value("PubMed", "table3", "paper", 1)["metric"] == 0.5681


@pytest.mark.parametrize(
    ("dataset", "experiment", "method", "steps"),
    [
        ("Coauthor Physics", "table3", "paper", 1),  # the paper has no such graph
        ("digits", "table2", "paper", 1),
        ("PubMed", "inductive", "paper", 1),  # nor this experiment
        ("CIFAR-10", "table2", "anchored", 1),
        ("CIFAR-10", "table2", "paper", 4),
    ],
)
def test_where_the_paper_has_nothing_there_is_nothing(dataset, experiment, method, steps):
    assert value(dataset, experiment, method, steps) == {}


def test_data_sets_and_methods_are_ones_that_we_know():
    assert set(published()["beside"].values()) == set(VALUES)
    assert all(beside(name) == name for name in VALUES)
    for experiments in VALUES.values():
        for name in ("table1", "table2", "table3"):
            assert set(experiments.get(name, ())) <= set(STYLES)


def test_the_default_of_an_ablation_is_the_student_of_the_table():
    default = {"solvers": "anderson trajectory", "modules": "Anderson", "window": "m = 1"}
    default |= {
        "time-map": "exponential",
        "gamma-rho": "gamma = 2, rho = 0.1",
        "beta": "beta = 0.9",
    }
    for experiments in VALUES.values():
        [table] = [name for name in experiments if name.startswith("table")]
        student = experiments[table]["paper"]
        for name, variant in default.items():
            for steps, found in experiments.get(name, {}).get(variant, {}).items():
                assert found["metric"] == student[steps]["metric"]


# The paper's source, where it is at hand.

NAMES = {
    "Generic TCN": "tcn",
    "GCNN": "gcnn",
    "AWD-QRNN": "awd_qrnn",
    "Transformer-XL": "transformer_xl",
    "AlexNet": "alexnet",
    "Inception-V2": "inception_v2",
    "HRNet-W18-C": "hrnet",
    "GCN": "gcn",
    "GAT": "gat",
    "GCNII": "gcnii",
    "GPM": "gpm",
    "MDEQ": "anderson",
    "IGNN": "anderson",
    "EIGNN": "eignn",
    "MIGNN": "mignn",
    "IGNN-Solver": "ignn_solver",
    "HyperDEQ": "hyperdeq",
    "C-DEQ (Ours)": "paper",
}
LABELS = {
    "solvers": "performance_efficiency_comparison",
    "lambdas": "lambda",
    "modules": "aa_module_ablations",
    "window": "sensitivity_analysis_m",
    "gamma-rho": "hyperparameters_ablation",
    "beta": "hyperparameter_beta",
    "time-map": "mapping_function_ablation",
    "overhead": "training_overhead",
    "cost": "training_time_comparison",
}


@pytest.fixture(scope="module")
def source():
    path = Path(os.environ.get("CDEQ_PAPER", ""))
    if not path.is_file():
        pytest.skip("CDEQ_PAPER does not name the LaTeX source of the paper")
    return path.read_text(encoding="utf-8")


def tabulars(source, label):
    """The bodies of the tables with a label."""
    whole = source.split(rf"\label{{tab:{label}}}")[1].split(r"\end{table")[0]
    return re.findall(r"\\midrule(.*?)\\bottomrule", whole, re.DOTALL)


def numbers(text):
    return [float(number) for number in re.findall(r"(?<![\w.])\d+(?:\.\d+)?", text)]


@pytest.mark.parametrize(
    ("label", "table", "datasets"),
    [
        ("wikitext", "table1", ["WikiText-103"]),
        ("ImageNet", "table2", ["ImageNet"]),
        ("ogb", "table3", ["ogbn-arxiv", "ogbn-products"]),
    ],
)
def test_tables_are_the_papers(source, label, table, datasets):
    for body, dataset in zip(tabulars(source, label), datasets, strict=True):
        single = "deq" if dataset == "ImageNet" else "anderson"
        found = {}
        for line in body.split(r"\\"):
            line = re.sub(r"\\textbf\{([^}]*)\}|~?\\cite\{[^}]*\}|\\midrule|[{}]", r"\1", line)
            name, *cells = [cell.strip() for cell in line.split("&")]
            if cells:
                method = single if name == "DEQ" else NAMES[name]
                *scores, seconds = map(float, cells[2:])
                told = {"metric": scores[0], "seconds": seconds}
                told |= {"top5": scores[1]} if len(scores) > 1 else {}
                found.setdefault(method, {})[cells[1]] = told
        assert found == VALUES[dataset][table]


@pytest.mark.parametrize(("experiment", "label"), LABELS.items())
def test_the_numbers_of_ablations_are_the_papers(source, experiment, label):
    """Each number as often as in the paper; heads of rows and columns are no results."""
    [body] = tabulars(source, label)
    body = re.sub(r"\$[^$]*=[^$]*\$|\$[\d.]+\$", "", body)
    body = re.sub(r"(?m)^ *(WikiText-103|0|0\.05) ", "", body)
    ours = [
        number / 1000 if name == "peak memory" else number
        for experiments in VALUES.values()
        for steps in experiments.get(experiment, {}).values()
        for found in steps.values()
        for name, number in found.items()
    ]
    assert Counter(ours) == Counter(numbers(re.sub(r"(\d)h\b", r"\1", body)))
