"""The tiers of tests: what each runs, and how long it may take on two idle cores."""

from dataclasses import dataclass

# Tests that need another environment, or half an hour: commands of their own run them.
APART = ("tests/clients/", "tests/compose/", "tests/soak/")
# Tests of training and of benchmarks, and tests that compile for minutes: the quick tier runs those that a change
# reaches, and no others. In a turn, the tests of such a file have theirs together, as they share what they make.
ON_CHANGE = (
    "tests/benchmarks/",
    "tests/kernels/triton/test_compilation.py",
    "tests/native/test_sanitized.py",
    "tests/training/",
)
# Folders with tests that compute whole models on a device that stands for a GPU.
MODELS = ("tests/fake_device/", "tests/kernels/")
# Folders with tests that start suites, and these.
SUITES = ("tests/cli/", "tests/clients/", "tests/scheduler/", "tests/system/", *MODELS)

# Those that every turn starts: each topology answers, the README's commands work, and deaths lose nothing.
ALWAYS = (
    "tests/system/faults/test_faults.py",
    "tests/system/operators/test_readme.py",
    "tests/system/topologies/test_topologies.py",
)

_SUITES = "suite and not slow and not gpu and not compose"
_BELOW = f"not {_SUITES}"


@dataclass(frozen=True)
class Tier:
    """Tests that one command runs.

    Attributes:
        command: what a person types.
        budget_s: what it may take on two idle cores, once the environment is set up.
        marks: pytest's expression that the tests satisfy.
        share: of those tests: ``quick`` ones, the ``rest``, those of the rest whose ``turn`` it is, or ``all``.
        starts_suites: the tests wait more than they compute, and no cost of them is known.
    """

    command: str
    budget_s: int
    marks: str
    share: str = "all"
    starts_suites: bool = False

    def takes(self, file: str) -> bool:
        """True if ``file`` may have tests of this tier, so that it is worth collecting."""
        if self.marks == _BELOW:
            return not file.startswith((*APART, "tests/system/"))
        if self.marks.startswith("suite"):
            return file.startswith(SUITES)
        return not file.startswith(APART)


TIERS = {
    "quick": Tier("make test", 180, _BELOW, "quick"),
    "rest": Tier("make test-rest", 480, _BELOW, "rest"),
    "rest-turn": Tier("make test-rest-turn", 240, _BELOW, "turn"),
    "all": Tier("make test-all", 600, _BELOW),
    "suites": Tier("make test-suites", 960, _SUITES, starts_suites=True),
    "suites-turn": Tier("make test-suites-turn", 300, _SUITES, "turn", starts_suites=True),
    "nightly": Tier("make nightly", 4 * 3600, "not gpu and not compose", starts_suites=True),
}
