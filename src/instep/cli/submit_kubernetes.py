"""`instep submit kubernetes`: write the manifests of a training, and hand them to kubectl if asked to."""

from __future__ import annotations

import dataclasses
import datetime
import inspect
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

import typer

from instep.cli.options import make_spec
from instep.core.errors import SpecError
from instep.core.spec import PLACE_FIELDS, TrainSpec
from instep.launch.kubernetes.kubectl import apply, choose_kind
from instep.launch.kubernetes.manifests import main_resource, manifest_text
from instep.launch.kubernetes.spec import (
    TASK_FOLDER,
    Kind,
    KubernetesSpec,
    Volume,
    as_name,
    check_task_text,
    parse_env,
    task_key,
)

HELP = """Write the manifests that train a Task on Kubernetes: a TrainJob, a PyTorchJob or a plain Job.

TASK.py is the path inside the image (/workspace/digits.py). With --task-from-here it is a file here, which travels with
the job: for a first try, where the image has instep and what the file imports.
"""
_OURS = {
    *PLACE_FIELDS,
    *("rdzv_conf", "run_dir", "fresh", "json", "quiet", "preempted_exit"),
}
"""What the manifests decide, or what is asked for in another way here."""


def _option(
    name: str, kind: Any, default: Any, help: str, *flags: str, metavar: str | None = None
) -> inspect.Parameter:
    option = typer.Option(*(flags or (f"--{name.replace('_', '-')}",)), help=help, metavar=metavar)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


PARAMETERS = (
    _option("image", str, ..., "the container image: has Python, torch and instep"),
    _option("nodes", str, "1", "pods, one a machine; MIN:MAX for an elastic number"),
    _option("gpus_per_node", int, 0, "GPUs of each pod, one process each; 0: on CPU, with -n processes"),
    _option(
        "volume",
        list[str] | None,
        None,
        "a PersistentVolumeClaim and where the pods see it; may be given again. One holds the run directory",
        metavar="CLAIM:/PATH",
    ),
    _option("run_dir", str | None, None, "the run's directory in the pods, on a volume (PATH/runs/NAME)"),
    _option("name", str | None, None, "the job's name (the file's name and the time)"),
    _option("namespace", str | None, None, "where in the cluster (kubectl's current namespace)"),
    _option(
        "kind",
        Literal["auto", "trainjob", "pytorchjob", "job"],
        "auto",
        "trainjob: Kubeflow Trainer 2; pytorchjob: the operator before it; job: any cluster; auto: ask the cluster",
    ),
    _option(
        "set_env", list[str] | None, None, "an environment variable of the pods; may be given again", metavar="A=B"
    ),
    _option("cpus", str | None, None, "CPUs of each pod: 8, 500m"),
    _option("memory", str | None, None, "memory of each pod: 16Gi"),
    _option("grace", int, 120, "seconds that pods have to save when they are asked to go"),
    _option(
        "task_from_here",
        bool,
        False,
        "TASK.py is a file here, of at most 240 KiB; it travels in a ConfigMap",
        "--task-from-here",
    ),
    _option("write", str | None, None, "where the manifests go (runs/NAME/kubernetes.yaml)", metavar="FILE"),
    _option("apply", bool, False, "submit them: kubectl apply", "--apply"),
    _option("dry_run", bool, False, "only show them; write and submit nothing", "--dry-run"),
    _option("json", bool, False, "print what was done as one line of JSON", "--json"),
)


def takes(field: dataclasses.Field[Any]) -> bool:
    """Tell whether an option of `train` is one of this command too."""
    return field.name not in _OURS


