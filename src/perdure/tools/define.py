"""The `tool` decorator: a Python function as something a model may call.

Everything that can be wrong with a definition is said here, at decoration, and never in the middle of a turn.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from types import FunctionType, MethodType, NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Generic,
    NamedTuple,
    Never,
    ParamSpec,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    overload,
)

import msgspec
from msgspec import UNSET, Struct, convert, to_builtins
from msgspec.structs import asdict

from perdure.errors import InvalidDefinition, ToolError, quoted
from perdure.model import validate
from perdure.model.codec import clean
from perdure.model.retries import Retries, read_retries
from perdure.model.tool import Approval, OutputBudget, Recovery, ToolSpec
from perdure.tools.answer import output_schema_of
from perdure.tools.check import Schema
from perdure.tools.context import ToolContext
from perdure.tools.revive import ValueCodec, is_json, shown, value_codec
from perdure.tools.schema import (
    ADVICE,
    Described,
    decode_foreign,
    describe,
    description_in,
    encode_foreign,
    explain,
    parse_docstring,
    plain_type,
    tidy,
)

if sys.version_info >= (3, 14):
    from annotationlib import Format

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
FOR_EVER = 1e12
"""Seconds: no call takes longer, and a timer can count them."""


class ToolOptions(Struct, frozen=True):
    """What `@tool(…)` says beyond the function itself."""

    name: str | None = None
    description: str | None = None
    recovery: Recovery = "once"
    timeout: float | None = None
    retries: int | Retries = 0
    limit: int | None = None
    resource: str | None = None
    background: bool = False
    approval: Approval = "never"
    deferred: bool = False
    output_budget: OutputBudget | None = None


class Tool(Generic[P, R_co]):
    """A function that a model may call, and that you may call too, as if it were not decorated.

    `spec` is what the model is shown. `bind` turns the model's arguments into keyword arguments, `invoke` calls the
    function with them. In a class body the decorated method is bound like any other: `Agent(tools=[bank.balance])`.
    """

    __name__: str
    fn: Callable[P, R_co]
    spec: ToolSpec
    is_async: bool
    background: bool
    context_parameter: str | None
    needs_instance: bool
    retries: Retries

    def __init__(self, fn: Callable[P, R_co], options: ToolOptions | None = None) -> None:
        options = options or ToolOptions()
        if isinstance(fn, staticmethod):
            fn = fn.__func__
        _check_callable(fn)
        owner = f"tool {_label(fn)}"
        name = _own_name(fn) if options.name is None else options.name
        _check_options(owner, name, options)
        name = str.__str__(name)  # an enum of strings is its value
        signature = read_signature(fn, owner)
        text = parse_docstring(_doc(fn))
        parameters = [one._replace(description=text.parameters.get(one.name, "")) for one in signature.parameters]
        self._arguments = Arguments(owner, parameters)
        functools.update_wrapper(self, fn, updated=())  # an object that can be called may have a `bind` of its own
        self.__name__ = _own_name(fn)
        self.fn = fn
        self.is_async = inspect.iscoroutinefunction(_body(fn))
        self.background = options.background
        self.retries = read_retries(options.retries, "retries")
        self.context_parameter = None if signature.context is None else signature.context.name
        self.needs_instance = signature.needs_instance
        self.spec = ToolSpec(
            name=name,
            description=text.description
            if options.description is None
            else inspect.cleandoc(options.description).strip(),
            input_schema=self._arguments.schema,
            output_schema=_output_schema(signature),
            id=f"tool:{name}",
            recovery=options.recovery,
            approval=options.approval,
            deferred=options.deferred,
            timeout=options.timeout,
            retries=self.retries.more,
            limit=options.limit,
            resource=options.resource,
            output_budget=options.output_budget,
            background=options.background,
        )

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        return self.fn(*args, **kwargs)

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Tool[P, R_co]: ...
    @overload
    def __get__(self, instance: object, owner: type | None = None) -> Tool[..., R_co]: ...
    def __get__(self, instance: object, owner: type | None = None) -> Tool[P, R_co] | Tool[..., R_co]:
        if instance is None or not self.needs_instance:
            return self
        bound: Tool[..., R_co] = object.__new__(type(self))
        method = MethodType(self.fn, instance)
        bound.__dict__.update(self.__dict__, fn=method, __wrapped__=method, needs_instance=False)
        return bound

    def __repr__(self) -> str:
        return f"<Tool {self.spec.name}>"

    def bind(self, args: dict[str, Any]) -> dict[str, Any]:
        """The model's arguments, checked and converted; ToolError("invalid_tool_args") tells it what to mend."""
        try:
            return self._arguments.bind(args)
        except ValueError as error:
            raise ToolError(f"invalid arguments for {self.spec.name}: {error}", code="invalid_tool_args") from None

    def invoke(self, kwargs: dict[str, Any], ctx: ToolContext[Any]) -> Any:
        """Call the function with bound arguments and its context. An async function gives its coroutine."""
        fn: Callable[..., Any] = self.fn
        if self.context_parameter is None:
            return fn(**kwargs)
        return fn(**kwargs, **{self.context_parameter: ctx})


