"""G11: whatever bytes a store holds, decoding them imports nothing, runs nothing and opens nothing."""

from __future__ import annotations

import subprocess
import sys

CHILD = """
import sys

import msgspec
from perdure.model.codec import clean, decode, decode_row, encode

# Pickles that would run a command, import a module and build an object, if anybody unpickled them.
HOSTILE = [
    b"cos\\nsystem\\n(S'echo pwned'\\ntR.",
    b"\\x80\\x04\\x95\\x1d\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x8c\\x05posix\\x94\\x8c\\x06system\\x94\\x93\\x94\\x8c\\x02id\\x94\\x85\\x94R\\x94.",
    b"\\x80\\x02cantigravity\\nfly\\n.",
    b'{"__reduce__":["os.system",["id"]]}',
    b'{"py/object":"os.system","py/reduce":[{"py/function":"os.system"},{"py/tuple":["id"]}]}',
    b'{"lc":1,"type":"constructor","id":["os","system"],"kwargs":{"command":"id"}}',
    b'{"type":"constructor","id":["os","system"]}',
    b'{"type":"said.1","message":{"lc":1,"type":"constructor","id":["os","system"]}}',
    b'{"type":"os.system"}',
    b'{"type":"perdure.model.record.Said","message":{"role":"user","parts":[]}}',
    b'{"__class__":"subprocess.Popen","args":["id"]}',
    b"!!python/object/apply:os.system ['id']",
    b"__import__('os').system('id')",
    b"\\xff\\xfe\\x00",
    b"[" * 100_000,
    b'{"type":"ended.1","call":"1.0","outcome":{"type":"ok","value":' + b"[" * 100_000,
]
# The same as values of fields that hold any JSON: they come back as plain data.
INERT = [
    {"__reduce__": ["os.system", ["id"]]},
    {"lc": 1, "type": "constructor", "id": ["os", "system"], "kwargs": {"command": "id"}},
    {"py/object": "os.system"},
    {"$type": "System.Diagnostics.Process"},
]
ROWS = [encode({"type": "ended.1", "call": "1.0", "outcome": {"type": "ok", "value": v}}) for v in INERT]

# Loaded beforehand: what the loop below needs to look at errors.
refused, seen, watching = [], [], False


def hook(event, args):
    if watching and not event.startswith(("object.__getattr__", "sys._getframe")):
        seen.append(event)


sys.addaudithook(hook)
watching = True
for data in HOSTILE:
    for read in (decode_row, decode):
        try:
            read(data)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            refused += [data] if read is decode_row else []
plain = [decode_row(row).outcome.value for row in ROWS]
again = [clean(value) for value in plain]
watching = False

assert refused == HOSTILE, [d[:60] for d in HOSTILE if d not in refused]
assert plain == INERT, plain
assert again == INERT, again
print("events:", seen)
"""


def test_decoding_hostile_rows_touches_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode == 0, done.stderr
    assert done.stdout == "events: []\n"


def test_the_watch_would_have_seen_an_import_and_a_command() -> None:
    """The same hook around an unpickled row: without this, the test above could pass by not looking."""
    start, _ = CHILD.split("for data in HOSTILE:")
    child = (
        start.replace("import msgspec", "import msgspec\nimport pickle")
        + "pickle.loads(HOSTILE[1])\nwatching = False\nprint('events:', seen)\n"
    )

    done = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, timeout=60, check=False)

    assert "os.system" in done.stdout
    assert "pickle.find_class" in done.stdout
