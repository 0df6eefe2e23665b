"""Which way next? Predictions in, what it took in, a choice out. Pure.

What an exchange takes is what its messages should take (``costs``) and a rest that they do not
explain: experts that compute, workers that are waited for, whatever else is on the links. The rest is
learned from every exchange, by kind of exchange and by way; a way that was not gone yet is assumed to
have the rest of the others.

What is learned overrules what links cost only if it does so clearly. A node measures a way while the
other nodes go theirs: sending everything everywhere is quick as long as nobody else does.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from moesaic.dispatch.exchange.costs import CASES, Case

_FADES = 0.9  # what a measurement weighs after the next one
_FIRST_LOOK = 8  # exchanges after which a way that was never gone is tried
_LOOK_AGAIN = 64  # exchanges after which another way is gone, to see whether it is still slower
_WORTH_A_LOOK = 2.0  # times the best prediction; what should take longer is not tried
_CLEARLY = 0.7  # times what the way takes that links ask for; only then another is better
_MAX_KINDS = 1024


@dataclass(frozen=True)
class Choice:
    """A way, and what each should take."""

    case: Case
    predicted_s: dict[Case, float]
    exploring: bool = False  # chosen to be measured, not because it should be the fastest


@dataclass
class _Kind:
    """What was learned of exchanges of one kind."""

    rest_s: dict[Case, float] = field(default_factory=dict)
    unused: dict[Case, int] = field(default_factory=dict)  # exchanges since it was gone or tried

    def predict(self, model_s: Mapping[Case, float]) -> dict[Case, float]:
        known = [self.rest_s[case] for case in model_s if case in self.rest_s]
        usual = sum(known) / len(known) if known else 0.0
        return {
            case: max(0.0, seconds + self.rest_s.get(case, usual))
            for case, seconds in model_s.items()
        }

    def is_due(self, case: Case) -> bool:
        return self.unused.get(case, 0) >= (_LOOK_AGAIN if case in self.rest_s else _FIRST_LOOK)


class ExchangeChooser:
    """Chooses for each exchange, and learns what it took."""

    def __init__(self) -> None:
        self._kinds: dict[Hashable, _Kind] = {}

    def predict(self, kind: Hashable, model_s: Mapping[Case, float]) -> dict[Case, float]:
        """What each way should take, the rest included."""
        return self._kind(kind).predict(model_s)

    def choose(self, kind: Hashable, model_s: Mapping[Case, float]) -> Choice:
        """The way that should be the fastest.

        Args:
            kind: exchanges that should take equally long in the same way: layer group, epoch, rows.
            model_s: what the messages of each possible way should take; ties go to the first.
        """
        known = self._kind(kind)
        predicted_s = known.predict(model_s)
        best = min(predicted_s, key=predicted_s.__getitem__)
        first = min(model_s, key=model_s.__getitem__)
        if predicted_s[best] > _CLEARLY * predicted_s[first]:
            best = first
        for case, seconds in predicted_s.items():
            worth = seconds <= _WORTH_A_LOOK * predicted_s[best]
            if case != best and worth and known.is_due(case):
                known.unused[case] = 0
                return Choice(case, predicted_s, exploring=True)
        return Choice(best, predicted_s)

    def learn(self, kind: Hashable, case: Case, model_s: float, taken_s: float) -> None:
        """Note what an exchange took of which its messages should have taken ``model_s``."""
        known, rest_s = self._kind(kind), taken_s - model_s
        for other in CASES:
            known.unused[other] = 0 if other == case else known.unused.get(other, 0) + 1
        rests = known.rest_s
        rests[case] = _FADES * rests[case] + (1 - _FADES) * rest_s if case in rests else rest_s

    def _kind(self, kind: Hashable) -> _Kind:
        if kind not in self._kinds and len(self._kinds) >= _MAX_KINDS:
            self._kinds = {}  # of epochs that have gone
        return self._kinds.setdefault(kind, _Kind())
