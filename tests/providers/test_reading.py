"""The readers, sans-IO: what they make of every script, however its bytes are cut."""

from __future__ import annotations

import random

import pytest

from mainstay.errors import ProviderError
from mainstay.model.llm import ModelResponse
from mainstay.model.message import Reasoning, Text
from mainstay.providers.dialect import Dialect
from tests.fuzzing import FULL
from tests.providers.wire import ANSWERS, MODEL, Answer, dialects

CASES = [(name, case) for name, answers in ANSWERS.items() for case in answers]


def read(dialect: Dialect, pieces: list[bytes]) -> tuple[ModelResponse, str, str]:
    reader = dialect.reader(MODEL)
    text, thought = [], []
    for piece in pieces:
        for delta in reader.feed(piece):
            if isinstance(delta, str):
                text.append(delta)
            elif isinstance(delta, Reasoning):
                thought.append(delta.text)
    return reader.close(), "".join(text), "".join(thought)


@pytest.mark.parametrize(("name", "case"), CASES)
def test_a_stream_is_read_as_its_answer(name: str, case: str) -> None:
    answer = ANSWERS[name][case]

    response, text, thought = read(dialects()[name], [answer.reply.body])

    assert response == answer.response
    assert text == "".join(part.text for part in answer.response.parts if isinstance(part, Text))
    assert thought == answer.reasoning


def splits(answer: Answer) -> list[int]:
    everywhere = list(range(1, len(answer.reply.body)))
    return everywhere if FULL else random.Random(7).sample(everywhere, min(60, len(everywhere)))


@pytest.mark.fuzz
@pytest.mark.parametrize(("name", "case"), CASES)
def test_it_does_not_matter_where_a_stream_is_split(name: str, case: str) -> None:
    answer, dialect = ANSWERS[name][case], dialects()[name]
    body = answer.reply.body
    whole = read(dialect, [body])

    assert read(dialect, [body[at : at + 1] for at in range(len(body))]) == whole
    for at in splits(answer):
        assert read(dialect, [body[:at], body[at:]]) == whole, at


TERMINAL = {
    "anthropic": b'data: {"type":"message_stop"',
    "openai": b"event: response.",
    "openai-chat": b'"finish_reason":"',
    "google": b'"modelVersion"',
    "bedrock": b"metadata",
}
"""Where, at the latest, the event begins that makes an answer complete: its last occurrence."""


@pytest.mark.fuzz
@pytest.mark.parametrize(("name", "case"), CASES)
def test_a_stream_that_ends_early_is_never_an_answer(name: str, case: str) -> None:
    """Whatever came before the dialect's terminal event, only that event makes it complete."""
    answer, dialect = ANSWERS[name][case], dialects()[name]
    body = answer.reply.body
    begins = body.rindex(TERMINAL[name])

    for at in {0, begins, *[at for at in splits(answer) if at <= begins]}:
        with pytest.raises(ProviderError) as caught:
            read(dialect, [body[:at]])
        assert caught.value.code == "broken_stream", at
        assert caught.value.retryable, at
