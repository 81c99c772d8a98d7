"""One training loop for teachers and students: resumable, logged, alone or under torchrun."""

from cdeq.placement import PlacementError
from cdeq.training.batches import batches_by_number
from cdeq.training.checkpoint import CheckpointError
from cdeq.training.log import Progress, ProgressBar
from cdeq.training.loop import FitConfig, fit
from cdeq.training.parallel import is_main_process, own_part, process_group, process_rank
from cdeq.training.teaching import TeachConfig, few_step_teaching, teach

__all__ = [
    "CheckpointError",
    "FitConfig",
    "PlacementError",
    "Progress",
    "ProgressBar",
    "TeachConfig",
    "batches_by_number",
    "few_step_teaching",
    "fit",
    "is_main_process",
    "own_part",
    "process_group",
    "process_rank",
    "teach",
]
