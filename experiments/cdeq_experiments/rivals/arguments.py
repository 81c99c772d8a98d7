"""What an explicit model was built with, refused by name where it makes no sense."""

from __future__ import annotations

from typing import Any

from cdeq.models.arguments import arguments_of

LEAST = {"seed": 0, "memory": 0, "image_size": 8}
"""The least that a count may be, if not 1; image classifiers halve their maps three times after the stem."""


def checked_arguments(names: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a constructor, given its `locals()`, those it only passes on among them.

    Dropouts are at least 0 and below 1.
    """
    config: dict[str, Any] = {}
    for name, value in arguments_of(names).items():
        config |= value if isinstance(value, dict) else {name: value}
    for name, value in config.items():
        if name.endswith("dropout"):
            if not 0 <= value < 1:
                raise ValueError(f"{name} must be at least 0 and below 1, not {value}")
        elif type(value) is int and value < LEAST.get(name, 1):
            raise ValueError(f"{name} must be at least {LEAST.get(name, 1)}, not {value}")
    return config
