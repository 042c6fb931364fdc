"""The words around a statement, and the way back from a prompt to its statement.

`statement` adds nothing. `instruct` says in our words what form the answer must have. `livecodebench` is
LiveCodeBench's prompt (lcb_runner/prompts/code_generation.py, generic chat form) as one user message, which
DeepCoder trains with. `evalplus` is EvalPlus's chat prompt. `complete` is HumanEval's own form: the model goes on
from the prompt, so the task has a starter.
"""

from __future__ import annotations

from engine.types import Task

EXPERT = (
    "You are an expert Python programmer. You will be given a question (problem specification) and will generate a "
    "correct Python program that matches the specification and passes all tests.\n\n### Question:\n"
)
EVALPLUS = "Please provide a self-contained Python script that solves the following problem in a markdown code block:\n"
FROM_STDIN = (
    "### Format: Read the inputs from stdin solve the problem and write the answer to stdout (do not directly test on "
    "the sample inputs). Enclose your code within delimiters as follows. Ensure that when the python program runs, it "
    "reads the inputs, runs the algorithm and writes output to STDOUT.\n"
)
FROM_STARTER = (
    "### Format: You will use the following starter code to write the solution to the problem and enclose your code "
    "within delimiters.\n"
)
ANSWER = "### Answer: (use the provided format with backticks)\n\n"
WHOLE_PROGRAM = "Answer with the whole program in one ```python block."
READS_STDIN = "Write a Python program that reads standard input and writes standard output."
DEFINES = "Write a Python program that defines "

_BEFORE = (EXPERT, EVALPLUS)
_AFTER = (FROM_STDIN, FROM_STARTER, READS_STDIN, DEFINES, WHOLE_PROGRAM)


def stdin_prompt(statement: str, style: str) -> str:
    """The prompt of a problem whose program reads stdin and writes stdout."""
    statement = statement.strip("\n")
    if style == "livecodebench":
        return f"{EXPERT}{statement}\n\n{FROM_STDIN}```python\n# YOUR CODE HERE\n```\n\n{ANSWER}"
    if style == "instruct":
        return f"{statement}\n\n{READS_STDIN} {WHOLE_PROGRAM}\n"
    return statement


def call_prompt(statement: str, starter: str, entry_point: str, style: str) -> str:
    """The prompt of a problem whose program defines a function; `starter` is how it is to begin, if that is given."""
    statement = statement.strip("\n")
    begin = starter.strip("\n")
    if style == "livecodebench":
        begin = begin or f"def {entry_point}("
        return f"{EXPERT}{statement}\n\n{FROM_STARTER}```python\n{begin}\n```\n\n{ANSWER}"
    if style == "instruct":
        begins = f" It begins like this:\n```python\n{begin}\n```\n" if begin else " "
        return f"{statement}\n\n{DEFINES}`{entry_point}`.{begins}{WHOLE_PROGRAM}\n"
    return f"{statement}\n\n{begin}" if begin else statement


def code_prompt(code: str) -> str:
    """EvalPlus's prompt for a function that is given by its head and docstring."""
    return f"{EVALPLUS}```python\n{code.strip()}\n```\n"


def statement_of(task: Task) -> str:
    """What the task says, without the words that other tasks have around it too."""
    prompt = task.prompt
    text = prompt if isinstance(prompt, str) else "\n\n".join(message["content"] for message in prompt)
    for words in _BEFORE:
        text = text.removeprefix(words)
    ends = [place for words in _AFTER if (place := text.rfind(words)) >= 0]
    return text[: min(ends)] if ends else text
