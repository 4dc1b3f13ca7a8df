"""A loss of gathered or reduced tensors: all_gather returns copies without a gradient, all_reduce works unseen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from instep.check.finding import Finding, Severity
from instep.check.observations import Observed
from instep.check.records.collectives import ModelSplit
from instep.check.records.gradients import BackwardRan, FunctionUsed, GatherMade, GatherUsed, ReducedUsed
from instep.check.rule import Rule
from instep.check.source.autograd_gathers import returned_alone
from instep.check.source.contrastive_labels import labels_without_offset
from instep.check.source.gathered_losses import reaches_loss
from instep.check.source.loops import module_of
from instep.check.source.module import SourceModule

_FIX = "gathered = torch.distributed.nn.functional.all_gather(features)"
_SUM_FIX = "total = torch.distributed.nn.functional.all_reduce(part)"


class GatherCutsGradient(Rule):
    """Finds losses that depend on what all_gather or all_reduce made of a tensor with gradients."""

    id = "gather-cuts-gradient"
    severity = Severity.ERROR
    effect = "The gradient lacks the terms that went through other ranks, or is too small by the world size."
    watches = {BackwardRan: "a backward pass"}  # noqa: RUF012

    def judge(self, observed: Observed, modules: Sequence[SourceModule]) -> Iterable[Finding]:
        """Yield one finding for each line that gathers for a loss."""
        seen: set[tuple[str, int]] = set()
        for used in (use for uses in observed.by_rank(GatherUsed) for use in uses):
            if (used.file, used.line) not in seen:
                seen.add((used.file, used.line))
                yield self._finding(used, observed.world_size)
        for summed in (use for uses in observed.by_rank(ReducedUsed) for use in uses):
            if (summed.file, summed.line) not in seen:
                seen.add((summed.file, summed.line))
                yield self.finding(
                    (summed.file, summed.line),
                    "The loss is computed from what all_reduce added up in place. Autograd does not see that: only the "
                    f"rank's own part has a gradient, and averaged over ranks it is {observed.world_size} times too "
                    "small.",
                    f"all_reduce of a tensor of shape {summed.shape} that requires gradients; the loss's graph uses it "
                    "afterwards",
                    _SUM_FIX,
                    Severity.WARNING,
                )
        yield from self._of_functions(observed, modules)
        for made in (make for makes in observed.by_rank(GatherMade) for make in makes):
            module = module_of(modules, made.file)
            if (
                (made.file, made.line) not in seen
                and module is not None
                and reaches_loss(module, made.line, made.lines)
            ):
                seen.add((made.file, made.line))
                yield self.finding(
                    (made.file, made.line),
                    f"A term of the loss is computed from what {made.function} returned, which carries no gradient.",
                    f"{made.function} of a tensor of shape {made.shape} that requires gradients; its result leads to "
                    "`backward`",
                    _FIX,
                    Severity.WARNING,
                )

    def _of_functions(self, observed: Observed, modules: Sequence[SourceModule]) -> Iterable[Finding]:
        """Yield autograd functions that gather, and give back only what the own loss says of the own rows."""
        used = {use.function for uses in observed.by_rank(FunctionUsed) for use in uses if use.beside_input}
        for name in sorted(used) if not observed.has(ModelSplit) else ():
            for module in modules:
                returned = returned_alone(module, name)
                if returned is not None:
                    yield self.finding(
                        module.place(returned),
                        f"`{name}` gives back its own slice of its own gradient: what the other ranks' losses say of "
                        "these rows is lost.",
                        f"`{module.line(returned.lineno)}`: its backward pass issues no collective, and the loss "
                        "compares local rows with gathered ones",
                        "+ dist.all_reduce(gradients)  # those of all ranks; then return the own slice of the sum",
                        Severity.WARNING,
                    )

    def read(self, module: SourceModule) -> Iterable[Finding]:
        """Yield contrastive losses whose labels point at the first rank's rows, on every rank."""
        for call in labels_without_offset(module):
            yield self.finding(
                module.place(call.node),
                "The labels count from zero on every rank, but the scores are against the rows of all ranks.",
                f"`{module.line(call.node.lineno)}`: on rank 1 the label 0 is the first row of rank 0",
                "labels = torch.arange(n) + rank * n",
                Severity.WARNING,
            )

    def _finding(self, used: GatherUsed, world_size: int) -> Finding:
        place = used.file, used.line
        what = f"{used.function} of a tensor of shape {used.shape} that requires gradients"
        if not used.has_gradient:
            return self.finding(
                place,
                f"The loss depends on what {used.function} returned, which carries no gradient.",
                f"{what}: its rows are part of the loss, without a gradient",
                _FIX,
            )
        if not used.shape or used.is_whole:
            return self.finding(
                place,
                f"Every rank computes the whole loss from gathered tensors, and only its own part has a gradient: "
                f"averaged over ranks, gradients are {world_size} times too small.",
                f"{what}; the rank's own part was put back among the gathered ones",
                _FIX,
                Severity.WARNING,
            )
        return self.finding(
            place,
            "The loss compares local rows with gathered ones; other ranks' losses give no gradient to these rows.",
            f"{what}; the rank's own part was put back among the gathered ones",
            _FIX,
            Severity.WARNING,
        )
