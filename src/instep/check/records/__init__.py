"""The kinds of observations. Importing this package registers all of them; a new module needs its line here."""

from instep.check.records import collectives, files, replicas, run, schedules

__all__ = ["collectives", "files", "replicas", "run", "schedules"]
