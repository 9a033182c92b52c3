"""A calculator as a tool: the policy may ask it as often as it likes, then answers.

    policy  37*21=        the calculator is asked, and says 777
    policy  777           an answer: right or wrong, and the sample ends

An answer that ends in "=" asks; anything else answers. Sums, differences and products of whole numbers with brackets.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable

from rollout_server.environments.interface import Action, Step, Task

_OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
MAX_CHARACTERS, MAX_DIGITS = 64, 18


class Calculator:
    """The record's field `answer` holds the right number.

    tool_reward: for an expression that the calculator could read. says: its words, with `{}` for the result. malformed: what it says to an
    expression that it could not read.
    """

    def __init__(self, *, tool_reward: float = 0.0, says: str = "{}", malformed: str = "error") -> None:
        if "{}" not in says:
            raise ValueError(f"says={says!r} has no {{}} for the result; add one")
        self._tool_reward, self._says = tool_reward, says
        self._malformed = malformed
        self._answer = ""
        self._num_asked = 0

    def reset(self, task: Task) -> str:
        """Raises ValueError for a record without an answer."""
        if "answer" not in task.fields:
            raise ValueError(f"the record has no field `answer`, only {sorted(task.fields)}")
        self._answer = str(task.fields["answer"]).strip()
        return task.prompt

    def step(self, action: Action) -> Step:
        said = action.text.strip()
        if not said.endswith("="):
            return Step(reward=float(said == self._answer), done=True, parts={"asked": float(self._num_asked > 0)})
        try:
            result = self._says.replace("{}", str(calculate(said[:-1])))
        except ValueError:
            return Step(observation=self._malformed)
        self._num_asked += 1
        return Step(observation=result, reward=self._tool_reward or None)


def calculate(expression: str) -> int:
    """Value of sums, differences and products of whole numbers. Example: `calculate("3*(4+5)") == 27`. Raises ValueError for anything else."""
    if len(expression) > MAX_CHARACTERS:
        raise ValueError(f"an expression of {len(expression)} characters; at most {MAX_CHARACTERS} are read")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
        return _value(tree.body)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"{expression!r} is no expression: {error}") from None


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(number)) if not isinstance(number, bool):
            value = number
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            value = -_value(inner)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            value = _OPERATIONS[type(op)](_value(left), _value(right))
        case _:
            raise ValueError("only whole numbers, +, -, * and brackets")
    if abs(value) >= 10**MAX_DIGITS:
        raise ValueError(f"a number of more than {MAX_DIGITS} digits")
    return value
