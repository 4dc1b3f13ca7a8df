"""The kinds of observations. Importing this package registers all of them; a new module needs its line here."""

from instep.check.records import collectives, files, gradients, model_state, run, schedules

__all__ = ["collectives", "files", "gradients", "model_state", "run", "schedules"]
