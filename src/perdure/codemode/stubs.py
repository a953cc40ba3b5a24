"""Tools as functions of a cell: their names, their parameters, their types, and what the prompt says of them.

A tool's name may be anything; a function's is an identifier, or a namespace and an identifier: `github.search-issues`
is `github.search_issues(…)`. Names that only Python refuses are mapped; two tools that come to the same name are
refused, because a call could mean either.

A signature is written in two ways from the same schema. What the model is shown is exact: enumerations as literals,
objects by their keys. What a cell is checked against is wider (any mapping for an object, any string for an
enumeration), because a checker refuses a plain `dict` variable where a typed one is asked for, and the values
themselves are checked when the call is prepared.
"""

from __future__ import annotations

import builtins
import hashlib
import keyword
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from msgspec import Struct

from perdure.codemode.inside.values import bind
from perdure.model.code import FINISH, SLEEP
from perdure.model.codec import encode
from perdure.model.tool import ToolSpec

SETTLE = "settle"
OWN = frozenset({FINISH, SLEEP, SETTLE})
"""Functions of every cell that are no tools."""

_MODULES = frozenset(sys.stdlib_module_names)
"""A namespace must not hide a module that cells import, nor one that such a module imports: in CPython `strptime` asks
`calendar` for the names of days. Those of Monty are among them, and both executors give a tool one name."""
_TAKEN = frozenset(dir(builtins)) | frozenset(keyword.kwlist)

_DEEPEST = 12
_LONGEST_DEFAULT = 60


class StubParameter(Struct, frozen=True):
    """`name` as the schema has it, `alias` as a cell writes it."""

    name: str
    alias: str
    required: bool


