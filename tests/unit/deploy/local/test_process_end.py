"""A process that ends at once: what is registered for its end runs, and what it said is there."""

import subprocess
import sys

PROGRAM = """
import atexit, threading
from deploy.local.leaving import end

class Kept:
    def __del__(self):
        print("taken apart")

kept = Kept()
atexit.register(print, "registered")
threading.Thread(target=threading.Event().wait).start()  # would be waited for
print("said")
end(7)
"""


def test_a_process_ends_without_being_taken_apart():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, timeout=20, check=False
    )
    assert (done.returncode, done.stdout) == (7, b"said\nregistered\n")
