from typing import Literal

import pytest
from pydantic import BaseModel, Field, SecretStr

from moesaic.usage.flags import WrongFlag, flags_of, read_flags
from moesaic.usage.help import print_help


class Told(BaseModel):
    name: str = Field(..., description="what it is called")
    num_slots: int = Field(4, ge=1, le=64, description="how many")
    share_s: float = Field(2.0, gt=0, description="a share")
    way: Literal["near", "far"] = Field("near", description="which way")
    secret: SecretStr = Field(SecretStr("x"), description="a secret")
    keep: bool = Field(True, description="keep it")
    no_auth: bool = Field(False, description="let everybody in")


FLAGS = flags_of(Told, {"way": "Choice", "name": "Numbers"})


def test_flags_are_told_by_what_the_fields_are() -> None:
    shown = {flag.name: (flag.group, flag.form, flag.bounds, flag.default) for flag in FLAGS}

    assert shown == {
        "--way": ("Choice", "<near|far>", "", "near"),
        "--secret": ("Choice", "<str>", "", ""),
        "--keep": ("Choice", "", "", ""),
        "--no-auth": ("Choice", "", "", ""),
        "--name": ("Numbers", "<str>", "", ""),
        "--num-slots": ("Numbers", "<int>", "1<=x<=64", "4"),
        "--share-s": ("Numbers", "<float>", "0<x", "2"),
    }


def test_a_command_line_is_read_to_its_last_word() -> None:
    given = read_flags(
        FLAGS,
        ["--name", "-a=b", "--num-slots=3", "--num-slots", "5", "--no-keep", "--no-auth"],
    )

    assert given == {"name": "-a=b", "num_slots": "5", "keep": False, "no_auth": True}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--num-slot 3", "--num-slot: unknown flag, did you mean --num-slots?"),
        ("--no-keap", "--no-keap: unknown flag, did you mean --no-keep?"),
        ("--xyzzy", "--xyzzy: unknown flag"),
        ("near", "near: unknown flag, flags begin with --"),
        ("--name", "--name: a value is needed (<str>), got nothing"),
        ("--name --way near", "--name: a value is needed (<str>), got --way"),
        ("--keep=false", "--keep: takes no value, got 'false'"),
    ],
)
def test_what_cannot_be_read_is_named(line: str, says: str) -> None:
    with pytest.raises(WrongFlag) as wrong:
        read_flags(FLAGS, line.split())

    assert str(wrong.value) == says


def test_the_help_names_every_flag_in_its_group(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")

    print_help("told", "It is told.", FLAGS)

    shown = capsys.readouterr().out
    parts = [shown.index(part) for part in ("told", "Choice", "--[no-]keep", "Numbers", "--name")]
    assert parts == sorted(parts)
    assert "<near|far>" in shown
    assert "[default: on]" in shown
    assert "(default: )" not in shown
    assert max(map(len, shown.splitlines())) <= 80
