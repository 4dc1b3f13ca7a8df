"""The kinds of observations. Importing this package registers all of them; a new module needs its line here."""

from instep.check.records import collectives, files, model_state, run, schedules

__all__ = ["collectives", "files", "model_state", "run", "schedules"]
