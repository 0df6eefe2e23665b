"""Judge of silent peers: times in, verdicts out."""

from enum import Enum

INTERVAL_S = 0.25  # between pings on an idle link
SUSPECT_S = 1.0  # of silence
EJECT_S = 2.0  # of silence


class Verdict(Enum):
    """The next action on a link."""

    PING = "ping"
    WARN = "warn"  # ping, and say that the peer is suspect; once per silence
    EJECT = "eject"


class Pulse:
    """Judges one link, once per interval, by the silence of its peer while no request is outstanding.

    During an exchange only the exchange's deadline counts, for the far engine may be computing. After
    a gap in this side's own checks the silence starts anew: this side was not awake to hear.
    """

    def __init__(self, now: float) -> None:
        self._heard = self._checked = now
        self._warned = False

    def heard(self, now: float) -> None:
        """Note that a message came."""
        self._heard, self._warned = now, False

    def check(self, now: float, busy: bool) -> Verdict:
        """Judge the link at ``now``; ``busy`` if a request is outstanding on it."""
        slept = now - self._checked > 2 * INTERVAL_S
        self._checked = now
        if busy or slept:
            self.heard(now)
        silence = now - self._heard
        if silence > EJECT_S:
            return Verdict.EJECT
        if silence > SUSPECT_S and not self._warned:
            self._warned = True
            return Verdict.WARN
        return Verdict.PING
