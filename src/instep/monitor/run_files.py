"""The JSON files of a run, read as far as they can be: spec.json, result.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_object(path: Path, complaints: list[str]) -> dict[str, Any]:
    """Return the JSON object in a file, or nothing, with a complaint unless there is no such file."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        complaints.append(f"{path} cannot be read ({getattr(error, 'strerror', None) or 'it is no JSON'})")
        return {}
    if not isinstance(content, dict):
        complaints.append(f"{path} holds no JSON object")
        return {}
    return content


def read_options(run_dir: Path) -> dict[str, Any]:
    """Return the options of a run, from its spec.json; none where it cannot be read."""
    options = read_object(run_dir / "spec.json", []).get("spec")
    return options if isinstance(options, dict) else {}
