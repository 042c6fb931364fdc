"""From answers to programs: the rows of the adversarial corpus' part F and the kinds behind them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.reward.extract import Extraction, extract_program, parses

A = "print(1)\n"
B = "print(2)\n"


def block(code: str, tag: str = "python", fence: str = "```") -> str:
    return f"{fence}{tag}\n{code}{fence}\n"


@pytest.mark.parametrize(
    ("answer", "program"),
    [
        pytest.param(f"Draft:\n{block(A)}\nBetter:\n{block(B)}", B, id="two python blocks"),
        pytest.param(block(A) + "Output:\n" + block("1\n", "text"), A, id="python, then text"),
        pytest.param(block(A) + block("1\n", "json") + block("$ ls\n", "bash"), A, id="python, then json and bash"),
        pytest.param(block(A) + block("x = 2\n", ""), A, id="tagged wins over a later untagged"),
        pytest.param(block(A, "") + block("not python at all\n", ""), A, id="last untagged that parses"),
        pytest.param(f"<think>{block(A)}</think>It prints 1.", None, id="code only in the thinking"),
        pytest.param(f"<think>{block(A)}</think>\n{block(B)}", B, id="code after the thinking"),
        pytest.param(f"{block(A)}</think>{block(B)}", B, id="thinking opened by the prompt"),
        pytest.param(f"<think>a</think>{block(A)}<think>b</think>{block(B)}", B, id="after the last thought"),
        pytest.param(f"<think>\n{block(A)}", None, id="thinking never closed"),
        pytest.param(f"<think>x</think>\n<think>\n{block(A)}", None, id="second thought never closed"),
        pytest.param(block("print('<think>')\n"), "print('<think>')\n", id="think in a string"),
        pytest.param(block(A, "Python3"), A, id="Python3"),
        pytest.param(block(A, "py"), A, id="py"),
        pytest.param(block(A, "PYTHON"), A, id="PYTHON"),
        pytest.param(block(A, "python {.line}"), A, id="attributes"),
        pytest.param(block(A, " python"), A, id="blank before the tag"),
        pytest.param(block(A, ""), A, id="no tag"),
        pytest.param(block(A, "cpp"), None, id="cpp"),
        pytest.param(block(A, "text"), None, id="text"),
        pytest.param(block(A, fence="~~~~"), A, id="tildes"),
        pytest.param("````python\n```\nx\n```\n````\n", "```\nx\n```\n", id="longer fence holds a shorter one"),
        pytest.param(block('s = """\n    ```\n"""\n'), 's = """\n    ```\n"""\n', id="indented fence in a string"),
        pytest.param(
            "1. so:\n\n    ```python\n    if 1:\n        print(1)\n    ```\n", "if 1:\n    print(1)\n", id="list item"
        ),
        pytest.param("\ufeff" + block(A).replace("\n", "\r\n"), A, id="BOM and CRLF"),
        pytest.param(block("\ufeff" + A), A, id="BOM in the block"),
        pytest.param(block("print(\u00a01)\n"), "print(\u00a01)\n", id="NBSP is left for the compiler"),
        pytest.param(block("print(“1”)\n"), "print(“1”)\n", id="smart quotes are left for the compiler"),
        pytest.param(block(""), None, id="empty"),
        pytest.param(block(A) + block("\n\n"), None, id="last is empty"),
        pytest.param("Use `print(1)`.", None, id="inline code"),
        pytest.param("```print(1)```", None, id="one-line fence"),
        pytest.param("", None, id="nothing"),
        pytest.param(
            block('if __name__ == "__main__":\n    main()\n'),
            'if __name__ == "__main__":\n    main()\n',
            id="main guard",
        ),
        pytest.param("```python\ndef f():\n  return 1\n```", "def f():\n  return 1\n", id="no final newline"),
        pytest.param(
            block("def f(x):\n    return x\n\nassert f(1) == 1\n"),
            "def f(x):\n    return x\n\nassert f(1) == 1\n",
            id="asserts stay",
        ),
    ],
)
def test_program(answer: str, program: str | None) -> None:
    assert extract_program(answer).program == program


def test_a_block_that_was_cut_off_counts_if_it_parses() -> None:
    whole = extract_program(f"{block(A)}\n```python\nprint(2)\n")
    assert whole == Extraction("print(2)\n\n", True, "the last Python block")
    cut = extract_program(f"{block(A)}\n```python\nprint((2\n")
    assert (cut.program, cut.truncated) == (None, True)


def test_an_output_block_that_was_cut_off_does_not_hide_the_program() -> None:
    assert extract_program(f"{block(A)}\n```text\n1\n2").program == A


def test_a_prompt_that_opened_the_thinking() -> None:
    assert extract_program(block(A), thinking=True) == Extraction(None, True, "the thinking never ended")
    assert extract_program(f"hm</think>{block(A)}", thinking=True).program == A


def test_a_bare_answer_counts_only_where_it_is_asked_for() -> None:
    assert extract_program(A).program is None
    assert extract_program(A, bare=True).program == A
    assert extract_program("I do not know.", bare=True).program is None


@pytest.mark.parametrize(
    "text", ["(" * 100_000, "-" * 100_000 + "1", "not " * 20_000 + "1", "f'{" * 300, "\0", "x=1\n" * 10**6]
)
def test_no_source_upsets_the_host(text: str) -> None:
    assert parses(text) in (True, False)


@given(st.text())
def test_no_answer_upsets_the_extraction(text: str) -> None:
    found = extract_program(text)
    assert found.program is None or found.program in text.replace("\r\n", "\n").replace("\r", "\n") + "\n"


@given(
    st.lists(
        st.sampled_from(["```", "```python", "~~~", "    ```", "</think>", "<think>", "x = 1", "", "`"]), max_size=12
    )
)
def test_any_mixture_of_fences_and_thoughts(lines: list[str]) -> None:
    found = extract_program("\n".join(lines))
    assert (
        found.program is None
        or "</think>" not in found.program
        or "```" in lines
        or "```python" in lines
        or "~~~" in lines
    )


@given(st.lists(st.sampled_from(["x = 1", "if x:", "    y = 2", "", "print('a b')", "  z"]), min_size=1, max_size=8))
def test_what_is_fenced_comes_out_as_it_went_in(lines: list[str]) -> None:
    code = "".join(line + "\n" for line in lines)
    if not code.strip() or code.lstrip("\n")[:1] == " ":
        return
    assert extract_program(f"prose\n\n{block(code)}\nmore prose").program == code
