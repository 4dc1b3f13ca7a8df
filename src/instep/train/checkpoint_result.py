"""The results of `instep.evaluate` and `instep.predict`."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class EvaluateResult:
    """The metrics of a checkpoint."""

    metrics: dict[str, float]
    """As a training has them, with `eval_loss`; those of several sets as `name/metric`."""
    step: int
    checkpoint: str
    run_dir: str
    num_samples: int
    """Of all sets together."""
    world_size: int

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class PredictResult:
    """Where the predictions of a checkpoint are."""

    out: str
    columns: list[str]
    """Of the file, without `index`."""
    step: int
    checkpoint: str
    run_dir: str
    num_samples: int
    world_size: int

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return asdict(self)
