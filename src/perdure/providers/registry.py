"""Model strings: "anthropic:claude-…" → a provider.

One row per service: where it is, which variable holds its key, which dialect it speaks and how it differs from that
dialect's own. Nothing is imported before a provider is made, so naming a model costs nothing, and a row that nobody
uses needs no package. Other packages add services by an entry point in the group `perdure.providers`: a function
that takes the model's name and the options below, and returns a Provider.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from msgspec import Struct

from perdure.errors import InvalidDefinition, MissingExtra, quoted
from perdure.ports.provider import Provider

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from perdure.providers.dialect import Dialect, Timeouts
    from perdure.providers.http import Key

GROUP = "perdure.providers"

Speaks: TypeAlias = Literal["anthropic", "responses", "chat", "google", "vertex", "bedrock"]


class Service(Struct, frozen=True, kw_only=True):
    """Where a service is and how it is spoken to. `key_variables`: the first that is set counts; none means no key."""

    dialect: Speaks
    base_url: str
    base_url_variable: str
    key_variables: tuple[str, ...] = ()
    header: str = "authorization"
    quirks: Mapping[str, Any] = {}
    path: str = ""
    local: bool = False


LOCAL: dict[str, Any] = {"dialect": "chat", "local": True, "quirks": {"output_with_tools": "tool", "forced": False}}
"""Servers on this machine hold a model to a schema by a grammar, which leaves no room for a call of a tool."""

SERVICES: dict[str, Service] = {
    "anthropic": Service(
        dialect="anthropic",
        base_url="https://api.anthropic.com",
        base_url_variable="ANTHROPIC_BASE_URL",
        key_variables=("ANTHROPIC_API_KEY",),
        header="x-api-key",
    ),
    "openai": Service(
        dialect="responses",
        base_url="https://api.openai.com/v1",
        base_url_variable="OPENAI_BASE_URL",
        key_variables=("OPENAI_API_KEY",),
    ),
    "openai-chat": Service(
        dialect="chat",
        base_url="https://api.openai.com/v1",
        base_url_variable="OPENAI_BASE_URL",
        key_variables=("OPENAI_API_KEY",),
        quirks={"max_tokens": "max_completion_tokens", "strict": True, "documents": True, "cache_key": True},
    ),
    "google": Service(
        dialect="google",
        base_url="https://generativelanguage.googleapis.com",
        base_url_variable="GOOGLE_GEMINI_BASE_URL",
        key_variables=("GEMINI_API_KEY", "GOOGLE_API_KEY"),
        header="x-goog-api-key",
    ),
    "vertex": Service(dialect="vertex", base_url="", base_url_variable="GOOGLE_VERTEX_BASE_URL"),
    "bedrock": Service(dialect="bedrock", base_url="", base_url_variable="AWS_ENDPOINT_URL_BEDROCK_RUNTIME"),
    "azure": Service(
        dialect="chat",
        base_url="",
        base_url_variable="AZURE_OPENAI_ENDPOINT",
        path="/openai/v1",
        key_variables=("AZURE_OPENAI_API_KEY",),
        header="api-key",
        quirks={"max_tokens": "max_completion_tokens", "strict": True, "documents": True},
    ),
    "openrouter": Service(
        dialect="chat",
        base_url="https://openrouter.ai/api/v1",
        base_url_variable="OPENROUTER_BASE_URL",
        key_variables=("OPENROUTER_API_KEY",),
        quirks={"reasoning": "reasoning", "reasoning_back": "reasoning_details", "documents": True},
    ),
    "mistral": Service(
        dialect="chat",
        base_url="https://api.mistral.ai/v1",
        base_url_variable="MISTRAL_BASE_URL",
        key_variables=("MISTRAL_API_KEY",),
        quirks={
            "usage_option": False,
            "call_id": re.compile(r"[a-zA-Z0-9]{9}"),
            "reasoning": "none",
            "seed": "random_seed",
        },
    ),
    "groq": Service(
        dialect="chat",
        base_url="https://api.groq.com/openai/v1",
        base_url_variable="GROQ_BASE_URL",
        key_variables=("GROQ_API_KEY",),
        quirks={"max_tokens": "max_completion_tokens", "output_with_tools": "tool"},
    ),
    "deepseek": Service(
        dialect="chat",
        base_url="https://api.deepseek.com",
        base_url_variable="DEEPSEEK_BASE_URL",
        key_variables=("DEEPSEEK_API_KEY",),
        quirks={
            "output": "prompt",
            "json_object": True,
            "forced": False,
            "reasoning": "none",
            "reasoning_back": "reasoning_content",
        },
    ),
    "xai": Service(
        dialect="chat",
        base_url="https://api.x.ai/v1",
        base_url_variable="XAI_BASE_URL",
        key_variables=("XAI_API_KEY",),
    ),
    "together": Service(
        dialect="chat",
        base_url="https://api.together.xyz/v1",
        base_url_variable="TOGETHER_BASE_URL",
        key_variables=("TOGETHER_API_KEY",),
        quirks={"reasoning": "none"},
    ),
    "fireworks": Service(
        dialect="chat",
        base_url="https://api.fireworks.ai/inference/v1",
        base_url_variable="FIREWORKS_BASE_URL",
        key_variables=("FIREWORKS_API_KEY",),
    ),
    "cerebras": Service(
        dialect="chat",
        base_url="https://api.cerebras.ai/v1",
        base_url_variable="CEREBRAS_BASE_URL",
        key_variables=("CEREBRAS_API_KEY",),
        quirks={"max_tokens": "max_completion_tokens", "output_with_tools": "tool"},
    ),
    "ollama": Service(**LOCAL, base_url="http://localhost:11434/v1", base_url_variable="OLLAMA_BASE_URL"),
    "vllm": Service(**LOCAL, base_url="http://localhost:8000/v1", base_url_variable="VLLM_BASE_URL"),
    "lmstudio": Service(**LOCAL, base_url="http://localhost:1234/v1", base_url_variable="LMSTUDIO_BASE_URL"),
    "llamacpp": Service(**LOCAL, base_url="http://localhost:8080/v1", base_url_variable="LLAMACPP_BASE_URL"),
}


def check(model: object) -> None:
    """Refuse a model string that names no service, or one whose package is missing, before anything runs."""
    if not isinstance(model, str):
        raise InvalidDefinition(f"{quoted(model)} names no model: write a string, 'provider:model'")
    name, colon, which = model.partition(":")
    if not colon or not which.strip():
        raise InvalidDefinition(
            f"{quoted(model)} names no model: write 'provider:model', for example 'anthropic:claude-sonnet-4-5'"
        )
    if name in SERVICES:
        if importlib.util.find_spec("httpx2") is None:
            raise MissingExtra(f"the model {quoted(model)}", "http")
    elif _entry_point(name) is None:
        known = ", ".join(SERVICES)
        raise InvalidDefinition(
            f"there is no provider {quoted(name)}: choose one of {known}, or pass a Provider object"
        )


def provider(
    model: str,
    *,
    base_url: str | None = None,
    key: Key | None = None,
    headers: Mapping[str, str] | None = None,
    timeouts: Timeouts | None = None,
    http2: bool = False,
) -> Provider:
    """The provider behind "provider:model".

    `base_url` goes before the service's own variable, `key` before its key variable; a function is asked for the key at
    every request. `headers` are sent along. `timeouts` are how long the provider may take. `http2` offers HTTP/2 to it,
    which needs the extra of that name.

        Agent(provider("openai:gpt-5", base_url="https://gateway.example/v1", key=fetch_key))
    """
    check(model)
    if key is not None and not isinstance(key, str) and not callable(key):
        raise InvalidDefinition(
            f"key=… is a {type(key).__name__}: give a string, or a function that gives one (for 'bedrock:' one that "
            "gives Credentials)"
        )
    if http2 and importlib.util.find_spec("h2") is None:
        raise InvalidDefinition(
            "http2=True needs one more package: run `pip install -e '.[http2]'` in Perdure's folder"
        )
    name, _, which = model.partition(":")
    found = _entry_point(name) if name not in SERVICES else None
    if found is not None:
        more = {} if timeouts is None else {"timeouts": timeouts}
        made: Provider = found.load()(which, base_url=base_url, key=key, headers=headers, **more)
        return made
    from perdure.providers.http import HttpProvider, KeyHeader, no_key  # noqa: PLC0415  # needs the extra

    if base_url is not None and not isinstance(base_url, str):
        raise InvalidDefinition(f"base_url={quoted(base_url)} is not usable: give an address, https://…")
    service = SERVICES[name]
    where = base_url or os.environ.get(service.base_url_variable) or service.base_url
    if service.dialect == "bedrock":
        from perdure.providers.bedrock import bedrock  # noqa: PLC0415

        return bedrock(which, where, key, headers, timeouts, http2)
    if service.dialect == "vertex":
        from perdure.providers.vertex import vertex  # noqa: PLC0415

        return vertex(which, where, key, headers, timeouts, http2)
    if not where:
        raise InvalidDefinition(f"where is {name!r}? set {service.base_url_variable}, or give base_url=…")
    if base_url is None:
        where = where.rstrip("/") + service.path
    prefix = "Bearer " if service.header == "authorization" else ""
    variables = service.key_variables or ((f"{name.upper()}_API_KEY",) if service.local else ())
    optional = service.local and key is None and not any(os.environ.get(each) for each in variables)
    authorise = no_key if optional else KeyHeader(name, variables, service.header, prefix, key)
    return HttpProvider(
        _dialect(name, service),
        which,
        name=name,
        base_url=where,
        authorise=authorise,
        headers=headers,
        timeouts=timeouts,
        http2=http2,
    )


def is_service(name: str) -> bool:
    """Whether a model string may begin with it."""
    return name in SERVICES or _entry_point(name) is not None


def named(model: str) -> Provider:
    """The provider behind a model string, "scripted" included."""
    if model == "scripted":
        from perdure.providers.scripted import EchoModel  # noqa: PLC0415

        return EchoModel()
    return provider(model)


def _dialect(name: str, service: Service) -> Dialect:
    # Imported here: each dialect is a module of its own, and a program uses one or two of them.
    if service.dialect == "anthropic":
        from perdure.providers.anthropic import AnthropicMessages  # noqa: PLC0415

        return AnthropicMessages()
    if service.dialect == "responses":
        from perdure.providers.openai_responses import OpenAIResponses  # noqa: PLC0415

        return OpenAIResponses()
    if service.dialect == "google":
        from perdure.providers.google import GoogleGenerate  # noqa: PLC0415

        return GoogleGenerate()
    from perdure.providers.openai_chat import ChatCompletions, Quirks  # noqa: PLC0415

    return ChatCompletions(name, Quirks(**service.quirks))


def _entry_point(name: str) -> EntryPoint | None:
    from importlib.metadata import entry_points  # noqa: PLC0415  # slow to import, and seldom needed

    return next(iter(entry_points(group=GROUP, name=name)), None)
