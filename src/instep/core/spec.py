"""How to train: the fields of `TrainSpec` are exactly the options of `instep train` and the keywords of `instep.train`.

Each field declares its option (core/options.py).
"""

from dataclasses import dataclass
from typing import Any, Literal

from instep.core.errors import SpecError
from instep.core.launch_spec import LaunchSpec
from instep.core.mesh import STRATEGIES, Mesh
from instep.core.microbatches import check_microbatches
from instep.core.options import (
    FAILURES,
    NODES,
    NUMBERS,
    OUTPUT,
    PROCESSES,
    SAVING,
    TRAINING,
    OptionScope,
    node_option,
    operational_option,
    options_of,
    output_option,
    recipe_option,
)
from instep.core.profile_window import check_ranks
from instep.core.spec_checks import DEFAULT_BATCH_SIZE, DEFAULT_PATIENCE, check_spec
from instep.core.trackers import parse_trackers

DEFAULT_SHARDS = 16


@dataclass(frozen=True, kw_only=True)
class TrainSpec(LaunchSpec):
    """How to train: everything except the Task itself."""

    on: str = node_option(
        "here", NODES, "what starts the processes: here (this command), or ray, in its cluster (docs/clusters.md)"
    )
    address: str = node_option(
        "", NODES, "with --on ray: HOST:PORT of a cluster, or auto to find it; empty: start a new one"
    )
    max_restarts: int = operational_option(
        3, FAILURES, "restarts allowed after a failure; progress resets the count", at_least=0, in_evaluate=True
    )
    epochs: int | None = operational_option(
        None, TRAINING, "passes over the training data (3, unless --steps is given)", at_least=1, in_tune=True
    )
    steps: int | None = operational_option(
        None, TRAINING, "optimizer steps, instead of --epochs", at_least=1, in_tune=True
    )
    batch_size: int = recipe_option(
        DEFAULT_BATCH_SIZE, TRAINING, "samples in one optimizer step, over all processes and accumulation", at_least=1
    )
    accumulate: int = recipe_option(1, TRAINING, "micro-batches that a global batch is split into", at_least=1)
    seed: int = recipe_option(0, TRAINING, "seed of all randomness")
    exact: bool = recipe_option(
        False, NUMBERS, "the same bits at any number of processes: fixed shards, deterministic kernels (docs/exact.md)"
    )
    shards: int | None = recipe_option(
        None, NUMBERS, "with --exact: shards that a batch is split into (16, or the batch size)", at_least=1
    )
    strategy: str = operational_option(
        "auto",
        PROCESSES,
        "how the model is distributed; auto: ddp, or single (docs/strategies.md)",
        choices=STRATEGIES,
        in_evaluate=True,
    )
    mesh: str | None = operational_option(
        None, PROCESSES, "a combination of strategies: dp=2,fsdp=2,tp=2,pp=2", metavar="AXIS=N,…", in_evaluate=True
    )
    reshard: bool = operational_option(
        True, PROCESSES, "with fsdp: free a block's parameters after its forward pass; off: keep them for backward"
    )
    offload: bool = operational_option(
        False, PROCESSES, "with fsdp on GPUs: keep parameters and optimizer state in host memory"
    )
    narrow_gather: bool = operational_option(
        False, PROCESSES, "with fsdp and bf16 or fp16: gather parameters rounded to that, for half the traffic"
    )
    meta_init: bool = operational_option(
        False, PROCESSES, "with fsdp: build the model block by block, where it does not fit into one process"
    )
    schedule: Literal["gpipe", "1f1b", "interleaved"] = operational_option(
        "1f1b", PROCESSES, "schedule of a pipeline; 1f1b needs less memory, interleaved less time (docs/pipeline.md)"
    )
    microbatches: int | None = operational_option(
        None, PROCESSES, "micro-batches of a pipeline (4 per stage, if there are enough rows)", at_least=1
    )
    comm: Literal["auto", "shared-memory", "gloo"] = operational_option(
        "auto",
        PROCESSES,
        "how processes on CPU communicate; auto: shared memory, or gloo",
        in_verify=True,
        in_evaluate=True,
    )
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = recipe_option(
        "auto", NUMBERS, "precision of the layers; auto: bf16 on GPUs that support it, or fp32 (docs/precision.md)"
    )
    compile: bool | None = recipe_option(
        None,
        NUMBERS,
        "compile the loss together with the model; with fsdp or pipeline, the model's repeated blocks (unless given: "
        "on GPUs, with strategy single or ddp)",
    )
    recompute: bool = operational_option(
        False, PROCESSES, "save memory: compute the model's repeated blocks again in the backward pass"
    )
    clip_norm: float | None = recipe_option(None, TRAINING, "clip the gradient's global norm to this value")
    clip_value: float | None = recipe_option(
        None, TRAINING, "clip each element of the gradient to between minus this value and this value"
    )
    log_grad_norm: bool = operational_option(
        False,
        TRAINING,
        "log the gradient's global norm in every step (known anyway with --clip-norm)",
        "--log-grad-norm",
    )
    ema: float | None = recipe_option(
        None,
        TRAINING,
        "keep an exponential moving average of the weights with this decay (0.999), and evaluate with it",
        metavar="DECAY",
    )
    lr_schedule: Literal["task", "constant", "cosine", "linear"] = recipe_option(
        "task",
        TRAINING,
        "learning rate over the steps: the Task's own scheduler, or one by name; cosine and linear end at 0",
    )
    warmup: int = recipe_option(
        0, TRAINING, "with --lr-schedule: steps in which the learning rate rises to its value", at_least=0
    )
    stop_when: str | None = operational_option(
        None,
        TRAINING,
        "end early when this metric has stopped getting higher; METRIC:min: lower",
        metavar="METRIC",
    )
    patience: int = operational_option(
        DEFAULT_PATIENCE, TRAINING, "with --stop-when: evaluations without a better value", at_least=1
    )
    eval_every: str = operational_option(
        "1epoch", TRAINING, "evaluate every N steps (100) or every N epochs (1epoch), or never: only at the end"
    )
    save_every: str = operational_option(
        "10m",
        SAVING,
        "save a checkpoint every N steps (100) or epochs (1epoch), or in intervals of time (30s, 10m, 2h), and at the "
        "end; auto: the interval that costs least for one failure a day, auto:6h for one failure in six hours",
    )
    pause_at: str | None = operational_option(
        None, SAVING, "save and leave after so many steps (400) or epochs (2epochs); without it the run continues"
    )
    save_busy: Literal["wait", "skip"] = operational_option(
        "wait", SAVING, "when a checkpoint is due while the last is still being written: wait, or skip it"
    )
    keep: int = operational_option(3, SAVING, "number of newest checkpoints to keep", at_least=1)
    keep_every: int | None = operational_option(
        None, SAVING, "also keep a checkpoint every N steps", metavar="N", at_least=1
    )
    keep_best: str | None = operational_option(
        None, SAVING, "also keep the checkpoint with the highest metric; METRIC:min: the lowest", metavar="METRIC"
    )
    save_frozen: bool = operational_option(
        True, SAVING, "save parameters that require no gradient, too (docs/huggingface.md#adapters)"
    )
    check_every: int = operational_option(
        100, FAILURES, "compare the ranks every N steps (docs/divergence.md); 0: never", at_least=0
    )
    threads: int | None = recipe_option(
        None, PROCESSES, "CPU threads per process (its share of the cores; 1 with --exact)", at_least=1
    )
    flush_denormals: bool = recipe_option(True, NUMBERS, "treat denormal numbers as zero on CPU")
    init_from: str | None = recipe_option(
        None,
        TRAINING,
        "start from these weights: a run directory, a checkpoint, a .safetensors file or a folder of them",
    )
    init_partial: bool = recipe_option(
        False,
        TRAINING,
        "with --init-from: load the weights that fit, and list the others, which start anew",
        "--init-partial",
    )
    on_nan: Literal["stop", "skip"] = recipe_option(
        "stop", FAILURES, "when the loss is NaN or infinite: stop, or skip that update"
    )
    drop_last: bool = recipe_option(False, TRAINING, "leave out the last batch of an epoch when it is not full")
    shuffle_window: int | None = recipe_option(
        None,
        TRAINING,
        "where data is read in blocks: shuffle about this many samples among themselves (32 blocks; docs/sources.md)",
        metavar="SAMPLES",
        at_least=1,
    )
    on_bad_sample: Literal["stop", "skip"] = recipe_option(
        "stop", FAILURES, "when a sample cannot be read: stop, or read another one in its place (docs/sources.md)"
    )
    batch_tokens: int | None = recipe_option(
        None,
        TRAINING,
        "tokens in one optimizer step, padding included, in place of --batch-size; for instep.data.bucketed",
        metavar="TOKENS",
        at_least=1,
    )
    data_workers: int | None = operational_option(
        None,
        TRAINING,
        "processes (for tensors: threads) per rank that read batches ahead; 0: none (default: chosen by measurement)",
        at_least=0,
        per_node=True,
        in_verify=True,
        in_evaluate=True,
    )
    track: str | None = operational_option(
        None,
        OUTPUT,
        "send the run's numbers to trackers: csv, mlflow, tensorboard, trackio, wandb (docs/trackers.md). They never "
        "delay the training; at its end the command waits for them for up to a minute",
        metavar="NAME,…",
    )
    nvtx: bool = operational_option(
        False, OUTPUT, "mark the phases of each step as NVTX ranges, for Nsight (docs/profiling.md)", "--nvtx"
    )
    run_dir: str | None = output_option(None, SAVING, "the run's directory; an unfinished run in it is continued")
    fresh: bool = output_option(False, SAVING, "start over: an earlier run in --run-dir is moved aside", "--fresh")
    preempted_exit: int = node_option(
        0, FAILURES, "exit code after a preemption; 143 for schedulers that take 0 for done", per_node=False
    )
    json: bool = output_option(
        False,
        OUTPUT,
        "print the Result as one line of JSON, and everything else to standard error",
        "--json",
        in_verify=True,
        in_evaluate=True,
    )
    quiet: bool = output_option(False, OUTPUT, "no progress display", "--quiet", in_verify=True, in_evaluate=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_spec(self)

    @property
    def trackers(self) -> tuple[str, ...]:
        """The names in `track`."""
        return parse_trackers(self.track)

    @property
    def num_shards(self) -> int:
        """The number of shards that each micro-batch of a full batch is split into; 0 without exact mode."""
        if not self.exact:
            return 0
        shards = self.shards or DEFAULT_SHARDS
        return shards if self.batch_tokens is not None else min(shards, self._micro_rows)

    @property
    def _micro_rows(self) -> int:
        return -(-self.batch_size // self.accumulate)

    @property
    def num_threads(self) -> int | None:
        """CPU threads per process; None: its share of the cores."""
        return 1 if self.exact and self.threads is None else self.threads

    def mesh_of(self, world_size: int) -> Mesh:
        """Return the mesh of so many ranks; raise SpecError where there is none."""
        mesh = Mesh.of(self.strategy, self.mesh, world_size)
        if self.exact and (mesh.tp > 1 or mesh.pp > 1):
            raise SpecError(
                f"exact mode works with copies and shards of a model (dp, fsdp). {mesh} also splits its layers, so "
                "that sums depend on the split. Use --strategy ddp or fsdp, or train without --exact."
            )
        if self.compile and mesh.tp > 1:
            raise SpecError(
                f"compile: along tp({mesh.tp}), layers compute with shards that look like whole tensors, which "
                "torch.compile cannot trace. Leave --compile out, or use ddp, fsdp or pipeline."
            )
        if self.compile and self.exact and not mesh.has_whole_models:
            raise SpecError(
                f"compile: exact mode compiles a loss and its model as a whole. A model distributed over {mesh} is "
                "compiled block by block, which rounds differently. Leave --compile out, or use ddp."
            )
        self._check_sharded(mesh)
        return mesh

    def _check_sharded(self, mesh: Mesh) -> None:
        """Raise SpecError for options of fsdp that would have no effect."""
        asked = [name for name in ("meta_init", "offload", "narrow_gather") if getattr(self, name)]
        asked += ["reshard=False"] * (not self.reshard)
        # One process may try the options of a later run on several.
        if asked and mesh.fsdp == 1 and not (mesh.size == 1 and self.strategy == "fsdp"):
            raise SpecError(f"{asked[0]} is for sharded parameters. Use --strategy fsdp, or leave it out.")
        if asked and self.exact:
            raise SpecError(
                f"exact mode gathers parameters once a step, so {asked[0]} would have no effect. Leave it out."
            )

    def check_world(self, world_size: int) -> None:
        """Raise SpecError for a world size that has no mesh, or that leaves a rank without samples."""
        mesh = self.mesh_of(world_size)
        check_ranks(self.profile_ranks, world_size)
        if mesh.pp > 1:
            self.check_pipeline(mesh)
        if self.batch_tokens is not None:
            return  # the data's lengths say how many rows a batch has: `BatchPlan.check_world`
        world_size = mesh.data_size
        rows = self.batch_size // self.accumulate
        if self.exact:
            shard_rows = -(-self._micro_rows // self.num_shards)
            count = self.accumulate * -(-rows // shard_rows)
            if count < world_size:
                raise SpecError(
                    f"a batch of {self.batch_size} in shards of {shard_rows} has {count} shards, fewer than the "
                    f"{world_size} ranks. Use at most {count} processes, or more --shards."
                )
            return
        if rows >= world_size:
            return
        ranks = f"ranks {rows}..{world_size - 1}" if rows < world_size - 1 else f"rank {rows}"
        parts = f" in {self.accumulate} micro-batches" if self.accumulate > 1 else ""
        raise SpecError(
            f"batch_size={self.batch_size}{parts} leaves {ranks} of {world_size} without a sample in every step. "
            f"Use batch_size >= {world_size * self.accumulate}, or fewer processes."
        )

    def check_pipeline(self, mesh: Mesh) -> None:
        """Raise SpecError for what a pipeline on this mesh cannot do."""
        if mesh.fsdp * mesh.tp > 1:
            raise SpecError(
                f"mesh={self.mesh}: the stages of a pipeline cannot be split further yet. Use pp together with dp, for "
                f"instance dp={mesh.size // mesh.pp},pp={mesh.pp}."
            )
        check_microbatches(self.schedule, self.microbatches, mesh.pp)

    def recipe(self) -> dict[str, Any]:
        """Return the values that the trajectory depends on. A run is continued only with the same ones."""
        recipe = {o.name: getattr(self, o.name) for o in options_of(type(self)) if o.scope is OptionScope.RECIPE}
        # Compiled code rounds differently, which matters only in exact mode.
        compiled = True if self.exact and self.compile else None
        return recipe | {"shards": self.num_shards or None, "threads": self.num_threads, "compile": compiled}

    def resolved_epochs(self) -> int | None:
        """Return the number of epochs; None where `steps` says when to end."""
        return None if self.steps is not None else (self.epochs if self.epochs is not None else 3)
