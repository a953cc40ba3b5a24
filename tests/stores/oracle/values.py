"""What the lives of a store are made of: names, bodies, requests and answers, ordinary and odd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import precondition

from perdure.model.limit import Ask, Bound, Settle
from perdure.model.llm import Usage
from perdure.model.session import Answer, CancelRequest

CLOSED = b"closed "
JOINED = b'{"type":"joined.1"'
SPILLED = b'{"type":"spilled.1"'
"""How the last record of a closed turn begins here, an input that joined one, and what stands for a blob: nothing else
begins so. (The generator reads constants out of this code, and tries them.)"""

WORKERS = ("w1", "w2", "w3")
AGENTS = ("clerk", "scout")
SESSIONS = ("chat", "chat-2", "chat.1", "Übergröße 🦊", "名前", "e\u0301tude", "%_'\"; --")
KEYS = ("k1", "msg 2", "ключ\u2028🔑", "K1")

ODD = st.characters(exclude_categories=["Cs"], exclude_characters="\0")
"""Anything that normalisation lets through: no lone surrogates, no NUL."""

texts = st.text(ODD, max_size=12)
bodies = st.one_of(
    st.binary(max_size=40),
    texts.map(lambda t: t.encode()),
    st.sampled_from([b"", b"{}", "🦊\u202e\ufeff\U0010ffff".encode()]),
    st.binary(min_size=1, max_size=4).map(lambda b: b * 400),
).filter(lambda body: not body.startswith((CLOSED, JOINED, SPILLED)))
large = st.binary(min_size=1, max_size=4).map(lambda b: (b * (1 << 20))[: 1 << 20])
workers = st.sampled_from(WORKERS)
maybe_workers = st.sampled_from([None, *WORKERS])
maybe_stuck = st.sampled_from([(None, None), ("w1", None), ("w2", None), ("w1", "too deep"), (None, "too deep")])
"""Who is to work on an input, and why nobody is."""
lives = st.integers(0, 30_000)
os_processes = st.sampled_from(["", "os-1", "os-1", "os-2"])
agents = st.sampled_from(AGENTS)
names = st.sampled_from(SESSIONS)
kinds = st.sampled_from(["queue", "steer", "note"])
opening = st.sampled_from(["queue", "steer"])
index = st.integers(0, 1 << 16)
steps = st.integers(0, 3)
requests = st.builds(CancelRequest, st.sampled_from(["ann", "名前"]), texts, st.sampled_from(["", "r1"]))
answers = st.sampled_from(
    [Answer("approved", by="ann"), Answer("rejected", reason="non, merci"), Answer("value", {"n": [1, None, "🦊"]})]
)
few = st.lists(bodies, max_size=3)
switches = st.dictionaries(st.sampled_from(["look", "名前"]), st.sampled_from([True, False, None]))
decisions = st.sampled_from(
    [
        b"",
        b'{"label":"new"}',
        b'{"options":{"p":{"n":1}},"tools":{"generation":2,"members":{"look":true}},"parent":"chat"}',
        '{"tools":{"generation":1},"label":"🦊","snapshots":{"p":{"version":"1","revision":3}}}'.encode(),
        b'{"label":"dear","snapshots":{"p":{"version":"1","revision":2}},"ledger":{"title":{"input":5}}}',
        b'{"models":{"m":{"input":5}},"children":["chat-2"],"prelude":[{"role":"user","parts":[{"type":"text","text":"hi"}]}]}',
    ]
)


Rule = TypeVar("Rule", bound=Callable[..., None])


def has(*wanted: Callable[[Any], Any]) -> Callable[[Rule], Rule]:
    """A rule for when all of these find something."""
    return precondition(lambda self: all(find(self) for find in wanted))


spendings = st.tuples(
    st.sampled_from(["turns", "aside"]),
    st.sampled_from(["", "m-1"]),
    st.builds(lambda n, known: Usage(n, 1, calls=1) if known else Usage(unknown=1), st.integers(0, 9), st.booleans()),
)
"""What a turn has asked of a model; how much is not always known."""

LIMITS = (
    Bound("tokens/session/ever", "tokens", "session", 0, 2_000, 1_600),
    Bound("tokens/all/day", "tokens", "all", 86_400_000, 3_000, 1_000),
    Bound("turns/session/day", "turns", "session", 86_400_000, 2, 2),
)
bounds = st.lists(st.sampled_from(LIMITS), min_size=1, max_size=3, unique=True).map(tuple)
asks = st.builds(Ask, st.sampled_from([0, 10, 400]), st.sampled_from([1, 300, 5_000]))
settles = st.sampled_from([Settle(tokens=5, money=1), Settle(tokens=900), Settle(), Settle(free=True)])
