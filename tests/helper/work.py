"""A helper for tests: it does what a question says to itself, as hostile work or a stranger would."""

import os
from typing import Any

from moesaic.helper.limits import Limits
from moesaic.helper.serving import serve

LIMITS = Limits(cpu_s=0.2, memory_bytes=32 << 20)
_held: list[bytes] = []


def answer(question: Any) -> Any:
    """Do one thing."""
    match question:
        case ["pid"]:
            return os.getpid()
        case ["spin"]:
            while True:
                pass
        case ["hold the interpreter"]:  # no Python runs until it ends
            return 3 ** (10**8) % 2
        case ["hold", num_bytes]:
            _held.append(b"x" * num_bytes)
            return len(_held)
        case ["signal", number]:
            os.kill(os.getpid(), number)
        case ["signal if used", number]:
            if _held:
                os.kill(os.getpid(), number)
        case ["fail"]:
            raise RuntimeError
        case ["environment"]:
            return dict(os.environ)
        case ["text", length]:
            return "x" * length
    return question


if __name__ == "__main__":
    serve(answer, LIMITS)
