"""The build of the kernels that a process takes: this processor's, or the one that a variable names."""

import subprocess
import sys

import pytest

from moesaic.cli.checks.machine_checks import check_kernels
from moesaic.errors import UnusableSettings
from moesaic.native import compile
from moesaic.native.compile import VARIANTS, can_run, this_variant
from moesaic.native.library import lib, library

RUNNABLE = [name for name in VARIANTS if can_run(name)]

compiled = pytest.mark.skipif(library() is None, reason="no C compiler")


def test_a_process_takes_the_richest_build_that_its_processor_can_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MOESAIC_KERNELS", raising=False)

    assert this_variant() == RUNNABLE[0]


@pytest.mark.parametrize("name", RUNNABLE)
def test_a_variable_names_another_build(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOESAIC_KERNELS", name)

    assert this_variant() == name


@pytest.mark.parametrize("name", ["avx512", "altivec"])
def test_a_build_that_the_processor_cannot_run_is_refused_with_those_that_it_can(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile, "can_run", lambda name: name in ("avx2", "any"))
    monkeypatch.setenv("MOESAIC_KERNELS", name)

    with pytest.raises(UnusableSettings, match=f"one of avx2, any on this .* got '{name}'"):
        this_variant()
    assert check_kernels().status == "fail"


@compiled
def test_children_take_the_same_build_and_doctor_tells_which(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MOESAIC_KERNELS", this_variant())

    told = subprocess.run([sys.executable, compile.__file__], capture_output=True, text=True)

    found = compile.find(this_variant())
    assert told.stdout.strip() == str(found), told.stderr
    assert check_kernels().detail == f"for {this_variant()} (MOESAIC_KERNELS), {found}"


@compiled
def test_panels_are_as_wide_as_plans_take_them_to_be() -> None:
    assert lib().panel_width() == VARIANTS[this_variant()].panel
