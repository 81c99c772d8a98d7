"""Any methods on any equilibrium model at equal evaluations: score, distance, residual and seconds."""

from cdeq.evaluation.certified import CertifiedComparison, compare_certified
from cdeq.evaluation.comparison import (
    SOLVERS,
    Equilibria,
    Explicit,
    Method,
    Quality,
    Target,
    compare,
    explicit_row,
    find_equilibria,
    learned_solver_method,
    measure_quality,
    measure_seconds,
    median_seconds,
    median_times,
    method_rows,
    parameter_count,
    solver_method,
    student_method,
)
from cdeq.evaluation.metrics import Metric, accuracy, perplexity, top_accuracy
from cdeq.evaluation.results import (
    Results,
    ResultsError,
    Row,
    TeacherResult,
    current_command,
    current_commit,
    current_hardware,
    joined,
    provenance,
    write_measurements,
)
from cdeq.evaluation.text import find_text_equilibria, measure_text_quality, score_explicit_text
