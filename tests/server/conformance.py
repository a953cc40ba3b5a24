"""`make test-mcp`: the official conformance suite against `perdure mcp` and against our client, where npm is there.

    python tests/server/conformance.py

It needs Node 22, which npm brings too. Left out are, of a server, scenarios that want tools of the suite's own example;
of a client, two of what the SDK does for us: metadata of an authorization server in another place than its issuer says,
which the SDK refuses, and the exchange of an enterprise's tokens, which it has not.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("node@22", "@modelcontextprotocol/conformance@0.1.16")
TOOLS = ROOT / ".venv" / "conformance"
OF_A_SERVER = (
    "server-initialize",
    "ping",
    "tools-list",
    "resources-list",
    "dns-rebinding-protection",
    "server-sse-multiple-streams",
)
OF_A_CLIENT = (
    "initialize",
    "tools_call",
    "elicitation-sep1034-client-defaults",
    "sse-retry",
    "auth/metadata-default",
    "auth/metadata-var1",
    "auth/metadata-var2",
    "auth/metadata-var3",
    "auth/basic-cimd",
    "auth/scope-from-www-authenticate",
    "auth/scope-from-scopes-supported",
    "auth/scope-omitted-when-undefined",
    "auth/scope-step-up",
    "auth/scope-retry-limit",
    "auth/token-endpoint-auth-basic",
    "auth/token-endpoint-auth-post",
    "auth/token-endpoint-auth-none",
    "auth/pre-registration",
    "auth/2025-03-26-oauth-endpoint-fallback",
    "auth/resource-mismatch",
    "auth/offline-access-scope",
    "auth/offline-access-not-supported",
    "auth/client-credentials-jwt",
    "auth/client-credentials-basic",
)
TIMEOUT = 120.0


def install() -> dict[str, str]:
    """The suite and its Node, once: the environment in which it runs."""
    if shutil.which("npm") is None:
        raise SystemExit("conformance: npm is not there, which brings the suite: nothing ran")
    if not (TOOLS / "node_modules" / ".bin" / "conformance").exists():
        TOOLS.mkdir(parents=True, exist_ok=True)
        subprocess.run(["npm", "install", "--silent", "--no-save", "--prefix", str(TOOLS), *PACKAGES], check=True)
    programs = TOOLS / "node_modules"
    return {**os.environ, "PATH": f"{programs / 'node' / 'bin'}:{programs / '.bin'}:{os.environ['PATH']}"}


def passes(what: list[str], scenario: str, surroundings: dict[str, str]) -> bool:
    ran = subprocess.run(
        ["conformance", *what, "--scenario", scenario],
        cwd=ROOT, env=surroundings, capture_output=True, text=True, timeout=TIMEOUT, check=False,
    )  # fmt: skip
    said = ran.stdout + ran.stderr  # of a client it reports on stderr
    fine = ran.returncode == 0 and ", 0 failed" in said
    print(f"{'ok    ' if fine else 'FAILED'} {what[0]} {scenario}", flush=True)
    if not fine:
        print(said[-4000:])
    return fine


def served(surroundings: dict[str, str]) -> int:
    """How many scenarios of a server pass."""
    with tempfile.TemporaryDirectory(prefix="perdure-conformance-") as folder:
        words = ["mcp", "tests.server.sample_shop:shop", "--store", f"{folder}/a.db", "--http", "0"]
        with subprocess.Popen(
            [sys.executable, "-m", "perdure", *words], cwd=ROOT, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "SHOP": folder},
        ) as server:  # fmt: skip
            try:
                assert server.stderr is not None
                url = server.stderr.readline().split(" ")[2]
                return sum([passes(["server", "--url", url], each, surroundings) for each in OF_A_SERVER])
            finally:
                server.kill()


def main() -> int:
    surroundings = install()
    client = ["client", "--command", f"{shlex.quote(sys.executable)} -m tests.mcp.conforming_client"]
    passed = served(surroundings), sum([passes(client, each, surroundings) for each in OF_A_CLIENT])
    print(
        f"conformance: {passed[0]} of {len(OF_A_SERVER)} scenarios of a server, "
        f"{passed[1]} of {len(OF_A_CLIENT)} of a client"
    )
    return 0 if passed == (len(OF_A_SERVER), len(OF_A_CLIENT)) else 1


if __name__ == "__main__":
    sys.exit(main())
