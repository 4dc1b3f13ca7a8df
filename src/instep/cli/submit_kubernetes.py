"""`instep submit kubernetes`: write the manifests of a training, and apply them with kubectl if asked to."""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from instep.cli.command import TASK, VALUES, command, make_spec, option, print_json, say
from instep.core.errors import SpecError
from instep.core.options import OptionScope
from instep.core.spec import TrainSpec
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

_HELP = """Write the manifests that train a Task on Kubernetes: a TrainJob, a PyTorchJob or a plain Job.

TASK.py is the path inside the image (/workspace/digits.py). With --task-from-here it is a local file that is sent with
the job. That suits a first try, with an image that has instep and everything that the file imports.
"""
OPTIONS = (
    option("image", str, ..., "container image with Python, torch and instep"),
    option("nodes", str, "1", "number of pods, one per node; MIN:MAX for an elastic number"),
    option("gpus_per_node", int, 0, "GPUs of each pod, one process each; 0: on CPU, with -n processes"),
    option(
        "volume",
        list[str] | None,
        None,
        "a PersistentVolumeClaim and its path in the pods; may be repeated. One has the run directory",
        metavar="CLAIM:/PATH",
    ),
    option("run_dir", str | None, None, "the run's directory in the pods, on a volume (PATH/runs/NAME)"),
    option("name", str | None, None, "name of the job (the file's name and the time)"),
    option("namespace", str | None, None, "namespace in the cluster (kubectl's current namespace)"),
    option(
        "kind",
        Literal["auto", "trainjob", "pytorchjob", "job"],
        "auto",
        "trainjob: Kubeflow Trainer 2; pytorchjob: the operator before it; job: any cluster; auto: ask the cluster",
    ),
    option("set_env", list[str] | None, None, "environment variable of the pods; may be repeated", metavar="A=B"),
    option("cpus", str | None, None, "CPUs of each pod: 8, 500m"),
    option("memory", str | None, None, "memory of each pod: 16Gi"),
    option("grace", int, 120, "seconds that pods have to save when they are asked to stop"),
    option("task_from_here", bool, False, "TASK.py is a local file of at most 240 KiB; it is sent in a ConfigMap"),
    option("write", str | None, None, "file to write the manifests to (runs/NAME/kubernetes.yaml)", metavar="FILE"),
    option("apply", bool, False, "submit the manifests with kubectl apply"),
    option("dry_run", bool, False, "only print the manifests; write and submit nothing"),
    option("json", bool, False, "print the outcome as one line of JSON"),
)


@command(
    _HELP,
    *(TASK, VALUES, *OPTIONS),
    spec=TrainSpec,
    takes=lambda declared: declared.scope not in (OptionScope.NODE, OptionScope.OUTPUT),  # the manifests set these
)
def kubernetes(task: str, values: list[str] | None, **options: Any) -> None:
    """Write the manifests; submit them if asked to."""
    asked = {parameter.name: options.pop(parameter.name) for parameter in OPTIONS}
    train = make_spec(TrainSpec, options)
    if asked["apply"] and asked["dry_run"]:
        raise SpecError("--apply submits and --dry-run does not. Give one of them.")
    spec = _job_spec(task, values or [], train, asked)
    kind: Kind = asked["kind"]
    if asked["kind"] == "auto":
        kind, why = choose_kind()
        say(f"kind {kind}: {why}.")
    text = manifest_text(spec, kind)
    if asked["dry_run"]:
        if asked["json"]:
            print_json({"manifests": text})
        else:
            print(text.rstrip("\n"), flush=True)
        return
    path = Path(asked["write"] or f"runs/{spec.name}/kubernetes.yaml")
    _write(path, text)
    say(f"{path}: {spec.nodes} x {spec.processes} processes, run directory {spec.run_dir}")
    if asked["apply"]:
        say(apply(path))
    where = f" --namespace {spec.namespace}" if spec.namespace else ""
    follow = f"kubectl{where} logs --follow --prefix --selector=app.kubernetes.io/name={spec.name}"
    say(f"follow: {follow}" if asked["apply"] else f"submit: kubectl apply -f {path}\nfollow: {follow}")
    if asked["json"]:
        job = {"name": spec.name, "namespace": spec.namespace, "kind": kind, "resource": main_resource(spec, kind)}
        print_json({**job, "file": str(path), "run_dir": spec.run_dir, "applied": asked["apply"]})


def _job_spec(task: str, values: Sequence[str], train: TrainSpec, asked: Mapping[str, Any]) -> KubernetesSpec:
    """Return the job that the options describe; raise SpecError where there is none."""
    file, colon, class_name = task.partition(":")
    for value in values:
        if not value.partition("=")[0].isidentifier() or "=" not in value:
            raise SpecError(f"{value!r} is neither an option nor name=value.")
    stem = as_name(PurePosixPath(file).stem)[:30].rstrip("-")
    name = asked["name"] or f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    volumes = tuple(Volume.parse(text) for text in asked["volume"] or ())
    base = volumes[0].path.rstrip("/") if volumes else ""
    processes = _processes(train, asked["gpus_per_node"])
    path, text = _task_file(file, asked["task_from_here"])
    alike = ("image", "nodes", "namespace", "gpus_per_node", "cpus", "memory")
    spec = KubernetesSpec(
        **{option: asked[option] for option in alike},
        name=name,
        task=path + colon + class_name,
        words=(*values, *dataclasses.replace(train, processes=1).words()),
        processes=processes,
        run_dir=str(PurePosixPath(asked["run_dir"] or f"{base}/runs/{name}")),
        volumes=volumes,
        env=parse_env(asked["set_env"] or ()),
        grace_s=asked["grace"],
        max_restarts=train.max_restarts,
        task_text=text,
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


def _task_file(file: str, from_here: bool) -> tuple[str, str | None]:
    """Return the path of the Task's file in the pods, and its content if it is sent with the job."""
    path = Path(file)
    if from_here:
        if not path.is_file() or path.suffix != ".py":
            raise SpecError(
                f"{file} is not a local Python file to send with --task-from-here. Without it, give the path in the "
                "image."
            )
        return f"{TASK_FOLDER}/{task_key(file)}", check_task_text(file, path.read_bytes())
    if not file.startswith("/"):
        raise SpecError(
            f"{file} is not an absolute path. Give the path inside the image, for instance /workspace/{path.name}, or "
            "add --task-from-here to send a local file."
        )
    return file, None


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        raise SpecError(f"{path} cannot be written: {error.strerror}. Give another --write FILE.") from error
