"""Write the file of a Task from the parts of a script (reading.py). Pure: syntax trees in, text out."""

from __future__ import annotations

import ast
import copy
import re
from dataclasses import dataclass

from instep.cli.moving.parts import LossParts, ScriptParts, constant
from instep.cli.moving.rewriting import GIVEN, MARK, Writer, bound_names

_OPTIONS = ("epochs", "steps", "batch_size", "accumulate", "clip_norm", "lr_schedule", "warmup")
_HOOKS = re.compile(r"^(training|validation|test|predict)_step$|^configure_|_dataloader$|^on_|^(prepare_data|setup)$")
_TRAINERS_OPTIMIZERS = {"sgd": "SGD", "rmsprop": "RMSprop", "adagrad": "Adagrad"}


@dataclass(frozen=True)
class TaskText:
    """The file of a Task, and what is left to do."""

    text: str
    command: str
    """What trains it, with the numbers of the script."""
    todo: tuple[str, ...]


def task_text(parts: ScriptParts, name: str, script: str, file: str) -> TaskText:
    """Return the file of a Task that does what a script does, as far as that can be read from it."""
    writer = Writer(parts)
    name = name if name not in writer.known() else f"{name}2"
    methods = [_model(writer), _optimizer(writer), _scheduler(writer), _data(writer, "train"), _data(writer, "eval")]
    methods += [_loss(writer), _metrics(writer)]
    body = "\n\n".join(method for method in methods if method)
    fields = "\n".join(f"    {key}: {type(value).__name__} = {value!r}" for key, value in writer.fields.items())
    moved = _moved(writer, f"{body}\n" + "\n".join(writer.extra))
    used = {node.id for text in (*moved, *writer.extra, body) for node in _names(text)}
    command = f"instep train {file} {_command_options(writer)}".rstrip()
    head = [f'"""{name}, moved from {script} by `instep init`. Lines with {MARK} are yours to finish.', "", command]
    if "--batch-size" in command:
        head.append("--batch-size is for all processes together; in your script it was for each of them.")
    blocks = [
        "\n".join([*head, '"""']),
        "\n".join(["from dataclasses import dataclass", "", *_imports(parts, used), "", "import instep"]),
        *moved,
        *writer.extra,
        f"@dataclass(kw_only=True)\nclass {name}(instep.Task):\n" + (f"{fields}\n\n" if fields else "") + body,
        f'if __name__ == "__main__":\n    instep.main({name})',
    ]
    text = "\n\n".join(blocks[:2]) + "\n\n\n" + "\n\n\n".join(blocks[2:]) + "\n"
    ast.parse(text)
    return TaskText(text, command, tuple(writer.todo))


def _model(writer: Writer) -> str:
    parts = writer.parts
    if parts.model is None and parts.lightning is not None:
        parts.model = _plain_module(writer)
    lines = []
    if parts.model is not None:
        made = writer.rewritten(_with_fields(writer, parts.model))
        lines = [f"return {ast.unparse(made)}"]
    return writer.method("model(self)", lines, "return your nn.Module, on the CPU")


def _with_fields(writer: Writer, call: ast.expr) -> ast.expr:
    """Make fields of the numbers that a call gets by keyword."""
    call = copy.deepcopy(call)
    for entry in call.keywords if isinstance(call, ast.Call) else ():
        value = constant(writer.parts, entry.value) if entry.arg else None
        if entry.arg and isinstance(value, int | float) and not isinstance(value, bool):
            writer.fields.setdefault(entry.arg, value)
            entry.value = ast.Attribute(ast.Name("self", ast.Load()), entry.arg, ast.Load())
    return call


