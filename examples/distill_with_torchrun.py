"""Train a teacher and distil it, on any number of processes; docs/scaling-out.md has the commands.

Every process runs this file from top to bottom. --folder is one that all of them see.
"""

import argparse
from pathlib import Path

import torch

import cdeq
from cdeq.data import digits_images
from cdeq.models import ConvDEQ

parser = argparse.ArgumentParser()
parser.add_argument("--folder", type=Path, required=True)
parser.add_argument("--updates", type=int, default=200, help="of the student")
parser.add_argument("--teacher-updates", type=int, default=150)
parser.add_argument("--checkpoint-every", type=int, default=50)
parser.add_argument("--sharded", action="store_true", help="divide the teacher among the processes")
options = parser.parse_args()

with cdeq.process_group():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train = digits_images().train
    batches = list(zip(train.x.split(64), train.y.split(64), strict=True))[:-1]

    def share_of_batch(update):
        """This process's part of a batch, for `teach`; `distill` takes whole batches and divides them."""
        return tuple(part.to(device) for part in cdeq.own_part(batches[update % len(batches)]))

    torch.manual_seed(0)  # so that all processes begin with the same weights
    teacher = ConvDEQ(channels=8, groups=4, keep=0.0, gain=0.2).to(device)
    teaching = cdeq.TeachConfig(
        fit=cdeq.FitConfig(
            updates=options.teacher_updates,
            learning_rate=2e-3,
            checkpoint_every=options.checkpoint_every,
        ),
        pretrain_updates=options.teacher_updates // 2,
    )
    cdeq.teach(
        teacher,
        share_of_batch,
        teaching,
        sharded=options.sharded,
        folder=options.folder / "teacher",
    )

    distilling = cdeq.FitConfig(
        updates=options.updates,
        learning_rate=3e-3,
        checkpoint_every=options.checkpoint_every,
    )
    student = cdeq.distill(teacher, batches, fit=distilling, folder=options.folder / "distil")
    if cdeq.is_main_process():
        student.save(options.folder / "student")
        print(f"saved to {options.folder / 'student'}")
