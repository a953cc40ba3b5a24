"""Run the tests that failed again, alone and several times: `python tests/again.py`, after `make test` or `make gate`.

Each lane begins with an empty list of failures and removes the list of a run that did not come to its end, so the list
is that of the last lane. A failed case is run by its id, in no lane.

A test that passes then depends on time or on its neighbours. It is named as unsteady, which is a defect of the test or
of what it tests; the build goes on, because nobody can tell the two apart from one run on a busy machine.

Not for those that say whether something was lost or done twice: one failure of them in a thousand runs is one too many.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROMISES = ("tests/crash/", "tests/stores/", "tests/golden/", "tests/soak/")
MOST = 3
"""More failures than these are no matter of luck."""
TIMES = 3


def failed(cache: Path) -> list[str]:
    try:
        return list(json.loads((cache / "v" / "cache" / "lastfailed").read_text()))
    except FileNotFoundError:
        return []


def refusal(tests: list[str]) -> str:
    """Why these are not run again, or nothing."""
    if not tests:
        return "no test failed: what failed was something else"
    if len(tests) > MOST:
        return f"{len(tests)} tests failed, more than {MOST}"
    kept = [test for test in tests if test.startswith(PROMISES)]
    return f"{kept[0]} failed, and says whether a promise holds" if kept else ""


def main() -> int:
    tests = failed(ROOT / ".pytest_cache")
    if why := refusal(tests):
        print(f"Nothing is run again: {why}.", file=sys.stderr)
        return 1
    for _ in range(TIMES):
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests], cwd=ROOT, check=False
        )
        if done.returncode != 0:
            return done.returncode
    print("".join(f"UNSTEADY: {test} failed once and passed {TIMES} times alone\n" for test in tests))
    return 0


if __name__ == "__main__":
    sys.exit(main())
