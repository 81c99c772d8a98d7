"""Compare methods on an equilibrium model at equal numbers of evaluations: score, distance, residual and seconds.

`evaluate` compares solvers and students on a model of your own in one call; the rest is what it is made of.
"""

from cdeq.evaluation.cards import card_of
from cdeq.evaluation.certificate_plot import plot_certificate, true_distances
from cdeq.evaluation.certified import CertifiedComparison, compare_certified
from cdeq.evaluation.comparison import (
    compare,
    evaluate,
    explicit_row,
    method_rows,
    teacher_result,
)
from cdeq.evaluation.environment import (
    begin_peak,
    current_command,
    current_commit,
    current_hardware,
    joined,
    peak_megabytes,
    provenance,
    write_measurements,
)
from cdeq.evaluation.frontier import within_time
from cdeq.evaluation.methods import (
    SOLVERS,
    Explicit,
    Method,
    Target,
    learned_solver_method,
    parameter_count,
    solver_method,
    student_method,
)
from cdeq.evaluation.metrics import (
    Metric,
    accuracy,
    mean_squared_error,
    perplexity,
    top_accuracy,
)
from cdeq.evaluation.plain import described, json_text
from cdeq.evaluation.plot import plot_results
from cdeq.evaluation.quality import (
    CONVERGED,
    STEPS,
    Batch,
    Equilibria,
    Quality,
    find_equilibria,
    measure_quality,
)
from cdeq.evaluation.results import Results, ResultsError, Row, TeacherResult, mean
from cdeq.evaluation.styles import (
    PALETTE,
    STYLES,
    MetricStyle,
    Style,
    cost_text,
    listed,
    metric_of,
    seconds_text,
    small_text,
    style,
    teacher_text,
)
from cdeq.evaluation.table import Point, curves, grid, kind_of, results_table
from cdeq.evaluation.text import (
    Segments,
    find_text_equilibria,
    measure_text_quality,
    score_explicit_text,
)
from cdeq.evaluation.timing import Seconds, measure_seconds, median_seconds, median_times
from cdeq.evaluation.training_time import Training, TrainingClock, read_training, timed_training

__all__ = [
    "CONVERGED",
    "PALETTE",
    "SOLVERS",
    "STEPS",
    "STYLES",
    "Batch",
    "CertifiedComparison",
    "Equilibria",
    "Explicit",
    "Method",
    "Metric",
    "MetricStyle",
    "Point",
    "Quality",
    "Results",
    "ResultsError",
    "Row",
    "Seconds",
    "Segments",
    "Style",
    "Target",
    "TeacherResult",
    "Training",
    "TrainingClock",
    "accuracy",
    "begin_peak",
    "card_of",
    "compare",
    "compare_certified",
    "cost_text",
    "current_command",
    "current_commit",
    "current_hardware",
    "curves",
    "described",
    "evaluate",
    "explicit_row",
    "find_equilibria",
    "find_text_equilibria",
    "grid",
    "joined",
    "json_text",
    "kind_of",
    "learned_solver_method",
    "listed",
    "mean",
    "mean_squared_error",
    "measure_quality",
    "measure_seconds",
    "measure_text_quality",
    "median_seconds",
    "median_times",
    "method_rows",
    "metric_of",
    "parameter_count",
    "peak_megabytes",
    "perplexity",
    "plot_certificate",
    "plot_results",
    "provenance",
    "read_training",
    "results_table",
    "score_explicit_text",
    "seconds_text",
    "small_text",
    "solver_method",
    "student_method",
    "style",
    "teacher_result",
    "teacher_text",
    "timed_training",
    "top_accuracy",
    "true_distances",
    "within_time",
    "write_measurements",
]
