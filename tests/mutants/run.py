"""Break the code on purpose: every mutant must turn the crash matrix red, or the tests beside it that are named below.

    python tests/mutants/run.py                    all of them, after the same tests on the unbroken code
    python tests/mutants/run.py --only two         the two quickest, without that
    python tests/mutants/run.py --only drop-fencing

A mutant is a unified diff beside this file, applied to a copy of the tree; its first line says what is wrong with it.
One that no longer applies is an error, and so is one whose tests cannot even be collected. Exit status 1: one survived.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

# What each must turn red: a part of the matrix, or the test of a window that the matrix cannot reach.
TESTS = {
    "count-a-park-as-an-attempt": ["tests/crash/test_parked.py", "-k", "memory and claim"],
    "take-a-park-for-a-crash": ["tests/crash/test_parked.py", "-k", "memory and claim"],
    "drop-fencing": ["tests/crash/test_matrix.py", "-k", "in_process and memory and late"],
    "swallow-lost-reply": ["tests/crash/test_matrix.py", "-k", "in_process and memory and lost and accept"],
    "run-before-start": ["tests/crash/test_windows.py", "-k", "in_process and approved and once and after and effect"],
    "acknowledge-before-commit": ["tests/crash/test_turns.py", "-k", "acknowledged"],
    "split-commit": ["tests/crash/test_matrix.py", "-k", "inside_any_transaction and loop"],
    "forget-cancel": ["tests/crash/test_halted.py", "-k", "has_its_ruled_fate and memory and lost and cancel"],
    "act-after-relief": ["tests/runtime/test_relieved.py"],
    "upgrade-in-pieces": ["tests/stores/test_upgrade.py"],
    "follow-links": ["tests/workspace/test_paths.py", "-k", "leads_out"],
    "check-then-open": ["tests/workspace/test_races.py"],
    "open-git-and-store": ["tests/workspace/test_paths.py", "-k", "off_limits"],
    "check-only-what-is-written": ["tests/workspace/test_paths.py", "-k", "off_limits"],
    "change-the-python": ["tests/workspace/test_paths.py", "-k", "python_of"],
    "find-programs-in-roots": ["tests/workspace/test_git.py", "-k", "unasked"],
    "read-hard-links": ["tests/workspace/test_paths.py", "-k", "second_name"],
    "edit-blindly": ["tests/workspace/test_file_tools.py", "-k", "left_alone or unknown"],
    "believe-the-summary": ["tests/workspace/test_diagnosis.py", "-k", "printed_summary"],
    "load-entities": ["tests/workspace/test_diagnosis.py", "-k", "entities"],
    "forget-earlier-content": ["tests/workspace/test_edits.py", "-k", "another_runtime"],
    "forget-substitutions": ["tests/workspace/test_policy.py", "-k", "table"],
    "trust-wrappers": ["tests/workspace/test_policy.py", "-k", "table"],
    "end-options-early": ["tests/workspace/test_policy.py", "-k", "table"],
    "let-rules-shadow": ["tests/workspace/test_policy.py", "-k", "deny"],
    "allow-what-is-unclear": ["tests/workspace/test_policy.py", "-k", "covers"],
    "run-what-was-not-approved": ["tests/workspace/test_approvals.py", "-k", "elsewhere"],
    "confine-without-filter": ["tests/commands/test_sandbox.py", "-k", "attack_is_refused"],
    "confine-without-covers": ["tests/commands/test_sandbox.py", "-k", "attack_is_refused"],
    "confine-in-the-open-network": ["tests/commands/test_sandbox.py", "-k", "attack_is_refused"],
    "confine-without-scopes": ["tests/commands/test_sandbox.py", "-k", "attack_is_refused"],
    "open-the-keeper": ["tests/commands/test_sandbox.py", "-k", "keeper_is_closed or older_versions"],
    "mount-behind-links": ["tests/commands/test_sandbox_links.py", "-k", "protected_is_refused"],
    "grant-behind-links": ["tests/commands/test_sandbox_links.py", "-k", "granted_in_a_root"],
    "mount-by-names": ["tests/commands/test_sandbox_links.py", "-k", "after_a_look"],
    "filter-one-architecture": ["tests/commands/test_sandbox.py", "-k", "attack_is_refused"],
    "filter-without-x32": ["tests/commands/test_filter.py", "-k", "by_the_filter"],
    "leave-set-group-id": ["tests/commands/test_sandbox.py", "-k", "attack_is_refused"],
    "leave-times": ["tests/commands/test_sandbox.py", "-k", "attack_is_refused"],
    "leave-devices": ["tests/commands/test_sandbox.py", "-k", "attack_is_refused"],
    "keep-the-input-of-the-host": ["tests/commands/test_sandbox.py", "-k", "attack_is_refused"],
    "leave-flags-of-files": ["tests/commands/test_sandbox.py", "-k", "attack_is_refused"],
    "keep-capabilities": ["tests/commands/test_sandbox.py", "-k", "privileges"],
    "count-no-processes": ["tests/commands/test_sandbox.py", "-k", "meets_its_limit"],
    "spawn-unconfined": ["tests/workspace/test_confined_tools.py"],
    "spawn-what-is-denied": ["tests/workspace/test_commands.py", "-k", "denies"],
    "spawn-unapproved": ["tests/workspace/test_commands.py", "-k", "asks_by_now"],
    "read-the-configuration-of-git": ["tests/workspace/test_git.py", "-k", "program_run"],
    "pass-variables-to-git": ["tests/workspace/test_git.py", "-k", "variables"],
    "confine-to-nothing": ["tests/commands/test_sandbox.py", "-k", "unless_the_host_allows"],
    "show-the-store": ["tests/commands/test_sandbox.py", "-k", "attack_is_refused"],
    "show-secrets": ["tests/workspace/test_approvals.py", "-k", "secret"],
    "show-secrets-to-plugins": ["tests/workspace/test_shown_secrets.py", "-k", "see_marks"],
    "reserve-nothing": ["tests/crash/test_limited.py", "-k", "ledger"],
    "forget-what-the-dead-reserved": ["tests/crash/test_limited.py", "-k", "wherever and memory"],
    "reserve-again-on-a-lost-reply": ["tests/crash/test_limited.py", "-k", "wherever and memory"],
    "give-back-what-was-cancelled": ["tests/runtime/test_limits.py", "-k", "cancelled_before and memory"],
}
TWO = ("drop-fencing", "acknowledge-before-commit")


class Stale(Exception):
    """A diff that does not fit the code any more."""


def apply(diff: str, tree: Path) -> None:
    """Apply a diff. A hunk is found by its text, wherever it is now, and must be there exactly once."""
    for part in re.split(r"^--- a/", diff, flags=re.M)[1:]:
        name, _, rest = part.partition("\n")
        file = tree / name.strip()
        text = file.read_text()
        for hunk in re.split(r"^@@.*\n", rest, flags=re.M)[1:]:
            lines = [line or " " for line in hunk.splitlines()]
            old = "".join(line[1:] + "\n" for line in lines if line[0] in " -")
            new = "".join(line[1:] + "\n" for line in lines if line[0] in " +")
            if text.count(old) != 1:
                raise Stale(f"{name.strip()} has {text.count(old)} places like this one:\n{old}")
            text = text.replace(old, new)
        file.write_text(text)


def copy(target: Path) -> Path:
    ignored = shutil.ignore_patterns("__pycache__", "*.db")
    for folder in ("src", "tests"):
        shutil.copytree(ROOT / folder, target / folder, ignore=ignored)
    for file in ("pyproject.toml", "README.md"):
        if (ROOT / file).exists():
            shutil.copy(ROOT / file, target / file)
    return target


def test(tree: Path, arguments: list[str]) -> tuple[int, str]:
    """pytest's exit status and last line, on the code of `tree`."""
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("PYTEST_ADDOPTS", None)
    where = subprocess.run(
        [sys.executable, "-c", "import perdure; print(perdure.__file__)"],
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if not where.stdout.startswith(str(tree)):
        return 3, f"the code under test is not the copy's: {where.stdout or where.stderr}"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--inline-snapshot=disable"]
    try:
        ran = subprocess.run(
            [*command, *arguments], cwd=tree, env=environment, capture_output=True, text=True, timeout=200, check=False
        )
    except subprocess.TimeoutExpired:
        return 3, "its tests did not end within 200 s"
    lines = [line for line in ran.stdout.splitlines() if line.strip()]
    return ran.returncode, lines[-1] if lines else ran.stderr[-300:]


def try_mutant(name: str) -> tuple[str, str]:
    """The verdict on a mutant, and pytest's last line."""
    with tempfile.TemporaryDirectory(prefix="perdure-mutant-") as folder:
        tree = copy(Path(folder).resolve())
        try:
            apply((HERE / f"{name}.diff").read_text(), tree)
        except Stale as error:
            return "does not apply", str(error)
        status, line = test(tree, TESTS[name])
    verdict = {0: "SURVIVED", 1: "killed"}.get(status, "error")
    return verdict, line


def check_unbroken(names: list[str]) -> str | None:
    """Why the same tests fail without any mutant, if they do: then a red run would prove nothing."""
    with tempfile.TemporaryDirectory(prefix="perdure-mutant-") as folder:
        tree = copy(Path(folder).resolve())
        for name in names:
            status, line = test(tree, TESTS[name])
            if status != 0:
                return f"the tests of {name} fail on the unbroken code: {line}"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description="Every mutant must turn the crash matrix red.")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="names of mutants, or 'two'")
    only = parser.parse_args().only
    names = list(TESTS) if only is None else list(TWO) if only == ["two"] else only
    if unknown := sorted(set(names) - set(TESTS)):
        parser.error(f"there is no mutant {', '.join(unknown)}; there are {', '.join(TESTS)}")
    if missing := sorted({file.stem for file in HERE.glob("*.diff")} ^ set(TESTS)):
        parser.error(f"diffs and tests do not match: {', '.join(missing)}")
    if only is None and (why := check_unbroken(names)):
        print(why)
        return 1
    bad = 0
    for name in names:
        began = time.monotonic()
        verdict, line = try_mutant(name)
        bad += verdict != "killed"
        print(f"{name:<28} {verdict:<16} {time.monotonic() - began:5.1f} s   {line}", flush=True)
    print(f"{len(names) - bad} of {len(names)} mutants killed")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
