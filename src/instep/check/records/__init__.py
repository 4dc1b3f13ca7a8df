"""The kinds of observations. Importing this package registers all of them; a new module needs its line here."""

from instep.check.records import gradients, run

__all__ = ["gradients", "run"]
