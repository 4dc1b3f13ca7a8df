"""Which options of a training contradict each other, or would have no effect: each check raises SpecError."""

from __future__ import annotations

from typing import TYPE_CHECKING

from instep.core.durations import Cadence
from instep.core.errors import SpecError
from instep.core.launch_spec import LaunchSpec
from instep.core.mesh import Mesh
from instep.core.metric_goal import MetricGoal
from instep.core.options import OptionScope, options_of
from instep.core.trackers import parse_trackers

if TYPE_CHECKING:
    from instep.core.spec import TrainSpec

DEFAULT_BATCH_SIZE = 64
DEFAULT_PATIENCE = 3


def check_spec(spec: TrainSpec) -> None:
    """Raise SpecError for options that cannot be, in the order in which people meet them."""
    for check in (_check_launcher, _check_strategy, _check_batch, _check_update, _check_schedule, _check_weights):
        check(spec)
    Cadence.parse("save_every", spec.save_every)
    Cadence.parse("eval_every", spec.eval_every)
    _check_pause(spec.pause_at)
    parse_trackers(spec.track)


def _check_pause(pause_at: str | None) -> None:
    if pause_at is not None and Cadence.parse("pause_at", pause_at) == Cadence():
        raise SpecError(f"pause_at={pause_at!r} names no step and no epoch. Leave --pause-at out.")


def _check_batch(spec: TrainSpec) -> None:
    if spec.shards is not None and not spec.exact:
        raise SpecError(f"shards={spec.shards} is for exact mode, which is off. Add --exact.")
    if spec.batch_tokens is not None and spec.batch_size != DEFAULT_BATCH_SIZE:
        raise SpecError(
            f"batch_tokens={spec.batch_tokens} and batch_size={spec.batch_size} both say how large a batch is. Give "
            "one of them."
        )
    is_sized = spec.batch_tokens is None
    if is_sized and spec.shards is not None and spec.shards > spec.batch_size:
        raise SpecError(
            f"batch_size={spec.batch_size} cannot be split into shards={spec.shards}: some would be empty. "
            f"Use shards <= {spec.batch_size}."
        )
    if spec.epochs is not None and spec.steps is not None:
        raise SpecError(f"epochs={spec.epochs} and steps={spec.steps} both say when to end. Give one of them.")
    if spec.preempted_exit not in range(256):
        raise SpecError(f"preempted_exit={spec.preempted_exit} is not an exit code. Use 0 to 255.")
    if is_sized and spec.batch_size < spec.accumulate:
        raise SpecError(
            f"batch_size={spec.batch_size} cannot be split into accumulate={spec.accumulate} micro-batches: "
            f"some would be empty. Use accumulate <= {spec.batch_size}."
        )


def _check_update(spec: TrainSpec) -> None:
    if spec.clip_norm is not None and not spec.clip_norm > 0:
        raise SpecError(f"clip_norm={spec.clip_norm} would clip every gradient to zero. Use a number above 0.")
    if spec.clip_value is not None and not spec.clip_value > 0:
        raise SpecError(f"clip_value={spec.clip_value} would clip every gradient to zero. Use a number above 0.")
    if spec.clip_norm is not None and spec.clip_value is not None:
        raise SpecError(
            f"clip_norm={spec.clip_norm} and clip_value={spec.clip_value} both clip the gradient, and the result "
            "would depend on which comes first. Give one of them."
        )
    if spec.ema is not None and not 0 < spec.ema < 1:
        raise SpecError(f"ema={spec.ema} is not a decay. Use a number between 0 and 1, such as 0.999.")
    if spec.compile and spec.recompute:
        raise SpecError("compile and recompute cannot be combined: recomputed blocks are not compiled. Give one.")


def _check_weights(spec: TrainSpec) -> None:
    if spec.narrow_gather and (spec.exact or spec.precision not in ("auto", "bf16", "fp16")):
        what = "exact mode" if spec.exact else f"precision={spec.precision}"
        raise SpecError(f"narrow_gather rounds parameters to bf16 or fp16, and {what} does not. Leave it out.")
    if spec.meta_init and (spec.exact or spec.init_from is not None):
        other = "exact" if spec.exact else "init_from"
        raise SpecError(f"meta_init and {other} cannot be combined. Leave --meta-init out.")
    if spec.init_partial and spec.init_from is None:
        raise SpecError("init_partial is for --init-from, which is not given. Add --init-from, or leave it out.")


def _check_schedule(spec: TrainSpec) -> None:
    """Raise SpecError for metrics that are none, and for options without the one that they belong to."""
    MetricGoal.parse("keep_best", spec.keep_best)
    goal = MetricGoal.parse("stop_when", spec.stop_when)
    if goal is not None and goal.name.endswith("loss") and goal.name == spec.stop_when:
        raise SpecError(
            f"stop_when={spec.stop_when} would end the run because its loss gets lower. Write {goal.name}:min, or "
            f"{goal.name}:max if more is better."
        )
    if goal is None and spec.patience != DEFAULT_PATIENCE:
        raise SpecError(f"patience={spec.patience} is for --stop-when, and no metric is named. Add --stop-when.")
    if spec.warmup and spec.lr_schedule == "task":
        raise SpecError(
            f"warmup={spec.warmup} belongs to a schedule by name. Add --lr-schedule constant, cosine or linear."
        )


def _check_launcher(spec: TrainSpec) -> None:
    """Raise SpecError for options that would be ignored by what starts the processes."""
    if spec.address and spec.on != "ray":
        raise SpecError(f"address={spec.address} is a Ray cluster's, and Ray is not used. Add --on ray.")
    if spec.on == "here":
        return
    if spec.address.startswith("ray://"):
        raise SpecError(
            f"address={spec.address} goes through Ray Client, which Ray Train does not fully support. Run the "
            "command on a node of the cluster with --address auto, or submit it with `ray job submit`."
        )
    for declared in options_of(LaunchSpec):
        value = getattr(spec, declared.name)
        if value != declared.default and (declared.scope is OptionScope.NODE or declared.name == "hang_after"):
            raise SpecError(
                f"{declared.name}={value} is for processes that instep starts itself. With on={spec.on}, "
                f"another launcher places and watches them. Leave {declared.flag} out."
            )


def _check_strategy(spec: TrainSpec) -> None:
    """Raise SpecError for a mesh that cannot be, and for a pipeline's options without a pipeline."""
    mesh = None if spec.mesh is None else Mesh.parse(spec.mesh)
    if mesh is not None and spec.strategy != "auto":
        raise SpecError(
            f"strategy={spec.strategy} and mesh={spec.mesh} both say how to distribute the model. Give one of them."
        )
    if spec.strategy == "pipeline" or (mesh is not None and mesh.pp > 1):
        return
    for name, default in (("schedule", "1f1b"), ("microbatches", None)):
        if (value := getattr(spec, name)) != default:
            raise SpecError(
                f"{name}={value} is for a pipeline, and there is none. Add --strategy pipeline, or --mesh with "
                "pp=2 or more."
            )
