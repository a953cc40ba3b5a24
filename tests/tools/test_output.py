from __future__ import annotations

from copy import deepcopy
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.errors import InvalidDefinition
from perdure.model.tool import OutputBudget
from perdure.tools.output import Projection, project

KEPT = "the whole output is kept"


def json_size(value: Any) -> int:
    return len(msgspec.json.encode(value))


def line_breaks(value: Any) -> int:
    if isinstance(value, str):
        return value.count("\n")
    if isinstance(value, list):
        return sum(map(line_breaks, value))
    if isinstance(value, dict):
        return sum(key.count("\n") + line_breaks(item) for key, item in value.items())
    return 0


def of_one_shape(shown: Any, whole: Any) -> bool:
    """Whether `shown` is `whole` with strings cut and with items missing, and with nothing else changed."""
    if isinstance(whole, str):
        return isinstance(shown, str)
    if isinstance(whole, list):
        if not isinstance(shown, list):
            return False
        if len(shown) == len(whole):
            return all(map(of_one_shape, shown, whole)) or of_one_shape_with_gap(shown, whole)
        return of_one_shape_with_gap(shown, whole)
    if isinstance(whole, dict):
        kept = [key for key in shown if key in whole]
        extra = [key for key in shown if key not in whole]
        return len(extra) <= 1 and all(of_one_shape(shown[key], whole[key]) for key in kept)
    return type(shown) is type(whole) and shown == whole


def of_one_shape_with_gap(shown: list[Any], whole: list[Any]) -> bool:
    gaps = [at for at, item in enumerate(shown) if isinstance(item, str) and item.endswith(f"dropped; {KEPT}] …")]
    for at in gaps:
        tail = len(shown) - at - 1
        pairs = [*zip(shown[:at], whole, strict=False), *zip(shown[at + 1 :], whole[len(whole) - tail :], strict=True)]
        if all(of_one_shape(one, other) for one, other in pairs):
            return True
    return False


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        0,
        -5,
        1.5,
        "",
        "short",
        "é" * 100,
        [],
        {},
        [1, "two", None],
        {"a": {"b": ["c"]}},
        "x\n" * 399,
        ["\\n" * 500],
    ],
)
def test_what_fits_is_returned_as_it_is(value: Any) -> None:
    projection = project(value)

    assert projection.value is value
    assert projection == Projection(value, truncated=False, dropped_bytes=0, dropped_lines=0)


def test_text_of_exactly_the_budget_is_whole() -> None:
    assert not project("x" * 1000, OutputBudget(1000)).truncated
    assert project("x" * 1001, OutputBudget(1000)).truncated


def test_text_of_exactly_the_lines_is_whole() -> None:
    assert not project("\n".join(["line"] * 20), OutputBudget(lines=20)).truncated
    assert project("\n".join(["line"] * 21), OutputBudget(lines=20)).truncated


def test_long_text_keeps_head_and_tail_and_names_what_is_missing() -> None:
    projection = project("a" * 5000 + "b" * 5000, OutputBudget(1000))

    head, marker, tail = projection.value.partition(f"… [{projection.dropped_bytes:,} bytes dropped; {KEPT}] …")
    assert marker
    assert head == "a" * len(head)
    assert tail == "b" * len(tail)
    assert len(head) + len(tail) + projection.dropped_bytes == 10_000
    assert abs(len(head) - len(tail)) <= 1
    assert 900 <= len(projection.value.encode()) <= 1000


def test_many_lines_keep_head_and_tail_and_name_what_is_missing() -> None:
    lines = [f"line {number}" for number in range(100)]

    projection = project("\n".join(lines), OutputBudget(lines=20))

    shown = projection.value.split("\n")
    assert len(shown) == 20
    assert shown[:10] == lines[:10]
    assert shown[10].startswith("… [") and shown[10].endswith(f" lines dropped; {KEPT}] …")  # noqa: PT018 - one fact
    assert shown[11:] == lines[91:]
    assert projection.dropped_lines == 82
    assert projection.dropped_bytes == len("\n" + "\n".join(lines[10:91]) + "\n")


