"""The official SDKs as oracles: on the same bytes they must read what our readers read.

Run by `make test-wire`, which installs them; without them these tests are skipped, and counted.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote

import msgspec
import pytest

from perdure.aws import Credentials, FrameReader, Signing, signed_headers
from perdure.model.llm import ModelResponse
from perdure.model.message import Text, ToolCall
from perdure.testing.model_server import ModelServer
from tests.programs import REQUIRED
from tests.providers.wire import ANSWERS, MODEL

Read = dict[str, Any]
"""Text, calls and output tokens: what every SDK tells in its own way."""


def load(name: str) -> Any:
    return importlib.import_module(name) if "wire" in REQUIRED else pytest.importorskip(name)


def ours(response: ModelResponse) -> Read:
    calls = [(part.id, part.name, part.args) for part in response.parts if isinstance(part, ToolCall)]
    text = "".join(part.text for part in response.parts if isinstance(part, Text))
    return {"text": text, "calls": calls, "output": response.usage.output if response.usage else None}


def args(text: str) -> Any:
    try:
        return msgspec.json.decode(text or "{}")
    except msgspec.DecodeError:
        return {}


async def by_anthropic(url: str) -> Read:
    sdk = load("anthropic")
    async with sdk.AsyncAnthropic(api_key="k", base_url=url, max_retries=0) as client:
        asked = client.messages.stream(model=MODEL, max_tokens=10, messages=[{"role": "user", "content": "x"}])
        async with asked as stream:
            message = await stream.get_final_message()
    calls = [(b.id, b.name, b.input) for b in message.content if b.type == "tool_use"]
    text = "".join(block.text for block in message.content if block.type == "text")
    return {"text": text, "calls": calls, "output": message.usage.output_tokens}


async def by_openai(url: str) -> Read:
    sdk = load("openai")
    final: Any = None
    items: list[Any] = []
    async with sdk.AsyncOpenAI(api_key="k", base_url=url, max_retries=0) as client:
        async for event in await client.responses.create(model=MODEL, input="x", stream=True):
            if event.type == "response.output_item.done":
                items.append(event.item)
            elif event.type in ("response.completed", "response.incomplete"):
                final = event.response
    calls = [(i.call_id, i.name, args(i.arguments)) for i in items if i.type == "function_call"]
    said = [content for item in items if item.type == "message" for content in item.content]
    text = "".join(getattr(content, "text", None) or str(getattr(content, "refusal", "")) for content in said)
    return {"text": text, "calls": calls, "output": final.usage and final.usage.output_tokens}


async def by_openai_chat(url: str) -> Read:
    sdk = load("openai")
    text, calls, output = "", dict[int, list[str]](), None
    async with sdk.AsyncOpenAI(api_key="k", base_url=url, max_retries=0) as client:
        asked = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}], stream=True)
        async for chunk in await asked:
            output = chunk.usage.completion_tokens if chunk.usage else output
            for choice in chunk.choices or ():
                if choice.delta is None:
                    continue
                text += (choice.delta.content or "") + (choice.delta.refusal or "")
                for call in choice.delta.tool_calls or ():
                    known = calls.setdefault(call.index, ["", "", ""])
                    known[0] = call.id or known[0]
                    known[1] = call.function.name or known[1]
                    known[2] += call.function.arguments or ""
    return {"text": text, "calls": [(id, name, args(raw)) for id, name, raw in calls.values()], "output": output}


async def by_google(url: str) -> Read:
    genai = load("google.genai")
    client = genai.Client(api_key="k", http_options={"base_url": url})
    text, calls, output = "", list[Any](), None
    async for chunk in await client.aio.models.generate_content_stream(model=MODEL, contents="x"):
        counts = chunk.usage_metadata
        if counts is not None:
            output = (counts.candidates_token_count or 0) + (counts.thoughts_token_count or 0)
        for candidate in chunk.candidates or ():
            for part in (candidate.content and candidate.content.parts) or ():
                if part.function_call is not None:
                    calls.append((part.function_call.id or "", part.function_call.name, part.function_call.args or {}))
                elif part.text and not part.thought:
                    text += part.text
    return {"text": text, "calls": calls, "output": output}


ORACLES: Mapping[str, Callable[[str], Any]] = {
    "anthropic": by_anthropic,
    "openai": by_openai,
    "openai-chat": by_openai_chat,
    "google": by_google,
}

BY_INDEX = "the SDK leaves the joining to its user, who goes by index"
DIFFERENT = {
    ("anthropic", "events without names"): "the SDK passes over events without a name",
    ("anthropic", "a beginning that says nothing"): "the SDK needs the message in it",
    ("openai-chat", "a call without an index goes on without an id"): BY_INDEX,
    ("openai-chat", "whole calls with neither index nor id"): BY_INDEX,
    ("openai-chat", "whole calls with index 0 and no id"): BY_INDEX,
    ("openai-chat", "an id in every delta, and another one each time"): "the last id would count for its user",
    ("openai-chat", "arguments that are an object"): "the SDK hands on the object, which cannot be joined",
    ("openai-chat", "arguments that are null"): "for us a call without arguments has none",
    ("openai-chat", "usage within the choice"): "the SDK knows usage beside the choices only",
    ("openai-chat", "usage that counts reasoning apart"): "the SDK hands on the figures as they are",
    ("google", "usage in pieces"): "the SDK hands on each piece, and the last lacks what the first told",
    ("anthropic", "half a call"): "the SDK raises where we keep the text for the model to see",
    ("openai-chat", "calls that all have index 0"): BY_INDEX,
}
CASES = [(name, case) for name in ORACLES for case in ANSWERS[name] if (name, case) not in DIFFERENT]


@pytest.mark.parametrize(("name", "case"), CASES)
async def test_the_official_sdk_reads_the_same(name: str, case: str) -> None:
    script = ANSWERS[name][case]
    async with ModelServer([script.reply]) as server:
        assert await ORACLES[name](server.url) == ours(script.response)


# ---------------------------------------------------------------------- AWS


def test_botocore_reads_the_same_frames() -> None:
    eventstream = load("botocore.eventstream")

    for case, script in ANSWERS["bedrock"].items():
        buffer = eventstream.EventStreamBuffer()
        buffer.add_data(script.reply.body)
        theirs = [(dict(message.headers), message.payload) for message in buffer]

        assert [(frame.headers, frame.payload) for frame in FrameReader().feed(script.reply.body)] == theirs, case


@pytest.mark.parametrize("token", ["", "a-session-token"])
@pytest.mark.parametrize("model", ["anthropic.claude-v1:0", "arn:aws:bedrock:us-east-1:1:inference-profile/x y", "a%b"])
def test_botocore_signs_the_same(model: str, token: str) -> None:
    auth, requests, keys = load("botocore.auth"), load("botocore.awsrequest"), load("botocore.credentials")
    url = f"https://bedrock-runtime.us-east-1.amazonaws.com/model/{quote(model, safe='')}/converse-stream"
    sent = {"content-type": "application/json"}
    theirs = requests.AWSRequest("POST", url, data=b'{"a":1}', headers=dict(sent))
    their_keys = keys.Credentials("AKID", "SECRET", token or None)
    auth.SigV4Auth(their_keys, "bedrock", "us-east-1").add_auth(theirs)
    signing = Signing(Credentials("AKID", "SECRET", token), "us-east-1", "bedrock", theirs.headers["X-Amz-Date"])

    mine = signed_headers(signing, "POST", url, sent, hashlib.sha256(b'{"a":1}').hexdigest())

    assert mine["authorization"] == theirs.headers["Authorization"]
