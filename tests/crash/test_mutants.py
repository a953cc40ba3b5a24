"""The matrix can fail: two mutants in every build, all of them with `make mutants`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

RUN = Path(__file__).parents[1] / "mutants" / "run.py"


@pytest.mark.gate
@pytest.mark.slow
def test_two_mutants_turn_the_matrix_red(record_property: Callable[[str, object], None]) -> None:
    ran = subprocess.run(
        [sys.executable, str(RUN), "--only", "two"], capture_output=True, text=True, timeout=280, check=False
    )

    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "2 of 2 mutants killed" in ran.stdout
    record_property("perdure", "mutants: 2 of 2 killed (make mutants runs them all)")


@pytest.mark.slow
def test_every_mutant_still_applies(tmp_path: Path) -> None:
    """Without running its tests: a diff that no longer fits is found in every build."""
    code = (
        "import sys, pathlib; sys.path.insert(0, sys.argv[1]); import run; "
        "[run.apply(f.read_text(), run.copy(pathlib.Path(sys.argv[2]) / f.stem)) for f in run.HERE.glob('*.diff')]"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, str(RUN.parent), str(tmp_path)], capture_output=True, text=True, check=False
    )

    assert ran.returncode == 0, ran.stderr