@overload
def tool(fn: Callable[P, R], /) -> Tool[P, R]: ...
@overload
def tool(
    *,
    name: str | None = None,
    description: str | None = None,
    recovery: Recovery = "once",
    timeout: float | None = None,
    retries: int | Retries = 0,
    limit: int | None = None,
    resource: str | None = None,
    background: bool = False,
    approval: Approval = "never",
    deferred: bool = False,
    output_budget: OutputBudget | None = None,
) -> Callable[[Callable[P, R]], Tool[P, R]]: ...
def tool(  # noqa: PLR0913 - each is a word of the public vocabulary; inside they travel as ToolOptions
    fn: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    recovery: Recovery = "once",
    timeout: float | None = None,
    retries: int | Retries = 0,
    limit: int | None = None,
    resource: str | None = None,
    background: bool = False,
    approval: Approval = "never",
    deferred: bool = False,
    output_budget: OutputBudget | None = None,
    **foreign: Never,
) -> Any:
    """Make a tool of a function, sync or async: its schema comes from its signature and docstring.

        @tool
        async def search(query: str, ctx: ToolContext, limit: int = 5) -> list[str]:
            '''Search the archive.

            Args:
                query: Words to look for.
            '''

    `recovery` says what happens to a call whose process died: `"once"` never repeats it, `"rerun"` repeats it under the
    same idempotency key, `"ask"` asks a person. `timeout` is in seconds for each attempt. `retries` is the number of
    attempts after a `Retry`, or `Retries(…)`, whose `on` names other exceptions after which a repetition is safe.
    `limit` bounds the calls of this tool that run at once, and tools of one `resource` take turns.
    `output_budget` says how much of what it returns the model is shown; without one, the agent's counts. A call of a
    `background` tool starts a process and returns its handle at once.
    """
    if foreign:
        validate.unknown_keywords("tool", foreign, validate.TOOL_KEYWORDS)
    options = ToolOptions(
        name, description, recovery, timeout, retries, limit, resource, background, approval, deferred, output_budget
    )
    return functools.partial(Tool, options=options) if fn is None else Tool(fn, options)


def as_tool(obj: Any) -> Tool[..., Any]:
    """A tool as it is, a plain function with the defaults of `@tool`."""
    made: Tool[..., Any] = obj if isinstance(obj, Tool) else Tool(obj)
    if made.needs_instance:
        raise InvalidDefinition(
            f"tool {_label(made.fn)} is a method without its instance: take it from an object (`tools=[thing.look]`)"
        )
    return made


# Arguments: their schema from the signature, and a model's JSON as keyword arguments


_SCALARS = (str, int, float, bool, NoneType)


class Parameter(NamedTuple):
    """One parameter that the model fills."""

    name: str
    annotation: Any
    default: Any = UNSET
    description: str = ""


