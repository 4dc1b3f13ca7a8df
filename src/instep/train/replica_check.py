"""The replica check: every N steps, compare the ranks' state, and find a straggler.

[Note: Drift]
All ranks make the same update from the same gradients, so parameters, optimizer state and BatchNorm's running
statistics are the same bits everywhere, until memory, a processor or a link fails on one of them; from then on every
step and every checkpoint is wrong. The ranks exchange one number that stands for all of it ([Note: Fingerprint]), and
only when these differ the numbers of the single tensors. Then rank 0 sets aside what was saved since the ranks last
agreed, and all ranks end with the same error: the next attempt continues from the last step that is beyond doubt.
Other buffers may differ by rank, where a model writes to them in its forward pass: that is reported once.
Where a rank holds only a part of the model, it is compared with the ranks that hold a replica of the same part (the
axis `dp` of the mesh), if there are any.

Ranks: all, alike.
"""

import socket
from collections.abc import Mapping, Sequence

import torch

from instep.core.errors import DivergenceError
from instep.guard.fingerprint import Drift, buffers_of, find_drift, fingerprint, fingerprints, updated_state
from instep.guard.straggler import StepTime, StragglerDetector
from instep.train.engine import Engine
from instep.train.saver import Saver


class ReplicaCheck:
    """Compares this rank with its replicas."""

    def __init__(self, engine: Engine, saver: Saver) -> None:
        world, mesh = engine.world, engine.grid.mesh
        self._engine, self._world, self._saver = engine, world, saver
        self._groups = list({tuple(mesh.ranks_along(("dp",), rank)): None for rank in range(world.world_size)})
        """The ranks that hold replicas of each other."""
        self._every = engine.spec.check_every if world.world_size > 1 else 0
        self._stragglers = StragglerDetector(world.world_size)
        self._watches_others = True
        """Whether buffers that may differ are still compared: until they do."""
        self._agreed = saver.step  # all ranks have read the same checkpoint, or begun with rank 0's weights
        if self._every:
            saver.trust(self._agreed)

    def is_due(self, step: int) -> bool:
        """Return whether to compare after this step."""
        return self._every > 0 and step % self._every == 0

    def compare(self, step: int) -> None:
        """Compare the ranks, unless this step was compared already; raise if they differ. Called on all ranks."""
        if not self._every or step == self._agreed:
            return
        strict, others = self._state() if len(self._groups[0]) > 1 else ({}, {})
        own = [fingerprints(list(part.values())) for part in (strict, others)]
        numbers = self._exchange([fingerprint(own[0]), len(own[0]), fingerprint(own[1])])
        if (group := self._disagreeing([row[:2] for row in numbers])) is not None:
            self._raise(step, *self._find(strict, own[0], group))
        if (group := self._disagreeing([row[2:3] for row in numbers])) is not None:
            self._watches_others = False
            self._report_buffers(self._find(others, own[1], group)[0])
        self._agreed = step
        self._saver.trust(step)
        times = [StepTime(row[3] / 1e9, row[4] / 1e9, row[5] / 1000) for row in numbers]
        for sentence in self._stragglers.check(times):
            self._engine.notice(sentence)

    def _state(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Return the named tensors that must be the same on all ranks, and those that may differ."""
        strict: dict[str, torch.Tensor] = {}
        loose: dict[str, torch.Tensor] = {}
        trained = self._engine.trained
        for number, state in enumerate(trained, start=1):
            statistics, others = buffers_of(state.model)
            suffix = f" (model {number})" if len(trained) > 1 else ""
            named = {} if state.average is None else state.average.named()
            averages = {f"the average of {name}": tensor for name, tensor in named.items()}
            for into, part in (
                (strict, updated_state(state.model, state.optimizer)),
                (strict, statistics),
                (strict, averages),
                (strict if self._engine.spec.exact else loose, others),  # exact mode makes all buffers the same
            ):
                into.update({name + suffix: tensor for name, tensor in part.items()})
        return strict, loose if self._watches_others else {}

    def _exchange(self, numbers: Sequence[torch.Tensor | int]) -> list[list[int]]:
        """Return every rank's numbers and times, in one collective. Called on all ranks."""
        share = self._engine.pace.take()
        times = [int(share.data_s * 1e9), int(share.compute_s * 1e9), int(share.num_rows * 1000)]
        own = torch.tensor([*map(int, numbers), *times], dtype=torch.int64, device=self._world.device)
        return [list(map(int, part.tolist())) for part in self._world.all_gather(own)]

    def _disagreeing(self, rows: Sequence[list[int]]) -> tuple[int, ...] | None:
        """Return a group of ranks whose numbers should be the same, and are not."""
        return next((group for group in self._groups if any(rows[r] != rows[group[0]] for r in group)), None)

    def _find(
        self, named: Mapping[str, torch.Tensor], numbers: torch.Tensor, group: Sequence[int]
    ) -> tuple[Drift, list[str]]:
        """Return what differs in a group, and the hosts of all ranks. Called on all ranks."""
        by_rank = self._world.all_gather_object(
            {"host": socket.gethostname(), "held": dict(zip(named, numbers.tolist(), strict=True))}
        )
        drift = find_drift({rank: by_rank[rank]["held"] for rank in group})
        assert drift is not None
        return drift, [entry["host"] for entry in by_rank]

    def _raise(self, step: int, drift: Drift, hosts: list[str]) -> None:
        # The others wait for rank 0: when a rank ends, the launcher ends the rest, in the middle of what they do.
        doubtful = self._world.broadcast_object(self._saver.set_aside(self._agreed) if self._world.is_main else None)
        suspects = sorted({hosts[rank] for rank in drift.ranks})
        on = f", on {', '.join(suspects)}" if len(set(hosts)) > 1 else ""
        aside = f" Set aside: {', '.join(doubtful)}." if doubtful else ""
        resumes = (
            f"continues from the newest checkpoint that is not newer than step {self._agreed}"
            if self._agreed
            else "starts over"
        )
        raise DivergenceError(
            f"the ranks no longer hold the same: between step {self._agreed} and step {step} {drift}{on}. Memory, a "
            "processor or a link has failed there, or the code depends on the rank (torch.distributed.get_rank(), "
            f"noise of its own, another processor); no update since step {self._agreed} can be trusted.{aside} "
            f"The next attempt {resumes}."
        )

    def _report_buffers(self, drift: Drift) -> None:
        names = drift.names
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        self._engine.notice(
            f"the ranks hold different values in the buffer {names[0]}{more}, which the model writes to in its forward "
            "pass. Rank 0's are saved. With --exact they are the same everywhere."
        )
