"""One training loop for teachers and students: resumable, logged, alone or under torchrun."""

from cdeq.training.checkpoint import CheckpointError
from cdeq.training.loop import FitConfig, fit
from cdeq.training.parallel import process_group
from cdeq.training.teaching import TeachConfig, teach

__all__ = ["CheckpointError", "FitConfig", "TeachConfig", "fit", "process_group", "teach"]