class Arguments:
    """The arguments of one tool: their schema, and how they become keyword arguments."""

    __slots__ = ("_copies", "_hook", "_optional", "_struct", "schema")

    def __init__(self, owner: str, parameters: Sequence[Parameter]) -> None:
        types = [_parameter_type(owner, one) for one in parameters]
        described = _describe_parameters(owner, parameters, types)
        self.schema = _arguments_schema(parameters, described)
        self._optional = any(one.default is not UNSET for one in parameters)
        # Whatever msgspec hands through as it is (Any, a bare dict) must not be shared with the recorded call: the tool
        # may change it, and the next attempt would see that.
        self._copies = any(one not in _SCALARS for kind in types for one in get_args(kind) or (kind,))
        self._hook = decode_foreign if described.foreign else None
        # Defaults stay with the function, so that it gets its own objects.
        fields = [
            (one.name, kind) if one.default is UNSET else (one.name, kind, UNSET)
            for one, kind in zip(parameters, types, strict=True)
        ]
        self._struct = msgspec.defstruct("Arguments", fields, kw_only=True, forbid_unknown_fields=True)

    def bind(self, args: Any) -> dict[str, Any]:
        """Model arguments as keyword arguments; ValueError names the path and the expectation."""
        try:
            if self._copies:
                args = to_builtins(args, str_keys=True)
            try:
                # First as it is: nearly always enough, and each option of `convert` costs as much as the conversion.
                found = (
                    convert(args, self._struct)
                    if self._hook is None
                    else convert(args, self._struct, dec_hook=self._hook)
                )
            except msgspec.ValidationError:
                found = convert(args, self._struct, strict=False, str_keys=True, dec_hook=self._hook)
        except (msgspec.ValidationError, TypeError) as error:
            raise ValueError(self._explain(error)) from None
        if self._optional:
            return {name: value for name, value in asdict(found).items() if value is not UNSET}
        return asdict(found)

    def _explain(self, error: Exception) -> str:
        text = explain(error)
        if text.startswith("$: object contains unknown field"):
            return f"{text}; known: {', '.join(self._struct.__struct_fields__) or 'none'}"
        return text


def _parameter_type(owner: str, parameter: Parameter) -> Any:
    try:
        # `x: str = None` means that null is fine, whatever the annotation forgets.
        forgotten = parameter.default is None and not _takes_none(parameter.annotation)
        return plain_type(parameter.annotation | None if forgotten else parameter.annotation)
    except Exception as error:  # a foreign type may raise anything when it is looked at
        raise _unsupported(owner, parameter, error) from error


def _takes_none(annotation: Any) -> bool:
    args = get_args(annotation)
    if get_origin(annotation) is Annotated:
        return _takes_none(args[0])
    return annotation in (Any, object, None) or NoneType in args or None in args


def _describe_parameters(owner: str, parameters: Sequence[Parameter], types: Sequence[Any]) -> Described:
    try:
        return describe(types)
    except Exception:  # all at once says not which one it was: ask one by one, to name it
        for parameter, kind in zip(parameters, types, strict=True):
            try:
                describe([kind])
            except Exception as error:  # a foreign type may raise anything when it describes itself
                raise _unsupported(owner, parameter, error) from error
        raise


def _unsupported(owner: str, parameter: Parameter, error: Exception) -> InvalidDefinition:
    return InvalidDefinition(
        f"{owner}, parameter {parameter.name!r}: no model can fill {parameter.annotation!r} ({error}): {ADVICE}"
    )


def _arguments_schema(parameters: Sequence[Parameter], described: Described) -> Schema:
    properties = {}
    for parameter, schema in zip(parameters, described.schemas, strict=True):
        if text := _annotated_description(parameter.annotation) or parameter.description:
            schema["description"] = text  # also instead of what a class says of itself: this is nearer
        if parameter.default is not UNSET:
            schema.update(_shown_default(parameter.default))
        properties[parameter.name] = schema
    required = [one.name for one in parameters if one.default is UNSET]
    return tidy(
        {
            "type": "object",
            "properties": properties,
            **({"required": required} if required else {}),
            "additionalProperties": False,
        },
        described.defs,
    )


