"""The manifests: a plain Job with its Service, Kubeflow's TrainJob, or the older PyTorchJob. Pure."""

from pathlib import PurePosixPath
from typing import Any

from instep.core.errors import EXIT_SPEC, EXIT_USER
from instep.launch.kubernetes.spec import PORT, TASK_FOLDER, Kind, KubernetesSpec
from instep.launch.kubernetes.yaml import Commented, to_yaml
from instep.world.device import ACCELERATORS

RESOURCES: dict[Kind, str] = {"trainjob": "trainjobs.trainer.kubeflow.org", "pytorchjob": "pytorchjobs.kubeflow.org"}
"""The custom resource that a cluster must have for a kind; every cluster has Jobs."""
PREEMPTED = 143
"""The exit code of a pod that was asked to stop and has saved: with 0, the training would count as complete."""
_TRAINER_API = "trainer.kubeflow.org/v1alpha1"
_JOIN_TIMEOUT_S = 1800
"""How long a pod waits for the others, which may first have to get a node and pull the image."""
_BACKOFF = "Failed pods before the job fails: --max-restarts for each pod."
_SHM = (
    "The processes of a pod communicate, and DataLoader workers pass samples, through /dev/shm.\n"
    "A container has 64 MB of it unless more is mounted. It counts as the pod's memory."
)
_CLAIM = "All pods read and write the run directory: the claim must be ReadWriteMany."
_GRACE = "At SIGTERM all ranks save at the same step; this is the time they have for it."
_POD_IP = "The address at which the other pods reach this one."


def manifests(spec: KubernetesSpec, kind: Kind) -> list[dict[str, Any]]:
    """Return all objects of a training."""
    file = PurePosixPath(spec.task.partition(":")[0]).name
    task = [_object(spec, "v1", "ConfigMap", {"data": {file: spec.task_text}}, f"{spec.name}-task")]
    job = {"trainjob": _train_job, "pytorchjob": _pytorch_job, "job": _job}[kind](spec)
    return job if spec.task_text is None else task + job


def manifest_text(spec: KubernetesSpec, kind: Kind) -> str:
    """Return the manifests as the text of a YAML file."""
    title = f"{spec.name}: {spec.nodes} pods, run directory {spec.run_dir}. Written by instep submit kubernetes."
    return to_yaml(manifests(spec, kind), title)


def main_resource(spec: KubernetesSpec, kind: Kind) -> str:
    """Return the name of the job's object, as kubectl takes it."""
    return f"{RESOURCES.get(kind, 'job')}/{spec.name}"


def _object(
    spec: KubernetesSpec, api_version: str, kind: str, body: dict[str, Any], name: str | None = None
) -> dict[str, Any]:
    metadata = {"name": name or spec.name, **_given({"namespace": spec.namespace}), "labels": _labels(spec)}
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, **body}


def _labels(spec: KubernetesSpec) -> dict[str, str]:
    return {"app.kubernetes.io/name": spec.name, "app.kubernetes.io/managed-by": "instep"}


def _job(spec: KubernetesSpec) -> list[dict[str, Any]]:
    service = {
        "clusterIP": Commented("Headless: it gives each pod a DNS name and forwards nothing.", "None"),
        "selector": {"app.kubernetes.io/name": spec.name},
        "publishNotReadyAddresses": Commented("The pods must find each other before they are ready.", True),
        "ports": [{"name": "rendezvous", "port": PORT}],
    }
    job = {
        "completionMode": Commented(
            "Pods are called NAME-0, NAME-1, …, and a new pod takes the name of the one it replaces.", "Indexed"
        ),
        **_job_spec(spec, f"{spec.name}-0.{spec.name}", "train", {"subdomain": spec.name}),
    }
    return [_object(spec, "v1", "Service", {"spec": service}), _object(spec, "batch/v1", "Job", {"spec": job})]


def _job_spec(spec: KubernetesSpec, host: str, container_name: str, pod_fields: dict[str, Any]) -> dict[str, Any]:
    """Return what a plain Job and the Job inside a TrainingRuntime have in common."""
    pod = {**pod_fields, "restartPolicy": "Never", **_pod_spec(spec, host, container_name, "rendezvous")}
    return {
        "completions": spec.max_nodes,
        "parallelism": spec.max_nodes,
        "backoffLimit": Commented(_BACKOFF, spec.max_restarts * spec.max_nodes),
        "podFailurePolicy": _failure_policy(container_name),
        "template": {"metadata": {"labels": _labels(spec)}, "spec": pod},
    }


def _train_job(spec: KubernetesSpec) -> list[dict[str, Any]]:
    """Return a TrainJob with a TrainingRuntime of its own.

    The fields with which a TrainJob changes a cluster's runtime (volumes, the grace period) were renamed in each of
    2.0, 2.1 and 2.2. A TrainingRuntime was not, and the cluster's administrator has nothing to prepare.
    """
    replicated_job = {
        "name": "node",
        "template": {
            "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
            "spec": _job_spec(spec, f"{spec.name}-node-0-0.{spec.name}", "node", {}),
        },
    }
    runtime = {
        "mlPolicy": Commented("Without torchrun: each pod starts its own launcher.", {"numNodes": spec.max_nodes}),
        "template": {"spec": {"replicatedJobs": [replicated_job]}},
    }
    job = {
        "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": spec.name},
        "trainer": {"numNodes": spec.max_nodes, "image": spec.image},
    }
    return [
        _object(spec, _TRAINER_API, "TrainingRuntime", {"spec": runtime}),
        _object(spec, _TRAINER_API, "TrainJob", {"spec": job}),
    ]


