"""What the tests of clusters share: one SLURM, one Ray, networks of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ray_cluster import RayCluster, RayHome, ray_cluster, ray_home
from rings import require
from slurm_cluster import SlurmCluster, slurm_cluster


@pytest.fixture(scope="session")
def slurm() -> Iterator[SlurmCluster]:
    """A real SLURM of four nodes."""
    require("SLURM")
    with slurm_cluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def ray_nodes() -> Iterator[RayCluster]:
    """A real Ray of two nodes, with one CPU each."""
    require("Ray nodes")
    with ray_cluster() as cluster:
        yield cluster


@pytest.fixture
def ray_alone() -> Iterator[RayHome]:
    """A place where a command can start a Ray of its own."""
    require("Ray nodes")
    with ray_home() as home:
        yield home
