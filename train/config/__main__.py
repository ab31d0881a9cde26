"""`python -m train.config`: print the README's table of keys."""

import signal

from train.config.help import markdown

signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # all that it does is print: `| head` ends it

if __name__ == "__main__":
    print(markdown())
