"""`muster config`: print the table in docs/keys.md of keys."""

import signal

from muster.train.config.help import markdown

signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # the program only prints: let `| head` end it

if __name__ == "__main__":
    print(markdown())
