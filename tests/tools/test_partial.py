"""A typed answer while it is written."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest

from perdure.tools.answer import NOTHING, JsonPrefix, PartialOutput

ROW = {"type": "object", "properties": {"name": {"type": "string"}, "n": {"type": "integer"}}, "required": ["name"]}
SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string"},
        "kind": {"enum": ["bug", "bugfix"]},
        "due": {"type": "string", "format": "date"},
        "rows": {"type": "array", "items": {"$ref": "#/$defs/Row"}},
        "either": {
            "anyOf": [{"type": "null"}, {"$ref": "#/$defs/Row"}, {"type": "array", "items": {"type": "integer"}}]
        },
        "any": {},
    },
    "required": ["title"],
    "additionalProperties": False,
    "$defs": {"Row": ROW},
}


def values(text: str, schema: dict[str, Any] | None = None, size: int = 1) -> list[Any]:
    partial = PartialOutput(SCHEMA if schema is None else schema)
    found = [partial.feed(text[at : at + size]) for at in range(0, len(text), size)]
    return [each for each in found if each is not NOTHING]


def begins(part: Any, whole: Any) -> bool:
    """Whether a value is the beginning of another: parts may be missing at the end, and the last may go on."""
    if isinstance(part, dict) and isinstance(whole, dict):
        return all(name in whole and begins(each, whole[name]) for name, each in part.items())
    if isinstance(part, list) and isinstance(whole, list):
        return len(part) <= len(whole) and all(begins(*pair) for pair in zip(part, whole, strict=False))
    if isinstance(part, str) and isinstance(whole, str):
        return whole.startswith(part)
    return bool(part == whole)


def made_up(random: random.Random, depth: int = 0) -> Any:
    kind = random.choice(["text", "number", "word", "list", "object"] if depth < 4 else ["text", "number"])
    match kind:
        case "text":
            return "".join(random.choices('ab"\\\n{}[],: é😀', k=random.randrange(8)))
        case "number":
            return random.choice([0, -1, 12345, 1.5, 2e-7])
        case "word":
            return random.choice([True, False, None])
        case "list":
            return [made_up(random, depth + 1) for _ in range(random.randrange(4))]
        case _:
            return {"k" + '"' * index: made_up(random, depth + 1) for index in range(random.randrange(4))}


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("ascii", [True, False])
def test_every_beginning_of_json_has_a_value_that_is_its_beginning(seed: int, ascii: bool) -> None:
    whole = {"x": made_up(random.Random(seed)), "y": made_up(random.Random(seed + 1000))}
    text = json.dumps(whole, ensure_ascii=ascii, indent=seed % 3 or None)
    prefix = JsonPrefix()

    for char in text:
        prefix.feed(char)
        try:
            value = prefix.value()
        except ValueError:
            assert "\\ud83d" in text, "half of a pair of surrogates"
            continue
        assert begins(value, whole)
    assert prefix.value() == whole


@pytest.mark.parametrize("seed", range(20))
def test_the_value_in_the_end_does_not_depend_on_how_the_text_is_cut(seed: int) -> None:
    whole = {"title": "x", "any": made_up(random.Random(seed))}
    text = f"Here it is:\n```json\n{json.dumps(whole)}\n```\nBye {{}}"

    for size in (1, 2, 3, 7, len(text)):
        prefix = JsonPrefix("{")
        for at in range(0, len(text), size):
            prefix.feed(text[at : at + size])
        assert prefix.value() == whole, size


def test_required_parts_may_be_missing_and_texts_may_go_on() -> None:
    assert values('{"rows": [{"name": "A"}], "title": "ab"}')[:4] == [
        {},
        {"rows": []},
        {"rows": [{}]},
        {"rows": [{"name": ""}]},
    ]


@pytest.mark.parametrize(
    ("text", "last"),
    [
        ('{"title": "x", "kind": "bug', {"title": "x"}),
        ('{"title": "x", "kind": "bug"', {"title": "x", "kind": "bug"}),
        ('{"title": "x", "due": "2026-01', {"title": "x"}),
        ('{"title": "x", "rows": [{"name": "a", "n": 12', {"title": "x", "rows": [{"name": "a"}]}),
        ('{"title": "x", "rows": [{"name": "a", "n": 12}', {"title": "x", "rows": [{"name": "a", "n": 12}]}),
        ('{"title": "x", "any": tru', {"title": "x"}),
        ('{"title": "x", "tit', {"title": "x"}),
        ('{"title": "x", "either": [1, 2, 3', {"title": "x", "either": [1, 2]}),
        ('{"title": "x", "either": {"name": "a', {"title": "x", "either": {"name": "a"}}),
    ],
)
def test_what_cannot_be_told_from_its_beginning_is_left_out(text: str, last: Any) -> None:
    assert values(text)[-1] == last


@pytest.mark.parametrize(
    ("text", "last"),
    [
        ('{"title": 7, "any": 1, "due"', {"any": 1}),
        ('{"other": 7, "title": "x"}', {"title": "x"}),
        ('{"rows": [{"n": 1}, {"name": "b"}], "title": "x"}', {"title": "x"}),
        ('{"rows": [7, {"name": "b"}', {"rows": [{"name": "b"}]}),
        ('{"kind": "cat", "title": "x"}', {"title": "x"}),
        ('{"either": "cat", "title": "x"}', {"title": "x"}),
    ],
)
def test_what_does_not_fit_is_left_out(text: str, last: Any) -> None:
    assert values(text)[-1] == last


@pytest.mark.parametrize("text", ["", "I cannot say.", "[1, 2]", '"words"', "{oops", '{"a" "b" }}}'])
def test_what_is_no_such_json_has_no_value_worth_showing(text: str) -> None:
    assert all(value == {} for value in values(text))


def test_lists_and_texts_at_the_root_grow_too() -> None:
    assert values('["a", "b"]', {"type": "array", "items": {"type": "string"}})[-1] == ["a", "b"]
    assert values('"abc', {"type": "string"}) == ["", "a", "ab", "abc"]


@pytest.mark.slow
def test_a_long_answer_has_few_values_so_that_all_of_them_cost_what_fifty_do() -> None:
    text = json.dumps({"title": "x", "rows": [{"name": f"row {index}", "n": index} for index in range(30_000)]})
    partial, made, sizes = PartialOutput(SCHEMA), 0, 0

    for at in range(0, len(text), 12):
        if partial.feed(text[at : at + 12]) is not NOTHING:
            made, sizes = made + 1, sizes + at

    assert len(text) > 1_000_000
    assert made < 50 * math.log(len(text)) + 50
    assert sizes < 55 * len(text)


class Asked(dict[str, Any]):
    """A schema that counts how often it is looked at."""

    times = 0

    def get(self, key: Any, default: Any = None, /) -> Any:
        self.times += 1
        return super().get(key, default)


def test_the_work_of_checking_grows_with_the_text_and_not_with_its_square() -> None:
    looked = []
    for count in (1_000, 2_000, 4_000):
        row = Asked(ROW)
        schema = {"type": "object", "properties": {"rows": {"type": "array", "items": row}}}
        values(json.dumps({"rows": [{"name": f"row {index}", "n": index} for index in range(count)]}), schema, size=5)
        looked.append(row.times)

    assert looked[1] < 2.3 * looked[0]
    assert looked[2] < 2.3 * looked[1]
