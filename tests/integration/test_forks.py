"""What was opened before a fork belongs to the parent."""

import subprocess
import sys

SCRIPT = """
import os
from kvflow.errors import ForkedProcess
from kvflow.forks import Origin

origin = Origin("the thing")
origin.require()
child = os.fork()
if not child:
    assert origin.is_elsewhere
    Origin("of the child").require()
    try:
        origin.require()
    except ForkedProcess as error:
        os._exit(7 if "the thing" in error.message and error.remedy else 1)
    os._exit(2)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), origin.is_elsewhere)
"""


def test_a_forked_child_is_refused_and_may_open_its_own():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert done.stdout == "7 False\n"
