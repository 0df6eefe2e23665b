"""``calls.h``, the C sources and Python: three that must agree on every name, type and offset."""

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from moesaic.native import header
from moesaic.native.library import lib
from moesaic.native.structs import STRUCTS

pytestmark = pytest.mark.usefixtures("native")
SOURCES = header.HEADER.parent


def test_every_exported_function_is_declared_as_it_is_defined() -> None:
    defined = {
        name: function
        for source in sorted(SOURCES.rglob("*.c"))
        for name, function in header.read_functions(source.read_text()).items()
    }

    assert defined == header.functions()


def test_python_fills_every_struct_and_lays_it_out_as_c_does(tmp_path: Path) -> None:
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc")
    assert compiler
    places = [(name, field.name) for name, fields in header.structs().items() for field in fields]
    lines = [f'sizeof(struct {name}), "{name}"' for name in header.structs()]
    lines += [f'offsetof(struct {name}, {field}), "{name}.{field}"' for name, field in places]
    prints = "".join(f'printf("%zu %s\\n", {line});' for line in lines)
    (tmp_path / "layout.c").write_text(
        '#include <stddef.h>\n#include <stdio.h>\n#include "calls.h"\n'
        f"int main(void) {{ {prints} return 0; }}"
    )
    subprocess.run(
        [compiler, "-I", str(SOURCES), "-o", "layout", "layout.c"], cwd=tmp_path, check=True
    )
    told = subprocess.run([tmp_path / "layout"], capture_output=True, text=True, check=True).stdout
    in_c = {name: int(size) for size, name in map(str.split, told.splitlines())}

    assert STRUCTS.keys() == header.structs().keys()
    in_python = {name: ctypes.sizeof(struct) for name, struct in STRUCTS.items()}
    for name, field in places:
        in_python[f"{name}.{field}"] = getattr(STRUCTS[name], field).offset
    assert in_python == in_c


def test_arguments_go_by_name() -> None:
    x, weight, out = torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0]), torch.empty(1, 2)
    known = {"x": x.data_ptr(), "weight": weight.data_ptr(), "out": out.data_ptr()}
    sizes = {"x_stride": 2, "count": 1, "size": 2, "eps": 0.0, "threads": 1}

    lib().add_rms_norm(**sizes, **known, delta=None, sum=None)

    torch.testing.assert_close(out, torch.tensor([[3.0, 8.0]]) / 12.5**0.5)
    with pytest.raises(TypeError, match="sum"):
        lib().add_rms_norm(**sizes, **known, delta=None)
    with pytest.raises(TypeError):
        lib().add_rms_norm(**sizes, **known, delta=None, sum=None, slots=None)
