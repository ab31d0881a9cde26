"""`python -m train`, in a clone: trains, as `muster` does anywhere."""

from muster.train.__main__ import main

if __name__ == "__main__":
    main()
