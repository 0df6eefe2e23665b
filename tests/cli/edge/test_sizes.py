import pytest

from moesaic.cli.checks.sizes import read_memory, read_size
from moesaic.cli.terminal.outcome import CommandError, Exit


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("40M", 40_000_000),
        ("1.5G", 1_500_000_000),
        ("512MiB", 512 << 20),
        ("2kb", 2000),
        ("1KiB", 1024),
        ("7B", 7),
        (" 3T ", 3 * 10**12),
    ],
)
def test_a_size_is_read_with_its_unit(text: str, size: int) -> None:
    assert read_size("--memory", text) == size


@pytest.mark.parametrize("text", ["40", "M", "-40M", "4 0M", "40X", "", "1e3M", "0M", "0.1B"])
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(CommandError, match=r"--memory .*such as 40M") as raised:
        read_size("--memory", text)

    assert raised.value.status == Exit.USAGE


def test_one_size_is_for_all_agents() -> None:
    assert read_memory("40M", 3) == (40_000_000,) * 3
    assert read_memory("1K,2K", 2) == (1000, 2000)
    assert read_memory("", 3) == ()


def test_a_size_for_each_agent_and_no_more() -> None:
    with pytest.raises(CommandError, match=r"these are 2 sizes for 3 agents.* or --agents 2"):
        read_memory("40M,80M", 3)
