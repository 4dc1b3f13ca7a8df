"""The manifests: a plain Job with its Service, Kubeflow's TrainJob, or the older PyTorchJob. Pure."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from instep.launch.kubernetes.asked import PORT, Kind, KubernetesSpec
from instep.launch.kubernetes.pod import failure_policy, pod_spec
from instep.launch.kubernetes.yaml import Noted, to_yaml

RESOURCES: dict[Kind, str] = {"trainjob": "trainjobs.trainer.kubeflow.org", "pytorchjob": "pytorchjobs.kubeflow.org"}
"""What a cluster must know for a kind; a Job is known to all."""
_TRAINER_API = "trainer.kubeflow.org/v1alpha1"
_COUNTED = "Failed pods before the job is given up: --max-restarts for each pod."


def manifests(spec: KubernetesSpec, kind: Kind) -> list[dict[str, Any]]:
    """Describe everything that has to be there for a training."""
    before = [_config_map(spec)] if spec.task_text is not None else []
    return before + {"trainjob": _train_job, "pytorchjob": _pytorch_job, "job": _job}[kind](spec)


def manifest_text(spec: KubernetesSpec, kind: Kind) -> str:
    """Write the manifests as a file for people and kubectl."""
    title = f"{spec.name}: {spec.nodes} pods, run directory {spec.run_dir}. Written by instep submit kubernetes."
    return to_yaml(manifests(spec, kind), title)


def main_resource(spec: KubernetesSpec, kind: Kind) -> str:
    """Name the object to look at, as kubectl takes it."""
    return f"{RESOURCES.get(kind, 'job')}/{spec.name}"


def _metadata(spec: KubernetesSpec, name: str | None = None) -> dict[str, Any]:
    where = {"namespace": spec.namespace} if spec.namespace is not None else {}
    return {"name": name or spec.name, **where, "labels": _labels(spec)}


def _labels(spec: KubernetesSpec) -> dict[str, str]:
    return {"app.kubernetes.io/name": spec.name, "app.kubernetes.io/managed-by": "instep"}


def _config_map(spec: KubernetesSpec) -> dict[str, Any]:
    file = PurePosixPath(spec.task.partition(":")[0]).name
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(spec, f"{spec.name}-task"),
        "data": {file: spec.task_text},
    }


def _job(spec: KubernetesSpec) -> list[dict[str, Any]]:
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(spec),
        "spec": {
            "clusterIP": Noted("Headless: it gives each pod a name, and passes nothing on.", "None"),
            "selector": {"app.kubernetes.io/name": spec.name},
            "publishNotReadyAddresses": Noted("The pods must find each other before they are ready.", True),
            "ports": [{"name": "rendezvous", "port": PORT}],
        },
    }
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(spec),
        "spec": {
            "completionMode": Noted(
                "Pods are called NAME-0, NAME-1, …, and a new one takes a lost one's name.", "Indexed"
            ),
            **_job_spec(spec, f"{spec.name}-0.{spec.name}", "train", {"subdomain": spec.name}),
        },
    }
    return [service, job]


def _job_spec(spec: KubernetesSpec, host: str, container_name: str, more: dict[str, Any]) -> dict[str, Any]:
    """Give what a Job of its own and one of Kubeflow's have in common."""
    pod = pod_spec(spec, host, "Never", container_name)
    return {
        "completions": spec.max_nodes,
        "parallelism": spec.max_nodes,
        "backoffLimit": Noted(_COUNTED, spec.max_restarts * spec.max_nodes),
        "podFailurePolicy": failure_policy(container_name),
        "template": {"metadata": {"labels": _labels(spec)}, "spec": more | pod},
    }


def _train_job(spec: KubernetesSpec) -> list[dict[str, Any]]:
    """Describe a TrainJob with a runtime of its own.

    How a TrainJob changes a cluster's runtime (volumes, the grace period) has had another name in each of 2.0, 2.1 and
    2.2; a TrainingRuntime has not, and it needs nothing that the cluster's owner would have had to prepare.
    """
    host = f"{spec.name}-node-0-0.{spec.name}"
    runtime = {
        "apiVersion": _TRAINER_API,
        "kind": "TrainingRuntime",
        "metadata": _metadata(spec),
        "spec": {
            "mlPolicy": Noted("No torchrun here: each pod starts its own agent.", {"numNodes": spec.max_nodes}),
            "template": {
                "spec": {
                    "replicatedJobs": [
                        {
                            "name": "node",
                            "template": {
                                "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
                                "spec": _job_spec(spec, host, "node", {}),
                            },
                        }
                    ]
                }
            },
        },
    }
    job = {
        "apiVersion": _TRAINER_API,
        "kind": "TrainJob",
        "metadata": _metadata(spec),
        "spec": {
            "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": spec.name},
            "trainer": {"numNodes": spec.max_nodes, "image": spec.image},
        },
    }
    return [runtime, job]


def _pytorch_job(spec: KubernetesSpec) -> list[dict[str, Any]]:
    """Describe a PyTorchJob of workers only: beside a Master, RANK and WORLD_SIZE would be set for machines."""
    pod = pod_spec(spec, f"{spec.name}-worker-0", "OnFailure", "pytorch", "pytorchjob-port")
    del pod["restartPolicy"]  # the operator's own, below, takes its place
    elastic = {"rdzvBackend": "c10d", "rdzvPort": PORT, "minReplicas": spec.min_nodes, "maxReplicas": spec.max_nodes}
    job = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": _metadata(spec),
        "spec": {
            "elasticPolicy": {**elastic, "maxRestarts": spec.max_restarts},
            "runPolicy": {"backoffLimit": Noted(_COUNTED, spec.max_restarts * spec.max_nodes)},
            "pytorchReplicaSpecs": {
                "Worker": {
                    "replicas": spec.max_nodes,
                    "restartPolicy": Noted("Also pods that were evicted are replaced under this one.", "OnFailure"),
                    "template": {"metadata": {"labels": _labels(spec)}, "spec": pod},
                }
            },
        },
    }
    return [job]
