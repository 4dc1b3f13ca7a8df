"""What Lightning and the Hugging Face Trainer are told: their steps, and arguments that are options of ours."""

from __future__ import annotations

import ast
import re

from instep.cli.moving.loss import loss_parts
from instep.cli.moving.parts import ScriptParts, calls, keyword, name_of


def read_lightning(parts: ScriptParts) -> None:
    """Read a LightningModule's arguments, its steps, and its Trainer."""
    if parts.lightning is None:
        return
    methods = {node.name: node for node in parts.lightning.body if isinstance(node, ast.FunctionDef)}
    if (init := methods.get("__init__")) is not None:
        named = init.args.args[len(init.args.args) - len(init.args.defaults) :]
        for argument, default in zip(named, init.args.defaults, strict=True):
            parts.arguments.setdefault(argument.arg, default)
        for node in ast.walk(init):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
                parts.attributes[node.targets[0].attr] = node.value
        text = ast.unparse(parts.lightning)
        own = [value for name, value in parts.attributes.items() if f"self.{name}(" in text and _is_model(parts, value)]
        if "forward" not in methods and len(own) == 1:
            parts.model = own[0]
    if (step := methods.get("training_step")) is not None and len(step.args.args) > 1:
        value = next((node.value for node in reversed(step.body) if isinstance(node, ast.Return) and node.value), None)
        if value is not None:
            target: ast.expr = ast.Name(step.args.args[1].arg, ast.Load())
            parts.loss = loss_parts(target, step.body, value)
    for call in calls(parts.tree, "Trainer"):
        for theirs, ours in {
            "max_epochs": "epochs",
            "max_steps": "steps",
            "gradient_clip_val": "clip_norm",
            "accumulate_grad_batches": "accumulate",
        }.items():
            if (value := keyword(call, theirs)) is not None:
                parts.options[ours] = value
    if (configure := methods.get("configure_optimizers")) is not None and '"interval": "step"' in ast.unparse(
        configure
    ).replace("'", '"'):
        parts.scheduler_interval = "step"


def _is_model(parts: ScriptParts, value: ast.expr) -> bool:
    """Return whether an attribute of a LightningModule is a model: not a loss or a metric."""
    own = {node.name for node in parts.tree.body if isinstance(node, ast.ClassDef)}
    return isinstance(value, ast.Call) and (
        name_of(value) in own or not re.search("Loss|Metric|Accuracy", name_of(value))
    )


def read_trainer(parts: ScriptParts) -> None:
    """Read the Hugging Face Trainer and its arguments."""
    call = next((c for c in calls(parts.tree, "Trainer", "Seq2SeqTrainer") if keyword(c, "train_dataset")), None)
    if call is None:
        return
    parts.trainer = call
    parts.model = call.args[0] if call.args else keyword(call, "model")
    parts.train_data, parts.eval_data = keyword(call, "train_dataset"), keyword(call, "eval_dataset")
    parts.options |= {"clip_norm": ast.Constant(1.0), "lr_schedule": ast.Constant("linear")}
    for arguments in calls(parts.tree, "TrainingArguments", "Seq2SeqTrainingArguments"):
        for theirs, ours in {
            "num_train_epochs": "epochs",
            "max_steps": "steps",
            "per_device_train_batch_size": "batch_size",
            "gradient_accumulation_steps": "accumulate",
            "max_grad_norm": "clip_norm",
            "lr_scheduler_type": "lr_schedule",
            "warmup_steps": "warmup",
        }.items():
            if (value := keyword(arguments, theirs)) is not None:
                parts.options[ours] = value
        for name in ("learning_rate", "weight_decay"):
            if (value := keyword(arguments, name)) is not None:
                parts.arguments[name] = value
        parts.arguments["optim"] = keyword(arguments, "optim") or ast.Constant("adamw_torch")
