"""The tools of one session: what is composed, what is taken away, and what is remembered of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from perdure.errors import UnknownTool
from perdure.model.session import ToolState
from perdure.model.tool import ToolSpec
from perdure.tools.catalog import KEEP, Catalog, Membership
from tests.tools.samples import Offering, add, drop, other_add, say


class Counted:
    """Plugins that hide tools, and how often they were asked."""

    def __init__(self, *hidden: str) -> None:
        self.hidden, self.version, self.asked = hidden, 0, 0

    def removals(self, specs: Sequence[ToolSpec]) -> Sequence[str]:
        self.asked += 1
        return self.hidden

    def membership(self, *tools: Any) -> Membership:
        return Membership(Catalog(tools or (add, drop)), removals=self.removals, plugins=lambda: self.version)


def names(membership: Membership) -> list[str]:
    return sorted([spec.name for spec in membership.specs])


# ---------------------------------------------------------------------- what is there


def test_without_decisions_everything_is_there() -> None:
    membership = Membership(Catalog([add, drop]))

    assert names(membership) == ["add", "drop"]
    assert membership.names() == ["add", "drop"]
    assert membership.get("add") is not None
    assert membership.get("say") is None


def test_tool_that_is_switched_off_is_gone_and_comes_back() -> None:
    membership = Membership(Catalog([add, drop]))

    off = membership.edit({"drop": False})
    assert (off, names(membership)) == (ToolState(1, {"drop": False}), ["add"])
    on = membership.edit({"drop": True})
    assert (on, names(membership)) == (ToolState(2, {"drop": True}), ["add", "drop"])
    cleared = membership.edit({"drop": None})
    assert (cleared, names(membership)) == (ToolState(3, {}), ["add", "drop"])


def test_edit_with_a_name_that_nobody_knows_changes_nothing() -> None:
    membership = Membership(Catalog([add, drop]))

    with pytest.raises(UnknownTool, match="'dorp'"):
        membership.edit({"drop": False, "dorp": False})

    assert (membership.state, names(membership)) == (ToolState(), ["add", "drop"])


def test_decision_about_a_tool_that_is_away_waits_for_it() -> None:
    offering = Offering("fly")
    membership = Membership(Catalog([add, offering]), ToolState(3, {"fly": False, "swim": False}))
    assert (names(membership), membership.orphans()) == (["add"], ["swim"])

    offering.names = ()
    membership.refresh()
    assert (names(membership), membership.orphans()) == (["add"], ["fly", "swim"])
    membership.edit({"fly": True})  # known, although it is away
    offering.names = ("fly", "swim")
    membership.refresh()

    assert (names(membership), membership.orphans()) == (["add", "fly"], [])


def test_nobody_switches_on_what_a_parent_hid() -> None:
    membership = Membership(Catalog([add, drop]), hidden=["drop", "say"])

    membership.edit({"drop": True})
    membership.overlay(Catalog([say]))

    assert names(membership) == ["add"]
    assert membership.get("drop") is None
    assert membership.get("say") is None


def test_nobody_adds_to_what_a_parent_granted() -> None:
    membership = Membership(Catalog([add, drop]), hidden=["say"], only=["add", "say", "fly"])
    assert names(membership) == ["add"]

    membership.edit({"drop": True})
    membership.overlay(Catalog([say, drop, other_add]))

    assert names(membership) == ["add"]
    assert names(membership.copy()) == ["add"]
    assert names(Membership(Catalog([add]), only=[])) == []


def test_plugin_hides_what_was_switched_on_and_what_was_laid_over() -> None:
    membership = Counted("drop", "say").membership()

    membership.edit({"drop": True})
    membership.overlay(Catalog([say]))

    assert names(membership) == ["add"]


# ---------------------------------------------------------------------- an overlay


def test_overlay_adds_tools_and_replaces_those_of_the_same_name() -> None:
    membership = Membership(Catalog([add, drop]))

    membership.overlay(Catalog([other_add, say]))

    found = membership.get("add")
    assert found is not None
    assert (names(membership), found.tool) == (["add", "drop", "say"], other_add)


def test_overlay_may_leave_the_agents_own_out_and_what_is_hidden_stays_hidden() -> None:
    membership = Membership(Catalog([add, drop]), hidden=["say"])

    membership.overlay(Catalog([other_add, say]), include_base=False)
    assert names(membership) == ["add"]
    membership.overlay(Catalog([]), include_base=False)
    assert names(membership) == []
    membership.overlay(Catalog([]))
    assert names(membership) == ["add", "drop"]


def test_catalogue_under_a_new_overlay_is_composed_anew() -> None:
    membership = Membership(Catalog([add]))
    membership.overlay(Catalog([drop, say]))
    before = membership.current()

    membership.overlay(Catalog([drop]))

    assert (membership.current() is before, names(membership)) == (False, ["add", "drop"])


# ---------------------------------------------------------------------- what is remembered


def test_catalogue_and_its_projection_are_made_once_for_as_long_as_nothing_changes() -> None:
    counted = Counted("drop")
    membership = counted.membership()
    first = membership.current()

    for _ in range(3):
        assert membership.current() is first
        assert membership.current().projection() is first.projection()
    assert counted.asked == 1
    assert [entry["name"] for entry in first.as_json()] == ["add"]


def test_projection_that_somebody_changes_is_his_own() -> None:
    membership = Membership(Catalog([add]))
    before = add.spec.input_schema["properties"]["n"]["type"]

    [entry] = membership.current().as_json()
    entry["contract"]["input_schema"]["properties"]["n"]["type"] = "string"

    [again] = membership.current().as_json()
    assert (again["contract"]["input_schema"]["properties"]["n"]["type"], before) == ("integer", "integer")
    assert add.spec.input_schema["properties"]["n"]["type"] == "integer"


def test_entry_of_the_projection_tells_everything_about_a_tool() -> None:
    [entry] = Membership(Catalog([drop])).current().as_json()

    assert entry == {
        "id": "tool:drop",
        "name": "drop",
        "description": "Drop everything.",
        "activation": "always",
        "bindings": {},
        "contract": {
            "input_schema": {"type": "object", "properties": {}, "additionalProperties": False},
            "output_schema": {"type": "string"},
        },
    }


def test_catalogue_is_composed_anew_when_a_part_of_it_changes() -> None:
    counted, offering, laid = Counted(), Offering("fly"), Offering("swim")
    membership = counted.membership(add, offering)
    membership.overlay(Catalog([laid]))
    assert names(membership) == ["add", "fly", "swim"]

    counted.hidden, counted.version = ("add",), 1
    assert names(membership) == ["fly", "swim"]
    offering.names = ("fly", "walk")
    membership.refresh()
    assert names(membership) == ["fly", "swim", "walk"]
    laid.names = ("dive",)
    membership.refresh()
    assert names(membership) == ["dive", "fly", "walk"]
    membership.edit({"walk": False})
    assert names(membership) == ["dive", "fly"]


def test_what_a_plugin_hides_is_asked_again_only_when_it_moved_or_was_invalidated() -> None:
    counted = Counted("drop")
    membership = counted.membership()
    assert names(membership) == ["add"]

    counted.hidden = ("add",)
    assert names(membership) == ["add"]
    membership.invalidate()
    assert (names(membership), counted.asked) == (["drop"], 2)


def test_provider_that_breaks_when_it_is_asked_again_keeps_what_it_offered() -> None:
    class Breaking(Offering):
        def specs(self) -> Sequence[ToolSpec]:
            if not self.names:
                raise OSError("gone")
            return super().specs()

    offering = Breaking("fly")
    membership = Membership(Catalog([add, offering]))
    offering.names = ()
    membership.refresh()

    assert names(membership) == ["add", "fly"]


def test_only_so_many_catalogues_are_kept() -> None:
    counted = Counted("drop")
    membership = counted.membership()
    kept = []
    for version in range(KEEP + 1):
        counted.version = version
        kept.append(membership.current())
    assert (KEEP, counted.asked) == (8, 9)

    counted.version = KEEP
    assert membership.current() is kept[-1]
    counted.version = 1
    assert (membership.current() is kept[1], counted.asked) == (True, 9)
    counted.version = 0
    assert (membership.current() is kept[0], counted.asked) == (False, 10)


def test_copy_is_tried_out_without_changing_the_original() -> None:
    membership = Membership(Catalog([add, drop]), hidden=["say"])
    membership.overlay(Catalog([say, other_add]))

    copy = membership.copy()
    copy.edit({"drop": False})

    assert (names(copy), names(membership)) == (["add"], ["add", "drop"])
