"""Kubernetes: from options to manifests, and from manifests to kubectl. Only kubectl.py starts a process."""
