"""Messages and their parts, as the model sees them and as they are stored.

Of a picture, a document or sound, what is stored and sent around is where its bytes are, never the bytes: `Stored`
names a blob beside the store, `Url` leaves the fetching to the provider, `FileRef` names what was uploaded to a
provider before. `Local` and `Inline` are what a host gives; they become `Stored` when the input is accepted, and no
record holds one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Protocol, TypeAlias, TypeVar

from msgspec import Struct, field
from msgspec.structs import force_setattr

from perdure.errors import InvalidInput, quoted

# ------------------------------------------------------------- files


class PathLike(Protocol):
    """What `os.PathLike` is, without the module: nothing in here touches files."""

    def __fspath__(self) -> str: ...


class Stored(Struct, frozen=True, gc=False, tag="stored"):
    """A blob of the store, by its SHA-256."""

    digest: str
    size: int


class Url(Struct, frozen=True, gc=False, tag="url"):
    """The provider fetches it, at every request."""

    url: str


class Local(Struct, frozen=True, gc=False, tag="local"):
    """A file of the host, read when the input is accepted."""

    path: str


class Inline(Struct, frozen=True, gc=False, tag="inline"):
    """Bytes in the host's memory."""

    data: bytes


Source: TypeAlias = Stored | Url | Local | Inline

TYPES = {
    "png": "image/png", "jpg": "image/jpeg", "jpeg": "image/jpeg", "gif": "image/gif", "webp": "image/webp",
    "bmp": "image/bmp", "tif": "image/tiff", "tiff": "image/tiff", "heic": "image/heic", "svg": "image/svg+xml",
    "pdf": "application/pdf", "txt": "text/plain", "md": "text/markdown", "csv": "text/csv", "html": "text/html",
    "json": "application/json", "xml": "application/xml",
    "doc": "application/msword", "xls": "application/vnd.ms-excel",
    "docx": "application/vnd.openxmlformats-officedocument.wordprocessingml.document",
    "xlsx": "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet",
    "wav": "audio/wav", "mp3": "audio/mpeg", "m4a": "audio/mp4", "ogg": "audio/ogg", "opus": "audio/opus",
    "flac": "audio/flac", "aac": "audio/aac", "webm": "audio/webm",
}  # fmt: skip
"""Media types by the end of a file's name: our own table, so that one input is the same on every machine."""


def _type_of(name: str, default: str = "application/octet-stream") -> str:
    return TYPES.get(name.rpartition(".")[2].lower(), default)


M = TypeVar("M", bound="Media")


class Media(Struct, frozen=True, gc=False, omit_defaults=True):
    """What pictures, documents and sound have in common."""

    source: Source
    media_type: str = ""
    name: str = ""

    @classmethod
    def file(cls: type[M], path: str | PathLike, media_type: str = "", name: str = "") -> M:
        """A file, read when the input is accepted; its type goes by the end of its name unless it is given."""
        text: Any = path if isinstance(path, str) else getattr(path, "__fspath__", str)()
        if not text or not isinstance(text, str):
            raise InvalidInput(f"{quoted(path)} is no path of a file")
        base = text.replace("\\", "/").rpartition("/")[2]
        return cls(Local(text), media_type or _type_of(base), name or base)

    @classmethod
    def from_bytes(cls: type[M], data: bytes, media_type: str, name: str = "") -> M:
        """Bytes that the host holds; their type must be said."""
        if type(data) is not bytes:
            raise InvalidInput(f"{quoted(data)} is not bytes: use {cls.__name__}.file(…) for a path")
        if not media_type:
            raise InvalidInput(f"say what the bytes are: {cls.__name__}.from_bytes(data, 'image/png')")
        return cls(Inline(data), media_type, name)

    @classmethod
    def url(cls: type[M], url: str, media_type: str = "", name: str = "") -> M:
        """An address that the provider fetches by itself."""
        if type(url) is not str or not url.startswith(("https://", "http://")):
            raise InvalidInput(f"{quoted(url)} is no address: a provider fetches https:// and http:// only")
        base = url.partition("?")[0].partition("#")[0].rpartition("/")[2]
        return cls(Url(url), media_type or _type_of(base, ""), name)


class Image(Media, frozen=True, gc=False, tag="image", omit_defaults=True):
    """A picture."""


class Document(Media, frozen=True, gc=False, tag="document", omit_defaults=True):
    """A PDF or a text."""


class Audio(Media, frozen=True, gc=False, tag="audio", omit_defaults=True):
    """Sound."""


