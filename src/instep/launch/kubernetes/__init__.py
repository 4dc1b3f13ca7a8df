"""Kubernetes: from what was asked for to manifests, and from manifests to kubectl.

Room: plain values and text; only kubectl.py starts a process. No torch.
"""
