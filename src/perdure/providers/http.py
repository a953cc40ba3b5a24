"""Providers over HTTP: carries what a dialect wrote, and hands the dialect what came back.

One request per `stream`: retries are the engine's, redirects are refused (they would take the key along). The
connection is closed the moment its reader goes, so a cancelled turn stops the model at once and leaves its neighbours
alone.

A provider object is part of an Agent, and agents are used in several Runtimes and event loops; connections belong to
one loop. So every loop has a client of its own, which lives from the first Runtime of that loop that has the agent to
the last.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import inspect
import os
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Mapping, Sequence
from typing import Protocol, TypeAlias
from urllib.parse import quote, unquote
from urllib.request import getproxies

from perdure.errors import InternalError, InvalidDefinition, MissingExtra, PerdureError, ProviderError, quoted
from perdure.model.llm import Delta, ModelRequest
from perdure.model.message import OpenFile, Stored
from perdure.ports.provider import no_token_count
from perdure.providers.dialect import (
    AnswerReader,
    CountsTokens,
    Dialect,
    Piece,
    Timeouts,
    Wire,
    hidden_status,
    nonsense,
    rate_report,
    too_slow,
)
from perdure.providers.structured import shape_request

try:
    import httpx2

    from perdure.providers.transport import AsyncioTransport
except ImportError:  # the class below is refused before it is used
    raise MissingExtra("a model over HTTP", "http") from None

Key: TypeAlias = str | Callable[[], str | Awaitable[str]]
"""A key, or a function that gives it for every request: keys expire and are rotated."""

ERROR_SECONDS = 10.0
"""How long the body of a refusal is read: its meaning is in its status and its first words."""

MAX_ERROR = 64 * 1024

MAX_ANSWER = 256 * 1024 * 1024
"""Bytes of one answer on the wire, a few hundred for every token: a reader keeps some of them until the end."""

FILE_STEP = 3 * 64 * 1024
"""Bytes of a file that are made base64 at once: a multiple of three, so that the pieces join without padding."""


class Authorise(Protocol):
    """What makes a request one of ours: headers from a key, or a signature over the whole of it."""

    async def __call__(self, wire: Wire, url: str, body: Callable[[], AsyncIterator[bytes]]) -> Mapping[str, str]: ...


def usable_key(provider: str, key: str) -> str:
    """A key without spaces and line ends that come with copies and files. One that no header can hold is refused."""
    key = key.strip()
    if not key.isascii() or not key.isprintable():
        raise ProviderError(f"the key for {provider!r} has characters that no key has", code="authentication")
    return key


class KeyHeader:
    """One header with the key in it. The key is asked for at every request and is in no message and no repr."""

    def __init__(
        self, provider: str, variables: Sequence[str], header: str, prefix: str = "", key: Key | None = None
    ) -> None:
        self._provider, self._variables, self._key = provider, tuple(variables), key
        self._header, self._prefix = header, prefix

    async def __call__(self, wire: Wire, url: str, body: Callable[[], AsyncIterator[bytes]]) -> Mapping[str, str]:
        key: object = self._key
        if key is None:
            key = self._variable()
        elif callable(key):
            key = key()
            key = await key if inspect.isawaitable(key) else key
        if not isinstance(key, str) or not key.strip():  # a function of the host's may return anything
            raise ProviderError(self._missing(), code="missing_key")
        return {self._header: self._prefix + usable_key(self._provider, key)}

    def lacking(self) -> str:
        """What is missing, in words; "" where there is a key, or a function that may give one."""
        return self._missing() if self._key is None and not self._variable() else ""

    def _variable(self) -> str:
        return next((found for each in self._variables if (found := os.environ.get(each, "").strip())), "")

    def _missing(self) -> str:
        where = " or ".join(self._variables) or "key=…"
        return f"there is no key for {self._provider!r}: set {where}, or make the provider with key=…"


async def no_key(wire: Wire, url: str, body: Callable[[], AsyncIterator[bytes]]) -> Mapping[str, str]:
    """For servers on this machine that ask for none."""
    return {}


@functools.cache
def _tls(http2: bool) -> ssl.SSLContext:
    """Made once: loading the certificates of the system takes a tenth of a second. One for each version of HTTP, which
    is agreed on when the connection is secured."""
    context = httpx2.create_ssl_context()
    context.set_alpn_protocols(["http/1.1", "h2"] if http2 else ["http/1.1"])
    return context


@functools.cache
def _no_tls() -> ssl.SSLContext:
    """For servers that are spoken to in the clear: it trusts no certificate at all, and costs nothing."""
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


class _Shared:
    """What one event loop has: its client, made when it is first needed, and how many Runtimes hold on to it."""

    def __init__(self) -> None:
        self.client: httpx2.AsyncClient | None = None
        self.users = 0


class HttpProvider:
    """A model behind an HTTP API."""

    def __init__(  # noqa: PLR0913  # what a provider is made of, each by name
        self,
        dialect: Dialect,
        model: str,
        *,
        name: str,
        base_url: str,
        authorise: Authorise,
        headers: Mapping[str, str] | None = None,
        http2: bool = False,
        timeouts: Timeouts | None = None,
    ) -> None:
        self.name = f"{name}:{model}"
        self._timeouts = Timeouts() if timeouts is None else timeouts
        self.model, self.dialect = model, dialect
        self._base, self._login = _without_login(base_url)
        self._authorise = authorise
        self._headers, self._http2 = _checked_headers(headers), http2
        self._fault = _fault_of(self._base)
        self._loops: dict[asyncio.AbstractEventLoop, _Shared] = {}

    def __repr__(self) -> str:
        return f"<provider {self.name} at {'no address' if self._fault else self._base}>"

    def lacking(self) -> list[str]:
        """What keeps it from being asked, as far as is known without asking: an address, a key. No key is in it."""
        found = [self._no_address()] if self._fault else []
        key = getattr(self._authorise, "lacking", None)
        return [*found, *([missing] if key is not None and (missing := key()) else [])]

    def _no_address(self) -> str:
        return f"the base URL of {self.name} is no address: {self._fault}"

    # ------------------------------------------------------------------ connections

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncGenerator[None, None]:
        """Keep the connections of this loop open meanwhile."""
        shared = self._shared()
        shared.users += 1
        try:
            yield
        finally:
            shared.users -= 1
            if not shared.users:
                self._loops.pop(asyncio.get_running_loop(), None)
                if shared.client is not None:
                    await shared.client.aclose()

    def _shared(self) -> _Shared:
        loop = asyncio.get_running_loop()
        shared = self._loops.get(loop)
        if shared is None:
            # Loops of other threads come and go meanwhile: this iterates over a copy, and an entry that is gone already
            # is no error.
            for gone in [each for each in list(self._loops) if each.is_closed()]:
                self._loops.pop(gone, None)
            shared = self._loops[loop] = _Shared()
        return shared

    async def _client(self) -> httpx2.AsyncClient:
        client = self._shared().client
        if client is not None:
            return client
        context = _no_tls() if self._base.startswith("http://") else await asyncio.to_thread(_tls, self._http2)
        shared, limits = self._shared(), self._timeouts
        if shared.client is None:
            # Where there are proxies, httpx2 knows who is reached through them, with transports of its own only.
            direct = not self._http2 and not getproxies().keys() - {"no"}
            shared.client = httpx2.AsyncClient(
                verify=context,
                transport=AsyncioTransport(context) if direct else None,
                http2=self._http2,
                timeout=httpx2.Timeout(limits.connect, read=limits.first_byte, write=limits.silence, pool=None),
                limits=httpx2.Limits(max_connections=None, max_keepalive_connections=64),
                follow_redirects=False,
            )
        return shared.client

    # ------------------------------------------------------------------ one request

    async def stream(self, request: ModelRequest) -> AsyncIterator[Delta]:
        shaped, reading = shape_request(self.dialect, request, self.model)
        wire, reader = self.dialect.build(shaped, self.model), reading(self.dialect.reader(self.model))
        # Outside of a Runtime nothing holds the connections: they live as long as the answer then.
        async with self.connected():
            client = await self._client()
            secrets: list[str] = []
            try:
                with _mapped(self.name, self._base, self._timeouts):
                    self._check_address()
                    answer = self._answer(client, wire, reader, request, secrets)
                    async with contextlib.aclosing(answer) as deltas:
                        async for delta in deltas:
                            yield delta
            except ProviderError as error:  # servers quote what they were sent
                raise _without(secrets, error) from None

    async def count_tokens(self, request: ModelRequest) -> int:
        """How many tokens a request would have, by the provider's own count. Nothing is answered, or charged for."""
        if not isinstance(self.dialect, CountsTokens):
            raise no_token_count(self.name)
        shaped, _ = shape_request(self.dialect, request, self.model)
        wire, secrets = self.dialect.build_count(shaped, self.model), list[str]()
        async with self.connected():
            client = await self._client()
            try:
                with _mapped(self.name, self._base, self._timeouts):
                    self._check_address()
                    sending = await self._request(client, wire, request.open_file, secrets)
                    response = await self._begun(client, sending)
                    try:
                        body = await _start_of(response, self._timeouts)
                    finally:
                        await response.aclose()
                if response.status_code != 200:
                    raise self._refusal(response, body, wire)
                return self.dialect.read_count(body)
            except ProviderError as error:  # servers quote what they were sent
                raise _without(secrets, error) from None

    async def _answer(
        self,
        client: httpx2.AsyncClient,
        wire: Wire,
        reader: AnswerReader,
        request: ModelRequest,
        secrets: list[str],
    ) -> AsyncGenerator[Delta, None]:
        sending = await self._request(client, wire, request.open_file, secrets)
        limits, clock = self._timeouts, asyncio.get_running_loop().time
        end = clock() + limits.whole
        response = await self._begun(client, sending)
        try:
            if request.report is not None:
                request.report(rate_report(response.headers, response.status_code == 200))
            if response.status_code != 200:
                raise self._refusal(response, await _start_of(response, self._timeouts), wire)
            kind = response.headers.get("content-type", "").lower()
            if kind.startswith(("text/html", "application/json")):
                body = await _start_of(response, self._timeouts)
                if (status := hidden_status(body)) is not None:
                    raise self.dialect.failure(status, response.headers, body)
                raise nonsense(f"{kind} in place of a stream", body)
            if (packed := response.headers.get("content-encoding", "identity").lower()) != "identity":
                raise ProviderError(
                    f"{self.name} sent its answer as {packed}, which it was asked not to do: a proxy at {self._base} "
                    "that compresses answers must leave event streams as they are",
                    code="provider_nonsense",
                )
            # Read once, when the body is begun.
            sending.extensions["timeout"]["read"] = limits.silence
            size = 0
            async for chunk in response.aiter_raw():
                if clock() > end:  # one that never ends speaks at least this often: silence ends it too
                    raise too_slow(self.name, "did not complete its answer", "whole", limits.whole)
                size += len(chunk)
                if size > MAX_ANSWER:
                    raise ProviderError(f"{self.name} sent {size:,} bytes: it is cut off", code="answer_too_large")
                for delta in reader.feed(chunk):
                    yield delta
            yield reader.close()
        finally:
            await response.aclose()

    def _refusal(self, response: httpx2.Response, body: bytes, wire: Wire) -> ProviderError:
        """What the provider refused; where nothing was found, also where it was looked for: it may be the base URL."""
        error = self.dialect.failure(response.status_code, response.headers, body)
        if response.status_code != 404:
            return error
        text = f"{error}; asked was {self._base}{wire.path}"
        return ProviderError(text, retryable=error.retryable, after=error.after, code=error.code)

    async def _begun(self, client: httpx2.AsyncClient, sending: httpx2.Request) -> httpx2.Response:
        """Send a request, and wait for the head of its answer."""
        limits = self._timeouts
        try:
            async with asyncio.timeout(limits.whole):  # a head that comes byte by byte is never silent
                return await client.send(sending, stream=True)
        except TimeoutError:
            raise too_slow(self.name, "did not complete its answer", "whole", limits.whole) from None
        except httpx2.ReadTimeout:
            raise too_slow(self.name, "did not begin to answer", "first_byte", limits.first_byte) from None

    def _check_address(self) -> None:
        """Refuse what is no address, and to leave this machine where `PERDURE_NO_NETWORK` is set: a test that would do
        so is a mistake."""
        if self._fault:
            raise ProviderError(self._no_address(), code="invalid_base_url")
        if not os.environ.get("PERDURE_NO_NETWORK"):
            return
        host = httpx2.URL(self._base).host
        if host not in ("localhost", "127.0.0.1", "::1"):
            raise ProviderError(
                f"{self.name} is at {host}, and PERDURE_NO_NETWORK forbids to go there: use a Cassette, a ModelServer "
                "or a FunctionModel in tests",
                code="no_network",
            )

    async def _authorised(self, wire: Wire, url: str, body: Callable[[], AsyncIterator[bytes]]) -> Mapping[str, str]:
        """The headers with the key. A function of the host's that fails is asked again: a vault may be away for a
        moment. The error names the type of what it raised, not its words, which may quote a key."""
        try:
            return await self._authorise(wire, url, body)
        except PerdureError:
            raise
        except Exception as error:  # the host's function may raise anything
            why = f"the function that gives the key of {self.name} raised {type(error).__name__}"
            raise ProviderError(why, retryable=True, code="no_key_given") from None

    async def _request(
        self, client: httpx2.AsyncClient, wire: Wire, open_file: OpenFile | None, secrets: list[str]
    ) -> httpx2.Request:
        """The request; `secrets` are filled with what of it no message may hold."""
        url = self._base + wire.path

        def body() -> AsyncIterator[bytes]:
            return _sent(wire.body, open_file)

        headers = {
            "content-type": "application/json",
            "accept": "text/event-stream",
            "accept-encoding": "identity",  # compressed pieces would wait for each other
            "content-length": str(wire.size),
            **wire.headers,
            **self._headers,
        }
        keys = {**await self._authorised(wire, url, body), **_basic(self._login)}
        secrets += [value.partition(" ")[2] or value for value in keys.values()]
        secrets += filter(None, [self._login.partition(":")[2]])
        secrets += [value.removeprefix("Bearer ") for value in self._headers.values()]
        headers |= keys
        return client.build_request("POST", url, headers=headers, content=body())


