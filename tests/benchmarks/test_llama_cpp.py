"""What `bench engine` gives llama.cpp is the model that the other sides have."""

import os
import shutil
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file

from benchmarks.engine.bench import DEMO, LLAMA_CPP, SHAPE
from benchmarks.engine.gguf import write_gguf
from benchmarks.engine.llama_cpp import COMPLETION, llama_cpp_server, token_times

SMALL = {**SHAPE, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2, "head_dim": 32, "num_experts": 8, "moe_intermediate_size": 96}
NUMBERS = {4: "I", 5: "i", 6: "f", 7: "?"}  # types of GGUF


@dataclass
class Reader:
    """As much of GGUF as the writer may use, read as its specification says."""

    data: bytes
    at: int = 4

    def number(self, kind: str) -> Any:
        self.at += struct.calcsize("<" + kind)
        return struct.unpack_from("<" + kind, self.data, self.at - struct.calcsize("<" + kind))[0]

    def string(self) -> str:
        size = self.number("Q")
        self.at += size
        return self.data[self.at - size : self.at].decode()

    def value(self, kind: int) -> Any:
        if kind == 8:
            return self.string()
        if kind == 9:
            inner, count = self.number("I"), self.number("Q")
            return [self.value(inner) for _ in range(count)]
        return self.number(NUMBERS[kind])

    def read(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        version, num_tensors, num_keys = (self.number(kind) for kind in "IQQ")
        assert (self.data[:4], version) == (b"GGUF", 3)
        metadata = {self.string(): self.value(self.number("I")) for _ in range(num_keys)}
        places: dict[str, tuple[list[int], int]] = {}
        for _ in range(num_tensors):
            name = self.string()
            dimensions = [self.number("Q") for _ in range(self.number("I"))]
            assert self.number("I") == 0, "float32"
            places[name] = dimensions[::-1], self.number("Q")
        alignment = metadata["general.alignment"]
        start = -(-self.at // alignment) * alignment
        tensors = {}
        for name, (shape, offset) in places.items():
            assert offset % alignment == 0
            flat = np.frombuffer(self.data, "<f4", int(np.prod(shape)), start + offset)
            tensors[name] = flat.reshape(shape)
        return metadata, tensors


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    torch.manual_seed(3)
    config = transformers.Qwen3MoeConfig(**SMALL, initializer_range=0.2)
    model = transformers.Qwen3MoeForCausalLM(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:  # one mixed up with another must not go unseen
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, directory)
    return directory


def test_a_gguf_file_holds_the_checkpoint_to_the_bit(checkpoint: Path, tmp_path: Path) -> None:
    write_gguf(checkpoint, tmp_path / "model.gguf")

    metadata, tensors = Reader((tmp_path / "model.gguf").read_bytes()).read()

    ours = load_file(checkpoint / "model.safetensors")
    same = {
        "token_embd": "model.embed_tokens",
        "output": "lm_head",
        "output_norm": "model.norm",
        "blk.1.attn_k": "model.layers.1.self_attn.k_proj",
        "blk.1.attn_k_norm": "model.layers.1.self_attn.k_norm",
        "blk.1.attn_norm": "model.layers.1.input_layernorm",
        "blk.0.attn_output": "model.layers.0.self_attn.o_proj",
        "blk.0.ffn_norm": "model.layers.0.post_attention_layernorm",
        "blk.0.ffn_gate_inp": "model.layers.0.mlp.gate",
    }
    for name, theirs in same.items():
        np.testing.assert_array_equal(tensors[f"{name}.weight"], ours[f"{theirs}.weight"])
    for kind in ("gate", "up", "down"):
        experts = [f"model.layers.1.mlp.experts.{e}.{kind}_proj.weight" for e in range(8)]
        stacked = np.stack([ours[expert] for expert in experts])
        np.testing.assert_array_equal(tensors[f"blk.1.ffn_{kind}_exps.weight"], stacked)
    assert sum(t.size for t in tensors.values()) == sum(t.size for t in ours.values())
    assert metadata["general.architecture"] == "qwen3moe"
    assert metadata["qwen3moe.expert_used_count"] == 4
    assert metadata["qwen3moe.rope.freq_base"] == 10000.0
    assert metadata["tokenizer.ggml.tokens"][:2] == ["<|endoftext|>", "<|im_start|>"]
    assert len(metadata["tokenizer.ggml.tokens"]) == SHAPE["vocab_size"]
    assert metadata["tokenizer.ggml.token_type"][:4] == [3, 3, 3, 1]


def test_a_token_that_ends_within_a_character_comes_with_the_next() -> None:
    events = [(0.1, b'{"tokens_predicted": 1}'), (0.3, b'{"tokens_predicted": 3}')]
    end = (0.4, b'{"tokens_predicted": 3, "stop": true}')

    assert token_times([*events, end]) == [0.1, 0.3, 0.3]


@pytest.mark.skipif(LLAMA_CPP not in os.environ, reason=f"{LLAMA_CPP} names no Python")
def test_llama_cpp_generates_what_transformers_does(checkpoint: Path, tmp_path: Path) -> None:
    write_gguf(checkpoint, tmp_path / "model.gguf")
    model = transformers.Qwen3MoeForCausalLM.from_pretrained(checkpoint).eval()
    prompts = torch.randint(300, SHAPE["vocab_size"], (4, 64))
    with torch.inference_mode():
        whole = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=24,
            do_sample=False,
        )

    asked = {"prompt": prompts.tolist(), "n_predict": 24, "temperature": 0, "return_tokens": True}
    with llama_cpp_server(os.environ[LLAMA_CPP], tmp_path / "model.gguf", 4, "f32") as (_, client):
        answers = client.post(COMPLETION, json=asked).raise_for_status().json()

    assert [answer["tokens"] for answer in answers] == whole[:, 64:].tolist()
