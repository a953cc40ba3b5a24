"""docs/troubleshooting.md has one entry for every error class, and the errors lead to their entries."""

import inspect
import traceback
from pathlib import Path

import pytest

from perdure import errors
from perdure.errors import PerdureError, ProviderError, UnknownSession

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / errors.PAGE).read_text()
CLASSES = [
    name
    for name, thing in vars(errors).items()
    if inspect.isclass(thing) and issubclass(thing, Exception) and thing.__module__ == errors.__name__
]
ENTRIES = {part.partition("\n")[0]: part.partition("\n")[2].strip() for part in TEXT.split("\n### ")[1:]}


def test_every_error_class_has_one_entry() -> None:
    assert sorted(ENTRIES) == sorted(CLASSES)
    assert TEXT.count("\n### ") == len(CLASSES)


@pytest.mark.parametrize("name", CLASSES)
def test_an_entry_says_something(name: str) -> None:
    text = ENTRIES[name].partition("\n## ")[0].strip()

    assert text.endswith(".")
    assert len(text) > 30


def test_a_traceback_ends_with_the_link_to_the_entry() -> None:
    told = traceback.format_exception(UnknownSession("s"))

    assert told[-1] == "See docs/troubleshooting.md#unknownsession\n"
    assert "docs/" not in str(UnknownSession("s"))


def test_a_class_of_the_hosts_own_leads_to_the_entry_of_its_base() -> None:
    class Refused(ProviderError):
        pass

    assert Refused("no").page == "docs/troubleshooting.md#providererror"
    assert PerdureError("no").page == "docs/troubleshooting.md#perdureerror"
