"""Plugins that installed packages offer: found by name, loaded only when somebody asks."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest

from perdure.errors import InvalidDefinition
from perdure.plugins.registry import PluginSet, discover

CODE = """
    from perdure.plugins.hooks import Plugin

    class Audit(Plugin):
        id = "audit"

    class Deaf(Plugin):
        id = "deaf"
        time_limit = 0

    def configured():
        made = Audit()
        made.id = "configured"
        return made

    ready = Audit()

    def broken():
        raise RuntimeError("no licence")

    def nothing():
        return None
"""


class Site:
    """A directory on the path with packages as an installer leaves them."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def install(self, distribution: str, entries: dict[str, str], code: str = CODE) -> None:
        module = distribution.replace("-", "_")
        (self.root / f"{module}.py").write_text(textwrap.dedent(code))
        info = self.root / f"{module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        lines = [f"{name} = {module}:{what}" for name, what in entries.items()]
        (info / "entry_points.txt").write_text("\n".join(["[perdure.plugins]", *lines, ""]))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.syspath_prepend(str(tmp_path))
    for module in ("sample_audit", "sample_other", "sample_broken"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    return Site(tmp_path)


def test_nothing_is_offered_and_nothing_is_found() -> None:
    assert discover() == []


def test_plugins_are_found_through_their_entry_points(site: Site) -> None:
    site.install("sample-audit", {"watch": "Audit", "made": "configured"})

    every, one = discover(), discover("watch")

    assert [plugin.id for plugin in every] == ["configured", "audit"]  # by the name of the entry point
    assert [type(plugin).__module__ for plugin in one] == ["sample_audit"]
    assert PluginSet(every).ids == ("configured", "audit")


def test_names_are_given_in_the_order_they_are_asked_for(site: Site) -> None:
    site.install("sample-audit", {"watch": "Audit", "made": "configured"})

    assert [plugin.id for plugin in discover("watch", "made")] == ["audit", "configured"]


def test_a_plugin_object_is_taken_as_it_is(site: Site) -> None:
    site.install("sample-audit", {"watch": "ready"})

    assert [plugin.id for plugin in discover()] == ["audit"]


def test_nothing_is_loaded_that_was_not_asked_for(site: Site) -> None:
    site.install("sample-audit", {"watch": "Audit"})
    site.install("sample-broken", {"trap": "Trap"}, "raise SystemError('loaded')")

    assert [plugin.id for plugin in discover("watch")] == ["audit"]
    assert "sample_broken" not in sys.modules


def test_an_unknown_name_is_refused_with_those_that_are_offered(site: Site) -> None:
    site.install("sample-audit", {"watch": "Audit", "made": "configured"})

    with pytest.raises(InvalidDefinition, match=r"no installed package offers the plugin 'wtach'; offered: \['made'"):
        discover("watch", "wtach")


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("missing", "the plugin 'watch' of sample_audit:missing cannot be made: AttributeError"),
        ("broken", "the plugin 'watch' of sample_audit:broken cannot be made: RuntimeError: no licence"),
        ("nothing", "a NoneType is no plugin"),
        ("Deaf", "the time limit of plugin 'deaf'"),
    ],
)
def test_an_entry_point_without_a_plugin_is_refused(site: Site, what: str, why: str) -> None:
    site.install("sample-audit", {"watch": what})

    with pytest.raises(InvalidDefinition, match=why):
        discover()


def test_a_package_that_cannot_be_imported_is_refused(site: Site) -> None:
    site.install("sample-broken", {"trap": "Trap"}, "import no_such_thing")

    with pytest.raises(InvalidDefinition, match="'trap' of sample_broken:Trap cannot be made: ModuleNotFoundError"):
        discover()


def test_two_packages_that_offer_one_name_are_refused(site: Site) -> None:
    site.install("sample-audit", {"watch": "Audit"})
    site.install("sample-other", {"watch": "Audit", "other": "configured"})

    with pytest.raises(InvalidDefinition, match="'watch': sample_audit:Audit and sample_other:Audit"):
        discover()
    assert [plugin.id for plugin in discover("other")] == ["configured"]