class Function(Struct, frozen=True):
    """A tool as a cell calls it. `path` is its name there; `parameters` are in the order of positional arguments."""

    path: str
    spec: ToolSpec
    parameters: tuple[StubParameter, ...]
    open: bool
    """Whether it takes arguments that its schema does not name."""

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments by the names of the schema. Raises TypeError in the words of Python."""
        return bind(self.path, self.signature, self.open, args, kwargs)

    @property
    def signature(self) -> list[tuple[str, str, bool]]:
        return [(each.name, each.alias, each.required) for each in self.parameters]


class Functions:
    """The tools of one cell by the paths that it calls them by. `fault` says why they cannot stand side by side.
    `texts` are what `shown` has made of them, by the schema of the output."""

    def __init__(self, tools: Sequence[ToolSpec]) -> None:
        self.by_path: dict[str, Function] = {}
        self.fault: str | None = None
        self.texts: dict[bytes, str] = {}
        for spec in tools:
            function = _function(spec)
            self.fault = self.fault or self._clash(function)
            self.by_path.setdefault(function.path, function)
        self.namespaces = tuple(sorted({path.partition(".")[0] for path in self.by_path if "." in path}))
        both = next((name for name in self.namespaces if name in self.by_path), None)
        if self.fault is None and both is not None:
            inside = next(each.spec.name for path, each in self.by_path.items() if path.startswith(f"{both}."))
            self.fault = (
                f"the tool {self.by_path[both].spec.name!r} and the namespace of {inside!r} would both be {both!r} in "
                "code: rename one"
            )

    def _clash(self, function: Function) -> str | None:
        spec, other = function.spec, self.by_path.get(function.path)
        if other is not None:
            return (
                f"the tools {other.spec.name!r} and {spec.name!r} would both be {function.path}() in code: rename one"
            )
        if function.path in OWN:
            return f"the tool {spec.name!r} has the name of a function that every cell has: rename it"
        aliases: dict[str, str] = {}
        for parameter in function.parameters:
            if parameter.alias in aliases:
                return (
                    f"the parameters {aliases[parameter.alias]!r} and {parameter.name!r} of the tool {spec.name!r} "
                    f"would both be {parameter.alias!r} in code: rename one"
                )
            aliases[parameter.alias] = parameter.name
        return None

    def get(self, path: str) -> Function | None:
        return self.by_path.get(path)

    def members(self, namespace: str) -> list[Function]:
        return [each for path, each in self.by_path.items() if path.startswith(f"{namespace}.")]

    @property
    def plain(self) -> list[Function]:
        return [each for path, each in self.by_path.items() if "." not in path]

    @cached_property
    def asynchronous(self) -> frozenset[str]:
        """The paths whose calls must be awaited."""
        return frozenset((*self.by_path, SLEEP, SETTLE))

    @cached_property
    def stubs(self) -> dict[str, str]:
        """Stub modules, for the checker."""
        return _stubs(self)

    @cached_property
    def print(self) -> str:
        """A short digest of everything that a cell could call: the print of its catalogue."""
        text = "\0".join(f"{space}\0{stub}" for space, stub in sorted(self.stubs.items()))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def identifier(name: str) -> str:
    """`name` as an identifier that hides no word or built-in of Python."""
    plain = re.sub(r"\W", "_", name, flags=re.ASCII) or "_"
    if plain[0].isdigit():
        plain = f"_{plain}"
    return f"{plain}_" if plain in _TAKEN else plain


def _path(name: str) -> str:
    *spaces, last = [part for part in name.split(".") if part] or ["_"]
    if not spaces:
        return identifier(last)
    namespace = identifier("_".join(spaces))
    namespace = f"{namespace}_" if namespace in _MODULES or namespace in OWN else namespace
    return f"{namespace}.{identifier(last)}"


def _function(spec: ToolSpec) -> Function:
    properties = spec.input_schema.get("properties") or {}
    required = set(spec.input_schema.get("required") or ())
    ordered = sorted(properties, key=lambda name: name not in required)  # stable: Python wants the required ones first
    parameters = tuple(StubParameter(name, identifier(name), name in required) for name in ordered)
    return Function(_path(spec.name), spec, parameters, spec.input_schema.get("additionalProperties", False) is True)


# Types


class _Types:
    """JSON Schema as Python annotations. `wide` is what a cell is checked against."""

    def __init__(self, *, wide: bool) -> None:
        self.wide = wide
        self.classes: dict[str, str] = {}
        self._names: dict[int, str] = {}

    def of(self, schema: Any, root: Mapping[str, Any], hint: str, depth: int = 0) -> str:
        if not isinstance(schema, Mapping) or depth > _DEEPEST:
            return "Any"
        if "$ref" in schema:
            return self._reference(str(schema["$ref"]), root, depth)
        if "enum" in schema or "const" in schema:
            return self._literal(schema.get("enum", [schema.get("const")]))
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list):
                return self._union([self.of(each, root, hint, depth + 1) for each in schema[key]])
        kind = schema.get("type")
        if isinstance(kind, list):
            return self._union([self.of({**schema, "type": each}, root, hint, depth + 1) for each in kind])
        if kind == "array":
            items = self.of(schema.get("items", True), root, hint, depth + 1)
            return f"Sequence[{items}]" if self.wide else f"list[{items}]"
        if kind == "object":
            return self._object(schema, root, hint, depth)
        return _SCALARS.get(str(kind), "Any")

    def _reference(self, reference: str, root: Mapping[str, Any], depth: int) -> str:
        found: Any = root
        for part in reference.removeprefix("#/").split("/"):
            found = found.get(part) if isinstance(found, Mapping) else None
        return self.of(found, root, reference.rsplit("/", 1)[-1], depth + 1)

    def _literal(self, values: Sequence[Any]) -> str:
        if self.wide:
            return self._union([_SCALARS.get(_KINDS.get(type(value), ""), "Any") for value in values])
        simple = all(value is None or type(value) in (str, int, bool) for value in values)
        return f"Literal[{', '.join(map(repr, values))}]" if simple and values else "Any"

    def _union(self, members: Sequence[str]) -> str:
        unique = list(dict.fromkeys(members))
        return "Any" if "Any" in unique or not unique else " | ".join(unique)

    def _object(self, schema: Mapping[str, Any], root: Mapping[str, Any], hint: str, depth: int) -> str:
        properties = schema.get("properties")
        if self.wide:
            return "Mapping[str, Any]"
        if not isinstance(properties, Mapping) or not properties:
            return f"dict[str, {self.of(schema.get('additionalProperties', True), root, hint, depth + 1)}]"
        known = self._names.get(id(schema))
        if known is not None:
            return known
        name = self._named(hint)
        self._names[id(schema)] = name
        self.classes[name] = ""  # its place, before those of its fields
        required = set(schema.get("required") or ())
        fields = {key: self.of(value, root, f"{hint}_{key}", depth + 1) for key, value in properties.items()}
        fields = {key: each if key in required else f"NotRequired[{each}]" for key, each in fields.items()}
        if all(key.isidentifier() and not keyword.iskeyword(key) for key in fields):
            lines = [f"class {name}(TypedDict):", *(f"    {key}: {each}" for key, each in fields.items())]
        else:
            pairs = ", ".join(f"{key!r}: {each}" for key, each in fields.items())
            lines = [f'{name} = TypedDict("{name}", {{{pairs}}})']
        self.classes[name] = "\n".join(lines)
        return name

    def _named(self, hint: str) -> str:
        base = (
            "".join(word[:1].upper() + word[1:] for word in re.split(r"\W|_", hint, flags=re.ASCII) if word) or "Value"
        )
        base = f"_{base}" if base[0].isdigit() or base in _TAKEN or base in _IMPORTED else base
        name, more = base, 2
        while name in self.classes:
            name, more = f"{base}{more}", more + 1
        return name


_SCALARS = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "null": "None"}
_KINDS = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
_IMPORTED = frozenset({"Any", "Literal", "Mapping", "NotRequired", "Sequence", "TypedDict"})
_HEADER = """\
from collections.abc import Mapping, Sequence
from typing import Any, Awaitable, Literal, NotRequired, TypedDict