def _annotated_description(annotation: Any) -> str:
    args = get_args(annotation)
    if get_origin(annotation) is Annotated:
        texts = [description_in(one) for one in reversed(args[1:])]
    elif get_origin(annotation) in (Union, UnionType):
        texts = [_annotated_description(one) for one in args]
    else:
        return ""
    return next((text for text in texts if text and isinstance(text, str)), "")


def _shown_default(default: Any) -> Schema:
    try:
        plain = to_builtins(default, str_keys=True, enc_hook=encode_foreign)
        return {"default": plain} if clean(plain) == plain else {}
    except Exception:  # any object may be a default, and a model need not see it
        return {}


# Reading a function


class Signature(NamedTuple):
    """What callers fill, what the runtime fills, and the annotation of what comes back, as it was `written`."""

    parameters: list[Parameter]
    context: Parameter | None
    needs_instance: bool
    returns: Any
    written: Any


def read_signature(fn: Callable[..., Any], owner: str, context: type = ToolContext) -> Signature:
    """Read a function whose parameter of the type `context` is filled by the runtime."""
    try:
        signature = _signature(fn)
    except (TypeError, ValueError) as error:
        raise InvalidDefinition(
            f"{owner} has no readable signature ({error}): wrap it in a function of your own"
        ) from None
    written = _written(fn)
    given = fn.keywords if isinstance(fn, functools.partial) else {}  # settled by the host, so no model sees them
    parameters: list[Parameter] = []
    contexts: list[Parameter] = []
    needs_instance = False
    for at, one in enumerate(signature.parameters.values()):
        if at == 0 and one.name == "self" and _in_class_body(fn):
            needs_instance = True
            continue
        _check_parameter(owner, one)
        if one.name in given:
            continue
        if one.name == "ctx" and one.annotation is inspect.Parameter.empty:
            raise InvalidDefinition(
                f"{owner}: its parameter 'ctx' has no annotation, and what has none is filled by the caller, here the "
                f"model: write `ctx: {context.__name__}` for the context, or give the parameter another name"
            )
        annotation = resolve(one.annotation, written, f"{owner}, parameter {one.name!r}", context)
        if _is_context(annotation, context):
            contexts.append(Parameter(one.name, annotation))
        else:
            default = UNSET if one.default is inspect.Parameter.empty else one.default
            parameters.append(Parameter(one.name, annotation, default))
    if len(contexts) > 1:
        raise InvalidDefinition(f"{owner} has two contexts, {' and '.join(one.name for one in contexts)}: keep one")
    returns = signature.return_annotation
    return Signature(parameters, contexts[0] if contexts else None, needs_instance, returns, written)


def _signature(fn: Callable[..., Any]) -> inspect.Signature:
    if sys.version_info >= (3, 14):
        # Annotations are computed on demand there: one that cannot be must not hide the others.
        return inspect.signature(fn, annotation_format=Format.FORWARDREF)
    return inspect.signature(fn)


def resolve(annotation: Any, written: Any, where: str, context: type = ToolContext) -> Any:
    """The annotation as a type: strings and forward references are looked up where the function was written."""
    if annotation is inspect.Parameter.empty:
        return Any
    if _is_context(annotation, context):
        return annotation

    def carrier() -> None: ...

    carrier.__annotations__ = {"it": annotation}  # `get_type_hints` reads them from nowhere else
    fault: Exception | None = None
    for scope in _scopes(written):
        try:
            return get_type_hints(carrier, getattr(written, "__globals__", {}), scope, include_extras=True)["it"]
        except NameError as error:
            fault = error
        except Exception as error:  # an annotation is code, and may raise anything when it is evaluated
            fault = error
            break
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__forward_arg__", "")
    # A context may be imported for type checkers only, which is where its argument matters.
    contexts = {kind.__name__: kind for kind in (context, *context.__subclasses__())}
    if (name := re.match(r"(?:\w+\.)*(\w+)", text)) and name[1] in contexts:
        return contexts[name[1]]
    raise InvalidDefinition(
        f"{where}: the annotation {annotation!r} cannot be resolved ({fault}): "
        "import its names at run time, where the function is defined"
    )


