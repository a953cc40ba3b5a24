"""Keys, addresses, proxies and certificates: from where each service takes them, over real sockets."""

from __future__ import annotations

import asyncio
import shlex
import ssl
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from perdure.aws import Credentials
from perdure.errors import InvalidDefinition, ProviderError
from perdure.model.llm import ModelRequest, ModelResponse
from perdure.model.message import Message
from perdure.providers import http
from perdure.providers.registry import provider
from perdure.testing.model_server import ModelServer, Reply
from tests.providers.wire import ANSWERS

ASK = ModelRequest([Message("user", "hello")])
HELLO = "Grüße, Welt 😀"
AWS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_BEARER_TOKEN_BEDROCK", "AWS_PROFILE")

PYTHON = shlex.quote(sys.executable)  # the checkout may lie below a folder with a space in its name


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An environment without keys, and AWS files of its own."""
    for name in (*AWS, "GOOGLE_ACCESS_TOKEN", "GOOGLE_CLOUD_PROJECT", "GOOGLE_CLOUD_LOCATION", "AZURE_OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))


async def answer_text(model: Any) -> str:
    async for delta in model.stream(ASK):
        if isinstance(delta, ModelResponse):
            return "".join([part.text for part in delta.all_parts() if hasattr(part, "text")])
    raise AssertionError("no answer")


async def asked_bedrock(times: int = 1, key: Any = None) -> list[dict[str, str]]:
    """The headers of requests to Bedrock, one after the other."""
    async with ModelServer([ANSWERS["bedrock"]["text"].reply] * times) as server:
        model = provider("bedrock:amazon.nova", base_url=server.url, key=key)
        for _ in range(times):
            assert await answer_text(model) == HELLO
    return [each.headers for each in server.asked]


def key_of(headers: dict[str, str]) -> str:
    return headers["authorization"].partition("Credential=")[2].partition("/")[0]


async def test_bedrock_takes_keys_of_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDVAR")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "session-1")

    [headers] = await asked_bedrock()

    assert (key_of(headers), headers["x-amz-security-token"]) == ("AKIDVAR", "session-1")
    assert "/eu-west-1/bedrock/aws4_request" in headers["authorization"]


@pytest.mark.parametrize("file", ["credentials", "config"])
@pytest.mark.parametrize("profile", ["default", "work"])
async def test_bedrock_takes_keys_of_a_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, profile: str
) -> None:
    section = f"profile {profile}" if file == "config" and profile != "default" else profile
    lines = (
        f"[other]\naws_access_key_id = WRONG\n\n[{section}]\naws_access_key_id = AKIDFILE\naws_secret_access_key = s%\n"
    )
    (tmp_path / file).write_text(lines)
    if profile != "default":
        monkeypatch.setenv("AWS_PROFILE", profile)

    [headers] = await asked_bedrock()

    assert key_of(headers) == "AKIDFILE"


async def test_bedrock_runs_the_process_of_a_profile_for_every_request(tmp_path: Path) -> None:
    """Its keys expire: what it gave once is not kept."""
    script = tmp_path / "keys.py"
    script.write_text(
        "import json, pathlib\n"
        f"count = pathlib.Path({str(tmp_path / 'count')!r})\n"
        "number = int(count.read_text()) + 1 if count.exists() else 1\n"
        "count.write_text(str(number))\n"
        "print(json.dumps({'Version': 1, 'AccessKeyId': f'AKID{number}', 'SecretAccessKey': 's', 'SessionToken': 't',"
        " 'Expiration': '2020-01-01T00:00:00Z'}))\n"
    )
    (tmp_path / "config").write_text(f"[default]\ncredential_process = {PYTHON} {shlex.quote(str(script))}\n")

    headers = await asked_bedrock(times=2)

    assert [key_of(each) for each in headers] == ["AKID1", "AKID2"]


@pytest.mark.parametrize(
    "command",
    [f"{PYTHON} -c 'raise SystemExit(3)'", "/no/such/program", f"{PYTHON} -c 'print(1)'"],
    ids=["that fails", "that is not there", "that prints nonsense"],
)
async def test_a_process_of_a_profile_that_gives_no_keys_is_told(tmp_path: Path, command: str) -> None:
    (tmp_path / "config").write_text(f"[default]\ncredential_process = {command}\n")
    with pytest.raises(ProviderError, match="credential_process") as caught:
        await answer_text(provider("bedrock:amazon.nova", base_url="http://127.0.0.1:1"))
    assert caught.value.code == "missing_key"


async def test_bedrock_takes_keys_of_a_function_each_time() -> None:
    given = iter([Credentials("AKIDONE", "s"), Credentials("AKIDTWO", "s", "t")])

    async def keys() -> Credentials:
        return next(given)

    headers = await asked_bedrock(times=2, key=keys)

    assert [key_of(each) for each in headers] == ["AKIDONE", "AKIDTWO"]
    assert ["x-amz-security-token" in each for each in headers] == [False, True]


async def test_a_bearer_token_for_bedrock_goes_before_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in AWS[:2]:
        monkeypatch.setenv(name, "AKID")
    monkeypatch.setenv("AWS_BEARER_TOKEN_BEDROCK", "token-1")

    [headers] = await asked_bedrock()
    [given] = await asked_bedrock(key="token-2")

    assert (headers["authorization"], given["authorization"]) == ("Bearer token-1", "Bearer token-2")


async def test_bedrock_without_keys_names_the_variables() -> None:
    with pytest.raises(ProviderError, match="AWS_ACCESS_KEY_ID") as caught:
        await answer_text(provider("bedrock:amazon.nova", base_url="http://127.0.0.1:1"))
    assert caught.value.code == "missing_key"


@pytest.mark.parametrize(("location", "where"), [(None, "global"), ("europe-west4", "europe-west4")])
async def test_vertex_takes_project_location_and_token(
    monkeypatch: pytest.MonkeyPatch, location: str | None, where: str
) -> None:
    monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "shop")
    if location is not None:
        monkeypatch.setenv("GOOGLE_CLOUD_LOCATION", location)
    tokens = iter(["second", "third"])
    async with ModelServer([ANSWERS["google"]["text"].reply] * 3) as server:
        monkeypatch.setenv("GOOGLE_VERTEX_BASE_URL", server.url)
        monkeypatch.setenv("GOOGLE_ACCESS_TOKEN", "first")
        assert await answer_text(provider("vertex:gemini-x")) == HELLO
        model = provider("vertex:gemini-x", key=lambda: next(tokens))
        assert [await answer_text(model), await answer_text(model)] == [HELLO, HELLO]

    path = f"/v1/projects/shop/locations/{where}/publishers/google/models/gemini-x:streamGenerateContent?alt=sse"
    assert {each.path for each in server.asked} == {path}
    assert [each.headers["authorization"] for each in server.asked] == [
        f"Bearer {t}" for t in ("first", "second", "third")
    ]


def test_vertex_without_a_project_is_refused_with_its_variable() -> None:
    with pytest.raises(InvalidDefinition, match="GOOGLE_CLOUD_PROJECT"):
        provider("vertex:gemini-x")


async def test_azure_takes_endpoint_key_and_deployment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_OPENAI_API_KEY", "k-1")
    async with ModelServer([ANSWERS["openai-chat"]["text"].reply] * 2) as server:
        monkeypatch.setenv("AZURE_OPENAI_ENDPOINT", f"{server.url}/")
        assert await answer_text(provider("azure:my-deployment")) == HELLO
        assert await answer_text(provider("azure:my-deployment", base_url=f"{server.url}/gateway")) == HELLO

    assert [each.path for each in server.asked] == ["/openai/v1/chat/completions", "/gateway/chat/completions"]
    assert server.asked[0].json["model"] == "my-deployment"
    assert server.asked[0].headers["api-key"] == "k-1"


def test_azure_without_an_endpoint_is_refused_with_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_OPENAI_ENDPOINT", raising=False)
    with pytest.raises(InvalidDefinition, match="AZURE_OPENAI_ENDPOINT"):
        provider("azure:my-deployment")


# ---------------------------------------------------------------------- proxies and certificates


async def test_a_proxy_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    async with ModelServer([ANSWERS["anthropic"]["text"].reply]) as server:
        monkeypatch.setenv("HTTP_PROXY", server.url)
        monkeypatch.setenv("http_proxy", server.url)
        assert await answer_text(provider("anthropic:x", base_url="http://models.test", key="k")) == HELLO

    [asked] = server.asked
    assert asked.path == "http://models.test/v1/messages"


@asynccontextmanager
async def over_tls(server: ModelServer, authority: Path) -> AsyncGenerator[str, None]:
    """The server's address behind TLS: bytes are passed on to it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority / "cert.pem", authority / "key.pem")

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", server.port)
        await asyncio.gather(copy(reader, inner_writer), copy(inner_reader, writer), return_exceptions=True)

    listening = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    async with listening:
        yield f"https://127.0.0.1:{listening.sockets[0].getsockname()[1]}"