class FileRef(Struct, frozen=True, gc=False, tag="file_ref", omit_defaults=True):
    """A file that was uploaded to a provider before, by the provider's name ("anthropic") and the file's id there."""

    provider: str
    id: str
    media_type: str = ""
    name: str = ""


File: TypeAlias = Image | Document | Audio | FileRef
FILES = (Image, Document, Audio, FileRef)


OpenFile: TypeAlias = Callable[[Stored], AsyncIterator[bytes]]
"""How a provider reads a blob: the pieces of its bytes, in order."""


# ------------------------------------------------------------- messages


Role: TypeAlias = Literal["system", "user", "assistant", "tool"]
ResultStatus: TypeAlias = Literal["ok", "failed", "denied", "cancelled", "outcome_unknown"]


class Text(Struct, frozen=True, gc=False, tag="text"):
    """Words."""

    text: str


class Reasoning(Struct, frozen=True, gc=False, tag="reasoning", omit_defaults=True):
    """A model's reasoning. `replay` is what its provider needs to see again, opaque to us."""

    text: str = ""
    replay: Any = None


class ToolCall(Struct, frozen=True, gc=False, tag="tool_call", omit_defaults=True):
    """A call the model asked for. `id` is the provider's; `raw` holds arguments that were not a JSON object."""

    id: str = ""
    name: str = ""
    args: dict[str, Any] = field(default_factory=dict)
    raw: str | None = None
    replay: Any = None


class ToolResult(Struct, frozen=True, gc=False, tag="tool_result", omit_defaults=True):
    """What the model gets back for one call. `call_id` repeats the provider's id of the call."""

    call_id: str
    name: str
    content: Any = None
    status: ResultStatus = "ok"
    files: tuple[File, ...] = ()


class ProviderPart(Struct, frozen=True, gc=False, tag="provider_part", omit_defaults=True):
    """Part of an answer that only its own provider understands: signed or encrypted reasoning, what a tool of the
    provider's did.

    `body` is its JSON, and goes back to the same `dialect` byte for byte. Another dialect is shown `text`, never the
    body. `kind` is the provider's own word for it.
    """

    dialect: str
    model: str
    kind: str
    body: str
    text: str = ""


Part: TypeAlias = Text | Reasoning | ToolCall | ToolResult | ProviderPart | Image | Document | Audio | FileRef


Scalar: TypeAlias = str | int | float | bool
"""A value of metadata."""


class Metadata(dict[str, Scalar]):
    """Whom something is done for, as hooks, tools and processes see it. A dict to whatever reads or encodes it, which
    cannot be changed, because everything that works for a turn shares it; `copy()` gives one that can be."""

    __slots__ = ()

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("metadata cannot be changed here: session.update(metadata=…) does that, for the turns to come")

    if not TYPE_CHECKING:  # to a checker it is the dict that it derives from
        __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __copy__(self) -> Metadata:
        return self

    def __deepcopy__(self, _: object) -> Metadata:
        return self

    def __reduce__(self) -> tuple[type[Metadata], tuple[dict[str, Scalar]]]:
        return Metadata, (dict(self),)


NO_METADATA = Metadata()


class Message(Struct, frozen=True, gc=False):
    """One message: a role and its parts. A plain string is accepted as the only part."""

    role: Role
    parts: tuple[Part, ...] = ()

    if TYPE_CHECKING:

        def __init__(self, role: Role, parts: str | Iterable[Part] = ()) -> None: ...

    def __post_init__(self) -> None:
        given: object = self.parts
        if type(given) is tuple:
            return
        if isinstance(given, str):
            force_setattr(self, "parts", (Text(given),))
        else:
            if not isinstance(given, Iterable):
                raise InvalidInput(f"the parts of a message are text, or a list of parts, not {quoted(given)}")
            force_setattr(self, "parts", tuple(given))

    @property
    def text(self) -> str:
        """The text parts, joined."""
        return "".join([p.text for p in self.parts if type(p) is Text])

    @property
    def tool_calls(self) -> list[ToolCall]:
        return [p for p in self.parts if type(p) is ToolCall]

    @property
    def tool_results(self) -> list[ToolResult]:
        return [p for p in self.parts if type(p) is ToolResult]


InputContent: TypeAlias = str | Message | Sequence[str | Part]
"""What a host may say: words, a user message, or words and files in a list."""


def unanswered(messages: Iterable[Message]) -> list[str]:
    """Provider ids of calls that no result follows: a history with any of these cannot be continued."""
    waiting: dict[str, None] = {}
    for message in messages:
        for part in message.parts:
            if type(part) is ToolCall:
                waiting[part.id] = None
            elif type(part) is ToolResult:
                waiting.pop(part.call_id, None)
    return list(waiting)
