"""What was chosen for a run besides its recipe's own numbers, in one line for a person."""

from __future__ import annotations

from instep.train.engine import Engine


def describe_choices(engine: Engine, compiled: bool) -> str:
    """Word it: `bf16, fused AdamW, compiled, recomputing 12 Block`; nothing for a plain training on CPU."""
    trained = engine.trained
    fused = sorted({type(each.optimizer).__name__ for each in trained if each.fused})
    recomputed = ", ".join(each.recomputed for each in trained if each.recomputed)
    precision = engine.precision.name
    if engine.on_cpu and precision == "fp32" and not compiled and not recomputed:
        return ""
    words = [precision, *(f"fused {name}" for name in fused), *["compiled"] * compiled]
    return ", ".join(words + [f"recomputing {recomputed}"] * bool(recomputed))