def _without_login(base_url: object) -> tuple[str, str]:
    """The address without the name and password in it, and those: addresses are shown and logged, headers are not."""
    if not isinstance(base_url, str):
        raise InvalidDefinition(f"base_url={quoted(base_url)} is not usable: give an address, https://…")
    scheme, found, rest = base_url.strip().rstrip("/").partition("://")
    where, slash, path = rest.partition("/")
    login, _, host = where.rpartition("@")
    return f"{scheme}{found}{host}{slash}{path}", unquote(login)


def _fault_of(base: str) -> str:
    """What is wrong with a base URL, without quoting it; "" where nothing is."""
    try:
        url = httpx2.URL(base)
    except httpx2.InvalidURL:
        return "it has a port or characters that no address has"
    if url.scheme not in ("http", "https") or not url.host:
        return "it begins with http:// or https://"
    if "%" in url.host or (url.port is not None and not 0 < url.port < 65_536):
        return "it has a port or characters that no address has"
    if url.query or url.fragment:
        return "it has a query or a fragment, and paths are put after it: give what is needed beside it by headers=…"
    return ""


def _basic(login: str) -> dict[str, str]:
    """The header of a name and password; it goes before a key in the same one."""
    return {"authorization": f"Basic {base64.b64encode(login.encode()).decode()}"} if login else {}


