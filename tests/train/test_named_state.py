"""An optimizer's state by name: it finds its parameters again, or says which one it does not find."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from instep.checkpoint.state_tree import find_other_type
from instep.train.optimizer import Names, by_name, by_number, check_shapes


def trained(*sizes: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(*(nn.Linear(size, size) for size in sizes))
    optimizer = torch.optim.Adam([{"params": [p]} for p in model.parameters()], lr=0.1)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    return model, optimizer


def back(saved: Any, names: list[list[str]], is_partial: bool = False, tied: dict[str, list[str]] | None = None) -> Any:
    return by_number(saved, names, is_partial, lambda name: name, lambda name: (tied or {}).get(name, []))


def test_there_and_back() -> None:
    model, optimizer = trained(2, 3)
    names = Names(model).of_groups(optimizer)
    assert names == [["0.weight"], ["0.bias"], ["1.weight"], ["1.bias"]]
    saved = by_name(optimizer, names)
    assert set(saved["state"]) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert [group["params"] for group in saved["param_groups"]] == names
    wanted = optimizer.state_dict()
    for group in wanted["param_groups"]:  # how it computes is not saved
        del group["foreach"], group["fused"]
    assert back(saved, names) == wanted
    assert back(optimizer.state_dict(), names) == optimizer.state_dict()  # the numbers of format 1


def test_a_stage_takes_what_is_its_own() -> None:
    model, optimizer = trained(2, 3)
    saved = by_name(optimizer, Names(model).of_groups(optimizer))
    for group in saved["param_groups"][2:]:  # as the groups of two stages are merged
        saved["param_groups"][0]["params"] += group["params"]
    result = back(saved, [["1.bias", "1.weight"]], is_partial=True)
    assert result["param_groups"][0]["params"] == [0, 1]
    assert result["state"] == {0: saved["state"]["1.bias"], 1: saved["state"]["1.weight"]}


def test_a_parameter_of_nobody_goes_by_its_place_and_a_new_layer_by_its_name() -> None:
    model, optimizer = trained(2)
    names = Names(model)
    model.add_module("late", nn.Linear(2, 2, bias=False))
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1)), *model.late.parameters()]})
    assert names.of_groups(optimizer)[-1] == ["group 2, parameter 0", "late.weight"]


def test_state_of_no_parameter_is_passed_on() -> None:
    model, optimizer = trained(2)
    optimizer.state["counts"] = {"all": 3}
    names = Names(model).of_groups(optimizer)
    saved = by_name(optimizer, names)
    assert saved["state"]["counts"] == {"all": 3}
    assert back(saved, names)["state"]["counts"] == {"all": 3}


def test_a_tied_parameter_is_found_by_its_other_name() -> None:
    model, optimizer = trained(2)
    saved = by_name(optimizer, Names(model).of_groups(optimizer))
    result = back(saved, [["head"], ["0.bias"]], tied={"head": ["0.weight"]})
    assert result["state"][0] == saved["state"]["0.weight"]


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([["0.weight"], ["other"]], "parameter other is in group 1 here, and in the saved optimizer it is not"),
        ([["0.weight"], []], "parameter 0.bias is in group 1 of the saved optimizer, and here it is not"),
        ([["0.bias"], ["0.weight"]], "parameter 0.bias is in group 0 here"),
        ([["0.weight", "0.bias"]], "has 2 groups of parameters, and this one has 1"),
    ],
)
def test_what_does_not_fit_is_named(names: list[list[str]], text: str) -> None:
    model, optimizer = trained(2)
    saved = by_name(optimizer, Names(model).of_groups(optimizer))
    with pytest.raises(ValueError, match=text):
        back(saved, names)


def test_numbers_that_do_not_fit() -> None:
    _, optimizer = trained(2)
    with pytest.raises(ValueError, match=r"the saved groups have \[1, 1\] parameters, and here they have \[2, 1\]"):
        back(optimizer.state_dict(), [["a", "b"], ["c"]])
    with pytest.raises(ValueError, match="Continue it without a pipeline first"):
        back(optimizer.state_dict(), [["a"]], is_partial=True)


def test_a_number_in_the_place_of_a_tensor_is_refused() -> None:
    """A fused kernel would write behind its end."""
    weight = nn.Parameter(torch.zeros(3, 2))
    optimizer = torch.optim.Adam([weight])
    good = {"step": torch.tensor(1.0), "exp_avg": torch.zeros(3, 2), "exp_avg_sq": torch.zeros(3, 2)}
    check_shapes(optimizer, {weight: good})
    with pytest.raises(ValueError, match=r"exp_avg_sq has shape \[\] for a parameter of shape \[3, 2\]"):
        check_shapes(optimizer, {weight: good | {"exp_avg_sq": torch.tensor(0.0)}})
    with pytest.raises(ValueError, match=r"exp_avg is of torch.float16, for a parameter of torch.float32"):
        check_shapes(optimizer, {weight: good | {"exp_avg": torch.zeros(3, 2, dtype=torch.float16)}})


def test_lists_of_another_length_are_found() -> None:
    fresh = {"betas": (0.9, 0.99), "_schedulers": [{"_milestones": [3]}]}
    assert find_other_type(fresh, fresh) == ""
    assert find_other_type(fresh | {"betas": (0.9,)}, fresh) == "betas has 1 value, and had 2"
    longer = fresh | {"_schedulers": [{"_milestones": [3, 3]}]}
    assert find_other_type(longer, fresh) == "_schedulers.0._milestones has 2 values, and had 1"
