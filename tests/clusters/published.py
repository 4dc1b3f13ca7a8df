"""Hold manifests against the schemas that Kubernetes and Kubeflow publish."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate

SCHEMAS = Path(__file__).parent / "schemas"
CORE_VERSIONS = ("1.31", kubernetes_validate.latest_version())
"""Since 1.31 a podFailurePolicy is no longer a beta feature."""
_CUSTOM = {
    "TrainJob": ("trainjob-2.0", "trainjob-2.3"),
    "TrainingRuntime": ("trainingruntime-2.0", "trainingruntime-2.3"),
    "PyTorchJob": ("pytorchjob-1.9",),
}


def check(manifest: dict[str, Any]) -> None:
    """Raise jsonschema.ValidationError where a manifest breaks its schema; unknown fields break it too."""
    names = _CUSTOM.get(manifest["kind"])
    if names is None:
        for version in CORE_VERSIONS:
            kubernetes_validate.validate(manifest, version, strict=True)
        return
    for name in names:
        published = json.loads((SCHEMAS / f"{name}.json").read_bytes())
        assert manifest["apiVersion"].endswith("/" + published["version"])
        jsonschema.Draft202012Validator(_strict(published["schema"])).validate(manifest)


def _strict(schema: Any) -> Any:
    """Refuse unknown fields, which a cluster would silently drop; read int-or-string as both."""
    if isinstance(schema, list):
        return [_strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    strict = {key: _strict(value) for key, value in schema.items()}
    open_ended = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object" and not open_ended:
        strict["additionalProperties"] = False
    return strict
