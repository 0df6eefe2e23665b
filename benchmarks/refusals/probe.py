"""Asks a gateway's ``/livez`` without a pause, and tells the longest wait between two lines that it reads.

A process of its own, so that nothing else holds it: ``python -m benchmarks.refusals.probe PORT``.
"""

import socket
import sys
import threading
import time

HOST = "127.0.0.1"
ASK = f"GET /livez HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode()


def main() -> None:
    """Answer each line of the input with the longest wait in milliseconds since the last one."""
    longest_s = 0.0
    answered = threading.Condition()

    def ask() -> None:
        nonlocal longest_s
        with socket.create_connection((HOST, int(sys.argv[1]))) as connection:
            while True:
                began = time.perf_counter()
                connection.sendall(ASK)
                answer = b""
                while not answer.endswith(b"}"):
                    if not (more := connection.recv(4096)):
                        return
                    answer += more
                with answered:
                    longest_s = max(longest_s, time.perf_counter() - began)
                    answered.notify()

    threading.Thread(target=ask, daemon=True).start()
    for _ in sys.stdin:
        with answered:
            # What is under way counts too.
            answered.wait(60)
            print(longest_s * 1000, flush=True)
            longest_s = 0.0


if __name__ == "__main__":
    main()
