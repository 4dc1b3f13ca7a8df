"""The kinds of observations. Importing this package registers all of them; a new module needs its line here."""

from instep.check.records import (
    collectives,
    data,
    files,
    gradients,
    live_state,
    model_state,
    replicas,
    run,
    schedules,
    seeding,
)

__all__ = [
    "collectives",
    "data",
    "files",
    "gradients",
    "live_state",
    "model_state",
    "replicas",
    "run",
    "schedules",
    "seeding",
]
