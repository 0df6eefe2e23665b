"""Settings that only some modes have, each group with the modes that read it."""

from moesaic.settings import ModelSettings


class ModeSettings(ModelSettings):
    """Settings of all modes; a group of some modes derives from it, and names them in ``modes``."""

    dispatch: str
    deterministic: bool