def submit(task: str, values: Sequence[str], options: Mapping[str, Any]) -> None:
    """Write the manifests; submit them if asked to."""
    ours = {parameter.name: options[parameter.name] for parameter in PARAMETERS}
    train = make_spec(TrainSpec, {name: value for name, value in options.items() if name not in ours})
    if ours["apply"] and ours["dry_run"]:
        raise SpecError("--apply submits and --dry-run does not. Give one of them.")
    spec = _asked(task, values, train, ours)
    kind: Kind = ours["kind"]
    if ours["kind"] == "auto":
        kind, why = choose_kind()
        _say(f"kind {kind}: {why}.")
    text = manifest_text(spec, kind)
    if ours["dry_run"]:
        _show(text, ours["json"])
        return
    path = Path(ours["write"] or f"runs/{spec.name}/kubernetes.yaml")
    _write(path, text)
    _say(f"{path}: {spec.nodes} x {spec.processes} processes, run directory {spec.run_dir}")
    if ours["apply"]:
        _say(apply(path))
    where = ["--namespace", spec.namespace] if spec.namespace else []
    follow = " ".join(
        ["kubectl", *where, "logs", "--follow", "--prefix", f"--selector=app.kubernetes.io/name={spec.name}"]
    )
    _say(f"follow: {follow}" if ours["apply"] else f"submit: kubectl apply -f {path}\nfollow: {follow}")
    if ours["json"]:
        found = {"name": spec.name, "namespace": spec.namespace, "kind": kind, "resource": main_resource(spec, kind)}
        print(json.dumps({**found, "file": str(path), "run_dir": spec.run_dir, "applied": ours["apply"]}), flush=True)


def _asked(task: str, values: Sequence[str], train: TrainSpec, ours: Mapping[str, Any]) -> KubernetesSpec:
    """Put together what is asked for, and refuse what cannot be."""
    file, colon, class_name = task.partition(":")
    for value in values:
        if not value.partition("=")[0].isidentifier() or "=" not in value:
            raise SpecError(f"{value!r} is neither an option nor name=value.")
    name = ours["name"] or _fresh_name(file)
    volumes = tuple(Volume.parse(text) for text in ours["volume"] or ())
    base = volumes[0].path.rstrip("/") if volumes else ""
    processes = _processes(train, ours["gpus_per_node"])
    spec = KubernetesSpec(
        name=name,
        image=ours["image"],
        task=_place_task(file, ours["task_from_here"]) + colon + class_name,
        words=(*values, *dataclasses.replace(train, processes=1).words()),
        nodes=ours["nodes"],
        processes=processes,
        run_dir=str(PurePosixPath(ours["run_dir"] or f"{base}/runs/{name}")),
        volumes=volumes,
        namespace=ours["namespace"],
        gpus_per_node=ours["gpus_per_node"],
        cpus=ours["cpus"],
        memory=ours["memory"],
        env=parse_env(ours["set_env"] or ()),
        grace_s=ours["grace"],
        max_restarts=train.max_restarts,
        task_text=check_task_text(file, _read(file)) if ours["task_from_here"] else None,
    )
    if isinstance(processes, int):
        train.check_world(processes * spec.min_nodes)
    return spec


def _processes(train: TrainSpec, gpus_per_node: int) -> int | str:
    if not gpus_per_node:
        return train.processes
    if train.processes not in (1, "auto", "gpu", gpus_per_node):
        raise SpecError(
            f"-n {train.processes} and gpus_per_node={gpus_per_node}: each process has a GPU of its own. Leave -n out."
        )
    return gpus_per_node


def _place_task(file: str, from_here: bool) -> str:
    """Say where the pods find the Task's file."""
    if not from_here:
        if not file.startswith("/"):
            raise SpecError(
                f"{file} is not an absolute path. Give the path inside the image, for instance "
                f"/workspace/{PurePosixPath(file).name}, or add --task-from-here to send the file here along."
            )
        return file
    return f"{TASK_FOLDER}/{task_key(file)}"


def _read(file: str) -> bytes:
    path = Path(file)
    if not path.is_file() or path.suffix != ".py":
        raise SpecError(
            f"{file} is no Python file here. --task-from-here sends one along; without it, give its path there."
        )
    return path.read_bytes()


def _fresh_name(file: str) -> str:
    """Name a job after the Task's file and the time, as a run directory is."""
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    return f"{as_name(PurePosixPath(file).stem)[:30].rstrip('-')}-{stamp}"


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        raise SpecError(f"{path} cannot be written: {error.strerror}. Give another --write FILE.") from error


def _show(text: str, as_json: bool) -> None:
    """Print the manifests: where JSON is asked for, as its one line."""
    print(json.dumps({"manifests": text}) if as_json else text.rstrip("\n"), flush=True)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
