"""What an explicit model was built with, refused by name where it makes no sense."""

from __future__ import annotations

from typing import Any

from cdeq.models.arguments import arguments_of


def checked_arguments(names: dict[str, Any], **least: int) -> dict[str, Any]:
    """The arguments of a constructor, given its `locals()`, those it only passes on among them.

    A count is at least 1, or what `least` says; what is named a dropout is at least 0 and below 1.
    """
    config: dict[str, Any] = {}
    for name, value in arguments_of(names).items():
        config |= value if isinstance(value, dict) else {name: value}
    for name, value in config.items():
        lowest = least.get(name, 1)
        if name.endswith("dropout") and not 0 <= value < 1:
            raise ValueError(f"{name} must be at least 0 and below 1, not {value}")
        if type(value) is int and value < lowest and not name.endswith("dropout"):
            raise ValueError(f"{name} must be at least {lowest}, not {value}")
    return config
