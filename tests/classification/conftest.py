from collections.abc import Sequence

import pytest
import tokenizers
from hypothesis import HealthCheck, settings
from tokenizers import decoders, models, pre_tokenizers, trainers

from moesaic.classification.dialogue import Dialogue
from moesaic.models.text.tokenizer import Tokenizer

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
END = 2  # <|im_end|>
relaxed = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


class SmallTokenizer(Tokenizer):
    """A byte-level BPE with a few whole words."""

    def __init__(self) -> None:
        inner = tokenizers.Tokenizer(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=330,
            special_tokens=SPECIAL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        inner.train_from_iterator(["yes no maybe travel travels banking " * 9], trainer)
        super().__init__(inner, {})

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return super().decode(token_ids, skip_special_tokens)


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


@pytest.fixture(scope="session")
def dialogue(tokenizer, make_template) -> Dialogue:
    return Dialogue.of(tokenizer, make_template(), [END])