def _checked_headers(headers: object) -> dict[str, str]:
    """Extra headers of the host's. Their values may be keys: no message holds one."""
    if headers is None:
        return {}
    if not isinstance(headers, Mapping):
        raise InvalidDefinition("headers=… is not usable: give a dict of names and values")
    for name, value in headers.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise InvalidDefinition(f"the header {quoted(name)} is not usable: names and values are text")
        if not (name + value).isascii() or not (name + value.replace("\t", "")).isprintable():
            raise InvalidDefinition(f"the header {quoted(name)} is not usable: HTTP takes printable ASCII only")
    return dict(headers)


async def _sent(pieces: tuple[Piece, ...], open_file: OpenFile | None) -> AsyncIterator[bytes]:
    """The body, with the base64 of each file made on the way: a file is never in memory as a whole."""
    for piece in pieces:
        if not isinstance(piece, Stored):
            yield piece
            continue
        if open_file is None:
            raise InternalError("a request refers to a file and nothing can read it")
        rest = b""
        async for data in open_file(piece):
            data = rest + data
            whole = len(data) - len(data) % 3
            for start in range(0, whole, FILE_STEP):
                yield base64.b64encode(data[start : min(start + FILE_STEP, whole)])
            rest = data[whole:]
        if rest:
            yield base64.b64encode(rest)


