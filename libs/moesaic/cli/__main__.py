"""``python -m moesaic.cli`` is the ``moesaic`` command."""

from moesaic.cli.main import main

if __name__ == "__main__":
    main()
