"""Ways in which expert workers choose among the replicas of an expert."""

ExpertScheduling = str
"""``aebs``: so that the worker that has most has as little as can be, by the costs that workers have
measured; ``aebs-memory-bound``: the same where an expert costs 1, with any number of rows, as in the
paper; ``static``: by the placement alone, the same for every batch. Packages may add others, to compare with."""

SCHEDULINGS: tuple[ExpertScheduling, ...] = ("aebs", "aebs-memory-bound", "static")
"""The place of each is its code in frames: workers of other versions read it, so it never changes."""
