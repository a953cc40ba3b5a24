"""JSON schemas as each API takes them.

No API takes all of JSON Schema. What one does not know is said another way where there is one: `oneOf` as `anyOf`, a
`const` as an `enum` of one, a definition written out where it is used, a limit such as `minLength` in words in the
description. That widens what the provider holds its model to and nothing else: answers and arguments are checked
against the whole schema here, by the agent's output type and by the tool. A schema that has no such form (an object
with any keys where the API wants all of them named, say) raises Untranslatable, which names the place in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from msgspec import Struct

from perdure.errors import ProviderError
from perdure.model.codec import error_text
from perdure.model.llm import ModelRequest
from perdure.model.tool import ToolSpec
from perdure.providers.dialect import encode

T = TypeVar("T")

SILENT = frozenset({"title", "$schema", "$id", "$comment", "$anchor", "discriminator", "examples", "default"})
"""Keywords that hold a model to nothing: they are not sent to an API that does not know them."""

SHAPING = frozenset({"patternProperties", "prefixItems", "allOf", "dependentSchemas", "unevaluatedProperties"})
"""Keywords that say what a value consists of. Without them a schema would mean something else."""

NESTED = ("properties", "$defs", "patternProperties", "dependentSchemas")
LISTED = ("anyOf", "allOf", "oneOf", "prefixItems")
SINGLE = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")


WRITTEN_OUT = 5_000
"""Parts of a schema after which definitions stay definitions. Each may use the next one twice, and so on: written out,
thirty of them would have more parts than memory holds."""


class Untranslatable(Exception):
    """`place` is where in the schema (`$.properties.tags`), `why` what the API cannot take there."""

    def __init__(self, place: str, why: str) -> None:
        super().__init__(f"{place}: {why}")
        self.place, self.why = place, why


class SchemaRules(Struct, frozen=True, kw_only=True):
    """What an API takes. `keywords` and `formats` are those it knows, None all of them.

    `closed`: objects name all their properties and allow no others. `required`: and no property may be left out.
    `recursion`: a definition may refer to itself. `lone_ref`: beside a `$ref` nothing else may stand.
    """

    keywords: frozenset[str] | None = None
    formats: frozenset[str] | None = None
    closed: bool = False
    required: bool = False
    recursion: bool = True
    lone_ref: bool = True


COMMON = frozenset(
    {"type", "description", "enum", "properties", "required", "additionalProperties", "items", "anyOf", "$ref", "$defs"}
)

OPENAI_STRICT = SchemaRules(
    keywords=COMMON
    | {"const", "pattern", "format", "multipleOf", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
    | {"minItems", "maxItems"},
    formats=frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"}),
    closed=True,
    required=True,
)
ANTHROPIC_NATIVE = SchemaRules(
    keywords=COMMON | {"const", "format"},
    formats=frozenset({"date-time", "time", "date", "duration", "email", "hostname", "uri", "ipv4", "ipv6", "uuid"}),
    closed=True,
    recursion=False,
)
GOOGLE = SchemaRules(
    keywords=COMMON | {"format", "prefixItems", "minItems", "maxItems", "minimum", "maximum"},
    formats=frozenset({"date-time", "date", "time"}),
)
ANY = SchemaRules(lone_ref=False)


def translated(schema: Mapping[str, Any], rules: SchemaRules) -> dict[str, Any]:
    """The schema as the rules want it. Raises Untranslatable."""
    if rules == ANY:
        return {key: value for key, value in schema.items() if key != "$schema"}
    found: dict[str, Any] = _Translation(schema.get("$defs") or {}, rules).root(schema)
    return found


class _Translation:
    """One schema under way. `_kept` are the definitions that stay definitions: those that refer to themselves, and all
    that are met after `WRITTEN_OUT` parts."""

    def __init__(self, defs: Mapping[str, Any], rules: SchemaRules) -> None:
        self._defs, self._rules = defs, rules
        self._kept: dict[str, Any] = {}
        self._looped: dict[str, bool] = {}
        self._parts = 0

    def root(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = self._node({k: v for k, v in schema.items() if k != "$defs"}, "$")
        return {**found, "$defs": self._kept} if self._kept else found

    def _node(self, node: Any, place: str) -> Any:
        self._parts += 1
        if node is True or node == {}:
            if self._rules.closed:
                raise Untranslatable(place, "anything may stand here, and the API wants a type")
            return node
        if not isinstance(node, Mapping):
            return node
        if "$ref" in node:
            return self._reference(node, place)
        node = _respelled(node, self._rules.keywords)
        out: dict[str, Any] = {}
        advice: dict[str, Any] = {}
        for key, value in node.items():
            if self._knows(key, value):
                out[key] = self._inside(key, value, place)
            elif key in SHAPING:
                raise Untranslatable(f"{place}.{key}", f"the API knows no {key}")
            elif key not in SILENT:
                advice[key] = value
        if advice:
            limits = ", ".join(f"{key}: {encode(value).decode()}" for key, value in advice.items())
            out["description"] = " ".join(filter(None, [out.get("description", ""), f"({limits})"]))
        self._close(out, place)
        return out

    def _knows(self, key: str, value: Any) -> bool:
        rules = self._rules
        if key == "format" and rules.formats is not None:
            return value in rules.formats
        return rules.keywords is None or key in rules.keywords

    def _inside(self, key: str, value: Any, place: str) -> Any:
        if key in NESTED and isinstance(value, Mapping):
            return {name: self._node(each, f"{place}.{key}.{name}") for name, each in value.items()}
        if key in LISTED and isinstance(value, list):
            return [self._node(each, f"{place}.{key}[{index}]") for index, each in enumerate(value)]
        if key in SINGLE and not isinstance(value, bool):
            if key == "additionalProperties" and self._rules.closed:
                raise Untranslatable(place, "its keys are not named, and the API wants all of them named")
            return self._node(value, f"{place}.{key}")
        return value

    def _close(self, out: dict[str, Any], place: str) -> None:
        rules = self._rules
        kinds = out.get("type")
        if not rules.closed or not (kinds == "object" or (isinstance(kinds, list) and "object" in kinds)):
            return
        if "properties" not in out or out.get("additionalProperties") is True:
            raise Untranslatable(place, "its keys are not named, and the API wants all of them named")
        if rules.required:
            required = set(out.get("required", ()))
            optional = [name for name in out["properties"] if name not in required]
            if optional:
                raise Untranslatable(f"{place}.properties.{optional[0]}", "it may be left out, and the API wants all")
        out["additionalProperties"] = False

    def _reference(self, node: Mapping[str, Any], place: str) -> Any:
        name = str(node["$ref"]).removeprefix("#/$defs/")
        if name not in self._defs:
            raise Untranslatable(f"{place}.$ref", f"there is no definition {node['$ref']!r}")
        recursive = self._recursive(name)
        if not recursive and self._parts < WRITTEN_OUT:
            beside = {key: value for key, value in node.items() if key != "$ref"}
            return self._node({**self._defs[name], **beside}, place)
        if recursive and not self._rules.recursion:
            raise Untranslatable(f"{place}.$ref", f"{name!r} refers to itself, which the API does not take")
        if name not in self._kept:
            self._kept[name] = None  # known from here on: it refers to itself
            self._kept[name] = self._node(self._defs[name], f"$.$defs.{name}")
        return {"$ref": f"#/$defs/{name}"}

    def _recursive(self, name: str) -> bool:
        """Whether a definition comes back to itself."""
        if name not in self._looped:
            self._looped[name] = self._comes_back(name)
        return self._looped[name]

    def _comes_back(self, name: str) -> bool:
        seen: set[str] = set()
        waiting = list(_references(self._defs[name]))
        while waiting:
            each = waiting.pop()
            if each == name:
                return True
            if each not in seen and each in self._defs:
                seen.add(each)
                waiting += _references(self._defs[each])
        return False


def _references(node: Any) -> list[str]:
    if isinstance(node, Mapping):
        own = [str(node["$ref"]).removeprefix("#/$defs/")] if isinstance(node.get("$ref"), str) else []
        return own + [ref for value in node.values() for ref in _references(value)]
    return [ref for each in node for ref in _references(each)] if isinstance(node, list) else []


def _respelled(node: Mapping[str, Any], known: frozenset[str] | None) -> Mapping[str, Any]:
    """The same meaning in keywords that the API knows, where there are some."""
    if known is None:
        return node
    node = dict(node)
    if "oneOf" in node and "oneOf" not in known and "anyOf" not in node:
        node["anyOf"] = node.pop("oneOf")
    if "const" in node and "const" not in known:
        node["enum"] = [node.pop("const")]
    if "allOf" in node and "allOf" not in known and len(node["allOf"]) == 1:
        [only] = node.pop("allOf")
        node = {**only, **node}
    return node


# ---------------------------------------------------------------------- objects at the root

ROOT = "answer"
"""The property that a value is put into where an API wants an object and the value is none."""

ALTERNATIVES = ("anyOf", "oneOf", "allOf", "not", "enum", "const", "$ref")


def is_object(schema: Mapping[str, Any]) -> bool:
    return schema.get("type") == "object" and not any(word in schema for word in ALTERNATIVES)


def wrapped(schema: Mapping[str, Any]) -> dict[str, Any]:
    """An object whose only property is the value; definitions stay at the root."""
    inner = {key: value for key, value in schema.items() if key != "$defs"}
    out: dict[str, Any] = {"type": "object", "properties": {ROOT: inner}, "required": [ROOT]}
    return {**out, "$defs": schema["$defs"]} if "$defs" in schema else out


def tool_schema(schema: Mapping[str, Any], rules: SchemaRules) -> dict[str, Any]:
    """A tool's arguments, which are one object in every API: alternatives at the root become one that allows all."""
    for word in ("anyOf", "oneOf", "allOf"):
        if word in schema:
            schema = _union(schema, word)
    if not is_object(schema):
        raise Untranslatable("$", "arguments are an object, and this is none")
    return translated(schema, rules)


