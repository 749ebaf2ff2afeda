"""Generate function: several turns with a calculator. The policy writes `<calc>12*7</calc>` and reads `=84 `.

`--custom-generate-function-path examples.calculator.generate`

The tool's answers are appended as tokens and masked; the policy's own tokens are never tokenized again.
"""

import ast
import operator
from collections.abc import Callable

from miles_disagg.rollout.trajectory import Trajectory

OPEN, CLOSE = "<calc>", "</calc>"
MAX_TURNS = 4
_OPERATORS: dict[type, Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


async def generate(trajectory: Trajectory) -> None:
    """Let the policy write; whenever it closes a call, append the result and let it go on."""
    for _ in range(MAX_TURNS):
        turn = await trajectory.generate(stop=[*trajectory.sampling.stop, CLOSE])
        called = turn.text.rpartition(OPEN)[2].removesuffix(CLOSE)
        ended = turn.finish_reason != "stop" or turn.tokens[-1] == trajectory.tokenizer.eos_token_id
        if ended or OPEN not in turn.text:
            return
        trajectory.metadata["calls"] = trajectory.metadata.get("calls", 0) + 1
        if not trajectory.append_text(f"={calculate(called)} "):
            return


def calculate(expression: str) -> str:
    """The value of an arithmetic expression (+ - * / and parentheses), or `error`."""
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, OverflowError):
        return "error"
    return f"{value:g}"


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError("not arithmetic")
