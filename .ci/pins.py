"""`python .ci/pins.py TORCH TORCHVISION`: constraints.txt for another torch, whose own requirements are not pinned then."""

import re
import sys
from pathlib import Path

OF_TORCH = re.compile(r"(torch|torchvision|triton|nvidia-.*|cuda-.*)==")


def pins(torch: str, torchvision: str) -> list[str]:
    """Return the lines of constraints.txt with the given versions (`2.11`) in any patch release."""
    lines = (Path(__file__).parents[1] / "constraints.txt").read_text().splitlines()
    kept = [line for line in lines if not OF_TORCH.match(line)]
    return [*kept, f"torch=={torch}.*", f"torchvision=={torchvision}.*"]


if __name__ == "__main__":
    print("\n".join(pins(*sys.argv[1:])))
