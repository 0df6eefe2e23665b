"""Error of rounding to int8: the demo model's log-probabilities of real text, with and without it."""

import asyncio
import gzip
from pathlib import Path

import torch
from torch import Tensor

from moesaic.dispatch.local import LocalDispatcher
from moesaic.kernels.held_bytes import Quantization
from moesaic.models.configuration.config import load_config
from moesaic.models.layers.decoder import Decoder
from moesaic.models.layers.step_batch import StepBatch
from moesaic.models.text.tokenizer import Tokenizer
from moesaic.models.weights.checkpoint import Checkpoint

MODELS = Path(__file__).parents[2] / "models"
TEXT = MODELS / "training/data/text/wikitext2.test.txt.gz"
WINDOW = 256  # tokens
BLOCK = 16


def measure(num_windows: int) -> dict[str, float]:
    """Compare the two on as many windows of held-out text.

    Returns:
        Perplexities; the frequency at which the likeliest token is the same; the mean and the largest change of the
        actual token's log-probability.
    """
    tokenizer = Tokenizer.load(MODELS / "demo")
    text = gzip.decompress(TEXT.read_bytes()).decode()[: num_windows * WINDOW * 8]
    ids = torch.tensor(tokenizer.encode(text)[: num_windows * WINDOW]).view(-1, WINDOW)
    exact, rounded = (_logprobs(ids, how) for how in ("none", "int8"))
    actual = ids[:, 1:].unsqueeze(2)
    one, other = (x[:, :-1].gather(2, actual) for x in (exact, rounded))
    change = (one - other).abs()
    return {
        "perplexity_float32": round(float(one.mean().neg().exp()), 4),
        "perplexity_int8": round(float(other.mean().neg().exp()), 4),
        "same_likeliest_token": round(
            float((exact.argmax(2) == rounded.argmax(2)).double().mean()), 4
        ),
        "mean_abs_logprob_change": round(float(change.mean()), 5),
        "largest_abs_logprob_change": round(float(change.max()), 4),
    }


def _logprobs(ids: Tensor, quantization: Quantization) -> Tensor:
    """Log-probabilities ``[windows, WINDOW, vocab]`` after every token of each window."""
    directory = MODELS / "demo"
    parts = Checkpoint(directory), load_config(directory), torch.float32, torch.device("cpu")
    decoder = Decoder.load(*parts, quantization=quantization)
    experts = LocalDispatcher(*parts, quantization=quantization)
    cache = decoder.new_kv_cache(WINDOW // BLOCK)
    batch = StepBatch(
        token_ids=ids[0].tolist(),
        positions=list(range(WINDOW)),
        sequence_rows=[WINDOW],
        block_tables=[list(range(WINDOW // BLOCK))],
        wanted=[WINDOW],
    )
    step = experts.begin_step()

    async def forward(window: Tensor) -> Tensor:
        batch.token_ids = window.tolist()
        return await decoder.forward(
            batch, cache, lambda layer, hidden: experts.dispatch(step, layer, hidden)
        )

    with torch.inference_mode():
        return torch.stack([asyncio.run(forward(window)).log_softmax(1) for window in ids])
