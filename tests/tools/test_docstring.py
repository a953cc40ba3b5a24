from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.tools.schema import Docstring, parse_docstring

GOOGLE = """Find trains.

    Looks at today only.

    Args:
        start (str): Where it starts,
            as a city.
        end: Where it ends.
        via (dict[str, int], optional): Stops: by name.

    Returns:
        The trains.
    """

NUMPY = """Find trains.

    Looks at today only.

    Parameters
    ----------
    start : str
        Where it starts,
        as a city.
    end
        Where it ends.
    via : dict of str to int, optional
        Stops: by name.

    Returns
    -------
    list
        The trains.
    """

REST = """Find trains.

    Looks at today only.

    :param str start: Where it starts,
        as a city.
    :param end: Where it ends.
    :type end: str
    :param via: Stops: by name.
    :returns: The trains.
    """

PARAMETERS = {"start": "Where it starts, as a city.", "end": "Where it ends.", "via": "Stops: by name."}


@pytest.mark.parametrize(
    ("doc", "rest"),
    [
        pytest.param(GOOGLE, "Returns:\n    The trains.", id="google"),
        pytest.param(NUMPY, "Returns\n-------\nlist\n    The trains.", id="numpy"),
        pytest.param(REST, ":returns: The trains.", id="rest"),
    ],
)
def test_each_style_gives_parameters_and_a_description_without_them(doc: str, rest: str) -> None:
    parsed = parse_docstring(doc)

    assert parsed.parameters == PARAMETERS
    assert parsed.description == f"Find trains.\n\nLooks at today only.\n\n{rest}"


@pytest.mark.parametrize("doc", [None, "", "   \n ", 5, b"bytes"])
def test_nothing_to_read_is_an_empty_docstring(doc: object) -> None:
    assert parse_docstring(doc) == Docstring("", {})


def test_a_one_line_docstring_is_the_description() -> None:
    assert parse_docstring("Say hello.") == Docstring("Say hello.", {})


@pytest.mark.parametrize(
    "heading", ["Args:", "Arguments:", "Parameters:", "Params:", "Keyword Args:", "args:", "Other Parameters:"]
)
def test_google_headings_have_many_names(heading: str) -> None:
    assert parse_docstring(f"Do it.\n\n{heading}\n    x: The x.") == Docstring("Do it.", {"x": "The x."})


def test_a_description_on_the_next_line_is_found() -> None:
    assert parse_docstring("Do it.\n\nArgs:\n    x:\n        The x.\n    y (int):\n        The y.").parameters == {
        "x": "The x.",
        "y": "The y.",
    }


def test_starred_names_lose_their_stars() -> None:
    parsed = parse_docstring("Do it.\n\nArgs:\n    *names: All of them.\n    \\*\\*more: The rest.")

    assert parsed.parameters == {"names": "All of them.", "more": "The rest."}


def test_numpy_names_may_share_a_description() -> None:
    parsed = parse_docstring("Do it.\n\nParameters\n----------\nx, y : int\n    A place.\n")

    assert parsed == Docstring("Do it.", {"x": "A place.", "y": "A place."})


def test_prose_after_a_numpy_section_stays_in_the_description() -> None:
    parsed = parse_docstring("Do it.\n\nParameters\n----------\nx : int\n    The x.\n\nThen it is done.")

    assert parsed == Docstring("Do it.\n\nThen it is done.", {"x": "The x."})


def test_prose_after_a_google_section_stays_in_the_description() -> None:
    assert (
        parse_docstring("Do it.\n\nArgs:\n    x: The x.\n\nThen it is done.").description
        == "Do it.\n\nThen it is done."
    )


def test_epytext_fields_are_read_like_rest() -> None:
    assert parse_docstring("Do it.\n\n@param x: The x.") == Docstring("Do it.", {"x": "The x."})


def test_a_parameter_without_words_has_no_description() -> None:
    assert parse_docstring("Do it.\n\nArgs:\n    x:\n    y: The y.").parameters == {"y": "The y."}


@pytest.mark.parametrize(
    "doc",
    [
        "Args: none of note.",
        "Args:",
        "Args:\nnot indented",
        "Parameters",
        "Parameters without a rule\n\nmore",
        "A colon: in prose",
        "Ratio :param",
    ],
)
def test_what_is_no_section_stays_in_the_description(doc: str) -> None:
    assert parse_docstring(doc) == Docstring(doc, {})


@given(
    st.lists(
        st.sampled_from(
            [
                "Args:",
                "Parameters",
                "----------",
                ":param x: y",
                "    x: y",
                "x : int",
                "",
                "  ",
                "    more",
                "prose",
                "\t",
            ]
        )
        | st.text(max_size=20)
    )
)
def test_any_text_is_read_without_failing(lines: list[str]) -> None:
    parsed = parse_docstring("\n".join(lines))

    assert all(parsed.parameters.values())
    assert parsed.description == parsed.description.strip()
