"""The plugins of an agent as a whole: who has which hook, what is refused, and what a session gets of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from perdure.errors import InvalidDefinition, PluginConflict, PluginError
from perdure.plugins.hooks import HOOKS, Plugin, SessionContext, SnapshotReader, SnapshotWriter
from perdure.plugins.registry import PluginSet
from tests.plugins.made import having

CTX = SessionContext("s", "agent")


class Idle(Plugin):
    def __init__(self, id: str = "idle") -> None:
        self.id = id


class Counter(Plugin):
    """Keeps a number per session."""

    id = "counter"

    def __init__(self, start: int = 0) -> None:
        self.count = start

    def for_session(self, ctx: SessionContext) -> Plugin:
        return Counter(int(ctx.options or 0))

    @property
    def revision(self) -> int:
        return self.count

    def snapshot(self, writer: SnapshotWriter) -> int:
        return self.count

    def restore(self, snapshot: Any, reader: SnapshotReader) -> None:
        self.count = snapshot.state or 0

    def before_turn(self, ctx: Any) -> None:
        self.count += 1


def per_session(made: Callable[[Plugin, SessionContext], Any], id: str = "p") -> Plugin:
    plugin: Plugin = type("Own", (Plugin,), {"id": id, "for_session": made})()
    return plugin


# ---------------------------------------------------------------------- what costs nothing


def test_plugins_that_override_nothing_have_no_hooks_at_all() -> None:
    plugins = PluginSet([Idle(str(n)) for n in range(20)])
    session = plugins.open({})

    assert len(plugins.ids) == 20
    assert [hook for hook in HOOKS if plugins.has(hook) or session.has(hook) or session.hooks(hook)] == []


def test_asking_for_a_hook_that_nobody_has_makes_nothing() -> None:
    session = PluginSet([Idle()]).open({})

    assert session.hooks("before_turn") is session.hooks("before_turn")
    assert session.hooks("before_turn").entries == ()


def test_a_hook_that_does_not_exist_is_our_own_mistake() -> None:
    with pytest.raises(KeyError):
        PluginSet([Idle()]).open({}).hooks("before_lunch")


def test_no_plugins_at_all() -> None:
    assert not PluginSet()
    assert PluginSet([Idle()])


# ---------------------------------------------------------------------- who has what, in which order


def test_hooks_run_in_the_order_of_the_plugins_whatever_their_priority() -> None:
    plugins = PluginSet(
        [having("before_turn", lambda ctx: None, id, priority=n) for n, id in enumerate("zax")] + [Idle("idle")]
    )

    assert [plugin.id for plugin, _ in plugins.open({}).hooks("before_turn").entries] == ["z", "a", "x"]


@pytest.mark.parametrize("hook", ["transform_view", "compact"])
def test_views_and_compactors_run_by_descending_priority_and_equals_in_order(hook: str) -> None:
    plugins = PluginSet(
        [having(hook, lambda *told: None, id, priority=n) for id, n in [("a", 0), ("b", 7), ("c", -1), ("d", 0)]]
    )

    assert [plugin.id for plugin, _ in plugins.open({}).hooks(hook).entries] == ["b", "a", "d", "c"]


def test_a_hook_is_inherited_like_any_method() -> None:
    class Child(Counter):
        id = "child"

    assert PluginSet([Child()]).has("before_turn")


def test_an_exclusive_slot_has_an_owner() -> None:
    plugins = PluginSet([Idle(), having("project_result", lambda ctx: None, "short")])

    owner = plugins.owner("project_result")
    assert owner is not None
    assert owner.id == "short"
    assert plugins.owner("project_prose") is None


# ---------------------------------------------------------------------- what is refused


def test_two_plugins_of_one_id_are_refused() -> None:
    with pytest.raises(PluginConflict, match="the id 'idle' belongs to 'idle' already") as caught:
        PluginSet([Idle(), Counter(), Idle()])
    assert (caught.value.plugin, caught.value.other) == ("idle", "idle")


@pytest.mark.parametrize("slot", ["project_result", "project_prose"])
def test_a_second_owner_of_an_exclusive_slot_is_refused_and_both_are_named(slot: str) -> None:
    with pytest.raises(PluginConflict) as caught:
        PluginSet([having(slot, lambda *told: None, "one"), Idle(), having(slot, lambda *told: None, "two")])

    assert str(caught.value) == f"plugin 'two': the slot {slot} belongs to 'one' already: leave one of them out"
    assert isinstance(caught.value, InvalidDefinition)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (Idle, r"pass a plugin object, not its class: plugins=\[Idle\(…\)\]"),
        (object(), "a object is no plugin: derive it from perdure.Plugin"),
        ("audit", "a str is no plugin"),
        (None, "a NoneType is no plugin"),
        (int, "a type is no plugin"),
    ],
    ids=["class", "object", "name", "none", "other class"],
)
def test_what_is_no_plugin_is_refused(given: Any, why: str) -> None:
    with pytest.raises(InvalidDefinition, match=why):
        PluginSet([Idle(), given])


@pytest.mark.parametrize(
    "id", ["", " ", "a/b", "a\nb", "a\0", "x" * 101, "\ud800", 5, None], ids=lambda id: ascii(id)[:12]
)
def test_a_bad_id_is_refused(id: Any) -> None:
    with pytest.raises(InvalidDefinition, match="plugin Idle needs an id of 1 to 100 printable characters"):
        PluginSet([Idle(id)])


@pytest.mark.parametrize("id", ["a", "x" * 100, "größe", "my-org.audit_2", "a b"])
def test_a_good_id_is_taken(id: str) -> None:
    assert PluginSet([Idle(id)]).ids == (id,)


@pytest.mark.parametrize(
    ("attributes", "why"),
    [
        ({"version": 2}, "the version of plugin 'p' is printable text, not 2"),
        ({"version": "\ud800"}, "the version of plugin 'p' is printable text"),
        ({"time_limit": 0}, "the time limit of plugin 'p' is a positive number of seconds, not 0"),
        ({"time_limit": -1}, "the time limit of plugin 'p'"),
        ({"time_limit": float("nan")}, "the time limit of plugin 'p'"),
        ({"time_limit": None}, "the time limit of plugin 'p'"),
        ({"time_limit": "30"}, "the time limit of plugin 'p'"),
        ({"priority": "high"}, "the priority of plugin 'p' is a number, not 'high'"),
        ({"priority": float("nan")}, "the priority of plugin 'p' is a number"),
        ({"prompt": "be kind"}, "prompt of plugin 'p' is a hook: make it a method"),
        ({"before_turn": property(lambda self: None)}, "before_turn of plugin 'p' is a hook: make it a method"),
    ],
    ids=lambda value: (
        None if isinstance(value, str) else f"{next(iter(value))} {ascii(next(iter(value.values())))[:9]}"
    ),
)
def test_a_plugin_put_together_wrongly_is_refused(attributes: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidDefinition, match=why):
        PluginSet([type("Wrong", (Plugin,), {"id": "p", **attributes})()])


def test_a_hook_set_on_the_object_is_refused_because_nobody_would_call_it() -> None:
    plugin = Idle()
    plugin.before_turn = lambda ctx: None  # type: ignore[method-assign]

    with pytest.raises(InvalidDefinition, match="before_turn of plugin 'idle' is set on the object"):
        PluginSet([plugin])


@pytest.mark.parametrize(
    "hook", ["for_session", "tools", "hidden_tools", "transform_text", "project_prose", "snapshot", "restore"]
)
def test_a_hook_that_cannot_wait_must_be_plain(hook: str) -> None:
    async def later(*told: Any) -> Any: ...

    with pytest.raises(InvalidDefinition, match=f"{hook} of plugin 'p' is asked where nothing can wait"):
        PluginSet([having(hook, later)])


@pytest.mark.parametrize("missing", ["revision", "for_session"])
def test_a_snapshot_without_its_count_or_without_instances_is_refused(missing: str) -> None:
    parts = {
        name: vars(Counter)[name] for name in ("revision", "for_session", "snapshot", "restore") if name != missing
    }

    with pytest.raises(InvalidDefinition, match="plugin 'p' has a snapshot: let `revision` count its changes"):
        PluginSet([type("Half", (Plugin,), {"id": "p", **parts})()])


# ---------------------------------------------------------------------- what a session gets


def test_sessions_share_everything_when_nobody_keeps_anything() -> None:
    idle = having("before_turn", lambda ctx: None)
    plugins = PluginSet([idle])

    assert plugins.open({"p": CTX}) is plugins.open({})
    assert plugins.open({}).plugins == (idle,)


def test_each_session_has_its_own_instance_and_shares_the_others() -> None:
    counter, idle = Counter(), having("before_turn", lambda ctx: None, "idle")
    plugins = PluginSet([counter, idle])

    one = plugins.open({"counter": SessionContext("s1", "agent", options=5), "idle": CTX})
    two = plugins.open({"counter": SessionContext("s2", "agent"), "idle": CTX})

    assert [plugin.id for plugin in one.plugins] == ["counter", "idle"]
    assert [one.plugins[0].revision, two.plugins[0].revision, counter.revision] == [5, 0, 0]
    assert one.plugins[1] is two.plugins[1] is idle
    [(owner, method), _] = one.hooks("before_turn").entries
    method(None)
    assert owner is one.plugins[0]
    assert [one.plugins[0].revision, two.plugins[0].revision] == [6, 0]


def test_a_count_is_not_a_hook_to_call() -> None:
    session = PluginSet([Counter()]).open({"counter": CTX})

    assert session.has("snapshot")
    assert not session.has("revision")


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (lambda self, ctx: Idle("p"), "for_session gave a Idle: make one of its own class and id"),
        (lambda self, ctx: None, "for_session gave a NoneType: make one of its own class and id"),
        (lambda self, ctx: type(self), "for_session gave a type: make one of its own class and id"),
        (lambda self, ctx: int(ctx.options), "for_session: ValueError: invalid literal for int"),
        (lambda self, ctx: exit(3), "for_session: SystemExit: 3"),
    ],
    ids=["class", "none", "type", "raises", "exits"],
)
def test_an_instance_that_cannot_be_had_refuses_the_session(made: Any, why: str) -> None:
    plugins = PluginSet([per_session(made)])

    with pytest.raises(PluginError, match=why) as caught:
        plugins.open({"p": SessionContext("s", "agent", options="many")})
    assert caught.value.plugin == "p"


def test_an_instance_of_another_id_refuses_the_session() -> None:
    def made(self: Any, ctx: SessionContext) -> Any:
        other = type(self)()
        other.id = "q"
        return other

    with pytest.raises(PluginError, match="make one of its own class and id"):
        PluginSet([per_session(made)]).open({"p": CTX})


def test_a_plugin_without_state_may_give_itself() -> None:
    plugin = per_session(lambda self, ctx: self)

    assert PluginSet([plugin]).open({"p": CTX}).plugins == (plugin,)


def test_a_plugin_with_state_may_not_be_shared_by_sessions() -> None:
    class Shared(Counter):
        def for_session(self, ctx: SessionContext) -> Plugin:
            return self

    with pytest.raises(PluginError, match="for_session gave the shared object"):
        PluginSet([Shared()]).open({"counter": CTX})


def test_a_context_that_we_forgot_is_not_blamed_on_the_plugin() -> None:
    with pytest.raises(KeyError):
        PluginSet([Counter()]).open({})


# ---------------------------------------------------------------------- a session without some of them


def test_hooks_of_absent_plugins_are_not_called() -> None:
    async def later(ctx: Any) -> None: ...

    session = PluginSet(
        [
            having("before_turn", later, "a"),
            having("before_turn", lambda ctx: None, "b"),
            having("after_turn", lambda ctx: None, "c"),
        ]
    ).open({})

    rest = session.without(["a"])
    less = rest.without(["c"])

    assert session.hooks("before_turn").waits
    assert [plugin.id for plugin, _ in rest.hooks("before_turn").entries] == ["b"]
    assert not rest.hooks("before_turn").waits
    assert rest.absent == {"a"}
    assert less.absent == {"a", "c"}
    assert rest.has("after_turn")
    assert not less.has("after_turn")
    assert [plugin.id for plugin in less.plugins] == ["a", "b", "c"]
    assert session.absent == frozenset()
    assert session.has("after_turn")


def test_one_more_plugin_comes_after_the_others() -> None:
    async def later(ctx: Any) -> None: ...

    session = PluginSet([having("before_turn", lambda ctx: None, "a"), Idle("gone")]).open({}).without(["gone"])

    more = session.and_also(having("before_turn", later, "overlay"))

    assert [plugin.id for plugin, _ in more.hooks("before_turn").entries] == ["a", "overlay"]
    assert more.hooks("before_turn").waits
    assert [plugin.id for plugin in more.plugins] == ["a", "gone", "overlay"]
    assert more.absent == {"gone"}
    assert list(more.names) == ["before_turn"]
    assert [plugin.id for plugin, _ in session.hooks("before_turn").entries] == ["a"]
