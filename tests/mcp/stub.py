"""An MCP server that does what a test says, on nothing but the standard library: it starts in milliseconds.

    python stub.py behaviour.json

The file says what it does, and is read again at every request, so that a test can change it while the server runs. Each
call of a tool is a line in `ledger` before anything else happens: what was really done, and how often.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

BEHAVIOUR = sys.argv[1] if len(sys.argv) > 1 else ""
MODERN = {"resultType": "complete", "ttlMs": 0, "cacheScope": "private"}
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}}}


def behaviour() -> dict[str, Any]:
    with open(BEHAVIOUR, encoding="utf-8") as file:
        found: dict[str, Any] = json.load(file)
    return found


def send(**message: Any) -> None:
    data = json.dumps({"jsonrpc": "2.0", **message}) + "\n"
    sys.stdout.write(data)
    sys.stdout.flush()


def ever() -> None:
    while True:
        time.sleep(3600)


def note(line: str) -> None:
    with open(behaviour()["ledger"], "a", encoding="utf-8") as file:
        file.write(line + "\n")


def wait_for(path: str) -> None:
    while not os.path.exists(path):
        time.sleep(0.005)


def text(said: str, **more: Any) -> dict[str, Any]:
    return {**MODERN, "content": [{"type": "text", "text": said}], **more}


def call(  # noqa: C901  # one case for each behaviour
    number: Any, params: dict[str, Any], does: dict[str, Any]
) -> dict[str, Any] | None:
    """The result of a call; None where it has answered, or never will."""
    name, args = params["name"], params.get("arguments") or {}
    note(f"{name} {json.dumps(args, sort_keys=True)}")
    match does.get("calls", {}).get(name, name):
        case "die":
            os._exit(3)
        case "hang":
            ever()
        case "gate":
            wait_for(args["gate"])
        case "fail":
            return text("it cannot be done", isError=True)
        case "error":
            send(id=number, error={"code": -32050, "message": "no, thank you"})
            return None
        case "picture":
            picture = {"type": "image", "data": PIXEL, "mimeType": "image/png"}
            return {**MODERN, "content": [{"type": "text", "text": "a dot"}, picture]}
        case "progress":
            token = params["_meta"]["progressToken"]
            for done in (1, 2):
                told = {"progressToken": token, "progress": done, "total": 2, "message": f"step {done}"}
                send(method="notifications/progress", params=told)
        case "meta":
            return text(json.dumps(params["_meta"]))
        case "huge":
            return text("x" * (20 * 1024 * 1024))
        case "wrong_ids":
            for other in (number + 1000, "abc", None, -1):
                send(id=other, result=text("not for you"))
        case "nonsense":
            sys.stdout.write("this is no message\n{}\n[1]\n")
            return {**MODERN, "content": [{"type": "surprise"}], "structuredContent": 7}
        case "flood":
            while True:
                send(method="notifications/message", params={"level": "info", "data": "x"})
        case "ask":
            return ask(params, args)
        case "model":
            return model(params)
        case "changes":
            send(method="notifications/tools/list_changed")
        case "environment":
            return text("\n".join([f"{name}={value}" for name, value in os.environ.items()]))
        case "open":
            try:
                with open(args["path"], "rb") as file:
                    return text(f"read {len(file.read())}")
            except OSError as error:
                return text(type(error).__name__)
        case "begin":
            import subprocess

            waits = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
            child = subprocess.Popen([sys.executable, "-I", "-S", "-c", waits, BEHAVIOUR], start_new_session=True)
            return text(str(child.pid))
        case "raw":
            sys.stdout.write(f'{{"jsonrpc": "2.0", "id": {number}, "result": {does["raw"]}}}\n')
            sys.stdout.flush()
            return None
        case "asks":
            return text(" ".join(asked_now(does["asks"], does["asks_params"], does.get("asks_times", 1))))
        case "half":
            sys.stdout.write('{"jsonrpc": "2.0", "id"')
            sys.stdout.flush()
            ever()
        case "noise":
            while True:
                sys.stdout.write("still thinking\n")
                sys.stdout.flush()
                time.sleep(0.02)
        case _:
            pass
    return text(str(args.get("text", "done")), **does.get("also", {}))


def ask(params: dict[str, Any], args: dict[str, Any]) -> dict[str, Any]:
    """Ask for a name, and say it back with what was remembered in the state."""
    answers = params.get("inputResponses")
    if answers is None:
        wanted = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
        asked = {"mode": "form", "message": "Who are you?", "requestedSchema": wanted}
        requests = {"who": {"method": "elicitation/create", "params": asked}}
        return {"resultType": "input_required", "inputRequests": requests, "requestState": json.dumps(args)}
    answer = answers["who"]
    remembered = json.loads(params["requestState"]).get("text", "")
    return text(f"{remembered} {answer['action']} {(answer.get('content') or {}).get('name', '')}".strip())


def model(params: dict[str, Any]) -> dict[str, Any]:
    answers = params.get("inputResponses")
    if answers is None:
        message = {"role": "user", "content": {"type": "text", "text": "What is the word?"}}
        asked = {"messages": [message], "maxTokens": 20}
        requests = {"word": {"method": "sampling/createMessage", "params": asked}}
        return {"resultType": "input_required", "inputRequests": requests, "requestState": "s"}
    return text(f"the model said {answers['word']['content']['text']}")


LATER: list[str] = []
"""Requests that came while something else was waited for."""


def asked_now(method: str, params: dict[str, Any], times: int) -> list[str]:
    """What the client answers to these questions, in the way of the protocol before 2026."""
    for number in range(times):
        send(id=f"q{number}", method=method, params=params)
    found: list[str] = []
    while len(found) < times:
        line = sys.stdin.readline()
        message = json.loads(line)
        if "method" in message:
            LATER.append(line)
            continue
        answer: dict[str, Any] = message.get("result") or {"action": "refused"}
        found.append(str(answer.get("action") or answer["content"]["text"]))
    return found


def listed(does: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    tools = [
        {"name": each, "description": f"The tool {each}.", "inputSchema": SCHEMA} if isinstance(each, str) else each
        for each in does.get("tools", ["echo"])
    ]
    page = {**MODERN, "tools": tools}
    if does.get("endless"):
        number = int(params.get("cursor", 0)) + 1
        return {**page, "tools": [{**tools[0], "name": f"echo{number}"}], "nextCursor": str(number)}
    return page


def answer(message: dict[str, Any]) -> None:
    does, method, number, params = behaviour(), message["method"], message.get("id"), message.get("params") or {}
    if number is None:
        return
    if method in does.get("hang", ()):
        ever()
    if method in does.get("die", ()):
        sys.stderr.write(f"cannot answer {method}\n")
        os._exit(7)
    capabilities = {"tools": {"listChanged": True}, **does.get("capabilities", {})}
    info = {"name": "stub", "version": "1"}
    if method == "server/discover" and "version" not in does:
        known = {"supportedVersions": does.get("versions", ["2026-07-28"]), "capabilities": capabilities}
        send(id=number, result={**MODERN, **known, "_meta": {"io.modelcontextprotocol/serverInfo": info}})
    elif method == "initialize" and "version" in does:
        send(id=number, result={"protocolVersion": does["version"], "capabilities": capabilities, "serverInfo": info})
    elif method == "ping":
        send(id=number, result={})
    elif method == "tools/list":
        send(id=number, result=listed(does, params))
    elif method == "tools/call":
        result = call(number, params, does)
        if result is not None:
            send(id=number, result=result)
    elif method == "resources/list":
        found = [{"uri": "stub://greeting", "name": "greeting", "mimeType": "text/plain"}]
        send(id=number, result={**MODERN, "resources": found})
    elif method == "resources/read":
        content = [{"uri": params["uri"], "mimeType": "text/plain", "text": "hello from a resource"}]
        send(id=number, result={**MODERN, "contents": content})
    elif method == "prompts/list":
        send(id=number, result={**MODERN, "prompts": [{"name": "greet", "arguments": [{"name": "who"}]}]})
    elif method == "prompts/get":
        said = {"type": "text", "text": f"Greet {params['arguments']['who']}."}
        send(id=number, result={**MODERN, "messages": [{"role": "user", "content": said}]})
    else:
        send(id=number, error={"code": -32601, "message": f"no method {method}"})


def main() -> None:
    if behaviour().get("stubborn"):
        import signal

        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while line := LATER.pop(0) if LATER else sys.stdin.readline():
        answer(json.loads(line))
    if behaviour().get("stubborn"):
        ever()


if __name__ == "__main__":
    main()
