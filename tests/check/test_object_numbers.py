"""Objects that are counted by who they are: a script that trains twice has other optimizers, at the same addresses."""

from __future__ import annotations

from instep.check.observe.object_numbers import ObjectNumbers


class _Thing:
    pass


def test_an_object_at_the_address_of_another_has_a_number_of_its_own() -> None:
    numbers = ObjectNumbers()
    things = [_Thing() for _ in range(3)]
    assert [numbers.of(thing) for thing in (*things, *things)] == [0, 1, 2, 0, 1, 2]
    addresses = {id(thing) for thing in things}
    things.clear()
    again = [_Thing() for _ in range(64)]
    reused = [thing for thing in again if id(thing) in addresses]
    assert reused
    assert all(thing not in numbers for thing in reused)
    assert [numbers.of(thing) for thing in reused] == list(range(3, 3 + len(reused)))
