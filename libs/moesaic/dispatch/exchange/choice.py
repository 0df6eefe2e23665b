"""Which way next? Predictions and trials in, a choice out. Pure.

At first the way is gone for which links cost least (``costs``). What exchanges take beyond that, with
experts that compute and workers that are waited for, is learned by kind of exchange and by way, and
makes predictions better; but it chooses nothing, for it was learned at different times, under
different loads, while others went other ways. Only trials (``trials``, ``evidence``) overrule links.
"""

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from moesaic.dispatch.exchange.costs import Case
from moesaic.dispatch.exchange.evidence import Evidence
from moesaic.dispatch.exchange.trials import Slot

_FADES = 0.9  # what a measurement weighs after the next one
_WORTH_A_LOOK = 3.0  # times as long as the best; what should take longer is not tried
_SLOT_EXCHANGES = 6  # of the slowest way that is tried
_IN_USE = 4.0  # exchanges of late; a kind with fewer is worth no trial
_USES_FADE, _MOST_USES = 0.95, 8.0  # with every question for wishes
_PAUSE_S = 2.0  # between the first two trials of a kind; twice as long with each further one
_CHECK_AGAIN_S = 120.0  # after a verdict
_MAX_KINDS = 1024


@dataclass(frozen=True)
class Choice:
    """A way, and what each should take."""

    case: Case
    predicted_s: dict[Case, float]
    exploring: bool = False  # gone because a trial says so, not because it should be the fastest
    changed: bool = False  # another way should be the fastest now


@dataclass
class _Kind:
    """What was learned of exchanges of one kind."""

    rest_s: dict[Case, float] = field(default_factory=dict)
    evidence: Evidence = field(default_factory=Evidence)
    best: Case = "direct"  # when it was chosen for last; so are the next two
    worth: list[Case] = field(default_factory=list)
    slowest_s: float = 0.0
    reported: Case | None = None  # the best way that was chosen last
    used: float = 0.0
    tried_s: float = float("-inf")
    trials: int = 0  # since the last verdict

    def predict(self, model_s: Mapping[Case, float]) -> dict[Case, float]:
        known = [self.rest_s[case] for case in model_s if case in self.rest_s]
        usual = sum(known) / len(known) if known else 0.0
        return {
            case: max(0.0, seconds + self.rest_s.get(case, usual))
            for case, seconds in model_s.items()
        }

    def consider(self, model_s: Mapping[Case, float], best_s: float) -> None:
        """Find out which ways are worth a trial. What they took at other times says nothing: a way that
        was slow when the machine was busy would never be gone again."""
        longer = {case: self._times_longer(case, model_s) for case in model_s}
        self.worth = [case for case, times in longer.items() if times <= _WORTH_A_LOOK]
        self.slowest_s = best_s * max(longer[case] for case in self.worth)

    def _times_longer(self, case: Case, model_s: Mapping[Case, float]) -> float:
        """How much longer than the best way it takes at least, by trials or else by links."""
        if case == self.best:
            return 1.0
        ratio = self.evidence.ratio(case, self.best)
        if ratio is not None:
            return math.exp(ratio.mean - ratio.error)
        return model_s[case] / max(model_s[self.best], 1e-9)

    @property
    def is_in_use(self) -> bool:
        return self.used >= _IN_USE and len(self.worth) > 1

    @property
    def is_settled(self) -> bool:
        return self.evidence.is_settled(self.best, self.worth)

    def wants_a_trial(self, now_s: float) -> bool:
        if self.is_settled:
            self.trials = 0
            return now_s >= self.tried_s + _CHECK_AGAIN_S
        return now_s >= self.tried_s + min(_CHECK_AGAIN_S, _PAUSE_S * (1 << min(self.trials, 16)))


class ExchangeChooser:
    """Chooses for each exchange, and learns what it took."""

    def __init__(self) -> None:
        self._kinds: dict[Hashable, _Kind] = {}
        self._in_use: list[_Kind] = []

    @property
    def is_settled(self) -> bool:
        """Whether it is known which way is the fastest, for all kinds that were in use lately."""
        return all(known.is_settled for known in self._in_use)

    def predict(self, kind: Hashable, model_s: Mapping[Case, float]) -> dict[Case, float]:
        """What each way should take, the rest included."""
        return self._kind(kind).predict(model_s)

    def best(self, kind: Hashable) -> Case:
        """The way that was the best when one was chosen last."""
        return self._kind(kind).best

    def choose(
        self, kind: Hashable, model_s: Mapping[Case, float], slot: Slot | None = None
    ) -> Choice:
        """The way that should be the fastest, or the one of the slot.

        Args:
            kind: exchanges that should take equally long in the same way: of equally many workers, rows.
            model_s: what the messages of each possible way should take; ties go to the first.
            slot: of the trial that is under way.
        """
        known = self._kind(kind)
        predicted_s = known.predict(model_s)
        first = min(model_s, key=model_s.__getitem__)
        known.best = known.evidence.best(first, model_s)
        known.consider(model_s, predicted_s[known.best])
        if slot is not None and slot.case != known.best and slot.case in known.worth:
            return Choice(slot.case, predicted_s, exploring=True)
        changed, known.reported = known.best != known.reported, known.best
        return Choice(known.best, predicted_s, changed=changed)

    def learn(
        self,
        kind: Hashable,
        case: Case,
        model_s: float,
        taken_s: float,
        slot: Slot | None = None,
        now_s: float = 0.0,
    ) -> None:
        """Note what an exchange took of which its messages should have taken ``model_s``.

        Args:
            kind: as it was chosen for.
            case: the way that was gone.
            model_s: see above.
            taken_s: how long it took.
            slot: of the trial in which it was done; ``None`` if it shows nothing there.
            now_s: when that is.
        """
        known, rest_s = self._kind(kind), taken_s - model_s
        known.used = min(known.used + 1, _MOST_USES)
        rests = known.rest_s
        rests[case] = _FADES * rests[case] + (1 - _FADES) * rest_s if case in rests else rest_s
        if slot is not None and slot.case == case:
            known.evidence.add(slot, taken_s)
            known.tried_s = now_s

    def wished_slot_s(self, now_s: float) -> float:
        """How long slots of a trial must be to show anything of the kinds that are in use; 0 if
        there is no need for one. Ask now and then."""
        self._in_use = [known for known in self._kinds.values() if known.is_in_use]
        for known in self._kinds.values():
            known.used *= _USES_FADE
        wishing = [known for known in self._in_use if known.wants_a_trial(now_s)]
        for known in wishing:
            known.tried_s, known.trials = now_s, known.trials + 1
        return max((_SLOT_EXCHANGES * known.slowest_s for known in wishing), default=0.0)

    def finish_trial(self) -> None:
        """The trial is over."""
        for known in self._kinds.values():
            known.evidence.finish()

    def _kind(self, kind: Hashable) -> _Kind:
        if kind not in self._kinds and len(self._kinds) >= _MAX_KINDS:
            self._kinds = {}  # of batches and workers that come no more
        return self._kinds.setdefault(kind, _Kind())
