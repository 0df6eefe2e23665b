"""When is a silent peer dead? Times in, verdicts out."""

from enum import Enum

INTERVAL_S = 0.25  # between pings on an idle link
SUSPECT_S = 1.0  # of silence
EJECT_S = 2.0  # of silence


class Verdict(Enum):
    """What to do about a link now."""

    PING = "ping"
    WARN = "warn"  # ping, and say that the peer is suspect; once per silence
    EJECT = "eject"


class Pulse:
    """Judges one link, once per interval, by how long its peer has been silent while nothing was asked of it.

    While an exchange is outstanding its own deadline rules, for the far engine may be computing. A silence counts only
    while this side was awake to hear: after a gap in its own checks it starts anew.
    """

    def __init__(self, now: float) -> None:
        self._heard = self._checked = now
        self._warned = False

    def heard(self, now: float) -> None:
        """Note that a message came."""
        self._heard, self._warned = now, False

    def check(self, now: float, busy: bool) -> Verdict:
        """Judge the link at ``now``; ``busy`` says that an exchange is outstanding on it."""
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