def _plain_module(writer: Writer) -> ast.expr | None:
    """Write a LightningModule's layers as an nn.Module; return the call that makes it."""
    module = copy.deepcopy(writer.parts.lightning)
    assert module is not None
    methods = [node for node in module.body if isinstance(node, ast.FunctionDef) and not _HOOKS.search(node.name)]
    if not any(node.name == "forward" for node in methods):
        return None
    init = next((node for node in methods if node.name == "__init__"), None)
    if init is not None:
        init.body = [node for node in init.body if "save_hyperparameters" not in ast.unparse(node)]
    module.name, module.bases, module.body = (
        f"{module.name}Net",
        [ast.parse("nn.Module", mode="eval").body],
        list(methods),
    )
    writer.extra.append(ast.unparse(ast.fix_missing_locations(module)))
    names = [argument.arg for argument in init.args.args[1:]] if init is not None else []
    known = [name for name in names if name in writer.parts.arguments]
    return ast.Call(
        ast.Name(module.name, ast.Load()), [], [ast.keyword(name, ast.Name(name, ast.Load())) for name in known]
    )


def _optimizer(writer: Writer) -> str:
    parts, lines = writer.parts, []
    if parts.optimizer is not None:
        call = _with_fields(writer, parts.optimizer)
        assert isinstance(call, ast.Call)
        if not re.fullmatch(r"[\w.]+\.parameters\(\)", ast.unparse(call.args[0])):
            writer.todo.append("optimizer: your script passes groups of parameters; params.named has their names")
            lines = [f"# {MARK}: your script passes groups of parameters; params.named has their names"]
        call.args[0] = ast.Name("params", ast.Load())
        lines += [f"return {ast.unparse(writer.rewritten(call, ('params',)))}"]
    elif parts.trainer is not None:
        writer.fields.setdefault("learning_rate", constant(parts, parts.arguments.get("learning_rate")) or 5e-5)
        decay = constant(parts, parts.arguments.get("weight_decay"))
        chosen = str(constant(parts, parts.arguments.get("optim")))
        more = (
            ", weight_decay=self.weight_decay" if decay else ", weight_decay=0.0" if chosen.startswith("adamw") else ""
        )
        if decay:
            writer.fields.setdefault("weight_decay", decay)
        lines = [f"return torch.optim.{_TRAINERS_OPTIMIZERS.get(chosen, 'AdamW')}(params, lr=self.learning_rate{more})"]
    return writer.method("optimizer(self, params)", lines, "return a torch.optim optimizer of params")


def _scheduler(writer: Writer) -> str:
    call = copy.deepcopy(writer.parts.scheduler)
    if call is None:
        return ""
    call.args[0] = ast.Name("optimizer", ast.Load())
    made = ast.unparse(writer.rewritten(call, ("optimizer",)))
    interval = writer.parts.scheduler_interval
    lines = [f"return {made}" if interval == "step" else f'return {{"scheduler": {made}, "interval": "epoch"}}']
    return writer.method("scheduler(self, optimizer, num_steps)", lines, "")


def _data(writer: Writer, which: str) -> str:
    made = writer.parts.train_data if which == "train" else writer.parts.eval_data
    if made is None and which == "eval":
        return ""
    text = "" if made is None else ast.unparse(writer.rewritten(made))
    lines = [f"return {text}"] if text else []
    if "random_split(" in text and "generator" not in text:
        writer.todo.append(f"{which}_data: random_split splits anew at each call; give it a generator with a seed")
        lines.insert(0, f"# {MARK}: give random_split a generator with a seed, so that both parts belong together")
    return writer.method(f"{which}_data(self)", lines, "return your dataset, with a length and samples by index")


def _loss(writer: Writer) -> str:
    loss, lines = writer.parts.loss, []
    if loss is not None:
        value = writer.rewritten(loss.value, _own_names(loss), loss.model)
        lines = [*_before_loss(writer, loss), f"return {ast.unparse(value)}"]
    elif writer.parts.trainer is not None:
        lines = ['return model(**batch)["loss"]']
    return writer.method(
        "loss(self, model, batch)", lines, "call the model once, and return the mean loss of the batch"
    )


