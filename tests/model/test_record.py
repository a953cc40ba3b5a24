"""The stored form of every record, byte by byte: what one release wrote, every later one must read."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from perdure.model.codec import decode_row, encode
from perdure.model.llm import Usage
from perdure.model.message import Message, Reasoning, Text, ToolCall, ToolResult
from perdure.model.outcome import (
    BudgetSpent,
    Finished,
    Incomplete,
    InvalidInput,
    Outcome,
    PendingCall,
    PluginAborted,
    ProviderFailed,
    Waiting,
    kind_of,
)
from perdure.model.plugin import Decision, Issue, PluginSnapshot
from perdure.model.record import (
    Asking,
    Closed,
    Completed,
    Delivered,
    Ended,
    Faltered,
    Framed,
    Joined,
    Noted,
    RecordRow,
    Replied,
    Said,
    Slot,
    Spilled,
    Started,
)
from perdure.model.tool import Artifact, BlobRef, Cancelled, Denied, Failed, Ok, OutcomeUnknown

HI = Message("user", "hi")

GOLDEN: list[tuple[str, RecordRow, str]] = [
    ("said", Said(HI), '{"type":"said.1","message":{"role":"user","parts":[{"type":"text","text":"hi"}]}}'),
    (
        "said in full",
        Said(HI, 7, "op1", "steer", "k"),
        '{"type":"said.1","message":{"role":"user","parts":[{"type":"text","text":"hi"}]},"at":7,"op":"op1",'
        '"kind":"steer","key":"k"}',
    ),
    ("joined", Joined(3), '{"type":"joined.1","turn":3}'),
    ("replied", Replied(1, ()), '{"type":"replied.1","step":1,"parts":[]}'),
    (
        "replied in full",
        Replied(
            2,
            (Reasoning("hm", {"s": 1}), Text("ok"), ToolCall("a", "look", {"q": [1]}), ToolCall("b", "look", raw="{")),
            Usage(1, 2, 3, 4, 5, 1, 1, 0.5),
            "tool_calls",
            "m-1",
            (0, 1),
            2,
            1,
            9,
            Slot(
                (Delivered(4, HI),),
                (HI,),
                (Decision("p", "before_tool_call", "ask_person", "sure?", ("q",)),),
                {"p": PluginSnapshot("1", 3, {"s": 1}, {"b": BlobRef("ab", 2)})},
                {"t": False, "u": None},
                12,
                True,
                (HI,),
                (Issue("lifecycle_hook_failed", "oh", "p"),),
            ),
        ),
        '{"type":"replied.1","step":2,"parts":[{"type":"reasoning","text":"hm","replay":{"s":1}},'
        '{"type":"text","text":"ok"},{"type":"tool_call","id":"a","name":"look","args":{"q":[1]}},'
        '{"type":"tool_call","id":"b","name":"look","raw":"{"}],'
        '"usage":{"input":1,"output":2,"cache_read":3,"cache_write":4,"reasoning":5,"calls":1,"unknown":1,"cost":"0.5"},'
        '"stop":"tool_calls","model":"m-1","started":[0,1],"attempt":2,"interrupted":1,"at":9,'
        '"slot":{"delivered":[{"input":4,"message":{"role":"user","parts":[{"type":"text","text":"hi"}]}}],'
        '"messages":[{"role":"user","parts":[{"type":"text","text":"hi"}]}],"decisions":['
        '{"plugin":"p","seam":"before_tool_call","kind":"ask_person","detail":"sure?","over":["q"]}],'
        '"snapshots":{"p":{"version":"1","revision":3,"state":{"s":1},'
        '"blobs":{"b":{"type":"blob","digest":"ab","size":2}}}},'
        '"tool_state":{"t":false,"u":null},"elapsed_ms":12,"last":true,'
        '"queued":[{"role":"user","parts":[{"type":"text","text":"hi"}]}],'
        '"issues":[{"code":"lifecycle_hook_failed","message":"oh","plugin":"p"}]}}',
    ),
    ("started", Started("1.0", {}), '{"type":"started.1","call":"1.0","args":{}}'),
    (
        "started in full",
        Started("1.0", {"q": 1}, 2, {"p": 1}, {"by": "ann"}, True, 1, 9, Slot(elapsed_ms=5)),
        '{"type":"started.1","call":"1.0","args":{"q":1},"attempt":2,"payload":{"p":1},"approved":{"by":"ann"},'
        '"deferred":true,"repeated":1,"at":9,"slot":{"elapsed_ms":5}}',
    ),
    (
        "faltered",
        Faltered("busy", "try later", 5000, 2, 1, "1.0", 9),
        '{"type":"faltered.1","code":"busy","message":"try later","due":5000,"attempt":2,"step":1,"call":"1.0","at":9}',
    ),
    (
        "ended with an artifact",
        Ended("1.0", Ok(1), artifacts=(Artifact("plan", "ab12", 7, "image/png"), Artifact("raw", "cd34", 0))),
        '{"type":"ended.1","call":"1.0","outcome":{"type":"ok","value":1},"artifacts":['
        '{"name":"plan","digest":"ab12","size":7,"media_type":"image/png"},{"name":"raw","digest":"cd34","size":0}]}',
    ),
    ("ended ok", Ended("1.0", Ok(1)), '{"type":"ended.1","call":"1.0","outcome":{"type":"ok","value":1}}'),
    (
        "ended ok in full",
        Ended("1.0", Ok("…", BlobRef("ab", 9)), 2, 1, 30, 9),
        '{"type":"ended.1","call":"1.0","outcome":{"type":"ok","value":"…",'
        '"whole":{"type":"blob","digest":"ab","size":9}},"attempts":2,"repeated":1,"ms":30,"at":9}',
    ),
    (
        "ended failed",
        Ended("1.0", Failed("tool_error", "no", {"x": 1})),
        '{"type":"ended.1","call":"1.0","outcome":{"type":"failed","code":"tool_error","message":"no","data":{"x":1}}}',
    ),
    (
        "ended denied",
        Ended("1.0", Denied("no", "ann"), 0),
        '{"type":"ended.1","call":"1.0","outcome":{"type":"denied","reason":"no","by":"ann"},"attempts":0}',
    ),
    (
        "ended cancelled",
        Ended("1.0", Cancelled("ann", "enough")),
        '{"type":"ended.1","call":"1.0","outcome":{"type":"cancelled","by":"ann","reason":"enough"}}',
    ),
    (
        "ended unknown",
        Ended("1.0", OutcomeUnknown("it died")),
        '{"type":"ended.1","call":"1.0","outcome":{"type":"outcome_unknown","reason":"it died"}}',
    ),
    (
        "completed",
        Completed("opening.1:ab:0", "compaction", "in short", Usage(3, 2), "m", 9, interrupted=1),
        '{"type":"completed.1","key":"opening.1:ab:0","label":"compaction","text":"in short",'
        '"usage":{"input":3,"output":2},"model":"m","at":9,"interrupted":1}',
    ),
    (
        "completed without an answer",
        Completed("opening.1:ab:0", "compaction", "", Usage(), error="overloaded"),
        '{"type":"completed.1","key":"opening.1:ab:0","label":"compaction","text":"","usage":{},"error":"overloaded"}',
    ),
    (
        "asking",
        Asking("opening.1:ab:0", "compaction", 9),
        '{"type":"asking.1","key":"opening.1:ab:0","label":"compaction","at":9}',
    ),
    (
        "framed",
        Framed("too long", (HI,), 9),
        '{"type":"framed.1","reason":"too long",'
        '"summary":[{"role":"user","parts":[{"type":"text","text":"hi"}]}],"at":9}',
    ),
    (
        "noted",
        Noted(Slot(snapshots={"p": PluginSnapshot("1", 2, {"n": 1})}), 9),
        '{"type":"noted.1","slot":{"snapshots":{"p":{"version":"1","revision":2,"state":{"n":1}}}},"at":9}',
    ),
    (
        "closed",
        Closed(Finished("", {"n": 1}), Usage(calls=1), Replied(1, (Text("hi"),)), 9),
        '{"type":"closed.1","outcome":{"type":"finished","value":{"n":1}},"usage":{"calls":1},'
        '"reply":{"type":"replied.1","step":1,"parts":[{"type":"text","text":"hi"}]},"at":9}',
    ),
    (
        "closed, the first of a child",
        Closed(Finished(), Usage(), prelude=(HI,)),
        '{"type":"closed.1","outcome":{"type":"finished"},"usage":{},'
        '"prelude":[{"role":"user","parts":[{"type":"text","text":"hi"}]}]}',
    ),
    ("noted child", Noted(Slot(children=("c",))), '{"type":"noted.1","slot":{"children":["c"]}}'),
    ("spilled", Spilled("ab", 70000), '{"type":"spilled.1","digest":"ab","size":70000}'),
]


@pytest.mark.parametrize(("record", "stored"), [pytest.param(r, s, id=name) for name, r, s in GOLDEN])
def test_a_record_is_stored_as(record: RecordRow, stored: str) -> None:
    assert encode(record).decode() == stored
    assert decode_row(stored) == record


@pytest.mark.parametrize(("record", "stored"), [pytest.param(r, s, id=name) for name, r, s in GOLDEN])
def test_a_later_releases_new_fields_do_not_disturb(record: RecordRow, stored: str) -> None:
    later = json.loads(stored) | {"added_later": {"any": [1]}}

    assert decode_row(json.dumps(later)) == record


@pytest.mark.parametrize(("record", "stored"), [pytest.param(r, s, id=name) for name, r, s in GOLDEN])
def test_the_order_of_stored_fields_does_not_matter(record: RecordRow, stored: str) -> None:
    assert decode_row(json.dumps(dict(reversed(json.loads(stored).items())))) == record


def test_every_kind_of_row_has_a_golden_form_and_a_versioned_tag() -> None:
    kinds = {type(record) for _, record, _ in GOLDEN}

    assert kinds == {Said, Joined, Replied, Started, Faltered, Ended, Asking, Completed, Framed, Noted, Closed, Spilled}
    assert sorted(str(k.__struct_config__.tag) for k in kinds) == [
        "asking.1",
        "closed.1",
        "completed.1",
        "ended.1",
        "faltered.1",
        "framed.1",
        "joined.1",
        "noted.1",
        "replied.1",
        "said.1",
        "spilled.1",
        "started.1",
    ]


@pytest.mark.parametrize(
    "stored",
    [
        "",
        "null",
        "[]",
        "{}",
        "not json",
        '{"type":"said.2","message":{"role":"user","parts":[]}}',
        '{"type":"said","message":{"role":"user","parts":[]}}',
        '{"type":"Said","message":{"role":"user","parts":[]}}',
        '{"type":1}',
        '{"type":"joined.1"}',
        '{"type":"joined.1","turn":"3"}',
        '{"type":"joined.1","turn":3} trailing',
        '{"type":"said.1","message":{"role":"robot","parts":[]}}',
        '{"type":"said.1","message":{"role":"user","parts":[{"type":"image"}]}}',
        '{"type":"ended.1","call":"1.0","outcome":{"type":"maybe"}}',
        '{"type":"closed.1","outcome":{"type":"ok"},"usage":{}}',
    ],
)
def test_what_no_release_of_ours_wrote_is_refused(stored: str) -> None:
    with pytest.raises(msgspec.MsgspecError):
        decode_row(stored)


def test_a_record_read_back_is_hashable_where_it_was_and_keeps_tuples() -> None:
    record = decode_row(encode(Said(Message("user", [Text("a"), Text("b")]))))

    assert isinstance(record, Said)
    assert record.message.parts == (Text("a"), Text("b"))
    assert type(record.message.parts) is tuple


# ---------------------------------------------------------------------- outcomes


@pytest.mark.parametrize(
    ("outcome", "stored"),
    [
        (Finished("hi"), {"type": "finished", "text": "hi"}),
        (
            Waiting((PendingCall("s.1.1.0", "approval", "pay", {"n": 1}, 5),)),
            {
                "type": "waiting",
                "calls": [{"call_id": "s.1.1.0", "kind": "approval", "tool": "pay", "args": {"n": 1}, "since": 5}],
            },
        ),
        (Cancelled("ann", "enough"), {"type": "cancelled", "by": "ann", "reason": "enough"}),
        (BudgetSpent("steps", 3), {"type": "budget_spent", "which": "steps", "limit": 3}),
        (
            ProviderFailed("busy", "no", 4),
            {"type": "provider_failed", "code": "busy", "message": "no", "attempts": 4},
        ),
        (PluginAborted("p", "c"), {"type": "plugin_aborted", "plugin": "p", "code": "c"}),
        (InvalidInput("c", "m"), {"type": "invalid_input", "code": "c", "message": "m"}),
        (Incomplete("length", "hal"), {"type": "incomplete", "reason": "length", "text": "hal"}),
        (Failed("c", "m"), {"type": "failed", "code": "c", "message": "m"}),
    ],
    ids=lambda v: kind_of(v) if isinstance(v, msgspec.Struct) else "",  # type: ignore[arg-type]
)
def test_an_outcome_is_known_by_its_tag(outcome: Outcome, stored: dict[str, Any]) -> None:
    assert json.loads(encode(outcome)) == stored
    assert kind_of(outcome) == stored["type"]
    assert decode_row(encode(Closed(outcome, Usage()))) == Closed(outcome, Usage())


def test_a_tool_result_in_a_message_is_stored_with_its_status() -> None:
    message = Message("tool", (ToolResult("a", "look", {"error": "x"}, "failed"),))

    assert encode(message) == (
        b'{"role":"tool","parts":[{"type":"tool_result","call_id":"a","name":"look",'
        b'"content":{"error":"x"},"status":"failed"}]}'
    )