def test_text_is_never_cut_inside_a_character() -> None:
    projection = project("😀é" * 5000, OutputBudget(1000))

    assert set(projection.value.partition("… [")[0]) == {"😀", "é"}
    assert len(projection.value.encode()) <= 1000


def test_a_dict_keeps_its_keys_and_shares_the_room_among_long_strings() -> None:
    value = {"id": 7, "name": "short", "body": "x" * 50_000, "log": "y" * 50_000, "ok": True}

    projection = project(value)

    shown = projection.value
    assert list(shown) == list(value)
    assert (shown["id"], shown["name"], shown["ok"]) == (7, "short", True)
    assert "bytes dropped" in shown["body"]
    assert len(shown["body"]) == pytest.approx(len(shown["log"]), abs=2)
    assert 15_000 < json_size(shown) <= 16 * 1024


def test_a_long_list_keeps_its_ends_and_says_how_many_are_missing() -> None:
    projection = project(list(range(100_000)))

    shown = projection.value
    gap = next(at for at, item in enumerate(shown) if isinstance(item, str))
    missing = 100_000 - (len(shown) - 1)
    assert shown[gap] == f"… [{missing:,} items dropped; {KEPT}] …"
    assert shown[:gap] == list(range(gap))
    assert shown[gap + 1 :] == list(range(gap + missing, 100_000))
    assert projection.dropped_bytes == json_size(list(range(gap, gap + missing))) - 1


def test_a_large_dict_keeps_its_ends_and_says_how_many_are_missing() -> None:
    value = {f"key {number}": number for number in range(10_000)}

    shown = project(value).value

    assert shown["…"] == f"[{10_000 - (len(shown) - 1):,} entries dropped; {KEPT}]"
    assert next(iter(shown)) == "key 0"
    assert list(shown)[-1] == "key 9999"


def test_the_marker_of_a_dict_is_never_taken_for_an_entry() -> None:
    value = {"…": "mine", **{f"key {number}": number for number in range(10_000)}, "… 2": "mine too"}

    shown = project(value).value

    assert shown["…"] == "mine"
    assert shown["… 2"] == "mine too"
    assert "entries dropped" in shown["… 3"]


def test_the_marker_of_a_dict_does_not_borrow_the_name_of_a_dropped_entry() -> None:
    entries = {f"key {number}": number for number in range(10_000)}

    shown = project({**entries, "…": "mine", **{f"last {key}": 0 for key in entries}}).value

    assert "…" not in shown
    assert "entries dropped" in shown["… 2"]


def test_a_list_of_large_records_keeps_some_that_still_say_something() -> None:
    records = [{"id": number, "text": "x" * 5000} for number in range(1000)]

    shown = project(records).value

    kept = [item for item in shown if isinstance(item, dict)]
    assert len(kept) >= 20
    assert all(list(item) == ["id", "text"] for item in kept)
    assert (kept[0]["id"], kept[-1]["id"]) == (0, 999)


def test_a_key_larger_than_the_budget_drops_its_entry_only() -> None:
    shown = project({"k" * 50_000: 1, "a": 2, "b": 3}).value

    assert (shown["a"], shown["b"]) == (2, 3)
    assert len(shown) == 3


def test_the_budget_counts_escapes_of_structured_values() -> None:
    shown = project({"a": "\x01" * 10_000, "b": '"' * 10_000}).value

    assert 8_000 < json_size(shown) <= 16 * 1024


def test_lines_of_all_strings_count_together() -> None:
    shown = project({"a": "x\n" * 300, "b": "y\n" * 300}).value

    assert line_breaks(shown) < 400
    assert "lines dropped" in shown["a"]
    assert "lines dropped" in shown["b"]


def test_markers_of_cut_strings_count_as_lines_too() -> None:
    text = "a\n" * 3 + "x" * 5000 + "\n" + "y" * 5000 + "\nb" * 3

    shown = project({f"key {number}": text for number in range(57)}).value

    assert len(shown) == 57
    assert line_breaks(shown) < 400


