"""Which part of an answer is run: the first closed fence of Python, whole, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.turn.code import cell_of


@pytest.mark.parametrize(
    ("text", "code", "dropped"),
    [
        ("```python\nx = 1\n```", "x = 1\n", False),
        ("I look.\n\n```py\nx = 1\n```\n", "x = 1\n", False),
        ("```\nx = 1\n```", "x = 1\n", False),
        ("```PYTHON\nx = 1\n```  \n\n", "x = 1\n", False),
        ("``` python title=a.py\nx = 1\n```", "x = 1\n", False),
        ("```python \t \nx = 1\n```", "x = 1\n", False),
        (f"```python{' ' * 500_000}title\nx = 1\n```", "x = 1\n", False),  # takes an hour where blanks are tried
        ("```{python}\nx = 1\n```", "x = 1\n", False),
        ("```python\r\nx = 1\r\n```\r\n", "x = 1\r\n", False),
        ("~~~python\nx = 1\n~~~", "x = 1\n", False),
        ("```python\n```", "", False),
        # What follows was written before the cell has run.
        ("```python\nx = 1\n```\nIt is 7.", "x = 1\n", True),
        ("```python\nx = 1\n```\n```python\nx = 2\n```", "x = 1\n", True),
        ("```python\nx = 1\n```\n```python\nx =", "x = 1\n", True),
        # Blocks of another language are skipped.
        ('```json\n{"a": 1}\n```\n```python\nx = 1\n```', "x = 1\n", False),
        # A fence inside a longer one, or of the other sign, is part of it.
        ("````python\nx = '''\n```\n'''\n````", "x = '''\n```\n'''\n", False),
        ("~~~python\nx = '''\n```\n'''\n~~~", "x = '''\n```\n'''\n", False),
        ("```python\nx = 1 # ```\n```", "x = 1 # ```\n", False),
        ("```python\n    ```\n```", "    ```\n", False),
        # Signs at which `splitlines` would break are no ends of lines.
        ("```python\nx = '\u2028```\x0c```'\n```", "x = '\u2028```\x0c```'\n", False),
    ],
)
def test_the_first_closed_fence_of_python_is_the_cell(text: str, code: str, dropped: bool) -> None:
    found = cell_of(text)

    assert found is not None
    assert (text[slice(*found.code)], found.dropped, found.fault) == (code, dropped, "")
    assert not text[found.end :].strip() or dropped


@pytest.mark.parametrize(
    "text",
    [
        "",
        "It is 7.",
        "Use `x` or ``` in a line",
        "```inline ``` code",
        "    ```python\n    x = 1\n    ```",  # an indented block shows code, it does not open a fence
        '```json\n{"a": 1}\n```',
        "```sql\nselect 1",
    ],
)
def test_an_answer_without_code_to_run_is_prose(text: str) -> None:
    assert cell_of(text) is None


@pytest.mark.parametrize(
    "text",
    [
        "```python\nx = 1",
        "```python",
        "```\nx = 1\n``",
        "```python\nx = 1\n~~~",
        "````python\nx = 1\n```",
        "```py\nx\n```x",
    ],
)
def test_half_a_fence_is_never_run(text: str) -> None:
    found = cell_of(text)

    assert found is not None
    assert found.code == (0, 0)
    assert "not closed" in found.fault


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("```bash\nrm -rf /\n```", "bash"),
        ("```js\n1\n```\n```ts\n2\n```", "js, ts"),
        ("```sh\nls", "sh"),
        ('```json\n{"a": 1}\n```\n```bash\nls\n```', "bash"),
    ],
)
def test_code_in_another_language_is_refused_by_its_name(text: str, named: str) -> None:
    found = cell_of(text)

    assert found is not None
    assert found.code == (0, 0)
    assert f"has code in {named}." in found.fault


LINES = st.lists(
    st.sampled_from(["```python", "```", "````", "~~~", "```json", "x = 1", "", "text", "  ```"]), max_size=12
)


@given(LINES, st.integers(min_value=0, max_value=200))
def test_a_cell_that_is_whole_stays_the_same_whatever_more_arrives(lines: list[str], cut: int) -> None:
    """A stream may be cut off when the first fence closes: nothing after it can change what runs."""
    text = "\n".join([*lines, ""])
    whole, part = cell_of(text), cell_of(text[:cut])

    if part is not None and not part.fault and text[:cut].endswith("\n"):
        assert whole is not None
        assert (whole.code, whole.end) == (part.code, part.end)
