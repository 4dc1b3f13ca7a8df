"""Clipping at the wrong moment, or by a norm that is not the gradient's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from instep.check.finding import Finding, Severity
from instep.check.observations import Observed
from instep.check.records.gradients import BackwardRan, GradientsClipped, ModelWrapped, StepTaken
from instep.check.records.scaling import common_factor, gradients_after_backward, gradients_at_step
from instep.check.records.timeline import TrainingStep, events_of, steps_together
from instep.check.rule import Rule
from instep.check.source.gradient_averages import clipped_before_averaging
from instep.check.source.local_shards import norms_of_shards
from instep.check.source.module import SourceModule

_CLOSE = 1e-6
"""Relative difference that is taken for rounding."""


class Clipping(Rule):
    """Finds clipping of scaled gradients, by the norm of a shard, and after the step."""

    id = "clipping"
    severity = Severity.ERROR
    effect = (
        "Gradients are clipped to another norm than the script says: far too small, different by rank, or not at all."
    )
    watches = {GradientsClipped: "clipped gradients"}  # noqa: RUF012

    def judge(self, observed: Observed, modules: Sequence[SourceModule]) -> Iterable[Finding]:
        """Yield clipping of scaled gradients, of shards, after steps."""
        yield from self._scaled(observed)
        yield from self._of_shards(observed, modules)
        yield from self._too_late(observed)
        yield from self._by_own_limit(observed)

    def _scaled(self, observed: Observed) -> Iterable[Finding]:
        clips = observed.by_rank(GradientsClipped)[0] if observed.world_size else []
        scaled = [clip for clip in clips if clip.pending_scale != 1]
        if scaled:
            norm = f"the norm was {scaled[0].norm:.4g}, " if scaled[0].norm >= 0 else ""
            yield self.finding(
                (scaled[0].file, scaled[0].line),
                "Gradients are clipped while they still contain the scale of GradScaler.",
                f"in {len(scaled)} of {len(clips)} calls; in the first {norm}with the scale "
                f"{scaled[0].pending_scale:g} and the limit {scaled[0].limit:g}",
                "+ scaler.unscale_(optimizer)  # before clipping",
            )

    def _of_shards(self, observed: Observed, modules: Sequence[SourceModule]) -> Iterable[Finding]:
        sharded = [wrapped for wrapped in _wrapped(observed) if wrapped.strategy != "ddp"]
        for steps in steps_together(observed) if sharded else ():
            scales = [common_factor(gradients_after_backward(step), gradients_at_step(step)) for step in steps]
            if None in scales or len(scales) < 2:
                continue
            known = [scale for scale in scales if scale is not None]
            if max(known) - min(known) > 0.01 * max(known):
                yield self.finding(
                    _place(steps[0], modules),
                    "Each rank clips its shard of the gradients by the norm of that shard.",
                    "between the backward pass and the step gradients were multiplied by "
                    + ", ".join(f"{scale:.4g} on rank {rank}" for rank, scale in enumerate(known)),
                    "Use torch.nn.utils.clip_grad_norm_ with fully_shard, model.clip_grad_norm_ with "
                    "FullyShardedDataParallel.",
                )
                return

    def read(self, module: SourceModule) -> Iterable[Finding]:
        """Yield gradients that are clipped before the script averages them, and norms of what one rank has of them."""
        for norm in norms_of_shards(module):
            yield self.finding(
                module.place(norm.node),
                "A norm of this rank's shard is taken for that of the whole parameter or gradient.",
                f"`{module.line(norm.node.lineno)}`: `to_local()` is one rank's part, and no collective follows",
                "- p.grad.to_local().norm()\n+ p.grad.norm()  # a DTensor's norm is that of all shards",
                Severity.WARNING,
            )
        for clip, average in clipped_before_averaging(module):
            yield self.finding(
                module.place(clip.node),
                "Gradients are clipped before they are averaged: each rank scales its own by another factor.",
                f"`{module.line(clip.node.lineno)}` comes before line {average.node.lineno}: "
                f"`{module.line(average.node.lineno)}`",
                "Average the gradients over the ranks first, then clip them.",
                Severity.WARNING,
            )

    def _by_own_limit(self, observed: Observed) -> Iterable[Finding]:
        """Yield the first clipping whose limit each rank has chosen for itself."""
        for clips in zip(*observed.by_rank(GradientsClipped), strict=False):
            limits = [clip.limit for clip in clips]
            is_same_call = len({(clip.file, clip.line, clip.step) for clip in clips}) == 1
            if len(clips) > 1 and is_same_call and max(limits) - min(limits) > _CLOSE * max(map(abs, limits)):
                yield self.finding(
                    (clips[0].file, clips[0].line),
                    "Each rank clips the gradients to a limit of its own.",
                    "the limits were " + ", ".join(f"{limit:.6g} on rank {rank}" for rank, limit in enumerate(limits)),
                    "Compute the limit from numbers that are the same on all ranks: all_reduce them first.",
                )
                return

    def _too_late(self, observed: Observed) -> Iterable[Finding]:
        events = events_of(observed, 0) if observed.world_size else []
        clips = [event for event in events if isinstance(event, GradientsClipped)]
        late = [clip for clip in clips if _follows_step(clip, events)]
        if len(late) > 1 and len(late) >= len(clips) - 1:
            yield self.finding(
                (late[0].file, late[0].line),
                "Gradients are clipped after optimizer.step has used them.",
                f"{len(late)} of {len(clips)} calls followed a step, with no backward pass between",
                "Clip between loss.backward() and optimizer.step().",
            )


def _wrapped(observed: Observed) -> list[ModelWrapped]:
    return observed.by_rank(ModelWrapped)[0] if observed.world_size else []


def _place(step: TrainingStep, modules: Sequence[SourceModule]) -> tuple[str, int]:
    """Return where the gradients were clipped: by torch's function, or by code that takes norms of local shards."""
    if clips := step.of(GradientsClipped):
        return clips[-1].file, clips[-1].line
    norms = ("norm", "vector_norm", "linalg.vector_norm", "get_total_norm")
    for module in modules:
        local = [call.node.lineno for call in module.calls_of("to_local")]
        for call in module.calls_of(*norms):
            if any(0 <= call.node.lineno - line <= 4 for line in local):
                return module.place(call.node)
    shards = [module.place(call.node) for module in modules for call in module.calls_of("to_local")]
    return next(iter(shards), step.place)


def _follows_step(clip: GradientsClipped, events: Sequence[object]) -> bool:
    """Return whether a step of the same optimizer, and no backward pass, came right before clipping."""
    for event in reversed(events[: events.index(clip)]):
        if isinstance(event, BackwardRan):
            return False
        if isinstance(event, StepTaken) and event.optimizer in clip.optimizers:
            return True
    return False
