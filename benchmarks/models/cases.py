"""Cases of ``bench models``: families, topologies, dtypes and formats, and the random models that stand for them."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.parity.cases import ParityCase, build_reference
from benchmarks.parity.configurations import BASES, CLASSES
from benchmarks.parity.published import FORMS, publish

DEMO = Path("models/demo")
VOCAB_SIZE = 4096  # of the demo model's tokenizer
TOPOLOGIES: dict[str, tuple[str, ...]] = {
    "local": (),
    "disaggregated": (),
    "gathered": ("--attention", "2"),
    "all-to-all": ("--attention", "2"),
    "edge": ("--agents", "2"),
}
FIRST = ("local", "disaggregated")  # in which everything is measured
DTYPES = ("float32", "bfloat16")
FORMATS: dict[str, tuple[str, ...]] = {
    "int8": ("--quantization", "int8"),
    "int4": ("--quantization", "int4"),
}
OF_FORMATS = "qwen3_moe"  # is measured in those
PUBLISHED = {
    "deepseek_v3": "fp8, blocks of 128 x 128",
    "gpt_oss": "mxfp4",
    "mixtral": "awq, groups of 32",
    "qwen3_moe": "gptq v1, 4 bits, groups of 32, sym",
    "glm4_moe": "pack-quantized, 4 bits, groups of 32, symmetric",
}
# Wide enough that weights count beside what a process takes itself.
_WIDTHS = {"intermediate_size", "moe_intermediate_size"} | {
    f"shared_{end}" for end in ("intermediate_size", "expert_intermediate_size")
}
_COUNTS = {"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"}
_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "max_position_embeddings": 4096,
    "initializer_range": 0.06,
}


@dataclass(frozen=True)
class ModelCase:
    """One suite to measure."""

    family: str
    topology: str
    dtype: str = "auto"
    form: str = "none"
    quantization: tuple[str, ...] = field(default=())

    @property
    def flags(self) -> tuple[str, ...]:
        """Flags of ``moesaic up`` beside the model."""
        more = TOPOLOGIES[self.topology]
        return ("--topology", self.topology, *more, "--dtype", self.dtype, *self.quantization)

    @property
    def is_published(self) -> bool:
        """True if the checkpoint itself is quantised."""
        return self.form != "none" and not self.quantization

    def __str__(self) -> str:
        return f"{self.family} {self.topology} {self.dtype} {self.form}"


def cases_of(family: str, *, quick: bool) -> Iterator[ModelCase]:
    """List what is measured of a family; ``quick``: apart alone, as the checkpoint is."""
    if quick:
        yield ModelCase(family, "disaggregated", "bfloat16")
        return
    for topology in TOPOLOGIES:
        for dtype in DTYPES if topology in FIRST else DTYPES[1:]:
            yield ModelCase(family, topology, dtype)
    for topology in FIRST:
        if family == OF_FORMATS:
            for form, flags in FORMATS.items():
                yield ModelCase(family, topology, "bfloat16", form, flags)
        if family in PUBLISHED:
            yield ModelCase(family, topology, "auto", PUBLISHED[family])


class Models:
    """Random models of one family in a directory: as bfloat16, published quantised, and the values of either."""

    def __init__(self, family: str, directory: Path) -> None:
        """Write the bfloat16 checkpoint."""
        self._family, self._directory = family, directory
        base = BASES[family]
        wider = {name: base[name] * 8 for name in _WIDTHS & base.keys()}
        more = {name: base[name] * 4 for name in _COUNTS & base.keys()}
        self._case = ParityCase(family, "measured", {**_SIZES, **wider, **more})
        self.plain = directory / "plain"
        self._write(self.plain, torch.bfloat16)

    def of(self, case: ModelCase) -> tuple[Path, Path]:
        """Find the checkpoint to serve, and one of the float numbers that it stands for."""
        if not case.is_published:
            return self.plain, self.plain
        published, values = self._directory / "published", self._directory / "values"
        if not published.exists():
            source = self._directory / "source"
            self._write(source, torch.float32)
            [form] = [each for each in FORMS if each.name == case.form]
            publish(source, published, values, form)
        return published, values

    def reference(self, directory: Path) -> Any:
        """Load a checkpoint of floats with transformers, in float32."""
        import transformers

        return (
            getattr(transformers, CLASSES[self._family][1])
            .from_pretrained(directory, dtype=torch.float32)
            .eval()
        )

    def _write(self, directory: Path, dtype: torch.dtype) -> None:
        model = build_reference(self._case, directory, save_original_format=True)
        model.to(dtype).save_pretrained(directory, save_original_format=True)
        config = json.loads((directory / "config.json").read_text())
        config["dtype"] = str(dtype).removeprefix("torch.")
        (directory / "config.json").write_text(json.dumps(config))
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(DEMO / name, directory)