"""


def _signature(function: Function, types: _Types, name: str) -> str:
    spec, parts = function.spec, []
    properties = spec.input_schema.get("properties") or {}
    for parameter in function.parameters:
        schema = properties[parameter.name]
        annotation = types.of(schema, spec.input_schema, f"{spec.name}_{parameter.name}")
        default = "" if parameter.required else f" = {_default(schema)}"
        parts.append(f"{parameter.alias}: {annotation}{default}")
    if function.open:
        parts.append("**more: Any")
    output = "Any"
    if spec.background:
        output = "dict[str, Any]"  # a handle
    elif spec.output_schema is not None:
        # What comes back is JSON: to a cell it is as wide or exact as it is to its reader.
        output = "Any" if types.wide else types.of(spec.output_schema, spec.output_schema, f"{spec.name}_result")
    return f"async def {name}({', '.join(parts)}) -> {output}:"


def _default(schema: Any) -> str:
    if isinstance(schema, Mapping) and "default" in schema:
        shown = repr(schema["default"])
        if len(shown) <= _LONGEST_DEFAULT:
            return shown
    return "..."


def _documentation(function: Function) -> str:
    lines = [function.spec.description.strip()] if function.spec.description.strip() else []
    properties = function.spec.input_schema.get("properties") or {}
    described = [
        (each.alias, str(properties[each.name]["description"]))
        for each in function.parameters
        if isinstance(properties[each.name], Mapping) and properties[each.name].get("description")
    ]
    if described:
        lines += ["", "Args:"] if lines else ["Args:"]
        lines += [f"    {alias}: {' '.join(text.split())}" for alias, text in described]
    text = "\n".join(lines).replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
    return f'"""{text}\n"""' if "\n" in text else f'"""{text}"""' if text else "..."


# For the checker


def _stubs(functions: Functions) -> dict[str, str]:
    """Stub modules by name: "" holds the plain functions and those that every cell has, the others are namespaces."""
    modules: dict[str, str] = {}
    for space in ("", *functions.namespaces):
        types = _Types(wide=True)
        members = functions.members(space) if space else functions.plain
        lines = [f"{_signature(each, types, each.path.rpartition('.')[2])} ..." for each in members]
        modules[space] = _HEADER + ("" if space else _OWN_STUBS) + "".join(f"{line}\n" for line in lines)
    return modules


_OWN_STUBS = """\
def __bound__() -> Any: ...
def finish(value: Any = None) -> None: ...
async def sleep(seconds: float) -> None: ...
async def settle(*calls: Awaitable[Any]) -> list[Any]: ...
"""


# For the prompt


def shown(functions: Functions, output_schema: Mapping[str, Any] | None = None) -> str:
    """The functions as Python that a model reads: classes of arguments first, then signatures with docstrings. It is
    asked for with every model call, and kept."""
    key = b"" if output_schema is None else encode(output_schema)
    if key in functions.texts:
        return functions.texts[key]
    types = _Types(wide=False)
    blocks = []
    for function in functions.by_path.values():
        # A dotted name is no Python; it is how the function is called, which is what the reader needs.
        head = _signature(function, types, function.path)
        blocks.append(f"{head}\n{textwrap.indent(_documentation(function), '    ')}")
    output = "str" if output_schema is None else types.of(output_schema, output_schema, "output")
    blocks.append(f'def finish(value: {output}) -> None:\n    """End your work with this value."""')
    classes = [text for text in types.classes.values() if text]
    text = functions.texts[key] = "\n\n".join((*classes, *blocks))
    return text
