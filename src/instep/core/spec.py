"""What a person may ask for: how to launch, and how to train.

The fields of `TrainSpec` are exactly the options of `instep train` and the keywords of `instep.train`;
`LaunchSpec` holds those that `instep run` shares. The command line is built from the metadata here, so an
option has one name, one default and one help text.
"""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from instep.core.errors import SpecError
from instep.core.mesh import Mesh
from instep.core.microbatches import check_microbatches

PLACE_FIELDS = (
    *("nnodes", "node_rank", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "local_addr"),
    *("hosts", "ssh", "allow_differences", "on", "address"),
)
"""Fields that say where a training is and how its machines meet: a cluster's job decides them."""
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(s|m|h)")
DEFAULT_SHARDS = 16
_SHORTEST_LOST_S = 5.0
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}


TRAINING = "Training"
PROCESSES = "Processes and strategy"
NUMBERS = "Numbers"
SAVING = "Run directory and checkpoints"
FAILURES = "Failures"
MACHINES = "Several machines"
OUTPUT = "Output and help"
GROUPS = (TRAINING, PROCESSES, NUMBERS, SAVING, FAILURES, MACHINES, OUTPUT)
"""The headings under which help shows options, in that order."""


def option(default: Any, help: str, *flags: str, group: str, recipe: bool = False, metavar: str | None = None) -> Any:
    """Declare a spec field that is also a command-line option.

    `recipe` marks what the trajectory depends on: a run cannot be continued with another value.
    """
    return dataclasses.field(
        default=default, metadata={"help": help, "flags": flags, "group": group, "recipe": recipe, "metavar": metavar}
    )


@dataclass(frozen=True, kw_only=True)
class LaunchSpec:
    """How many processes, where, and how they find each other; spelled as torchrun spells it."""

    processes: int | str = option(
        1,
        "processes on this machine; auto: one a GPU, or one a core",
        "-n",
        "--processes",
        "--nproc-per-node",
        group=PROCESSES,
    )
    nnodes: str = option("1", "machines, or MIN:MAX for an elastic number", "--nnodes", group=MACHINES)
    node_rank: int | None = option(
        None, "this machine's number, for --rdzv-backend static (0, unless given)", "--node-rank", group=MACHINES
    )
    rdzv_backend: str = option(
        "c10d", "how the machines find each other: c10d or static", "--rdzv-backend", group=MACHINES
    )
    rdzv_endpoint: str = option(
        "", "HOST:PORT of the rendezvous; empty: a free port here", "--rdzv-endpoint", group=MACHINES
    )
    rdzv_id: str = option("", "name of this job at the rendezvous; empty: a new one", "--rdzv-id", group=MACHINES)
    rdzv_conf: str = option("", "more rendezvous settings: KEY=VALUE,KEY=VALUE", "--rdzv-conf", group=MACHINES)
    local_addr: str = option("", "this machine's address, as the others reach it", "--local-addr", group=MACHINES)
    max_restarts: int = option(0, "restarts allowed after a failure", "--max-restarts", group=FAILURES)
    hang_after: str = option(
        "auto",
        "how long no rank may move before the job is ended as hung: 90s, 10m, never; auto: by the steps so far",
        "--hang-after",
        group=FAILURES,
    )
    lost_after: str = option(
        "10s",
        "how long nothing may be heard of a machine before the others go on without it",
        "--lost-after",
        group=MACHINES,
    )

    hosts: str = option(
        "", "start an agent on each of these machines over ssh", "--hosts", metavar="A,B", group=MACHINES
    )
    ssh: str = option("ssh", "with --hosts: the ssh command, with its options", "--ssh", group=MACHINES)
    allow_differences: bool = option(
        False,
        "with --hosts: start although code or versions differ between the machines",
        "--allow-differences",
        group=MACHINES,
    )

    def __post_init__(self) -> None:
        _check_processes(self.processes)
        _check_at_least("max_restarts", self.max_restarts, 0)
        if not re.fullmatch(r"[1-9]\d*(:[1-9]\d*)?", self.nnodes):
            raise SpecError(f"nnodes={self.nnodes!r} is neither a number nor MIN:MAX. Use for instance 2, or 1:4.")
        _ = self.hang_after_s
        _ = self.lost_after_s
        if not self.hosts and (self.allow_differences or self.ssh != "ssh"):
            raise SpecError("--ssh and --allow-differences are for --hosts, which is not given. Leave them out.")

    def words(self) -> list[str]:
        """Write the spec as options of a command line; what is as by default is left out."""
        found = []
        for field in dataclasses.fields(self):
            value, flags = getattr(self, field.name), field.metadata["flags"]
            if value == field.default:
                continue
            if isinstance(value, bool):
                on, _, off = flags[-1].partition("/")
                found.append(on if value else off)
            else:
                found += [flags[-1], str(value)]
        return found

    @property
    def min_nodes(self) -> int:
        """The fewest machines to run on."""
        return int(self.nnodes.split(":")[0])

    @property
    def max_nodes(self) -> int:
        """The most machines to run on."""
        return int(self.nnodes.split(":")[-1])

    @property
    def lost_after_s(self) -> float:
        """How long nothing may be heard of a machine."""
        seconds = seconds_of(str(self.lost_after).strip()) or 0.0
        if seconds < _SHORTEST_LOST_S:
            raise SpecError(
                f"lost_after={self.lost_after!r} is not a time of at least {_SHORTEST_LOST_S:.0f} s, which it takes to "
                "tell a lost machine from a busy one. Write for instance 10s or 1m."
            )
        return seconds

    @property
    def tcp_timeout_s(self) -> float:
        """How long nothing may be heard over a rank's connection: launching processes notice first, and say more."""
        return 1.5 * self.lost_after_s

    @property
    def hang_after_s(self) -> float | None:
        """How long no rank may move; None: to be chosen by what is usual for the job."""
        if self.hang_after in ("auto", "never"):
            return None if self.hang_after == "auto" else math.inf
        match = _DURATION.fullmatch(str(self.hang_after).strip())
        if match is None or float(match[1]) <= 0:
            raise SpecError(
                f"hang_after={self.hang_after!r} is not a time. Write for instance 90s, 10m, auto or never."
            )
        return float(match[1]) * _SECONDS[match[2]]


