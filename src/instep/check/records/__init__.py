"""The kinds of observations. Importing this package registers all of them; a new module needs its line here."""

from instep.check.records import data, replicas, run, seeding

__all__ = ["data", "replicas", "run", "seeding"]