@pytest.fixture
def fresh_tls() -> Iterator[None]:
    """Certificates are loaded once in a process: here for this test alone."""
    http._tls.cache_clear()
    yield
    http._tls.cache_clear()


@pytest.mark.usefixtures("fresh_tls")
async def test_certificates_of_ssl_cert_file_are_trusted(authority: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(authority / "ca.pem"))
    async with ModelServer([ANSWERS["anthropic"]["text"].reply]) as server, over_tls(server, authority) as url:
        assert await answer_text(provider("anthropic:x", base_url=url, key="k")) == HELLO


@pytest.mark.usefixtures("fresh_tls")
async def test_a_certificate_of_an_unknown_authority_is_refused_with_the_setting_to_change(
    authority: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    async with ModelServer([]) as server, over_tls(server, authority) as url:
        with pytest.raises(ProviderError, match="SSL_CERT_FILE") as caught:
            await answer_text(provider("anthropic:x", base_url=url, key="k"))

    assert (caught.value.code, caught.value.retryable, server.asked) == ("tls", False, [])


# ---------------------------------------------------------------------- base URLs


@pytest.mark.parametrize(
    "wrong",
    [
        "127.0.0.1:9",
        "localhost:9",
        "ftp://kim:hunter2@h",
        "http://",
        "http://h:99999",
        "http://kim:hun/ter2@h",
        "http://two words",
        "http://h/?key=hunter2",
        "https://h/v1#hunter2",
    ],
)
async def test_a_base_url_that_is_none_is_refused_at_once_and_not_quoted(wrong: str) -> None:
    model: Any = provider("anthropic:any", base_url=wrong, key="k")

    with pytest.raises(ProviderError, match="base URL") as caught:
        await answer_text(model)

    assert (caught.value.code, caught.value.retryable) == ("invalid_base_url", False)
    assert model.lacking() == [str(caught.value)]
    assert not [text for text in (str(caught.value), repr(model)) if "hun" in text]


async def test_where_nothing_is_found_or_nobody_is_the_address_is_named() -> None:
    async with ModelServer([Reply.error(404, {"error": {"message": "not found"}})]) as server:
        with pytest.raises(ProviderError, match=rf"asked was {server.url}/v1/v1/messages\n") as missing:
            await answer_text(provider("anthropic:any", base_url=f"{server.url}/v1", key="k"))
    assert missing.value.code == "unknown_model"

    with pytest.raises(ProviderError, match=f"at {server.url}: ") as gone:
        await answer_text(provider("anthropic:any", base_url=server.url, key="k"))
    assert gone.value.code == "unreachable"


@pytest.mark.parametrize("key", [7, Credentials("AKIA", "hunter2")])
def test_a_key_that_can_be_none_is_refused_where_it_is_given(key: Any) -> None:
    with pytest.raises(InvalidDefinition, match="key=") as caught:
        provider("bedrock:amazon.nova", key=key)
    assert "hunter2" not in str(caught.value)


# ---------------------------------------------------------------------- keys that no header can hold


async def test_space_around_a_key_for_bedrock_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", " AKIA1\n")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "one\n")

    [headers] = await asked_bedrock()

    assert key_of(headers) == "AKIA1"


@pytest.mark.parametrize("variables", [{"AWS_ACCESS_KEY_ID": "schlüssel"}, {"AWS_BEARER_TOKEN_BEDROCK": "schlüssel"}])
async def test_a_key_for_bedrock_that_no_header_can_hold_is_refused(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    for name, value in {"AWS_SECRET_ACCESS_KEY": "one", **variables}.items():
        monkeypatch.setenv(name, value)

    with pytest.raises(ProviderError, match="characters that no key has") as caught:
        await asked_bedrock()

    assert caught.value.code == "authentication"


async def test_a_function_that_gives_no_keys_for_bedrock_is_told() -> None:
    with pytest.raises(ProviderError, match="no Credentials") as caught:
        await asked_bedrock(key=lambda: None)
    assert caught.value.code == "missing_key"