SHORTEST_START, SHORTEST_RUN = 8, 16
"""How much of a secret is taken out of a message: its beginning where it was cut off, and any longer piece of it."""


def _without(secrets: list[str], error: ProviderError) -> ProviderError:
    """The error without keys, also where its text was cut off in the middle of one, or has it in another spelling."""
    text = str(error)
    for secret in secrets:
        for size in range(len(secret), SHORTEST_START - 1, -1):
            if secret[:size] in text:
                text = text.replace(secret[:size], KEY_MARK)
                break
    for spelling in [spelling for secret in secrets for spelling in _spellings(secret)]:
        text = _without_runs(text, spelling)
    if text == str(error):
        return error
    return ProviderError(text, retryable=error.retryable, after=error.after, code=error.code, unseen=error.unseen)


KEY_MARK = "[key]"


def _spellings(secret: str) -> list[str]:
    """How servers and proxies may quote it: as it is, in an address, in hexadecimal; and in base64, where it depends on
    what stands before it."""
    data = secret.encode()
    return [
        secret,
        quote(secret, safe=""),
        data.hex(),
        *[base64.b64encode(bytes(shift) + data).decode().rstrip("=")[4 if shift else 0 : -1] for shift in range(3)],
    ]


def _without_runs(text: str, spelling: str) -> str:
    """The text without what it has in common with a spelling, in upper or lower case, for `SHORTEST_RUN` characters or
    more."""
    known, seen = spelling.lower(), text.lower()
    out: list[str] = []
    start = at = 0
    while at + SHORTEST_RUN <= len(seen):
        end = at + SHORTEST_RUN
        if seen[at:end] not in known:
            at += 1
            continue
        while end < len(seen) and seen[at : end + 1] in known:
            end += 1
        out += [text[start:at], KEY_MARK]
        start = at = end
    return "".join([*out, text[start:]])


