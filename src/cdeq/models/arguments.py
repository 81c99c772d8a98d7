"""What a model was built with."""

from __future__ import annotations

from typing import Any


def arguments_of(names: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a constructor: `self.config = arguments_of(locals())`, before it gives names to anything else.

    A model is built again from them when it is loaded.
    """
    return {name: value for name, value in names.items() if name not in ("self", "__class__")}
