"""`python -m train.config`: print the README's table of keys."""

from train.config.help import markdown

if __name__ == "__main__":
    print(markdown())
