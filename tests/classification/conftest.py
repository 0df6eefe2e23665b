import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
END = 2  # <|im_end|>


class SmallTokenizer:
    """A byte-level BPE with a few whole words."""

    def __init__(self) -> None:
        self.inner = tokenizers.Tokenizer(models.BPE())
        self.inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.inner.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=330,
            special_tokens=SPECIAL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        self.inner.train_from_iterator(["yes no maybe travel travels banking " * 9], trainer)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(self.inner.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: list[int]) -> str:
        return str(self.inner.decode(token_ids, skip_special_tokens=False))


class SmallTemplate:
    """Turns between markers, as most models have them; ``before`` stands before an answer."""

    def __init__(self, before: str = "") -> None:
        self.before = before

    def render(self, messages, *, add_generation_prompt: bool) -> str:
        text = ""
        for turn in messages:
            before = self.before if turn["role"] == "assistant" else ""
            text += f"<|im_start|>{turn['role']}\n{before}{turn['content']}<|im_end|>\n"
        return text + ("<|im_start|>assistant\n" if add_generation_prompt else "")


@pytest.fixture(scope="session")
def tokenizer() -> SmallTokenizer:
    return SmallTokenizer()


@pytest.fixture(scope="session")
def make_template() -> type[SmallTemplate]:
    return SmallTemplate
