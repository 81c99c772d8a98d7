"""A pretrained image classifier at work: nothing is trained.

    python examples/pretrained_images.py

Loads the MDEQ of CIFAR-10 and its student from the zoo, with the few test images that come with them. Shows, after each
number of evaluations of f, the classes that plain iteration of the teacher names and those that the student names; and
below them what the converged teacher says, and how near the student's solve came to it.
"""

from __future__ import annotations

import torch

import cdeq
from cdeq.zoo import read_sample

CLASSES = ["plane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


@torch.no_grad()
def main() -> None:
    student = cdeq.load_pretrained("mdeq-cifar10")
    images, _ = read_sample("mdeq-cifar10")
    teacher, context = student.teacher, student.teacher.inject(images)
    z = teacher.start(context)
    print("evaluations  plain iteration          student")
    for steps in range(1, 5):
        z = teacher.step(z, context)
        plain = named(teacher.readout(z, context))
        print(f"{steps:<12} {plain:<24} {named(student(images, steps=steps))}")
    found = student.solve(images, tol=1e-3)
    evaluations, error = found.steps.double().mean(), float(found.error.max())
    print(f"converged    {named(found.output)}")
    print(f"             in {evaluations:.1f} evaluations, estimated error at most {error:.1e}")


def named(logits: torch.Tensor) -> str:
    """The class of each image."""
    return " ".join(CLASSES[place] for place in logits.argmax(dim=1).tolist())


if __name__ == "__main__":
    main()
