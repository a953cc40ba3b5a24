"""The project was called Mainstay: the old name stands only where old stores, commands and readers need it."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
OLD_NAME = re.compile("mainstay", re.IGNORECASE)
READ = {".py", ".md", ".toml", ".txt", ".diff", ".sh", ".yml", ".yaml", ".json", ".cfg", ""}
SKIPPED = {".git", "__pycache__", "build", "dist", "htmlcov"}

ALLOWED = {
    "CHANGELOG.md",
    "docs/upgrading.md",
    "docs/workspace.md",  # the name of temporary files
    "docs/identity.md",  # the reserved prefix of metadata
    "docs/mcp.md",  # the key of `_meta`
    "docs/sandbox.md",  # what is hidden
    "src/perdure/errors.py",
    "src/perdure/commands/confine.py",
    "src/perdure/commands/probe.py",
    "src/perdure/commands/sandbox.py",
    "src/perdure/commands/shim.py",
    "src/perdure/mcp/servers.py",
    "src/perdure/model/validate.py",
    "src/perdure/ports/store.py",
    "src/perdure/sessions/input_filters.py",
    "src/perdure/stores/sqlite/sockets.py",
    "src/perdure/workspace/files.py",
    "src/perdure/workspace/paths.py",
    "tests/commands/test_computing.py",
    "tests/commands/test_old_commands.py",
    "tests/commands/test_sandbox.py",
    "tests/commands/test_shim.py",
    "tests/mcp/test_calls.py",
    "tests/model/test_old_prefix.py",
    "tests/observe/test_sockets.py",
    "tests/sessions/test_input_filters.py",
    "tests/stores/test_moved.py",
    "tests/test_old_name.py",
    "tests/workspace/test_paths.py",
    "tests/workspace/test_policy.py",
    ".gitignore",
    ".git-blame-ignore-revs",
}
"""Files with a constant that stays, with a place that knows both names, or with their tests."""
ALLOWED_FOLDERS = ("tests/golden/",)


def project_files() -> dict[str, str]:
    """Return the text of every file of the project by its path."""
    found = {}
    for path in sorted(ROOT.rglob("*")):
        parts = path.relative_to(ROOT).parts
        hidden = any(part.startswith(".") and part != ".ci" for part in parts[:-1])
        if (
            hidden
            or SKIPPED & {*parts}
            or any(part.startswith(".venv") or part.endswith(".egg-info") for part in parts)
        ):
            continue
        if path.is_file() and path.suffix in READ and not parts[-1].startswith(".coverage"):
            found["/".join(parts)] = path.read_bytes().decode(errors="replace")
    return found


FILES = project_files()


def test_the_old_name_stands_only_in_these_files() -> None:
    found = {
        name
        for name, text in FILES.items()
        if not name.startswith(ALLOWED_FOLDERS) and (OLD_NAME.search(text) or OLD_NAME.search(name))
    }

    assert sorted(found - ALLOWED) == []
    assert sorted(ALLOWED - found) == []


def test_no_page_says_to_install_it_from_an_index() -> None:
    """Until there is a release, the name there may be a stranger's."""
    bare = re.compile(r"pip3? install (?:-\S+ )*['\"]?perdure\b")

    assert [name for name, text in FILES.items() if name != "tests/test_old_name.py" and bare.search(text)] == []
