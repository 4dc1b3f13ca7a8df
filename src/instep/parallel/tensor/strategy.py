"""The strategy `tensor`: each layer's weights shared by a team of ranks, which work on the same rows."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from instep.core.errors import TaskError
from instep.parallel.batch_context import BatchContext
from instep.parallel.capture import Call
from instep.parallel.strategy import NO_HINTS, ModelHints, Reducer, Strategy
from instep.parallel.tensor.apply import Changes, settle, split_layers
from instep.parallel.tensor.check import Answer, answer_of, difference
from instep.parallel.tensor.find import certain_plan, tried_plan, without_slices
from instep.parallel.tensor.plan import TensorPlan, brought_plan, given_plan
from instep.parallel.tensor.reducer import TensorReducer, num_split
from instep.parallel.tensor.slice import noting
from instep.parallel.tensor.team import Team
from instep.world.grid import Grid


class Tensor(Strategy):
    """Layers shared along the axis tp, copies along dp."""

    name = "tensor"
    is_partial = True
    axes = ("tp",)

    def __init__(self, grid: Grid, context: BatchContext) -> None:
        super().__init__(grid, context)
        self.team = Team.of(grid)

    def spread(self, model: nn.Module, hints: ModelHints = NO_HINTS) -> nn.Module:
        model = super().spread(model)
        self.said.append(split_model(model, self.grid, self.team, hints))
        return model

    def reducer(self, parameters: Sequence[nn.Parameter]) -> Reducer:
        return TensorReducer(parameters, self.grid)


def split_model(model: nn.Module, grid: Grid, team: Team, hints: ModelHints) -> str:
    """Find a plan for a model, carry it out, see that the answer is the same, and say the plan. Called on all ranks."""
    plan = _split(model, grid, team, hints)
    share = num_split(model) / max(1, sum(p.numel() for p in model.parameters()))
    return plan.describe(team.size, share)


def _split(model: nn.Module, grid: Grid, team: Team, hints: ModelHints) -> TensorPlan:
    call = hints.example().to(grid.world.device) if hints.example is not None else None
    expected = answer_of(model, call) if call is not None else None
    given = hints.tensor_plan(model) if hints.tensor_plan is not None else None
    brought = brought_plan(model) if given is None else None
    if given is not None or brought:
        source = "as the Task gives it" if given is not None else "as the model brings it"
        plan = given_plan(given or brought or {}, model, source, strict=given is not None)
        settle(plan, model, team, strict=given is not None)
        _follow(plan, model, grid, team, call, expected, strict=given is not None)
        return plan
    if call is None or expected is None:
        plan = certain_plan(model, team)
        split_layers(model, team, plan)
        return plan
    return _best(tried_plan(model, team, call), model, grid, team, call, expected)


def _follow(
    plan: TensorPlan, model: nn.Module, grid: Grid, team: Team, call: Call | None, expected: Answer | None, strict: bool
) -> None:
    """Carry out a plan that was given; refuse one that changes the answer. Called on all ranks."""
    split_layers(model, team, plan)
    if call is None or expected is None:
        return
    with noting() as notes:
        try:
            wrong = difference(expected, answer_of(model, call))
        except Exception as error:
            raise TaskError(
                f"the tensor plan, {plan.source}, does not run: {type(error).__name__}: {error}. Styles of PyTorch's "
                "give code its bare part of a tensor; with words (colwise, rowwise) tensors look whole to it."
            ) from error
    for path, sizes in notes.uneven_heads.items() if strict else ():
        raise TaskError(
            f"the tensor plan splits {path} by columns, which are cut into heads: {' × '.join(map(str, sizes))}, and "
            f"tp={team.size} does not divide that. Use a tp that does, or colwise_rep: then each rank has all heads."
        )
    if wrong := _agreed(wrong, grid):
        raise TaskError(
            f"the tensor plan, {plan.source}, changes the model's answer: {wrong}. Does a layer by rows get what one "
            "by columns gives? Use words (colwise, rowwise), or leave the plan away: then one is found."
        )


def _best(plan: TensorPlan, model: nn.Module, grid: Grid, team: Team, call: Call, expected: Answer) -> TensorPlan:
    """Carry out a plan that was found; if it changes the answer, one that passes fewer parts on. All ranks call it."""

    def attempt(changed: TensorPlan) -> tuple[str, Changes]:
        changes = split_layers(model, team, changed)
        return _agreed(difference(expected, answer_of(model, call)), grid), changes

    wrong, changes = attempt(plan)
    if not wrong:
        return plan
    changes.undo()
    paired = set[str]().union(*plan.pairs)
    bad: set[str] = set()
    for pair in plan.pairs:
        failed, changes = attempt(without_slices(plan, paired - pair, wrong))
        changes.undo()
        bad |= pair if failed else set()
    reduced = without_slices(plan, bad or paired, wrong)
    wrong, _ = attempt(reduced)
    if wrong:
        raise TaskError(
            f"no way to split this model gives its own answer: {wrong}. Give a tensor_plan, or use another strategy."
        )
    return reduced


def _agreed(wrong: str, grid: Grid) -> str:
    """Give the first rank's complaint to all: rounding may lie on both sides of the limit. Called on all ranks."""
    return next((str(told) for told in grid.world.all_gather_object(wrong) if told), "")
