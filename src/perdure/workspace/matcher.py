"""A program of its own that looks for a pattern in texts. `search.py` starts it and hands it the bytes of files.

A pattern that a model wrote may take for ever, and Python's `re` stops every thread of its process meanwhile. Here it
stops this program only, and the kernel ends that when its time on a CPU is spent, whatever becomes of the one that
started it. It opens no files: which ones may be read is decided where paths are checked.

First comes a line of JSON, an object with `pattern`, `ignore_case`, `before`, `after`, `most` and `seconds`, answered
with `{}` or `{"error"}`. Then, again and again, a line `[[first line, bytes], …]` and after it the bytes of these texts
together, answered with a line `[[text, line, column, words, lines before, lines after], …]`.
"""

import json
import re
import resource
import sys

LONGEST = 2000
"""Characters of a line that are shown, and 20 times as many are looked at."""
MEMORY = 2 * 1024**3


def main() -> None:
    asked = json.loads(sys.stdin.buffer.readline())
    resource.setrlimit(resource.RLIMIT_CPU, (asked["seconds"], asked["seconds"]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    try:
        pattern = re.compile(asked["pattern"], re.IGNORECASE if asked["ignore_case"] else 0)
    except (re.error, RecursionError, OverflowError, MemoryError) as error:
        answer({"error": str(error) or type(error).__name__})
        return
    answer({})
    while line := sys.stdin.buffer.readline():
        found: list[list[object]] = []
        for number, (first, size) in enumerate(json.loads(line)):
            lines = sys.stdin.buffer.read(size).decode("utf-8", "replace").split("\n")
            if lines and not lines[-1]:
                lines.pop()
            for index, text in enumerate(lines):
                match = pattern.search(text[: 20 * LONGEST])
                if match is not None and len(found) < asked["most"]:
                    before = [shown(each) for each in lines[max(index - asked["before"], 0) : index]]
                    after = [shown(each) for each in lines[index + 1 : index + 1 + asked["after"]]]
                    found.append([number, first + index, match.start() + 1, shown(text), before, after])
        answer(found)


def shown(text: str) -> str:
    text = text.rstrip("\r")
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def answer(value: object) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
