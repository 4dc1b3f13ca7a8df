"""Observations and sources for tests of rules, made by hand."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from instep.check.finding import Finding
from instep.check.observations import Observation, Observed
from instep.check.records.run import Ended
from instep.check.rule import Evidence, Rule, judge_all
from instep.check.source.module import SourceModule

SCRIPT = "train.py"


def module(text: str) -> SourceModule:
    """Return a file with a source text; it imports what distributed scripts import."""
    head = "import torch, os\nimport torch.distributed as dist\n"
    head += "from torch.nn.parallel import DistributedDataParallel as DDP\n"
    return SourceModule(SCRIPT, head + textwrap.dedent(text))


def read(rule: Rule, text: str) -> list[Finding]:
    """Return what a rule reads in a source text."""
    return judge_all([rule], Evidence([module(text)]))


def judge(rule: Rule, ranks: Sequence[Sequence[Observation]], text: str = "") -> list[Finding]:
    """Return what a rule says about observations of rank 0, 1, …, which all went to the end."""
    observed = Observed([[*observations, Ended(how="complete")] for observations in ranks])
    return judge_all([rule], Evidence([module(text)], observed))


def line_of(text: str, part: str) -> int:
    """Return the line, in the file that `module` makes, of the first line that contains `part`."""
    return next(number for number, line in enumerate(module(text).lines, 1) if part in line)
