"""Definitions in source as signatures: functions, classes with their constructor or fields, and enumerations."""

from __future__ import annotations

import ast
import json

LINE = 100


def show_definition(node: ast.ClassDef | ast.FunctionDef) -> str:
    """Returns the signature of a function, or of a class and its constructor. Without one: its bases and fields."""
    if isinstance(node, ast.FunctionDef):
        return _shown("def ", node)
    bases = ", ".join(map(ast.unparse, node.bases))
    if bases in ("Enum", "enum.Enum"):
        members = [ast.unparse(each).replace("'", '"') for each in node.body if isinstance(each, ast.Assign)]
        return "\n    ".join([f"class {node.name}(Enum):", *members])
    initial = next((each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"), None)
    if initial is None:
        fields = [ast.unparse(each) for each in node.body if isinstance(each, ast.AnnAssign)]
        return "\n    ".join([f"class {node.name}{bases and f'({bases})'}{':' if fields else ''}", *fields])
    return _shown("class ", initial, node.name)


def show_literal(value: object) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _shown(word: str, function: ast.FunctionDef, class_name: str = "") -> str:
    """One line. If that is too long: a line for each parameter. A constructor has the name of its class."""
    returns = "" if class_name or not function.returns else f" -> {ast.unparse(function.returns)}"
    given = function.args
    every = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(every) - len(given.defaults)) + [*given.defaults]
    parameters = [_parameter(each, default) for each, default in zip(every, defaults)]
    parameters = parameters[1:] if class_name or (every and every[0].arg == "self") else parameters
    if given.vararg or given.kwonlyargs:
        parameters.append(f"*{ast.unparse(given.vararg)}" if given.vararg else "*")
    parameters += [_parameter(each, default) for each, default in zip(given.kwonlyargs, given.kw_defaults)]
    parameters += [f"**{ast.unparse(given.kwarg)}"] if given.kwarg else []
    name = class_name or function.name
    line = f"{word}{name}({', '.join(parameters)}){returns}"
    if len(line) <= LINE:
        return line
    return "\n".join([f"{word}{name}(", *(f"    {each}," for each in parameters), f"){returns}"])


def _parameter(given: ast.arg, default: ast.expr | None) -> str:
    return f"{ast.unparse(given)} = {ast.unparse(default)}" if default else ast.unparse(given)
