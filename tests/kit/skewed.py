"""The kit's entry on a machine whose clock is a minute ahead."""

import time

from kit.front import run

true_time = time.time
time.time = lambda: true_time() + 60

if __name__ == "__main__":
    run()
