"""The rules, one line for each."""

from instep.check.rule import Rule

RULES: tuple[Rule, ...] = ()
