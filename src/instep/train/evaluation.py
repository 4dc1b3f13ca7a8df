"""Evaluate a run's model: on one set, or on several, each by its name.

Ranks: all, alike.
"""

import contextlib
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from instep.core.errors import TaskError
from instep.core.spec import TrainSpec
from instep.data.columns import as_columns
from instep.guard.pulse import Phase, here
from instep.parallel.preserve import evaluating
from instep.train.engine import Engine
from instep.train.evaluate import evaluate
from instep.train.reading import Collate, read_chunks

MetricsOfModel = Callable[[nn.Module, Any], dict[str, Any]]
"""Returns the metrics of a batch, as a Task does."""


def evaluation_sets(data: Any, collate: Collate | None) -> dict[str, Any]:
    """Return the evaluation sets by name; the only one has none. A dict of columns is one set."""
    if not isinstance(data, Mapping) or as_columns(data, samples_wanted=collate is not None) is not None:
        return {"": data}
    if not data or not all(isinstance(name, str) and name and "/" not in name for name in data):
        raise TaskError(
            f"eval_data returned a dict with the keys {list(data)!r:.80}. Give several sets names without a slash: "
            '{"clean": dataset, "noisy": dataset}.'
        )
    return dict(data)


def named_metrics(sets: Iterable[str], metrics: list[str]) -> list[str]:
    """Return the names under which the metrics of these sets come out."""
    return [f"{name}/{metric}" if name else metric for name in sets for metric in metrics]


def evaluate_sets(
    engine: Engine,
    model: nn.Module,
    spec: TrainSpec,
    step: int,
    metrics: MetricsOfModel,
    sets: Mapping[str, Any],
    collate: Collate | None,
) -> dict[str, float]:
    """Compute metrics exactly over whole sets. Called on all ranks."""
    scores: dict[str, float] = {}
    for name, dataset in sets.items():
        with contextlib.closing(read_evaluation(engine, [model], spec, step, dataset, collate)) as chunks:
            values = evaluate(lambda batch: metrics(model, batch), chunks, engine.grid.data, spec.exact)
        scores |= zip(named_metrics([name], list(values)), values.values(), strict=True)
    return scores


def read_evaluation(
    engine: Engine,
    models: Sequence[nn.Module],
    spec: TrainSpec,
    step: int,
    dataset: Any,
    collate: Collate | None,
    in_step: bool = False,
) -> Generator[tuple[Any, int]]:
    """Yield this rank's chunks of a set, each with its number of rows, as `evaluation_chunks` does.

    Meanwhile the models are in evaluation mode, in the run's precision, without gradients; the noise of a chunk depends
    on the step and the chunk. Called on all ranks.
    """
    pulse = here()
    engine.context.end_part()
    with contextlib.ExitStack() as stack:
        stack.enter_context(pulse.during(Phase.EVALUATE))
        saved = [stack.enter_context(evaluating(model)) for model in models]
        stack.enter_context(torch.no_grad())
        seed_chunk = stack.enter_context(engine.evaluation_noise(step))
        chunks = stack.enter_context(contextlib.closing(read_chunks(engine, spec, dataset, collate, in_step)))
        for batch, num_rows in chunks:
            pulse.beat(Phase.EVALUATE)
            seed_chunk()
            with engine.precision.autocast():
                yield batch, num_rows
            for buffers in saved:  # which chunks a rank has computed before must not matter, now or later
                buffers.restore()