@dataclass(frozen=True, kw_only=True)
class TrainSpec(LaunchSpec):
    """How to train: everything that is not the Task itself."""

    on: Literal["here", "ray"] = option(
        "here",
        "where processes are started: here, or by Ray, anywhere in its cluster (docs/clusters.md)",
        "--on",
        group=MACHINES,
    )
    address: str = option(
        "",
        "with --on ray: HOST:PORT of a running cluster, or auto to find it; empty: a Ray of this run's own",
        "--address",
        group=MACHINES,
    )
    max_restarts: int = option(
        3,
        "restarts allowed after a failure, counted anew whenever the run has come further",
        "--max-restarts",
        group=FAILURES,
    )
    epochs: int | None = option(
        None, "passes over the training data (3, unless --steps is given)", "--epochs", group=TRAINING
    )
    steps: int | None = option(None, "optimizer steps, instead of --epochs", "--steps", group=TRAINING)
    batch_size: int = option(
        64,
        "samples in one optimizer step, over all processes and accumulation",
        "--batch-size",
        recipe=True,
        group=TRAINING,
    )
    accumulate: int = option(
        1, "parts in which a global batch is worked through", "--accumulate", recipe=True, group=TRAINING
    )
    seed: int = option(0, "where all randomness comes from", "--seed", recipe=True, group=TRAINING)
    exact: bool = option(
        False,
        "the same bits at any number of processes: fixed shards, deterministic kernels (docs/exact.md)",
        "--exact/--no-exact",
        recipe=True,
        group=NUMBERS,
    )
    shards: int | None = option(
        None,
        "with --exact: into how many shards a batch is cut (16, or its size)",
        "--shards",
        recipe=True,
        group=NUMBERS,
    )
    strategy: Literal["auto", "single", "dp", "ddp", "fsdp", "tensor", "pipeline"] = option(
        "auto",
        "how the model is spread; auto: ddp when there are several processes (docs/strategies.md)",
        "--strategy",
        group=PROCESSES,
    )
    mesh: str | None = option(
        None,
        "a mixture of strategies: processes along each axis, dp=2,fsdp=2,tp=2,pp=2",
        "--mesh",
        metavar="AXIS=N,…",
        group=PROCESSES,
    )
    reshard: bool = option(
        True,
        "with fsdp: let go of a block's parameters after its forward pass; off: keep them until backward is over",
        "--reshard/--no-reshard",
        group=PROCESSES,
    )
    offload: bool = option(
        False,
        "with fsdp on GPUs: keep parameters and optimizer state in the host's memory",
        "--offload/--no-offload",
        group=PROCESSES,
    )
    narrow_gather: bool = option(
        False,
        "with fsdp and bf16 or fp16: gather parameters in that precision, for half the traffic; layers compute with "
        "rounded weights throughout",
        "--narrow-gather/--no-narrow-gather",
        group=PROCESSES,
    )
    meta_init: bool = option(
        False,
        "with fsdp: build the model without its numbers and make them block by block, for one that fits no process",
        "--meta-init/--no-meta-init",
        group=PROCESSES,
    )
    schedule: Literal["gpipe", "1f1b", "interleaved"] = option(
        "1f1b",
        "in which order a pipeline works: gpipe, 1f1b (less memory), interleaved (less idle time) (docs/pipeline.md)",
        "--schedule",
        group=PROCESSES,
    )
    microbatches: int | None = option(
        None,
        "into how many pieces a pipeline cuts the rows of a batch (4 for each of its stages, where the rows suffice)",
        "--microbatches",
        group=PROCESSES,
    )
    comm: Literal["auto", "shared-memory", "gloo"] = option(
        "auto",
        "how processes on CPU speak; auto: through shared memory where they share a machine, else gloo",
        "--comm",
        group=PROCESSES,
    )
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = option(
        "auto",
        "in which numbers layers compute; auto: bf16 on a GPU that has it, else fp32 (docs/precision.md)",
        "--precision",
        recipe=True,
        group=NUMBERS,
    )
    compile: bool | None = option(
        None,
        "compile the loss with the model in it (unless given: on GPUs, where the strategy is single or ddp)",
        "--compile/--no-compile",
        recipe=True,
        group=NUMBERS,
    )
    recompute: bool = option(
        False,
        "save memory: compute the model's repeated blocks once more in the backward pass",
        "--recompute/--no-recompute",
        group=PROCESSES,
    )
    clip_norm: float | None = option(
        None, "clip the gradient's global norm to this", "--clip-norm", recipe=True, group=TRAINING
    )
    eval_every: str = option(
        "1epoch",
        "evaluate every N steps, every Nepoch, or never (then only at the end)",
        "--eval-every",
        group=TRAINING,
    )
    save_every: str = option(
        "10m",
        "checkpoint every N steps or every so often (30s, 10m, 2h), and at the end; auto: as often as it pays, "
        "for a failure a day, or auto:6h for one in so long",
        "--save-every",
        group=SAVING,
    )
    save_busy: Literal["wait", "skip"] = option(
        "wait",
        "when a checkpoint is due and the last one is still being written: wait, or skip it",
        "--save-busy",
        group=SAVING,
    )
    keep: int = option(3, "how many of the newest checkpoints are kept", "--keep", group=SAVING)
    keep_every: int | None = option(
        None, "also keep the checkpoints of every so manyth step", "--keep-every", group=SAVING
    )
    keep_best: str | None = option(
        None,
        "also save and keep the best by this metric; METRIC:min where less is better",
        "--keep-best",
        metavar="METRIC",
        group=SAVING,
    )
    check_every: int = option(
        100,
        "compare the ranks every so many steps: do they hold the same, is one slow; 0: never (docs/divergence.md)",
        "--check-every",
        group=FAILURES,
    )
    threads: int | None = option(
        None,
        "CPU threads a process (unless given, the cores shared out; 1 with --exact)",
        "--threads",
        recipe=True,
        group=PROCESSES,
    )
    flush_denormals: bool = option(
        True,
        "treat denormal numbers as zero on CPU",
        "--flush-denormals/--no-flush-denormals",
        recipe=True,
        group=NUMBERS,
    )
    init_from: str | None = option(
        None,
        "start from these weights: a run directory, a checkpoint or a .safetensors file",
        "--init-from",
        recipe=True,
        group=TRAINING,
    )
    on_nan: Literal["stop", "skip"] = option(
        "stop", "when the loss is NaN or infinite: stop, or skip that update", "--on-nan", recipe=True, group=FAILURES
    )
    drop_last: bool = option(
        False,
        "leave out an epoch's last batch when it is not full",
        "--drop-last/--no-drop-last",
        recipe=True,
        group=TRAINING,
    )
    data_workers: int | None = option(
        None,
        "processes that load samples, for data that cannot be indexed by the batch",
        "--data-workers",
        group=TRAINING,
    )
    run_dir: str | None = option(
        None, "where this run lives; an unfinished run there is continued", "--run-dir", group=SAVING
    )
    fresh: bool = option(False, "start over: an earlier run in --run-dir is moved aside", "--fresh", group=SAVING)
    preempted_exit: int = option(
        0,
        "the exit code when asked to stop and saved, for schedulers that take 0 for done (143: ended by SIGTERM)",
        "--preempted-exit",
        group=FAILURES,
    )
    json: bool = option(
        False, "print the Result as one line of JSON, all else to standard error", "--json", group=OUTPUT
    )
    quiet: bool = option(False, "no progress display", "--quiet", group=OUTPUT)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, choices in _choices().items():
            if getattr(self, name) not in choices:
                raise SpecError(f"{name}={getattr(self, name)!r} is unknown. Choose one of {', '.join(choices)}.")
        self._check_place()
        for name, least in (("batch_size", 1), ("accumulate", 1), ("keep", 1)):
            _check_at_least(name, getattr(self, name), least)
        for name in ("epochs", "steps", "threads", "shards", "keep_every", "microbatches"):
            if getattr(self, name) is not None:
                _check_at_least(name, getattr(self, name), 1)
        if self.epochs is not None and self.steps is not None:
            raise SpecError(f"epochs={self.epochs} and steps={self.steps} both say when to end. Give one of them.")
        _check_at_least("check_every", self.check_every, 0)
        if self.preempted_exit not in range(256):
            raise SpecError(f"preempted_exit={self.preempted_exit} is no exit code. Use 0 to 255.")
        if self.data_workers is not None:
            _check_at_least("data_workers", self.data_workers, 0)
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise SpecError(f"clip_norm={self.clip_norm} would clip every gradient away. Use a number above 0.")
        if self.mesh is not None:
            Mesh.parse(self.mesh)
            if self.strategy != "auto":
                raise SpecError(
                    f"strategy={self.strategy} and mesh={self.mesh} both say how the model is spread. Give one of them."
                )
        self._check_pipelined()
        if self.compile and self.recompute:
            raise SpecError(
                "compile and recompute were both asked for, and recomputed blocks are not compiled. Give one."
            )
        if self.keep_best is not None and not re.fullmatch(r"[^:]+(:(min|max))?", self.keep_best):
            raise SpecError(f"keep_best={self.keep_best!r} is not a metric. Write accuracy, or eval_loss:min.")
        if self.narrow_gather and (self.exact or self.precision not in ("auto", "bf16", "fp16")):
            what = "exact mode" if self.exact else f"precision={self.precision}"
            raise SpecError(f"narrow_gather rounds parameters to bf16 or fp16, which {what} does not. Leave it out.")
        if self.meta_init and (self.exact or self.init_from is not None):
            with_what = "exact" if self.exact else "init_from"
            raise SpecError(f"meta_init and {with_what} do not go together: leave out --meta-init.")
        self._check_shards()
        if self.batch_size < self.accumulate:
            raise SpecError(
                f"batch_size={self.batch_size} cannot be worked through in accumulate={self.accumulate} parts: "
                f"some would be empty. Use accumulate <= {self.batch_size}."
            )
        Cadence.parse("save_every", self.save_every)
        Cadence.parse("eval_every", self.eval_every)

    def _check_place(self) -> None:
        """Refuse options that the one who starts the processes would not heed."""
        if self.on == "here":
            if self.address:
                raise SpecError(f"address={self.address} is a Ray cluster's, and Ray is not used. Add --on ray.")
            return
        if self.address.startswith("ray://"):
            raise SpecError(
                f"address={self.address} goes through Ray Client, which Ray Train cannot do without loss. Run the "
                "command on a machine of the cluster with --address auto, or submit it with `ray job submit`."
            )
        names = ("nnodes", "node_rank", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "local_addr")
        for field in dataclasses.fields(LaunchSpec):
            if field.name in (*names, "hang_after") and (value := getattr(self, field.name)) != field.default:
                raise SpecError(
                    f"{field.name}={value} is for processes that instep starts itself; with on=ray, Ray places and "
                    f"watches them. Leave {field.metadata['flags'][-1]} out."
                )

    def _check_pipelined(self) -> None:
        """Refuse options of a pipeline where there is none."""
        if self.strategy == "pipeline" or (self.mesh is not None and Mesh.parse(self.mesh).pp > 1):
            return
        for name, default in (("schedule", "1f1b"), ("microbatches", None)):
            if (value := getattr(self, name)) != default:
                raise SpecError(
                    f"{name}={value} is for a pipeline, and there is none. Add --strategy pipeline, or --mesh with "
                    "pp=2 or more."
                )

    def _check_shards(self) -> None:
        if self.shards is None:
            return
        if not self.exact:
            raise SpecError(f"shards={self.shards} cuts a batch for exact mode, which is off. Add --exact.")
        if self.shards > self.batch_size:
            raise SpecError(
                f"batch_size={self.batch_size} cannot be cut into shards={self.shards}: some would be empty. "
                f"Use shards <= {self.batch_size}."
            )

    @property
    def num_shards(self) -> int:
        """Into how many shards each part of a full batch is cut; 0 when exact mode is off."""
        rows = -(-self.batch_size // self.accumulate)
        return min(self.shards or DEFAULT_SHARDS, rows) if self.exact else 0

    @property
    def num_threads(self) -> int | None:
        """CPU threads a process; None: its share of the cores."""
        return 1 if self.exact and self.threads is None else self.threads

    def mesh_of(self, world_size: int) -> Mesh:
        """Lay the ranks out; refuse a world that does not come out."""
        mesh = Mesh.of(self.strategy, self.mesh, world_size)
        if self.exact and (mesh.tp > 1 or mesh.pp > 1):
            raise SpecError(
                f"exact mode holds for copies and shards of a model (dp, fsdp), and {mesh} also cuts its layers, whose "
                "sums then depend on the cut. Use --strategy ddp or fsdp, or train without --exact."
            )
        if self.compile and not mesh.has_whole_models:
            raise SpecError(
                f"compile: a model that is spread over {mesh} is not compiled. Leave --compile out, or use ddp."
            )
        self._check_sharded(mesh)
        return mesh

    def _check_sharded(self, mesh: Mesh) -> None:
        """Refuse options of fsdp where they would do nothing."""
        asked = [name for name in ("meta_init", "offload", "narrow_gather") if getattr(self, name)]
        asked += ["reshard=False"] * (not self.reshard)
        # One process may try what several will be started with.
        if asked and mesh.fsdp == 1 and not (mesh.size == 1 and self.strategy == "fsdp"):
            raise SpecError(
                f"{asked[0]} is for parameters that are cut over the ranks. Use --strategy fsdp, or leave it out."
            )
        if asked and self.exact:
            raise SpecError(f"exact mode gathers parameters once a step, so {asked[0]} would do nothing. Leave it out.")

    def check_world(self, world_size: int) -> None:
        """Refuse a world that cannot be laid out, or in which a rank would never have a sample."""
        mesh = self.mesh_of(world_size)
        if mesh.pp > 1:
            self.check_pipeline(mesh)
        world_size = mesh.data_size
        if self.exact:
            return self._check_exact_world(world_size)
        rows = self.batch_size // self.accumulate
        if rows >= world_size:
            return None
        ranks = f"ranks {rows}..{world_size - 1}" if rows < world_size - 1 else f"rank {rows}"
        parts = f" in {self.accumulate} parts" if self.accumulate > 1 else ""
        raise SpecError(
            f"batch_size={self.batch_size}{parts} leaves {ranks} of {world_size} without a sample in every step. "
            f"Use batch_size >= {world_size * self.accumulate}, or fewer processes."
        )

    def check_pipeline(self, mesh: Mesh) -> None:
        """Refuse what a pipeline on this mesh cannot do."""
        if mesh.fsdp * mesh.tp > 1:
            raise SpecError(
                f"mesh={self.mesh}: the stages of a pipeline cannot be split further yet. Use pp together with dp, for "
                f"instance dp={mesh.size // mesh.pp},pp={mesh.pp}."
            )
        check_microbatches(self.schedule, self.microbatches, mesh.pp)

    def _check_exact_world(self, world_size: int) -> None:
        micro_rows = -(-self.batch_size // self.accumulate)
        rows = -(-micro_rows // self.num_shards)
        count = self.accumulate * -(-(self.batch_size // self.accumulate) // rows)
        if count < world_size:
            raise SpecError(
                f"a batch of {self.batch_size} in shards of {rows} has {count} shards, which is not one for each of "
                f"{world_size} ranks. Use at most {count} processes, or more --shards."
            )

    def recipe(self) -> dict[str, Any]:
        """The fields the trajectory depends on; a run is continued only with the same ones."""
        found = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.metadata["recipe"]}
        # Compiled code rounds otherwise, which only exact mode minds.
        compiled = True if self.exact and self.compile else None
        return found | {"shards": self.num_shards or None, "threads": self.num_threads, "compile": compiled}

    def resolved_epochs(self) -> int | None:
        """How many epochs to train; None when `steps` says when to end."""
        return None if self.steps is not None else (self.epochs if self.epochs is not None else 3)


@dataclass(frozen=True)
class Cadence:
    """How often something is done: every so many steps, epochs or seconds; all None: only at the end."""

    steps: int | None = None
    epochs: int | None = None
    seconds: float | None = None
    between_failures_s: float | None = None
    """As often as it pays, for a failure in so long."""

    @classmethod
    def parse(cls, name: str, text: str | int) -> Cadence:
        """Read `100`, `2epochs`, `10m` or `never`."""
        text = str(text).strip()
        if text == "never":
            return cls()
        if re.fullmatch(r"[1-9]\d*", text):
            return cls(steps=int(text))
        if name == "eval_every" and (match := re.fullmatch(r"([1-9]\d*)? ?epochs?", text)):
            return cls(epochs=int(match[1] or 1))
        if name == "save_every" and (seconds := seconds_of(text)):
            return cls(seconds=seconds)
        if name == "save_every" and text.startswith("auto") and (seconds := seconds_of(text[4:].lstrip(":") or "24h")):
            return cls(between_failures_s=seconds)
        forms = "100 (steps), 1epoch or never" if name == "eval_every" else "100 (steps), 30s, 10m, 2h, auto or never"
        raise SpecError(f"{name}={text!r} is not an interval. Write for instance {forms}.")


@cache
def _choices() -> dict[str, tuple[str, ...]]:
    """Give the words that fields may be, of those that are words out of a few."""
    hints = get_type_hints(TrainSpec)
    return {name: get_args(hint) for name, hint in hints.items() if get_origin(hint) is Literal}


def seconds_of(text: str) -> float | None:
    """Read `30s`, `10m` or `2h`."""
    match = _DURATION.fullmatch(text)
    return float(match[1]) * _SECONDS[match[2]] if match else None


def _check_processes(processes: int | str) -> None:
    if processes in ("auto", "gpu", "cpu"):
        return
    if not re.fullmatch(r"-?\d+", str(processes)):
        raise SpecError(f"processes={processes!r} is neither a number nor auto, gpu or cpu.")
    _check_at_least("processes", int(processes), 1)


def _check_at_least(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise SpecError(f"{name}={value!r} is not a whole number.")
    if value < least:
        raise SpecError(f"{name}={value} cannot be: it must be at least {least}.")
