"""The evidence of a training: what its ranks recorded, read back for the comparison."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from instep.checkpoint.weights import load_weights
from instep.events.read import read_events
from instep.verify.recorder import GRADIENTS


@dataclass(frozen=True)
class Row:
    """One row of a global batch, as a rank computed it."""

    row: int
    index: int
    digest: str


@dataclass
class Evidence:
    """One training: samples by step, the trajectory, and the end."""

    name: str
    rows: dict[int, list[Row]] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    lrs: dict[int, float] = field(default_factory=dict)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    first_metrics: dict[str, float] = field(default_factory=dict)
    """Before the first step."""
    metrics: dict[str, float] = field(default_factory=dict)
    """In the end."""
    hashes: list[str] = field(default_factory=list)
    terms: dict[str, float] = field(default_factory=dict)
    """The sum of the absolute values of the terms that a gradient at step 1 is the sum of, where that is known."""
    eps: float = 0.0
    """Of the coarsest precision that a layer computed in."""
    notices: list[str] = field(default_factory=list)
    """What the training logged for a person."""


def read_evidence(name: str, run_dir: Path, folders: Sequence[Path], metrics: dict[str, float]) -> Evidence:
    """Return what the ranks recorded, attempt by attempt. A step that was repeated counts as it was the last time."""
    evidence = Evidence(name, metrics=metrics, weights=load_weights(run_dir))
    for folder in folders:
        rows: dict[int, list[Row]] = {}
        for path in sorted(folder.glob("rank-*.jsonl")):
            for record in _lines(path):
                if "step" in record and record["counted"]:
                    rows.setdefault(record["step"], []).extend(_rows(record))
                evidence.hashes = record.get("hashes", evidence.hashes)
                evidence.eps = max(evidence.eps, record.get("eps", 0.0))
                for parameter, size in record.get("terms", {}).items():
                    evidence.terms[parameter] = evidence.terms.get(parameter, 0.0) + size
        evidence.rows |= {step: sorted(rows[step], key=lambda row: row.row) for step in rows}
        if (folder / GRADIENTS).exists():
            evidence.gradients = load_file(folder / GRADIENTS)
    for event in read_events(run_dir):
        if event["event"] == "step":
            evidence.losses[event["step"]] = event["loss"]
            evidence.lrs[event["step"]] = event["lr"]
        if event["event"] == "notice":
            evidence.notices.append(event["text"])
        if event["event"] == "eval" and event["step"] == 0:
            evidence.first_metrics = event["metrics"]
    return evidence


def died_as_planned(folder: Path) -> bool:
    """Return whether a rank killed itself as planned."""
    return any("died_after" in record for path in folder.glob("rank-*.jsonl") for record in _lines(path))


def _rows(record: dict[str, Any]) -> list[Row]:
    pairs = zip(record["indices"], record["digests"], strict=True)
    return [Row(record["first_row"] + offset, index, digest) for offset, (index, digest) in enumerate(pairs)]


def _lines(path: Path) -> list[dict[str, Any]]:
    """Return all complete lines; a rank that was killed may have left half a line."""
    lines = path.read_text().split("\n")[:-1]
    return [json.loads(line) for line in lines if line.endswith("}")]
