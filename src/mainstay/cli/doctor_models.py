"""The part of `mainstay doctor` that is about models: which cannot be asked from here, and what to set for it.

Nothing is asked, and no value of a key is looked at beyond whether it is there. A model that only sessions of the store
name may be asked by workers that have its key, so what it lacks here is told and is no need.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from mainstay.agent import Agent
from mainstay.cli.doctor_processes import Need
from mainstay.engine.journal import load
from mainstay.errors import MainstayError
from mainstay.model.record import Said
from mainstay.model.session import SessionRow
from mainstay.model.settings import load as load_settings
from mainstay.ports.provider import Provider, candidates
from mainstay.ports.store import Store


class ModelState(Struct, frozen=True):
    """A model, who names it, and in words what keeps it from being asked from here, if anything does."""

    model: str
    named_by: list[str]
    lacks: list[str]


async def examine_models(
    store: Store | None, agents: Iterable[tuple[str, Agent[object]]]
) -> tuple[list[ModelState], list[Need]]:
    """The models of the given agents and of open sessions; and what a person should do about those of the agents."""
    states, needs = list[ModelState](), list[Need]()
    for name, agent in agents:
        for model, lacks in _lacking(agent.model):
            states.append(ModelState(model, [name], lacks))
            needs += [Need(f"{name}, model {model}", each, ADVICE) for each in lacks]
    named: dict[str, list[str]] = {}
    for row in [] if store is None else await store.open_sessions():
        for model in await _named_by(store, row):
            named.setdefault(model, []).append(row.id)
    for model, sessions in sorted(named.items()):
        # What has no colon is a name of `Runtime(models=…)`, which only that Runtime knows.
        states += [ModelState(each, sessions, lacks) for each, lacks in (_lacking(model) if ":" in model else ())]
    return states, needs


ADVICE = "set it where the agent runs, and look again; docs/providers.md lists the variables of every service"


def _lacking(model: str | Provider) -> list[tuple[str, list[str]]]:
    """Each model behind a name or an object, and what it lacks."""
    from mainstay.providers import registry  # most stores are looked at without one

    try:
        found = registry.named(model) if isinstance(model, str) else model
    except MainstayError as error:  # an unknown service, no endpoint, no region, no project
        return [(str(model), [str(error)])]
    return [(each.name, _of(each)) for each in candidates(found)]


def _of(provider: Provider) -> list[str]:
    lacking = getattr(provider, "lacking", None)
    return [] if lacking is None else list(lacking())


async def _named_by(store: Store | None, row: SessionRow) -> list[str]:
    """The models that a session with an open turn was told to ask."""
    assert store is not None
    settings = load_settings(row.settings)
    choices = [settings.choice, *[each.choice for each in settings.earlier]]
    try:
        records = await load(store, row.sid, row.turn or 0, row.next - 1)
    except MainstayError:  # told elsewhere
        records = []
    choices += [record.choice for _, record in records if isinstance(record, Said)]
    return list(dict.fromkeys([choice.model for choice in choices if choice is not None and choice.model]))
