"""One file of the user's, parsed: which functions it calls by their full names, and what encloses a piece of code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from instep.core.errors import SpecError


@dataclass(frozen=True)
class Call:
    """A call in the source."""

    node: ast.Call
    name: str
    """The full name as far as imports tell it: `torch.nn.parallel.DistributedDataParallel`, or `model.train`."""

    def argument(self, name: str, position: int | None = None) -> ast.expr | None:
        """Return an argument by its name or position; None: it is not given."""
        for keyword in self.node.keywords:
            if keyword.arg == name:
                return keyword.value
        if position is not None and position < len(self.node.args):
            return self.node.args[position]
        return None

    @property
    def last(self) -> str:
        """The last part of the name; also where the rest is no name, as in `states[0].full_tensor()`."""
        if isinstance(self.node.func, ast.Attribute):
            return self.node.func.attr
        return self.name.rpartition(".")[2]


class SourceModule:
    """A parsed file."""

    def __init__(self, path: str, text: str) -> None:
        self.path = path
        self.lines = text.splitlines()
        self.tree = ast.parse(text, path)
        self._parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    @classmethod
    def read(cls, path: Path) -> SourceModule:
        """Read a file; raise SpecError if it is not Python."""
        try:
            return cls(str(path.absolute()), path.read_text(encoding="utf-8"))  # as frames name it
        except (OSError, UnicodeDecodeError, SyntaxError) as error:
            raise SpecError(f"{path} cannot be read as Python: {error}") from None

    @cached_property
    def aliases(self) -> dict[str, str]:
        """What the names that this file imports stand for: `DDP` → `torch.nn.parallel.DistributedDataParallel`."""
        names: dict[str, str] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for item in node.names:
                    names[item.asname or item.name.partition(".")[0]] = (
                        item.name if item.asname else item.name.partition(".")[0]
                    )
            elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
                for item in node.names:
                    names[item.asname or item.name] = f"{node.module}.{item.name}"
        return names

    def name_of(self, node: ast.expr) -> str:
        """Return the dotted name of an expression with imports resolved; empty: it is none."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if isinstance(node, ast.Call):
            return ".".join([f"{self.name_of(node.func)}()", *reversed(parts)])
        if not isinstance(node, ast.Name):
            return ""
        return ".".join([self.aliases.get(node.id, node.id), *reversed(parts)])

    @cached_property
    def calls(self) -> list[Call]:
        """All calls, in the order of their lines."""
        nodes = [node for node in ast.walk(self.tree) if isinstance(node, ast.Call)]
        nodes.sort(key=lambda node: (node.lineno, node.col_offset))
        return [Call(node, self.name_of(node.func)) for node in nodes]

    @cached_property
    def call_of(self) -> dict[ast.AST, Call]:
        """The calls by their nodes."""
        return {call.node: call for call in self.calls}

    @cached_property
    def assigned(self) -> dict[str, list[ast.expr]]:
        """What each variable is set to, anywhere in the file, by `name = value`."""
        values: dict[str, list[ast.expr]] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    if isinstance(target, ast.Name):
                        values.setdefault(target.id, []).append(node.value)
        return values

    @cached_property
    def functions(self) -> dict[str, list[ast.FunctionDef | ast.AsyncFunctionDef]]:
        """The functions and methods by their names."""
        functions: dict[str, list[ast.FunctionDef | ast.AsyncFunctionDef]] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                functions.setdefault(node.name, []).append(node)
        return functions

    def calls_of(self, *names: str) -> Iterator[Call]:
        """Yield the calls whose full name, or its last part, is one of `names`."""
        for call in self.calls:
            if call.name in names or call.last in names:
                yield call

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield what encloses a node, from the inside out."""
        while node in self._parents:
            node = self._parents[node]
            yield node

    def statements_around(self, node: ast.AST) -> Iterator[ast.stmt]:
        """Yield the statements that enclose a node, from the inside out."""
        return (outer for outer in self.around(node) if isinstance(outer, ast.stmt))

    def place(self, node: ast.expr | ast.stmt) -> tuple[str, int]:
        """Return the (file, line) of a node."""
        return self.path, node.lineno

    def line(self, number: int) -> str:
        """Return the text of a line, without its indentation."""
        return self.lines[number - 1].strip() if 0 < number <= len(self.lines) else ""