def _pytorch_job(spec: KubernetesSpec) -> list[dict[str, Any]]:
    """Return a PyTorchJob of Workers only: with a Master, the operator would set RANK and WORLD_SIZE per pod."""
    elastic = {"rdzvBackend": "c10d", "rdzvPort": PORT, "minReplicas": spec.min_nodes, "maxReplicas": spec.max_nodes}
    pod = _pod_spec(spec, f"{spec.name}-worker-0", "pytorch", "pytorchjob-port")
    job = {
        "elasticPolicy": {**elastic, "maxRestarts": spec.max_restarts},
        "runPolicy": {"backoffLimit": Commented(_BACKOFF, spec.max_restarts * spec.max_nodes)},
        "pytorchReplicaSpecs": {
            "Worker": {
                "replicas": spec.max_nodes,
                "restartPolicy": Commented("With OnFailure, evicted pods are replaced too.", "OnFailure"),
                "template": {"metadata": {"labels": _labels(spec)}, "spec": pod},
            }
        },
    }
    return [_object(spec, "kubeflow.org/v1", "PyTorchJob", {"spec": job})]


def _pod_spec(spec: KubernetesSpec, host: str, container_name: str, port_name: str) -> dict[str, Any]:
    volumes: list[Any] = [
        {"name": f"volume-{n}", "persistentVolumeClaim": {"claimName": volume.claim}}
        for n, volume in enumerate(spec.volumes)
    ]
    volumes[0] = Commented(_CLAIM, volumes[0])
    volumes.append(Commented(_SHM, {"name": "shared-memory", "emptyDir": {"medium": "Memory"}}))
    if spec.task_text is not None:
        volumes.append({"name": "task", "configMap": {"name": f"{spec.name}-task"}})
    return {
        "terminationGracePeriodSeconds": Commented(_GRACE, spec.grace_s),
        "containers": [_container(spec, container_name, host, port_name)],
        "volumes": volumes,
    }


def _container(spec: KubernetesSpec, name: str, host: str, port_name: str) -> dict[str, Any]:
    env: list[Any] = [{"name": key, "value": value.replace("$", "$$")} for key, value in spec.env]
    if spec.max_nodes > 1:
        env.append(Commented(_POD_IP, {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}))
    mounts: list[Any] = [{"name": f"volume-{n}", "mountPath": volume.path} for n, volume in enumerate(spec.volumes)]
    mounts.append({"name": "shared-memory", "mountPath": "/dev/shm"})  # noqa: S108 - in the pod
    if spec.task_text is not None:
        mounts.append({"name": "task", "mountPath": TASK_FOLDER, "readOnly": True})
    return {
        "name": name,
        "image": spec.image,
        "command": _launcher_command(spec, host),
        **_given({"env": env}),
        "ports": [{"name": port_name, "containerPort": PORT}],
        **_given({"resources": _resources(spec)}),
        "volumeMounts": mounts,
    }


def _launcher_command(spec: KubernetesSpec, host: str) -> list[str]:
    """Return the command of one pod's launcher; the rendezvous is at `host`, the first pod."""
    words = ["instep", "train", spec.task, *spec.words, "--run-dir", spec.run_dir]
    words += ["--nproc-per-node", str(spec.processes), "--preempted-exit", str(PREEMPTED)]
    command = [text.replace("$", "$$") for text in words]  # Kubernetes would expand $(A)
    if spec.max_nodes > 1:
        command += ["--nnodes", spec.nodes, "--rdzv-endpoint", f"{host}:{PORT}", "--rdzv-id", spec.name]
        command += ["--rdzv-conf", f"join_timeout={_JOIN_TIMEOUT_S}", "--local-addr", "$(POD_IP)"]
    return command


def _resources(spec: KubernetesSpec) -> dict[str, Any]:
    """Return requests and limits; memory and GPUs cannot be overcommitted, so their limits equal the requests."""
    gpu = next(iter(ACCELERATORS.values())).kubernetes_resource
    requests = _given({"cpu": spec.cpus, "memory": spec.memory})
    limits = _given({"memory": spec.memory, gpu: spec.gpus_per_node})
    return _given({"requests": requests, "limits": limits})


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value}


def _failure_policy(container_name: str) -> dict[str, Any]:
    """Return which pod failures are retried: those that a node caused, not those of the code or the command line."""

    def on_exit(*codes: int) -> dict[str, Any]:
        return {"containerName": container_name, "operator": "In", "values": list(codes)}

    return {
        "rules": [
            Commented(
                "A wrong command line, or an error in the Task: a retry would fail the same way.",
                {"action": "FailJob", "onExitCodes": on_exit(EXIT_USER, EXIT_SPEC)},
            ),
            Commented(
                "The node was taken away: retry, and do not count it.",
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ),
            Commented(
                "Preempted, and saved: the same. All else (137: killed, out of memory) counts for backoffLimit.",
                {"action": "Ignore", "onExitCodes": on_exit(PREEMPTED)},
            ),
        ]
    }
