"""The strategy `tensor`: each layer's weights shared by a team of ranks, which work on the same rows; dp copies of that.

[Note: Whole parameters stay the same]
A parameter that every rank of a team holds whole gets its gradient from the same numbers on each, so the gradients are
the same, until a kernel adds up in another order on one of them (atomics on GPUs, another processor). Ranks that differ
in one bit drift apart. So such a gradient is not each rank's own: one rank of each team counts, and all ranks get the
same sum. It travels with the loss, so it costs no collective more than data parallelism does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from instep.core.errors import TaskError
from instep.parallel.capture import Call
from instep.parallel.ddp import DdpReducer
from instep.parallel.scope import Scope
from instep.parallel.strategy import Example, Reducer, Strategy
from instep.parallel.tensor.apply import Changes, settle, split_layers
from instep.parallel.tensor.check import Answer, answer_of, difference, on_device
from instep.parallel.tensor.find import certain_plan, tried_plan, without_slices
from instep.parallel.tensor.plan import TensorPlan, brought_plan, given_plan
from instep.parallel.tensor.slice import noting
from instep.parallel.tensor.team import Team
from instep.world.grid import Grid


class Tensor(Strategy):
    """Layers shared along the axis tp, copies along dp."""

    name = "tensor"

    def __init__(self, grid: Grid, scope: Scope) -> None:
        super().__init__(grid, scope)
        self.team = Team.of(grid)

    def spread(self, model: nn.Module, example: Example | None = None) -> nn.Module:
        model = super().spread(model)
        plan = split_model(model, self.grid, self.team, example, self.plan_of)
        share = num_split(model) / max(1, sum(p.numel() for p in model.parameters()))
        self.notices.append(plan.describe(self.team.size, share))
        return model

    def reducer(self, parameters: Sequence[nn.Parameter], num_sums: int) -> Reducer:
        return TensorReducer(parameters, self.grid, self.team, num_sums)


def split_model(
    model: nn.Module,
    grid: Grid,
    team: Team,
    example: Example | None = None,
    plan_of: Callable[[nn.Module], Mapping[str, Any]] | None = None,
) -> TensorPlan:
    """Find a plan for a model, carry it out, and see that the answer is the same. Called on all ranks."""
    call = on_device(example(), grid.world.device) if example is not None else None
    expected = answer_of(model, call) if call is not None else None
    given = plan_of(model) if plan_of is not None else None
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
                f"the tensor plan, {plan.source}, does not run: {type(error).__name__}: {error}. Styles of PyTorch's give "
                "each layer its bare part of a tensor; words (colwise, rowwise) keep its shape whole."
            ) from error
    for path, sizes in notes.uneven_heads.items() if strict else ():
        raise TaskError(
            f"the tensor plan splits {path} by columns, and they are cut into heads: {' × '.join(map(str, sizes))}, which "
            f"tp={team.size} does not divide. Use a tp that does, or colwise_rep for it: then each rank has all heads."
        )
    if wrong := _agreed(wrong, grid):
        raise TaskError(
            f"the tensor plan, {plan.source}, changes the model's answer: {wrong}. Does a layer by rows get what one by "
            "columns gives? Use words (colwise, rowwise), or leave the plan away: then one is found."
        )


def _best(plan: TensorPlan, model: nn.Module, grid: Grid, team: Team, call: Call, expected: Answer) -> TensorPlan:
    """Carry out a plan that was found; where it changes the answer, one that passes fewer parts on. Called on all ranks."""

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
    return next((str(told) for told in grid.world.tell_all(wrong) if told), "")


def is_split(parameter: torch.Tensor) -> bool:
    """Tell whether ranks share a parameter, so that each has a part."""
    return isinstance(parameter, DTensor) and any(isinstance(placement, Shard) for placement in parameter.placements)


def num_split(model: nn.Module) -> int:
    """Count the elements of parameters that ranks share."""
    return sum(p.numel() for p in model.parameters() if is_split(p))


class TensorReducer(Reducer):
    """Adds gradients up: those of parts over the ranks with the same parts, the others over all ranks, one a team."""

    def __init__(self, parameters: Sequence[nn.Parameter], grid: Grid, team: Team, num_sums: int) -> None:
        super().__init__(parameters)
        self._team = team
        self._parts = [p for p in self.parameters if is_split(p)]
        whole = [p for p in self.parameters if not is_split(p)]
        self._of_whole = DdpReducer(whole, grid.world, num_sums, counted=grid.is_counted)
        has_copies = self._parts and grid.data.world_size > 1
        self._of_parts = DdpReducer(self._parts, grid.data, 0) if has_copies else None

    def reduce(self, sums: Sequence[float | torch.Tensor]) -> list[float]:
        if self._of_parts is not None:
            self._of_parts.reduce(())
        return self._of_whole.reduce(sums)

    def scale(self, factor: float) -> None:
        if found := self._local(self.parameters):
            torch._foreach_mul_(found, factor)

    def clip(self, max_norm: float) -> torch.Tensor:
        norm = self._norm()
        if max_norm < float("inf"):
            factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
            for grad in self._local(self.parameters):
                grad.mul_(factor.to(grad.dtype))
        return norm

    def _norm(self) -> torch.Tensor:
        """The norm of all gradients together. Called on all ranks."""
        of_parts, of_whole = (
            self._squares([p for p in self.parameters if is_split(p) is split]) for split in (True, False)
        )
        return (self._team.world.sum(of_parts) + of_whole).sqrt()

    def _squares(self, parameters: Sequence[nn.Parameter]) -> torch.Tensor:
        grads = self._local(parameters)
        if not grads:
            return torch.zeros((), device=self._team.world.device)
        wide = torch.promote_types(grads[0].dtype, torch.float32)
        return torch.stack([norm.to(wide) for norm in torch._foreach_norm(grads)]).square().sum()

    def _local(self, parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
        grads = [p.grad for p in parameters if p.grad is not None]
        return [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