async def _start_of(response: httpx2.Response, limits: Timeouts) -> bytes:
    """The beginning of a body that is shown to people; never all of one that does not end."""
    found = b""
    with contextlib.suppress(httpx2.HTTPError, TimeoutError):
        async with asyncio.timeout(min(ERROR_SECONDS, limits.silence)):
            async for chunk in response.aiter_bytes():
                found += chunk
                if len(found) >= MAX_ERROR:
                    break
    return found


@contextlib.contextmanager
def _mapped(name: str, where: str, limits: Timeouts) -> Generator[None, None, None]:
    """Errors of the HTTP client as ours. Their texts are passed on only where no header can be quoted in them."""
    try:
        yield
    except httpx2.ConnectTimeout:
        raise too_slow(name, "could not be reached", "connect", limits.connect) from None
    except httpx2.TimeoutException:
        raise too_slow(name, "sent or took nothing", "silence", limits.silence) from None
    except httpx2.ConnectError as error:
        if isinstance(error.__cause__, ssl.SSLCertVerificationError) or "CERTIFICATE_VERIFY" in str(error):
            raise ProviderError(
                f"the certificate of {name} is not trusted: set SSL_CERT_FILE to your authority's ({error})", code="tls"
            ) from None
        raise ProviderError(
            f"{name} could not be reached at {where}: {error}", retryable=True, code="unreachable"
        ) from None
    except (httpx2.UnsupportedProtocol, httpx2.InvalidURL):
        raise ProviderError(f"the base URL of {name} is no address", code="invalid_base_url") from None
    except httpx2.LocalProtocolError:
        raise ProviderError(
            f"a header for {name} has characters that HTTP does not allow", code="invalid_request"
        ) from None
    except (httpx2.RemoteProtocolError, httpx2.ReadError, httpx2.WriteError, httpx2.CloseError) as error:
        raise ProviderError(
            f"the connection to {name} broke off: {error}", retryable=True, code="broken_stream", unseen=True
        ) from None
    except httpx2.ProxyError as error:
        raise ProviderError(f"the proxy for {name} refused: {error}", retryable=True, code="unreachable") from None
    except httpx2.HTTPError as error:
        raise ProviderError(f"{name}: {error}", code="http_error") from None