def test_short_strings_of_many_lines_leave_room_for_their_markers() -> None:
    shown = project({f"{number}": "\n" * 20 for number in range(10)}, OutputBudget(512, 40)).value

    assert json_size(shown) <= 512
    assert line_breaks(shown) < 40


def test_a_list_of_the_smallest_items_fills_the_budget() -> None:
    assert 16_000 < json_size(project([0] * 100_000).value) <= 16 * 1024


def test_encoded_json_that_fits_is_not_made_again() -> None:
    """A caller who encoded the value pays for it once: the bytes given are believed."""
    value = ["x" * 50_000]

    assert project(value, encoded=b"[]").value is value
    assert project(value, encoded=msgspec.json.encode(value)).truncated


def test_the_smallest_budget_still_has_room_for_the_marker() -> None:
    shown = project("x" * 1000, OutputBudget(256, 8)).value

    assert KEPT in shown
    assert len(shown.encode()) <= 256


@pytest.mark.parametrize(
    "value", ["x\n" * 100_000, ["x"] * 100_000, {"a": "x\n" * 100_000}], ids=["text", "list", "dict"]
)
def test_without_limits_nothing_is_cut(value: Any) -> None:
    projection = project(value, OutputBudget(None, None))

    assert projection == Projection(value)


def test_each_limit_counts_without_the_other() -> None:
    assert project("x\n" * 1000, OutputBudget(None, 20)).value.count("\n") < 20
    assert len(project("x\n" * 1000, OutputBudget(300, None)).value) <= 300


@pytest.mark.parametrize(
    ("limits", "told"),
    [
        ({"bytes": 255}, "255 bytes is not usable: give 256 or more"),
        ({"lines": 7}, "7 lines is not usable: give 8 or more"),
        ({"bytes": 1e6}, "1000000.0 bytes"),
        ({"lines": True}, "True lines"),
        ({"bytes": "16k"}, "'16k' bytes"),
    ],
    ids=["too few bytes", "too few lines", "a float", "a bool", "a string"],
)
def test_a_budget_without_room_for_its_marker_is_refused(limits: Any, told: str) -> None:
    with pytest.raises(InvalidDefinition, match=told):
        OutputBudget(**limits)


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
many = st.integers(0, 300)
long_texts = st.builds(lambda piece, times: piece * times, texts, many)
scalars = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
)
nested = st.recursive(
    scalars | texts | long_texts,
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(texts, inner, max_size=8),
    max_leaves=12,
)
wide_lists = st.builds(lambda items, times: items * times, st.lists(scalars | texts, min_size=1, max_size=3), many)
wide_dicts = st.builds(lambda key, item, times: {f"{key}{n}": item for n in range(times)}, texts, scalars | texts, many)
values = nested | st.lists(nested | wide_lists | wide_dicts, max_size=4) | wide_lists | wide_dicts
budgets = st.builds(OutputBudget, st.sampled_from([256, 300, 1000, 4096]), st.sampled_from([8, 9, 40, 400]))


@given(values, budgets)
def test_every_value_fits_the_budget_and_keeps_its_shape(value: Any, budget: OutputBudget) -> None:
    before = deepcopy(value)

    projection = project(value, budget)

    shown = projection.value
    assert value == before
    size = len(shown.encode()) if isinstance(shown, str) else json_size(shown)
    assert size <= (budget.bytes or 0)
    assert line_breaks(shown) < (budget.lines or 0)
    assert of_one_shape(shown, value)
    assert projection.truncated == (shown != value) == (projection.dropped_bytes > 0)
    assert projection == project(value, budget, encoded=msgspec.json.encode(value))


@given(long_texts, budgets)
def test_head_and_tail_of_a_text_are_its_own(text: str, budget: OutputBudget) -> None:
    projection = project(text, budget)

    if projection.truncated:
        head, _, rest = projection.value.rpartition("… [")
        tail = rest.partition("] …")[2]
        head, tail = head.removesuffix("\n"), tail.removeprefix("\n")
        assert text.startswith(head)
        assert text.endswith(tail)
        size = len(text.encode())
        assert 0 < projection.dropped_bytes <= size
        assert projection.dropped_lines <= text.count("\n")
