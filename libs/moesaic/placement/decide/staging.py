"""Steps of a migration, each of which fits into the memory of every worker."""

from collections.abc import Sequence

from moesaic.placement.traffic.statistics import Floats

Load = tuple[int, int]  # worker and expert


class Staging:
    """Sets of experts during a migration, from those that workers hold to those that they shall hold.

    Experts are numbered through all layers. An expert is settled once a worker that shall have it does.
    """

    def __init__(
        self,
        held: Sequence[set[int]],
        goal: Sequence[set[int]],
        capacity: Sequence[int | None],
        num_staying: int,
        worth: Floats,
    ) -> None:
        """Begin with ``held``, which is not changed.

        Args:
            held: experts of each worker, which fit.
            goal: experts of each worker in the end; every expert is in one of them.
            capacity: experts that a worker can have at once; None if it loads nothing.
            num_staying: number of workers that may load; they come first.
            worth: ``[num_staying, experts]``; experts of most worth are loaded first.
        """
        self._held = [set(experts) for experts in held]
        self._goal, self._capacity, self._num_staying = goal, capacity, num_staying
        self._worth = worth
        self._dropped: list[set[int]] = [set() for _ in held]
        self._holders: dict[int, set[int]] = {e: set() for experts in goal for e in experts}
        self._settled: set[int] = set()
        for n, experts in enumerate(self._held):
            for expert in experts:
                self._hold(n, expert)

    def way(self, eager: bool) -> list[list[set[int]]] | None:
        """Go to the goal.

        Args:
            eager: load further copies of settled experts before all are settled.

        Returns:
            Experts of each worker after each step, the goal last; None in a deadlock.
        """
        found: list[list[set[int]]] = []
        while self._held != self._goal:
            loads = self._loads(eager)
            self._load(loads)
            if not self._drop(eager) and not loads:
                # Nobody has room and lacks something. Whoever has room takes in what is in the way.
                loads = self._evacuations(eager)
                self._load(loads)
                self._drop(eager)
                if not loads:
                    return None
            found.append([set(experts) for experts in self._held])
        return found or [list(self._goal)]

    def _hold(self, n: int, expert: int) -> None:
        self._holders[expert].add(n)
        if expert in self._goal[n]:
            self._settled.add(expert)

    def _load(self, loads: Sequence[Load]) -> None:
        for n, expert in loads:
            self._held[n].add(expert)
            self._hold(n, expert)

    def _room(self, n: int) -> int:
        most = self._capacity[n]
        return 0 if most is None else most - len(self._held[n])

    def _pending(self, n: int, eager: bool) -> set[int]:
        """Experts that a worker lacks, and may load at this time."""
        lacking = self._goal[n] - self._held[n]
        if eager or len(self._settled) == len(self._holders):
            return lacking
        return lacking - self._settled

    def _loads(self, eager: bool) -> list[Load]:
        """Choose what workers load, as much as they have room for."""
        room = [self._room(n) for n in range(self._num_staying)]
        pending = [self._pending(n, eager) for n in range(self._num_staying)]
        short = {n for n, lacking in enumerate(pending) if len(lacking) > room[n]}

        def rank(load: Load) -> tuple[int, float, int, int]:
            n, expert = load
            holders = self._holders[expert]
            if not holders:
                urgency = 0
            elif expert in self._settled:
                urgency = 3
            else:  # its arrival frees the holders, which may need that
                urgency = 1 if holders & short else 2
            return urgency, -float(self._worth[n, expert]), n, expert

        possible = [
            (n, expert) for n, lacking in enumerate(pending) if room[n] for expert in lacking
        ]
        all_settled = len(self._settled) == len(self._holders)
        chosen: list[Load] = []
        coming: set[int] = set()
        for n, expert in sorted(possible, key=rank):
            if room[n] and (eager or all_settled or expert not in coming):
                chosen.append((n, expert))
                coming.add(expert)
                room[n] -= 1
        return chosen

    def _drop(self, eager: bool) -> bool:
        """Drop experts that workers shall not have and others hold; return true if any was dropped."""
        dropped = False
        strays = {e for n, held in enumerate(self._held) for e in held - self._goal[n]}
        for expert in sorted(strays):
            astray = {n for n in self._holders[expert] if expert not in self._goal[n]}
            # The one that can best afford it keeps it.
            if expert not in self._settled:
                astray.remove(max(sorted(astray), key=lambda n: self._slack(n, eager)))
            for n in astray:
                self._held[n].remove(expert)
                self._holders[expert].remove(n)
                self._dropped[n].add(expert)
            dropped = dropped or bool(astray)
        return dropped

    def _slack(self, n: int, eager: bool) -> int:
        return self._room(n) - len(self._pending(n, eager))

    def _evacuations(self, eager: bool) -> list[Load]:
        """Choose temporary places for one expert of every worker that is full and lacks others."""
        room = {n: self._room(n) for n in range(self._num_staying)}
        chosen: list[Load] = []
        for n in range(self._num_staying):
            if room[n] or not self._pending(n, eager):
                continue
            places = [
                (-room[host], expert, host)
                for host in room
                if room[host]
                for expert in self._held[n] - self._goal[n] - self._dropped[host]
            ]
            if places:
                _, expert, host = min(places)
                chosen.append((host, expert))
                room[host] -= 1
        return chosen
