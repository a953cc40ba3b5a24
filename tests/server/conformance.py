"""`make test-mcp`: the official conformance suite against `mainstay mcp`, where npm is there.

    python tests/server/conformance.py

It needs Node 22, which npm brings too. Scenarios that want tools of the suite's own example server are left out.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("node@22", "@modelcontextprotocol/conformance@0.1.16")
TOOLS = ROOT / ".venv" / "conformance"
SCENARIOS = (
    "server-initialize",
    "ping",
    "tools-list",
    "resources-list",
    "dns-rebinding-protection",
    "server-sse-multiple-streams",
)
PATIENCE = 120.0


def install() -> dict[str, str]:
    """The suite and its Node, once: the environment in which it runs."""
    if shutil.which("npm") is None:
        raise SystemExit("conformance: npm is not there, which brings the suite: nothing ran")
    if not (TOOLS / "node_modules" / ".bin" / "conformance").exists():
        TOOLS.mkdir(parents=True, exist_ok=True)
        subprocess.run(["npm", "install", "--silent", "--no-save", "--prefix", str(TOOLS), *PACKAGES], check=True)
    programs = TOOLS / "node_modules"
    return {**os.environ, "PATH": f"{programs / 'node' / 'bin'}:{programs / '.bin'}:{os.environ['PATH']}"}


def passes(scenario: str, url: str, surroundings: dict[str, str]) -> bool:
    ran = subprocess.run(
        ["conformance", "server", "--url", url, "--scenario", scenario],
        env=surroundings, capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    fine = ran.returncode == 0 and "0 failed" in ran.stdout
    print(f"{'ok    ' if fine else 'FAILED'} {scenario}", flush=True)
    if not fine:
        print(ran.stdout[-2000:], ran.stderr[-2000:], sep="\n")
    return fine


def main() -> int:
    surroundings = install()
    with tempfile.TemporaryDirectory(prefix="mainstay-conformance-") as folder:
        words = ["mcp", "tests.server.sample_shop:shop", "--store", f"{folder}/a.db", "--http", "0"]
        with subprocess.Popen(
            [sys.executable, "-m", "mainstay", *words], cwd=ROOT, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "SHOP": folder},
        ) as server:  # fmt: skip
            try:
                assert server.stderr is not None
                url = server.stderr.readline().split(" ")[2]
                passed = sum([passes(each, url, surroundings) for each in SCENARIOS])
            finally:
                server.kill()
    print(f"conformance: {passed} of {len(SCENARIOS)} scenarios of the server")
    return 0 if passed == len(SCENARIOS) else 1


if __name__ == "__main__":
    sys.exit(main())
