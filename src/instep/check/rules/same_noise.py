"""same-noise: ranks that draw the same random numbers in training, or begin with different weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from instep.check.finding import Finding, Severity
from instep.check.live_paths import live_paths
from instep.check.observations import Observed
from instep.check.records.collectives import ModelSplit
from instep.check.records.gradients import ModelWrapped, TensorReduced
from instep.check.records.live_state import LiveState
from instep.check.records.model_state import BeforeSharding, FirstUpdate, NoiseDrawn, SeedChosen
from instep.check.replication import are_connected, are_replicas
from instep.check.rule import Rule
from instep.check.source.collective_calls import is_distributed
from instep.check.source.module import SourceModule
from instep.check.source.rank_guards import guard_of_callers
from instep.check.source.restored_generators import restored_generators
from instep.check.source.shared_draws import draws_arrays
from instep.check.source.state_places import changes_by_one_rank, place_of

_RESTORES = ("load", "load_state_dict", "set_model_state_dict", "set_state_dict", "broadcast", "from_pretrained")


class SameNoise(Rule):
    """Compares the generators of the ranks in each step, and their weights before the first one."""

    id = "same-noise"
    severity = Severity.WARNING
    effect = "The noise of a step averages out less than it should: N ranks regularise like one."
    watches: ClassVar = {NoiseDrawn: "random numbers in a training step", FirstUpdate: "an optimizer step"}

    def judge(self, observed: Observed, modules: Sequence[SourceModule]) -> Iterable[Finding]:
        """Yield noise that all ranks share, and weights that they do not."""
        if observed.world_size < 2 or observed.has(ModelSplit) or not are_connected(observed):
            return
        if are_replicas(observed):
            yield from self._shared_noise(observed)
            yield from self._shared_generators(observed, modules)
        yield from self._different_weights(observed, modules)
        yield from self._different_shards(observed, modules)

    def _shared_noise(self, observed: Observed) -> Iterable[Finding]:
        ranks = [{drawn.step: drawn for drawn in noise} for noise in observed.by_rank(NoiseDrawn)]
        steps = sorted(set.intersection(*(set(rank) for rank in ranks)))
        same = [step for step in steps if len({(*rank[step].before, *rank[step].after) for rank in ranks}) == 1]
        if len(same) < 2 or len(same) < 0.8 * len(steps) or ranks[0][same[0]].framework:
            return  # a trainer of a framework seeds all ranks alike, and leaves no choice
        drawn, seeds = ranks[0][same[0]], [seeds for seeds in observed.by_rank(SeedChosen) if seeds]
        place, how = (drawn.file, drawn.line), ""
        if seeds and seeds[0][-1].file:
            chosen = next((seed for seed in reversed(seeds[0]) if seed.step <= same[0]), seeds[0][-1])
            place, how = (chosen.file, chosen.line), f" after the seed {chosen.seed}"
        yield self.finding(
            place,
            "All ranks draw the same noise in training (dropout, or what the script adds).",
            f"in {len(same)} of {len(steps)} steps the generators of {len(ranks)} ranks were in the same state{how}",
            "- torch.manual_seed(seed)\n+ torch.manual_seed(seed + rank)  # DDP sends rank 0's weights to the others",
        )

    def _shared_generators(self, observed: Observed, modules: Sequence[SourceModule]) -> Iterable[Finding]:
        """Yield generators of the script's own that draw the same arrays on all ranks, in each step."""
        if _trained_apart(observed):
            return
        for path in live_paths(observed, "generators", ("step",)):
            looks = path.values[:3]  # after the first steps, of one epoch
            is_drawn = len(looks) == 3 and len({look[0] for look in looks}) == 3
            if not is_drawn or any(len(set(look)) > 1 for look in looks) or not draws_arrays(modules, path.names[-1]):
                continue
            yield self.finding(
                place_of(modules, path.file, path.names) or ("", 0),
                f"All ranks draw the same numbers from `{path.text}` in training.",
                f"after each of the first {len(looks)} steps its state had changed, and was the same on all ranks",
                "- generator.manual_seed(seed)\n+ generator.manual_seed(seed + rank)",
            )

    def read(self, module: SourceModule) -> Iterable[Finding]:
        """Yield generators that are restored from one rank's checkpoint."""
        for call in restored_generators(module) if is_distributed(module) else ():
            yield self.finding(
                module.place(call.node),
                "After a resume all ranks draw the same random numbers: each gets the state that one rank has saved.",
                f"`{module.line(call.node.lineno)}`",
                "Save the state of each rank (all_gather_object) and restore its own; or seed with seed + rank.",
            )

    def _different_weights(self, observed: Observed, modules: Sequence[SourceModule]) -> Iterable[Finding]:
        places = sorted(set(changes_by_one_rank(modules)))
        for updates in zip(*observed.by_rank(FirstUpdate), strict=False):
            are_alike = len({(update.shapes, update.gradients) for update in updates}) == 1
            if not are_alike or updates[0].gradients is None or updates[0].is_sharded:
                continue
            if len({update.weights for update in updates}) > 1:
                yield self.finding(
                    places[0] if places else _seeded_apart(observed) or (updates[0].file, updates[0].line),
                    "The ranks train different weights with the same gradients: they did not begin as replicas.",
                    f"before the first step the {updates[0].num_parameters} parameters differed between the ranks, "
                    "and their gradients were equal",
                    "Broadcast rank 0's parameters before training, or use DDP, which does.",
                    Severity.ERROR,
                )

    def _different_shards(self, observed: Observed, modules: Sequence[SourceModule]) -> Iterable[Finding]:
        restores = [(module, call) for module in modules for call in module.calls if call.last in _RESTORES]
        of_one = [(module, call) for module, call in restores if guard_of_callers(module, call.node) is not None]
        if len(of_one) < len(restores):
            return  # weights may be set afterwards
        for shards in zip(*observed.by_rank(BeforeSharding), strict=False):
            if len({shard.weights for shard in shards}) > 1 and not shards[0].syncs and not shards[0].package:
                loads = [module.place(call.node) for module, call in of_one if call.last == "load_state_dict"]
                yield self.finding(
                    (loads or [(shards[0].file, shards[0].line)])[0],
                    "FSDP shards a module whose weights differ between the ranks: the result is a mixture of them.",
                    f"the weights of module {shards[0].number} differed before it was sharded",
                    "Seed all ranks alike before the model is made; seed them apart afterwards.",
                )
                return


def _trained_apart(observed: Observed) -> bool:
    """Return whether the first steps came before any model was wrapped: each rank trained the same, for itself."""
    wrapped = [made.step for models in observed.by_rank(ModelWrapped) for made in models]
    looks = [look.step for looks in observed.by_rank(LiveState) for look in looks if look.moment == "step"]
    if not wrapped or not looks or min(looks) >= min(wrapped):
        return False
    return not any(one.step < min(wrapped) for reduced in observed.by_rank(TensorReduced) for one in reduced)


def _seeded_apart(observed: Observed) -> tuple[str, int] | None:
    """Return where the ranks chose different seeds before their first step; None: they did not."""
    for seeds in zip(*observed.by_rank(SeedChosen), strict=False):
        if len({seed.seed for seed in seeds}) > 1 and seeds[0].step == 0 and seeds[0].file:
            return seeds[0].file, seeds[0].line
    return None