def _metrics(writer: Writer) -> str:
    parts, loss = writer.parts, writer.parts.loss
    if parts.eval_data is None or (parts.metric is not None and loss is None and parts.trainer is None):
        return ""
    if parts.metric is None:
        writer.todo.append("metrics: the evaluation has its loss only; return values by sample to have more")
        return ""
    if loss is None:
        right = '(logits.argmax(-1) == batch["labels"])'
        lines = ['logits = model(**batch)["logits"]', f'return {{"accuracy": {right}.float()}}']
    else:
        made = ast.unparse(writer.rewritten(parts.metric, _own_names(loss), loss.model))
        before = _before_loss(writer, loss)
        if "model(" in made:  # which is called once
            before = [line for line in before if "model(" not in line]
        lines = [*before, f'return {{"accuracy": ({made}).float()}}']
    return writer.method("metrics(self, model, batch)", lines, "")


def _own_names(loss: LossParts) -> set[str]:
    """Return the names that the lines of a loss set."""
    nodes = [loss.batch, *(target for s in loss.body if isinstance(s, ast.Assign) for target in s.targets)]
    return {node.id for part in nodes for node in ast.walk(part) if isinstance(node, ast.Name)}


def _before_loss(writer: Writer, loss: LossParts) -> list[str]:
    """Return the lines that unpack the batch, and compute what the loss depends on."""
    target = ast.unparse(loss.batch)
    lines = [] if target == "batch" else [f"{_bare(target)} = batch"]
    for statement in loss.body:
        assert isinstance(statement, ast.Assign)
        target = _bare(ast.unparse(statement.targets[0]))
        value = ast.unparse(writer.rewritten(statement.value, _own_names(loss), loss.model))
        if target != _bare(value):  # x = x.to(device)
            lines.append(f"{target} = {value}")
    return lines


def _bare(text: str) -> str:
    """Return a tuple without its parentheses."""
    return text[1:-1] if text.startswith("(") and text.endswith(")") and text.count("(") == 1 else text


def _moved(writer: Writer, body: str) -> list[str]:
    """Return the script's own definitions that the Task uses, and those that these use, as they are written."""
    parts, kept, texts = writer.parts, [], [body]
    while texts:
        used = {node.id for node in _names(texts.pop())}
        for node in parts.tree.body:
            is_definition = isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Assign)
            if (
                is_definition
                and node not in kept
                and node is not parts.lightning
                and used & (set(bound_names(node)) - GIVEN)
            ):
                kept.append(node)
                texts.append(_segment(parts.source, node))
    return [_segment(parts.source, node) for node in parts.tree.body if node in kept]


def _segment(source: str, node: ast.stmt) -> str:
    decorators = getattr(node, "decorator_list", [])
    first = decorators[0].lineno if decorators else node.lineno
    return "\n".join(source.splitlines()[first - 1 : node.end_lineno])


def _names(text: str) -> list[ast.Name]:
    lines = text.splitlines()
    if lines and lines[0].startswith("    "):  # methods
        text = "class _:\n" + text
    return [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)]


def _imports(parts: ScriptParts, used: set[str]) -> list[str]:
    """Return the script's imports of names that are used, and torch's usual ones where they are missing."""
    lines, bound = [], set()
    for node in parts.tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            kept = [alias for alias in node.names if (alias.asname or alias.name.partition(".")[0]) in used]
            bound |= {alias.asname or alias.name.partition(".")[0] for alias in kept}
            if kept:
                node = copy.copy(node)
                node.names = kept
                lines.append(ast.unparse(node))
    for name, line in {"torch": "import torch", "nn": "from torch import nn"}.items():
        if name in used and name not in bound:
            lines.append(line)
    return lines


def _command_options(writer: Writer) -> str:
    words = []
    for name in _OPTIONS:
        if name not in writer.parts.options:
            continue
        value = constant(writer.parts, writer.parts.options[name])
        if value is None or (name == "lr_schedule" and value not in ("constant", "cosine", "linear")):
            shown = ast.unparse(writer.parts.options[name])
            writer.todo.append(f"--{name.replace('_', '-')}: {shown} in your script")
        elif value != 0:
            words += [f"--{name.replace('_', '-')}", str(value)]
    return " ".join(words)
