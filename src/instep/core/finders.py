"""The finders of `instep tune --find`: their names, and where each is implemented."""

from instep.core.errors import SpecError
from instep.core.nearest import nearest

FINDERS = {
    "lr": "instep.tune.finders.lr:LrFinder",
    "batch-size": "instep.tune.finders.batch_size:BatchSizeFinder",
    "workers": "instep.tune.finders.settings:WorkersFinder",
    "threads": "instep.tune.finders.settings:ThreadsFinder",
    "processes": "instep.tune.finders.settings:ProcessesFinder",
}
"""By name, as `module:class`: a finder is imported only when it is used."""
FINDER_NAMES = tuple(FINDERS)


def check_finder(name: str) -> None:
    """Raise SpecError, with the names, for a finder that does not exist."""
    if name not in FINDERS:
        raise SpecError(f"find={name!r} is unknown.{nearest(name, FINDER_NAMES)} Choose one of {', '.join(FINDERS)}.")