def _union(schema: Mapping[str, Any], word: str) -> dict[str, Any]:
    """Alternatives of objects as one object. Which properties go together is left to the check of the arguments."""
    properties: dict[str, Any] = dict(schema.get("properties") or {})
    required: list[set[str]] = []
    for index, each in enumerate(schema[word]):
        if not isinstance(each, Mapping) or ("properties" not in each and "required" not in each):
            raise Untranslatable(f"$.{word}[{index}]", "arguments are an object, and this alternative is none")
        for name, property in (each.get("properties") or {}).items():
            known = properties.get(name)
            properties[name] = property if known in (None, property) else {"anyOf": [known, property]}
        required.append(set(each.get("required") or ()))
    always = set.union(*required) if word == "allOf" else set.intersection(*required) if required else set()
    rest = {key: value for key, value in schema.items() if key not in (word, "properties", "required", "type")}
    wanted = [name for name in properties if name in always | set(schema.get("required") or ())]
    return {"type": "object", "properties": properties, "required": wanted, **rest}


# ---------------------------------------------------------------------- what dialects use


class Remembered(Generic[T]):
    """A function of a schema, by the identity of the schema: definitions are made once and asked for at every call."""

    def __init__(self, make: Callable[[dict[str, Any]], T], most: int = 2_000) -> None:
        self._make, self._most = make, most
        self._known: dict[int, tuple[object, T | Untranslatable]] = {}

    def __call__(self, schema: dict[str, Any]) -> T:
        found = self._known.get(id(schema))
        if found is None or found[0] is not schema:
            if len(self._known) > self._most:
                self._known.clear()
            try:
                made: T | Untranslatable = self._make(schema)
            except Untranslatable as error:
                made = error
            except RecursionError:
                made = Untranslatable("$", "it is nested too deeply")
            except (TypeError, ValueError, AttributeError, LookupError) as error:  # schemas of others may be anything
                made = Untranslatable("$", f"it is no JSON schema ({error_text(error)})")
            found = self._known[id(schema)] = (schema, made)
        if isinstance(found[1], Untranslatable):
            raise found[1].with_traceback(None)
        return found[1]

    def takes(self, schema: dict[str, Any]) -> bool:
        try:
            self(schema)
        except Untranslatable:
            return False
        return True


def output_for(take: Remembered[T], schema: dict[str, Any], who: str) -> T:
    """The schema of an answer as the API's own parameter takes it, or ProviderError."""
    try:
        return take(schema)
    except Untranslatable as error:
        raise ProviderError(
            f"{who} cannot take the schema of the output, at {error}. Set ModelSettings(output_mode='tool'), or "
            "'prompt', or change the output type",
            code="invalid_schema",
        ) from None


def parameters(take: Remembered[T], request: ModelRequest, who: str) -> list[tuple[ToolSpec, T]]:
    """The tools of a request with the schemas of their arguments as the API takes them, or ProviderError."""
    out: list[tuple[ToolSpec, T]] = []
    for tool in request.tools:
        try:
            out.append((tool, take(tool.input_schema)))
        except Untranslatable as error:
            raise ProviderError(
                f"{who} cannot take the tool {tool.name!r}, at {error} in its input schema. Change its parameters, or "
                "leave it out of Agent(tools=[…])",
                code="invalid_schema",
            ) from None
    return out
