"""The readers, sans-IO: what they make of every script, however its bytes are cut."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable
from typing import get_args

import pytest

from perdure.errors import ProviderError
from perdure.model.llm import ModelResponse, Stop
from perdure.model.message import Reasoning, Text
from perdure.providers.dialect import Dialect
from tests.fuzzing import FULL, cases
from tests.providers.wire import ANSWERS, MODEL, Answer, dialects

STOPS = get_args(Stop)
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
def test_how_many_cuts_are_tried_is_told(record_property: Callable[[str, object], None]) -> None:
    answers = [ANSWERS[name][case] for name, case in CASES]
    every = sum(len(answer.reply.body) - 1 for answer in answers)
    tried = sum(len(splits(answer)) for answer in answers)
    record_property("perdure", f"wire: split and cut off at {tried} of {every} bytes of {len(answers)} answers")


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


def damaged(body: bytes, chance: random.Random) -> bytes:
    """A stream with bits flipped, or with its events in another order, some of them twice or not at all."""
    if chance.random() < 0.5:
        found = bytearray(body)
        for _ in range(chance.randrange(1, 4)):
            found[chance.randrange(len(found))] ^= 1 << chance.randrange(8)
        return bytes(found)
    parts = events(body)
    return b"".join(chance.choices(parts, k=len(parts)) if chance.random() < 0.5 else chance.sample(parts, len(parts)))


def events(body: bytes) -> list[bytes]:
    if body[:1] != b"\0":  # not AWS's frames, which begin with their length
        return re.findall(rb".*?(?:\r\n\r\n|\n\n)", body, re.DOTALL)
    found = []
    while body:
        size = int.from_bytes(body[:4], "big")
        found.append(body[:size])
        body = body[size:]
    return found


@pytest.mark.fuzz
@pytest.mark.parametrize("name", ANSWERS)
def test_a_damaged_stream_is_an_answer_or_a_typed_error(
    name: str, record_property: Callable[[str, object], None]
) -> None:
    """Nothing else: no other exception, and no endless loop."""
    chance, dialect, read_as = random.Random(f"{name}" if not FULL else None), dialects()[name], Counter[str]()
    bodies = [answer.reply.body for answer in ANSWERS[name].values()]
    assert all(b"".join(events(body)) == body for body in bodies)

    for _ in range(cases(2_000, 100_000)):
        body = damaged(chance.choice(bodies), chance)
        try:
            response, _, _ = read(dialect, [body])
        except ProviderError:
            read_as["a typed error"] += 1
        else:
            assert response.stop in STOPS, body
            read_as["an answer"] += 1
    record_property("perdure", f"wire: {read_as.total()} damaged streams of {name}: {dict(read_as)}")
