"""The command in a directory of its own, as the tests of the product's commands run it."""

from tests.cli.conftest import ask, house, run, start

__all__ = ["ask", "house", "run", "start"]
