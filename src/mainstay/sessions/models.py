"""Which model a turn asks, where a session or an input names another than its agent's.

What is kept is a name: a string that the registry knows, or one under which the Runtime was given a Provider
(`Runtime(models={…})`). So a turn that was interrupted asks the same model in the process that takes it up: a choice of
the input is in its record, one of the session holds for the inputs that are accepted after it (`settings.choice_for`).
Settings of the input go before those of the session, and those before the agent's.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterable, Mapping
from types import ModuleType
from typing import Any

from msgspec.structs import replace

from mainstay.errors import InvalidDefinition, InvalidInput, MainstayError, ProviderError, quoted
from mainstay.model.llm import Delta, ModelChoice, ModelRequest, ModelSettings
from mainstay.ports.provider import Connecting, Provider, candidates, is_provider
from mainstay.sessions.definition import Definition


class Models:
    """The models of a Runtime besides those of its agents; each is made when it is first asked for."""

    def __init__(self, given: Mapping[str, Provider], opened: contextlib.AsyncExitStack) -> None:
        self._given, self._opened = given, opened
        self._made: dict[str, Provider] = {}

    def choice(self, model: object, settings: object) -> ModelChoice | None:
        """What a caller asks for, as it is kept."""
        if settings is not None and not isinstance(settings, ModelSettings):
            raise InvalidInput(f"settings={quoted(settings)} is not usable: give ModelSettings(…)")
        name = "" if model is None else self._name(model)
        return ModelChoice(name, settings) if name or settings is not None else None

    def _name(self, model: object) -> str:
        if isinstance(model, str):
            if model not in self._given and model != "scripted":
                _registry().check(model)
            return model
        for name, each in self._given.items():
            if each is model:
                return name
        raise InvalidInput(
            f"{quoted(model)} cannot be named, and only names are kept: give it to the Runtime, "
            "Runtime(models={'mine': …}), and say model='mine'"
        )

    async def applied(self, definition: Definition, *choices: ModelChoice | None) -> Definition:
        """The definition as these choices leave it, the first going before the others."""
        made = [choice for choice in choices if choice is not None]
        if not made:
            return definition
        name = next((choice.model for choice in made if choice.model), "")
        settings = definition.settings
        for choice in reversed(made):
            settings = settings if choice.settings is None else choice.settings.over(settings)
        provider = await self.provider(name) if name else definition.provider
        return replace(definition, provider=provider, settings=settings)

    async def provider(self, name: str) -> Provider:
        """The model by that name; one that cannot be had refuses when it is asked."""
        if name not in self._made:
            try:
                found = self._given.get(name) or _registry().named(name)
            except MainstayError as error:
                # Not kept: what is missing may be set in the environment before the next turn.
                return Missing(name, str(error) if ":" in name else f"give it one, models={{{name!r}: …}}")
            self._made[name] = found  # before the first wait: another turn may ask for it meanwhile
            await keep_open(found, self._opened, made=name not in self._given)
        return self._made[name]


async def keep_open(provider: Provider, opened: contextlib.AsyncExitStack, made: bool) -> None:
    """Keep the connections of a model until `opened` is left.

    One that this Runtime `made` from a string is closed then. An object of the host's is the host's to close: it may be
    in other Runtimes, and in the next one.
    """
    for each in candidates(provider):
        if isinstance(each, Connecting):
            await opened.enter_async_context(each.connected())
        elif made and callable(close := getattr(each, "aclose", None)):
            opened.push_async_callback(close)


def _registry() -> ModuleType:
    from mainstay.providers import registry  # noqa: PLC0415  # `import mainstay` loads no provider

    return registry


class Missing:
    """Stands for a model that was named in another process and cannot be had in this one."""

    def __init__(self, name: str, why: str) -> None:
        self.name, self._why = name, why

    def stream(self, request: ModelRequest) -> AsyncIterator[Delta]:
        raise ProviderError(
            f"this turn is to ask the model {self.name!r}, which is not to be had in this Runtime: {self._why}",
            code="no_model",
        )


def checked(models: Any) -> dict[str, Provider]:
    """`Runtime(models=…)`: names and what answers under them."""
    if not isinstance(models, Mapping):
        raise InvalidDefinition(f"models={quoted(models)} is not usable: give a dict of names and models")
    found: dict[str, Provider] = {}
    for name, model in models.items():
        if not isinstance(name, str) or not name.strip() or len(name) > 200:
            raise InvalidDefinition(f"{quoted(name)} is no name of a model")
        if isinstance(model, str):
            found[name] = _registry().named(model)
        elif is_provider(model):
            found[name] = model
        else:
            raise InvalidDefinition(f"models[{name!r}]={quoted(model)} is no model: name one, or give a Provider")
    return found


def check_limited(limits: Iterable[str], names: Iterable[str]) -> None:
    """Refuse a limit for a service that there is not: it would limit nothing. `names` are those of models at hand."""
    known = {part.partition(":")[0] for name in names for part in name.split(" | ")}  # a list of models names them all
    for limit in limits:
        service, colon, _ = limit.partition(":")
        if colon and service not in known and not _registry().is_service(service):
            raise InvalidDefinition(
                f"rate_limits[{quoted(limit)}] limits nothing: there is no provider {quoted(service)}, and no agent or "
                "model of this Runtime is named so"
            )
