"""Sets of times as sorted, disjoint intervals. Pure."""

from collections.abc import Iterable

Interval = tuple[float, float]
"""Beginning and end."""


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the times that are in any of the intervals."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif end > begin:
            merged.append((begin, end))
    return merged


def intersection(left: list[Interval], right: list[Interval]) -> list[Interval]:
    """Return the times that are in both of two unions."""
    common: list[Interval] = []
    i = j = 0
    while i < len(left) and j < len(right):
        begin, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if begin < end:
            common.append((begin, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return common


def difference(left: list[Interval], right: list[Interval]) -> list[Interval]:
    """Return the times that are in the first of two unions and not in the second."""
    rest: list[Interval] = []
    j = 0
    for begin, end in left:
        while j < len(right) and right[j][1] <= begin:
            j += 1
        k = j
        while k < len(right) and right[k][0] < end:
            if right[k][0] > begin:
                rest.append((begin, right[k][0]))
            begin = max(begin, right[k][1])
            k += 1
        if begin < end:
            rest.append((begin, end))
    return rest


def length(intervals: Iterable[Interval]) -> float:
    """Return how long disjoint intervals are together."""
    return sum(end - begin for begin, end in intervals)
