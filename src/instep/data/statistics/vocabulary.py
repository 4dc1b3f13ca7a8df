"""Which tokens there are, by how often they occur."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from instep.core.errors import DataError, SpecError
from instep.data.statistics.blocks import read_samples
from instep.data.statistics.estimator import Estimator
from instep.data.statistics.ranks import accumulate

Token = str | int
UNKNOWN = "<unk>"


class Vocabulary(Estimator):
    """Numbers the tokens of texts: `specials` first, then the tokens, the most frequent first.

    A sample is a text, which is split at white space, or a sequence of tokens, texts or integers. Tokens of equal
    counts are in the order of their characters, so that the numbers depend on neither the order of the samples nor the
    process. Tokens that occur less than `min_count` times, and those beyond `max_size` (with the specials), are left
    out; `encode` gives them the number of "<unk>".
    """

    params = ("min_count", "max_size", "specials")

    def __init__(
        self, *, min_count: int = 1, max_size: int | None = None, specials: Sequence[str] = (UNKNOWN,)
    ) -> None:
        if min_count < 1:
            raise SpecError(f"min_count={min_count} is too small. Use at least 1.")
        if max_size is not None and max_size <= len(specials):
            raise SpecError(f"max_size={max_size} leaves no room beside the {len(specials)} specials.")
        self.min_count, self.max_size, self.specials = min_count, max_size, tuple(specials)
        self._counts: _Counts | None = None
        self._ids: dict[Token, int] = {}

    @property
    def is_fitted(self) -> bool:
        return self._counts is not None

    def fit(self, data: Any, *, column: int | str | None = None) -> Vocabulary:
        """Count the tokens of a list of samples or of a dataset, whose `column` it may be. Ranks of a run share it."""
        self._take(accumulate(_Counts, read_samples(data, column)))
        return self

    def partial_fit(self, samples: Iterable[Any]) -> Vocabulary:
        """Add samples to those that were counted."""
        counts = self._counts or _Counts()
        counts.add(samples)
        self._take(counts)
        return self

    def _take(self, counts: _Counts) -> None:
        self._counts = counts
        kept = [
            token for token, count in counts.tokens.items() if count >= self.min_count and token not in self.specials
        ]
        kept.sort(key=lambda token: (-counts.tokens[token], str(token), isinstance(token, str)))
        size = None if self.max_size is None else self.max_size - len(self.specials)
        self._ids = {token: number for number, token in enumerate([*self.specials, *kept[:size]])}

    @property
    def tokens_(self) -> list[Token]:
        """The tokens by number."""
        self._learned("tokens_")
        return list(self._ids)

    @property
    def counts_(self) -> dict[Token, int]:
        """How often each token of the vocabulary occurred; specials that did not occur have 0."""
        self._learned("counts_")
        assert self._counts is not None
        return {token: self._counts.tokens[token] for token in self._ids}

    def __len__(self) -> int:
        return len(self._ids)

    def __contains__(self, token: Token) -> bool:
        return token in self._ids

    def encode(self, sample: Any) -> list[int]:
        """Return the numbers of a sample's tokens."""
        self._require_fit()
        unknown = self._ids.get(UNKNOWN)
        numbers = [self._ids.get(token, unknown) for token in _tokens_of(sample)]
        if None in numbers:
            token = _tokens_of(sample)[numbers.index(None)]
            raise DataError(f'The vocabulary has neither {token!r} nor "<unk>". Give Vocabulary specials=("<unk>",).')
        return [number for number in numbers if number is not None]

    def decode(self, numbers: Iterable[int]) -> list[Token]:
        """Return the tokens of numbers."""
        self._require_fit()
        tokens = list(self._ids)
        indices = [int(number) for number in numbers]
        wrong = [number for number in indices if not 0 <= number < len(tokens)]
        if wrong:
            raise DataError(f"{wrong[0]} is no number of this vocabulary, which has {len(tokens)} tokens.")
        return [tokens[number] for number in indices]

    def _state(self) -> dict[str, Any]:
        assert self._counts is not None
        return {"tokens": list(self._ids), "counts": self._counts.to_json()}

    def _load(self, state: Mapping[str, Any]) -> None:
        counts = _Counts()
        counts.merge(state["counts"])
        self._take(counts)


class _Counts:
    """How often tokens occur."""

    def __init__(self) -> None:
        self.tokens: Counter[Token] = Counter()

    def add(self, samples: Iterable[Any]) -> None:
        """Count the tokens of samples."""
        for sample in samples:
            self.tokens.update(_tokens_of(sample))

    def to_json(self) -> dict[str, Any]:
        """Return tokens and counts, in an order that does not depend on how they were counted."""
        ordered = sorted(self.tokens.items(), key=lambda item: (-item[1], str(item[0]), isinstance(item[0], str)))
        return {"tokens": [token for token, _ in ordered], "counts": [count for _, count in ordered]}

    def merge(self, state: Mapping[str, Any]) -> None:
        """Add those of other samples."""
        for token, count in zip(state.get("tokens", ()), state.get("counts", ()), strict=True):
            self.tokens[token] += count


def _tokens_of(sample: Any) -> list[Token]:
    """Return the tokens of a text, or of a sequence of tokens."""
    if isinstance(sample, str):
        return list(sample.split())
    if hasattr(sample, "tolist"):  # a tensor or an array
        sample = sample.tolist()
    if not isinstance(sample, list | tuple):
        raise DataError(f"A sample is a {type(sample).__name__}; a text or a sequence of tokens is needed.")
    wrong = next((token for token in sample if not isinstance(token, str | int)), None)
    if wrong is not None:
        raise DataError(f"A token is a {type(wrong).__name__}: {wrong!r:.40}. Tokens are texts or integers.")
    return list(sample)