def _scopes(written: Any) -> Iterator[dict[str, Any]]:
    """Where names of an annotation may live besides the module: first what the function has, then who defines it."""
    own = {one.__name__: one for one in getattr(written, "__type_params__", ())}
    code, cells = getattr(written, "__code__", None), getattr(written, "__closure__", None) or ()
    for name, cell in zip(code.co_freevars if code else (), cells, strict=False):
        try:
            own[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    yield own
    frame = sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith("perdure."):
        frame = frame.f_back
    yield {**frame.f_locals, **own}


def _is_context(annotation: Any, context: type) -> bool:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _is_context(args[0], context)
    if origin is Union or origin is UnionType:
        return any(_is_context(one, context) for one in args)
    kind = origin or annotation
    return isinstance(kind, type) and issubclass(kind, context)


def _output_schema(signature: Signature) -> dict[str, Any] | None:
    """The schema of what is returned, if it has one: a tool may return things that only it understands."""
    if signature.returns is inspect.Signature.empty:
        return None
    try:
        return output_schema_of(resolve(signature.returns, signature.written, "return")) or None
    except InvalidDefinition:
        return None


_RETURNS = "__perdure_returns__"


def returns_codec(fn: Callable[..., Any], where: str) -> ValueCodec | None:
    """How what a function returns is stored and brought back: by its annotation; a class returns itself. None without
    an annotation, or with `Any`: then it is JSON. Raises InvalidDefinition when the annotation cannot be resolved or
    there is no way back from JSON.

    It is kept with the function, whose annotation does not change.
    """
    plain = type(fn) is FunctionType and _RETURNS in fn.__dict__
    written = fn if plain else _written(fn)
    kept = getattr(written, "__dict__", {})
    if _RETURNS in kept:
        found: ValueCodec | None = kept[_RETURNS]
        return found
    called = fn
    while isinstance(called, functools.partial):
        called = called.func
    if isinstance(called, type):  # its signature is that of `__init__`, which returns None
        return _codec_of(called, called, where, is_async=False)
    try:
        annotation = _signature(fn).return_annotation
    except (TypeError, ValueError):  # no signature, and so no annotation: many functions written in C
        return None
    codec = _codec_of(annotation, written, where, is_async=inspect.iscoroutinefunction(_body(fn)))
    if inspect.isfunction(written):
        kept[_RETURNS] = codec
    return codec


def _codec_of(annotation: Any, written: Any, where: str, *, is_async: bool) -> ValueCodec | None:
    if annotation is inspect.Signature.empty:
        return None
    kind = resolve(annotation, written, f"{where}, what it returns")
    if not is_async and get_origin(kind) in (Awaitable, Coroutine):
        kind = get_args(kind)[-1]  # a plain function that returns what an async one does
    if is_json(kind):
        return None
    try:
        return value_codec(kind)
    except InvalidDefinition as error:
        raise InvalidDefinition(f"{where} returns {shown(kind)}: {error}") from None


def _body(fn: Any) -> Any:
    """The function that runs: behind partials and tools, or the `__call__` of an object."""
    while isinstance(fn, functools.partial | Tool):
        fn = fn.func if isinstance(fn, functools.partial) else fn.fn
    return fn if inspect.isroutine(fn) else getattr(type(fn), "__call__", fn)  # noqa: B004 - the method is wanted


def _written(fn: Any) -> Any:
    """The function whose annotations are read: behind decorators too, as `inspect.signature` does."""
    fn = _body(fn)
    while hasattr(fn, "__wrapped__"):
        fn = _body(fn.__wrapped__)
    return getattr(fn, "__func__", fn)


def _in_class_body(fn: Any) -> bool:
    path = getattr(fn, "__qualname__", "").split(".")
    return inspect.isfunction(fn) and len(path) > 1 and path[-2] != "<locals>"


def _own_name(fn: Any) -> str:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return str(getattr(fn, "__name__", type(fn).__name__))


def _label(fn: Any) -> str:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return repr(getattr(fn, "__qualname__", type(fn).__qualname__))


def _doc(fn: Any) -> Any:
    body = _body(fn)
    return getattr(body, "__doc__", None) or (None if inspect.isroutine(fn) else type(fn).__doc__)


# What a definition may say


def _check_callable(fn: Any) -> None:
    if isinstance(fn, Tool):
        raise InvalidDefinition(f"{_label(fn.fn)} is a tool already: decorate it once")
    if isinstance(fn, classmethod):
        raise InvalidDefinition(f"{_label(fn.__func__)} is a class method: use a static method or a function")
    if inspect.isclass(get_origin(fn) or fn):
        raise InvalidDefinition(f"{_label(fn)} is a class: pass a function, or an instance that can be called")
    if not callable(fn):
        raise InvalidDefinition(
            f"{quoted(fn)} cannot be called: a tool is a function; its name is given with @tool(name=…)"
        )
    body = _body(fn)
    if inspect.isasyncgenfunction(body) or inspect.isgeneratorfunction(body):
        raise InvalidDefinition(
            f"tool {_label(fn)} is a generator: return a list, and report progress with ctx.progress()"
        )


def _check_parameter(owner: str, parameter: inspect.Parameter) -> None:
    where = f"{owner}, parameter {parameter.name!r}"
    if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
        raise InvalidDefinition(
            f"{where}: a model cannot fill {parameter}: name each parameter, or take a list or dict"
        )
    if parameter.kind is inspect.Parameter.POSITIONAL_ONLY or parameter.name.startswith("__"):
        raise InvalidDefinition(f"{where} is positional-only, and models pass arguments by name: drop the `/` or `__`")
    if type(parameter.default).__name__ == "FieldInfo":
        raise InvalidDefinition(f"{where} has a Field as its default: write Annotated[…, Field(…)] and a plain default")


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_seconds(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < FOR_EVER


_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "description": (lambda it: it is None or isinstance(it, str), "a string"),
    "recovery": (lambda it: it in ("once", "rerun", "ask"), '"once", "rerun" or "ask"'),
    "timeout": (lambda it: it is None or _is_seconds(it), "seconds, more than 0"),
    "retries": (lambda it: isinstance(it, Retries) or _is_whole(it, 0), "a whole number, 0 or more, or Retries(…)"),
    "limit": (lambda it: it is None or _is_whole(it, 1), "a whole number, 1 or more"),
    "resource": (lambda it: it is None or (isinstance(it, str) and it != ""), "a name"),
    "background": (lambda it: isinstance(it, bool), "True or False"),
    "approval": (lambda it: it in ("never", "ask"), '"never" or "ask"'),
    "deferred": (lambda it: isinstance(it, bool), "True or False"),
    "output_budget": (lambda it: it is None or isinstance(it, OutputBudget), "an OutputBudget"),
}


def _check_options(owner: str, name: Any, options: ToolOptions) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidDefinition(
            f"{owner}: {quoted(name)} is no name for a tool: use 1 to 64 letters, digits, _ or -, with @tool(name=…)"
        )
    for option, (holds, expected) in _RULES.items():
        value = getattr(options, option)
        if not holds(value):
            raise InvalidDefinition(f"{owner}: {option}={quoted(value)} is not usable: give {expected}")
    if options.background and options.deferred:
        raise InvalidDefinition(
            f"{owner}: background=True and deferred=True exclude each other: in the background a tool may simply wait"
        )
