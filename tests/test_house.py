"""What a reader can rely on: functions that fit in the head, rooms whose arrows point one way, and a quick import."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import vitlite

SOURCE = Path(vitlite.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
MOST_DECISIONS = 15

Function = ast.FunctionDef | ast.AsyncFunctionDef


def decisions(function: Function) -> int:
    """Every decision a reader has to make, those of functions within it included."""
    total = 1  # the function itself
    for node in ast.walk(function):
        if isinstance(node, (ast.If, ast.For, ast.While, ast.ExceptHandler, ast.IfExp, ast.match_case)):
            total += 1
        elif isinstance(node, ast.BoolOp):
            total += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            total += 1 + len(node.ifs)
    return total


def functions(file: Path) -> Iterator[Function]:
    return (node for node in ast.walk(ast.parse(file.read_text("utf-8"))) if isinstance(node, Function))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(SOURCE).as_posix())
def test_a_function_fits_in_the_head(file: Path) -> None:
    dense = {function.name: n for function in functions(file) if (n := decisions(function)) > MOST_DECISIONS}
    assert not dense, f"more than {MOST_DECISIONS} decisions: {dense}"


def test_decisions_are_counted() -> None:
    text = """
def f(a, b):
    if a and b or not a:
        return [x for x in a if x if not x]
    try:
        while a:
            pass
    except ValueError:
        return a if b else [y for x in a for y in x]
"""
    (function,) = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef))
    assert decisions(function) == 1 + 1 + 2 + 3 + 1 + 1 + 1 + 2


@pytest.mark.parametrize("comment", ["noqa: C901", "noqa: PLR0915", "noqa: C", "noqa: PLR"])
def test_no_function_is_excused(comment: str) -> None:
    assert not [file.name for file in FILES if comment in file.read_text("utf-8")]
