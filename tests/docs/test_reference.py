"""The reference is complete and true: every public name is on its page, the options are the spec's, examples run.

python tests/docs/test_reference.py                            write docs/reference/options.md
"""

from __future__ import annotations

import ast
import importlib
import re
import runpy
import sys
import textwrap
from pathlib import Path

import pytest

import instep
from instep.core.options import GROUPS, Option, OptionScope, options_of
from instep.core.spec import TrainSpec

ROOT = Path(__file__).parent.parent.parent
REFERENCE = ROOT / "docs" / "reference"
PAGES = sorted(REFERENCE.glob("*.md"))
CLASSES = {
    "task.md": ("instep.train.task", "Task"),
    "run.md": ("instep.train.run", "Run"),
    "step.md": ("instep.train.step", "Step"),
    "result.md": ("instep.train.result", "Result"),
}
BASES = {"run.md": ("instep.train.run_evaluation", "RunEvaluation")}
"""Classes whose names the class of a page has, too."""
_HEAD = """\
# Options

The fields of `instep.TrainSpec`: the options of `instep train`, and the keywords of `instep.train(task, ...)` and
`instep.start(...)`. This page is generated: `python tests/docs/test_reference.py`.
"""

_CONTINUING = """\
## Continuing a run

A run cannot be continued with another Task, or with other values of the Task's fields. `epochs` and `steps` can only be
raised, and not if the scheduler depends on the number of steps. `compile` must stay the same only with `exact`. These
options must stay the same, because the result depends on them:

"""


def options_page() -> str:
    """Return the page of options, from their declarations."""
    options = options_of(TrainSpec)
    parts = [_HEAD]
    for group in GROUPS:
        rows = [_row(option) for option in options if option.group == group]
        if rows:
            parts.append(f"## {group}\n\n| keyword | flag | default | |\n|---|---|---|---|\n" + "\n".join(rows) + "\n")
    recipe = ", ".join(f"`{option.name}`" for option in options if _is_recipe(option))
    parts.append(_CONTINUING + "\n".join(textwrap.wrap(f"{recipe}.", 120, break_on_hyphens=False)) + "\n")
    return "\n".join(parts)


def _is_recipe(option: Option) -> bool:
    return option.scope is OptionScope.RECIPE and option.name != "compile"


def _row(option: Option) -> str:
    flags = ", ".join(f"`{flag}`" for flag in option.flags)
    choices = f" Choices: {', '.join(f'`{choice}`' for choice in option.choices)}." if option.choices else ""
    text = option.help[0].upper() + option.help[1:].rstrip(".") + "." + choices
    return f"| `{option.name}` | {flags} | `{option.default!r}` | {text.replace('|', chr(92) + '|')} |"


def public_names(module: str, cls: str) -> set[str]:
    """Return the public methods, properties, fields and attributes that the source of a class defines."""
    file = importlib.import_module(module).__file__
    assert file is not None
    (node,) = [n for n in ast.parse(Path(file).read_text()).body if isinstance(n, ast.ClassDef) and n.name == cls]
    names = set()
    # Also under `if TYPE_CHECKING:`. What is defined inside of a method is not the class's.
    for part in [*node.body, *(n for outer in node.body if isinstance(outer, ast.If) for n in outer.body)]:
        if isinstance(part, ast.FunctionDef):
            names.add(part.name)
        for inner in ast.walk(part):
            if isinstance(inner, ast.AnnAssign | ast.Assign):
                for target in inner.targets if isinstance(inner, ast.Assign) else [inner.target]:
                    names |= _assigned(target, is_field=inner is part)
    return {name for name in names if not name.startswith("_")}


def _assigned(target: ast.expr, is_field: bool) -> set[str]:
    if isinstance(target, ast.Tuple):
        return set().union(*(_assigned(entry, is_field) for entry in target.elts))
    if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
        return {target.attr}
    return {target.id} if is_field and isinstance(target, ast.Name) else set()


def blocks(page: Path) -> list[str]:
    """Return the Python examples of a page."""
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.M | re.S)


def documents(text: str, name: str) -> bool:
    """Return whether a page has a name in code style: `name`, `instep.name`, `name(…)`, outside of examples."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    return re.search(rf"`(?:[\w.]+\.)?{re.escape(name)}(?:\([^`]*\))?`", prose) is not None


def test_options_are_those_of_the_spec() -> None:
    assert (REFERENCE / "options.md").read_text() == options_page()


@pytest.mark.parametrize("page", CLASSES)
def test_every_public_name_is_on_its_page(page: str) -> None:
    text = (REFERENCE / page).read_text()
    names = public_names(*CLASSES[page]) | (public_names(*BASES[page]) if page in BASES else set())
    assert names
    assert sorted(name for name in names if not documents(text, name)) == []


def test_names_of_a_class_are_found() -> None:
    assert {"loss", "blocks", "collate", "stop"} <= public_names(*CLASSES["task.md"])
    assert {"prepare", "epochs", "is_main", "loss"} <= public_names(*CLASSES["run.md"])
    assert {"batches", "gather"} <= public_names(*BASES["run.md"])
    assert {"wall_s", "history", "load_model"} <= public_names(*CLASSES["result.md"])


def test_every_exported_name_is_on_a_page() -> None:
    text = "\n".join(page.read_text() for page in PAGES)
    assert [name for name in instep.__all__ if not documents(text, name)] == []
    assert [name for name in instep.data.__all__ if f"`instep.data.{name}" not in text] == []


def test_the_index_lists_every_page() -> None:
    listed = re.findall(r"^\| \[([\w.]+)\]", (REFERENCE / "README.md").read_text(), re.M)
    assert sorted([*listed, "README.md"]) == [page.name for page in PAGES]


def test_links_lead_somewhere() -> None:
    broken = []
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([\w./-]*)(?:#([\w-]+))?\)", page.read_text()):
            there = (page.parent / target).resolve() if target else page
            heads = re.findall(r"^#+ (.*)$", there.read_text(), re.M) if there.exists() else []
            slugs = {re.sub(r"[^\w -]", "", head).lower().replace(" ", "-") for head in heads}
            if not there.exists() or (anchor and anchor not in slugs):
                broken.append(f"{page.name}: {target}#{anchor}")
    assert broken == []


@pytest.mark.parametrize("page", [page.name for page in PAGES])
def test_examples_compile(page: str) -> None:
    for number, block in enumerate(blocks(REFERENCE / page)):
        compile(block, f"{page}, example {number + 1}", "exec", dont_inherit=True)


RUNNING = [(page.name, block) for page in PAGES for block in blocks(page) if block.startswith("# runs\n")]


@pytest.mark.parametrize("block", [block for _, block in RUNNING], ids=[name for name, _ in RUNNING])
def test_complete_examples_run(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "example.py"
    script.write_text(block)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(script)])
    runpy.run_path(str(script), run_name="__main__")


def test_pages_with_complete_examples() -> None:
    assert {"task.md", "run.md", "step.md", "result.md"} <= {name for name, _ in RUNNING}


if __name__ == "__main__":
    (REFERENCE / "options.md").write_text(options_page())
