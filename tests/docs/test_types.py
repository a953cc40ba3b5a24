"""What type checkers say: nothing about the examples of the documentation, and what they should about sample programs.

mypy runs as strict as it can be, pyright as users of an editor have it (basic), each once over everything. A page is
one program here too. The samples in `typed/` mark with `# error` the lines that must be refused.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.test_examples import PAGES, ROOT, blocks_of

SAMPLES = sorted((ROOT / "tests" / "docs" / "typed").glob("*.txt"))
PROTOCOL = "<!-- not run: this is the protocol that"
"""Above a block that shows a class of ours, and is no program."""


def extract(folder: Path) -> tuple[dict[str, Path], set[tuple[str, int]]]:
    """Write all programs: the page or sample behind each file, and where samples are to be refused."""
    sources: dict[str, Path] = {}
    refused: set[tuple[str, int]] = set()
    for page in PAGES:
        lines = [""] * len(page.read_text().splitlines())
        for block in blocks_of(page):
            if block.language == "python" and not block.above.startswith(PROTOCOL):
                text = block.text.splitlines()
                lines[block.line - 1 : block.line - 1 + len(text)] = text  # in the page's own lines
        name = f"page_{re.sub(r'[^a-z]', '_', page.stem.lower())}.py"
        (folder / name).write_text("\n".join(lines) + "\n")
        sources[name] = page
    for sample in SAMPLES:
        name = f"sample_{sample.stem}.py"
        (folder / name).write_text(sample.read_text())
        sources[name] = sample
        marked = enumerate(sample.read_text().splitlines(), 1)
        refused |= {(name, number) for number, line in marked if line.endswith("  # error")}
    return sources, refused


def check(found: dict[tuple[str, int], str], sources: dict[str, Path], refused: set[tuple[str, int]]) -> None:
    wrong = [f"{sources[name].name}:{line}: {found[name, line]}" for name, line in sorted(found.keys() - refused)]
    accepted = [f"{sources[name].name}:{line}" for name, line in sorted(refused - found.keys())]

    assert wrong == []
    assert accepted == [], "these lines were to be refused"


@pytest.mark.slow
def test_examples_and_samples_pass_mypy_as_strict_as_it_is(tmp_path: Path) -> None:
    sources, refused = extract(tmp_path)

    run = [sys.executable, "-m", "mypy", "--strict", "--python-version=3.11", "--no-error-summary", "--output=json"]
    cache = f"--cache-dir={ROOT / '.mypy_cache' / 'examples'}"
    done = subprocess.run([*run, cache, "--config-file=", "."], cwd=tmp_path, capture_output=True, text=True)

    found = [json.loads(line) for line in done.stdout.splitlines()]
    errors = {(Path(each["file"]).name, each["line"]): each["message"] for each in found if each["severity"] == "error"}
    assert done.stderr == ""
    check(errors, sources, refused)


@pytest.mark.gate
@pytest.mark.slow
def test_examples_and_samples_pass_pyright_as_editors_have_it(tmp_path: Path) -> None:
    sources, refused = extract(tmp_path)
    options = {"typeCheckingMode": "basic", "pythonVersion": "3.11"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(options))

    # `basedpyright` is pyright with its own JavaScript engine in the wheel: it needs no download when it runs.
    run = [sys.executable, "-m", "basedpyright", "--outputjson", f"--pythonpath={sys.executable}", "."]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True)

    found = json.loads(done.stdout)["generalDiagnostics"]
    errors = {
        (Path(each["file"]).name, each["range"]["start"]["line"] + 1): each["message"]
        for each in found
        if each["severity"] == "error"
    }
    check(errors, sources, refused)
