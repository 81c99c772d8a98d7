"""Values as plain JSON."""

from __future__ import annotations

import json
import math
from dataclasses import fields, is_dataclass
from typing import Any


def described(value: Any) -> Any:
    """Settings as plain JSON: a dataclass becomes its fields under the name of its type."""
    if is_dataclass(value) and not isinstance(value, type):
        named = {field.name: described(getattr(value, field.name)) for field in fields(value)}
        return {"type": type(value).__name__, **named}
    if isinstance(value, dict):
        return {str(key): described(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [described(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)


def json_text(value: Any) -> str:
    """JSON for people to read; a number that is not finite becomes null, since JSON has no NaN."""
    return json.dumps(_finite(value), indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
