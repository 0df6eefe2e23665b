"""The plan of one step: its chunks, and what they need before they run."""

from dataclasses import dataclass, field
from functools import cached_property

from moesaic.engine.sequences.sequence import AnySequence, Chunk, ScoringSequence

LONG_STEP_ROWS = 256  # such a step may take longer than tokens may be held


@dataclass
class PlannedStep:
    """One step: its chunks, and the KV blocks to copy, (from, to), before it."""

    chunks: list[Chunk] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    prompt_rows: int = 0  # rows of sequences that do not decode
    prompt_cost: float = 0.0  # of these rows, see ``row_costs``
    is_light: bool = False  # of light tenants only, while others have work

    @cached_property
    def num_rows(self) -> int:
        """Number of rows, once the step is planned."""
        return sum(len(chunk.token_ids) for chunk in self.chunks)

    @property
    def sequences(self) -> list[AnySequence]:
        """The sequences that fail if the step does."""
        return [chunk.sequence for chunk in self.chunks]

    def drop(self, sequence: AnySequence) -> None:
        """Take out all that ``sequence`` was to compute. Its lanes are still its own."""
        self.chunks[:] = [chunk for chunk in self.chunks if chunk.sequence is not sequence]
        if isinstance(sequence, ScoringSequence):
            targets = {block for lane in sequence.lanes for block in lane}
            self.copies[:] = [copy for copy in self.copies if copy[1] not in targets]
