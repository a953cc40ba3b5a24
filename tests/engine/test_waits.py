"""Waits: whoever holds a completion key may resolve its wait, and nobody else; what is asked is told whole."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure import Agent, Runtime, ToolCall, tool
from perdure.engine.waits import sign, verify, wait_id
from perdure.errors import BlobMissing, UnknownWait
from perdure.model.codec import spilled
from perdure.testing import ScriptedModel

SECRET, OTHER = b"s" * 32, b"t" * 32
WAIT = "chat-1.7.1.0:deferred"
KEY = sign(SECRET, WAIT)


def test_a_key_names_its_wait() -> None:
    assert wait_id("chat-1.7", "1.0", "deferred") == WAIT
    assert verify(SECRET, KEY) == WAIT


def test_a_key_is_the_same_in_every_process() -> None:
    # Made with openssl: printf '…' | openssl dgst -sha256 -hmac …, the first 24 bytes as URL-safe base64.
    assert KEY == "msw1.Y2hhdC0xLjcuMS4wOmRlZmVycmVk.n1odaQYB7145Oy2vxl2hhz6kSp1jdzYt"


def test_all_keys_begin_alike_and_fit_into_a_link() -> None:
    for wait in (WAIT, "a:b", "ünï.1.1.0:deferred", "with space/?&#.1.1.0:deferred"):
        key = sign(SECRET, wait)
        assert key.startswith("msw1.")
        assert set(key) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_.")


@given(st.binary(min_size=1, max_size=64), st.text(st.characters(codec="utf-8")))
def test_every_wait_can_be_signed_and_verified(secret: bytes, wait: str) -> None:
    assert verify(secret, sign(secret, wait)) == wait


def test_a_key_of_another_store_is_unknown() -> None:
    with pytest.raises(UnknownWait):
        verify(OTHER, KEY)


@pytest.mark.parametrize("position", range(len(KEY)))
def test_a_key_mangled_at_any_place_is_unknown(position: int) -> None:
    for other in "AZaz09-_.!= é\0":
        mangled = KEY[:position] + other + KEY[position + 1 :]
        if mangled != KEY:
            with pytest.raises(UnknownWait):
                verify(SECRET, mangled)


@pytest.mark.parametrize("position", range(len(KEY) + 1))
def test_a_key_with_something_added_or_missing_is_unknown(position: int) -> None:
    for mangled in (KEY[:position] + "A" + KEY[position:], KEY[:position] + "!" + KEY[position:], KEY[:position]):
        if mangled != KEY:
            with pytest.raises(UnknownWait):
                verify(SECRET, mangled)


def test_unused_bits_of_a_name_cannot_be_changed() -> None:
    key = sign(SECRET, "a")
    assert key.split(".")[1] == "YQ"

    with pytest.raises(UnknownWait):
        verify(SECRET, key.replace(".YQ.", ".YR."))


@pytest.mark.parametrize(
    "key",
    [
        "",
        "msw1",
        "msw1..",
        "msw1.YQ.",
        "...",
        "msw1.YQ.\ud800",
        "msw1.\ud800.YQ",
        "msw1.YQ.é",
        "msw1." + base64.urlsafe_b64encode(b"\xff").decode().rstrip("=") + ".YQ",
        "msw1." + "A" * 100_000 + ".A",
        None,
        5,
        KEY.encode(),
        ["msw1", "YQ", "YQ"],
    ],
    ids=lambda key: repr(key)[:20],
)
def test_what_is_no_key_is_unknown_and_nothing_more_is_said(key: Any) -> None:
    with pytest.raises(UnknownWait) as raised:
        verify(SECRET, key)

    assert str(raised.value) == ("this completion key is unknown or revoked: it works only in the store that issued it")


def test_the_signature_of_one_wait_does_not_open_another() -> None:
    name = sign(SECRET, "chat-1.7.1.1:deferred").split(".")[1]
    prefix, _, signature = KEY.split(".")

    with pytest.raises(UnknownWait):
        verify(SECRET, f"{prefix}.{name}.{signature}")


# ---------------------------------------------------------------------- what lies beside the store


async def test_a_question_whose_blob_is_gone_is_reported_and_not_left_out(tmp_path: Path) -> None:
    """Somebody deleted files by hand. Nothing waits, as far as a list without it tells."""

    @tool(approval="ask")
    def seal(deed: str) -> str:
        """Seal a deed, if a person agrees."""
        return "sealed"

    model = ScriptedModel([[ToolCall("c", "seal", {"deed": "whereas " * 10_000})]])
    async with Runtime(tmp_path / "agent.db", agents=[Agent(model, tools=[seal])]) as runtime:
        session = await runtime.session("chat")
        await session.run("seal it")
        (wait,) = await runtime.store.waits()
        digest = spilled(wait.body)
        assert digest is not None
        (file,) = [each for each in tmp_path.rglob("*") if each.is_file() and each.name.endswith(digest[2:])]
        file.unlink()

        with pytest.raises(BlobMissing, match=digest):
            await session.pending()
