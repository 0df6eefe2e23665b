"""The longest context that a model is served with. Needs no torch."""

from dataclasses import replace

from moesaic.errors import UnusableSettings
from moesaic.models.configuration.architecture import ModelConfig


def with_context(config: ModelConfig, max_model_len: int) -> ModelConfig:
    """Cut a model's context to ``max_model_len`` tokens, or let it be as long as its rotation is scaled for.

    Args:
        config: configuration of the model.
        max_model_len: tokens of prompt and answer together; 0: as many positions as ``config.json`` says.

    Raises:
        UnusableSettings: the model knows fewer positions.
    """
    if not max_model_len:
        return config
    yarn, most = config.rope.yarn, config.max_positions
    if yarn is not None:
        most = max(most, int(yarn.factor * yarn.original_max_positions))
    if max_model_len > most:
        raise UnusableSettings(
            "--max-model-len",
            f"{max_model_len} tokens are more than the model's {most} positions; give at most these, or a rope_scaling "
            "in its config.json that it was made for",
        )
    return replace(config, max_positions=max_model_len)
