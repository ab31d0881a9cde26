"""`python -m train.report RUN_FOLDER`: make report.html anew."""

import json
import sys
from pathlib import Path

from train.report.page import write_report

if __name__ == "__main__":
    if len(sys.argv) != 2 or not (Path(sys.argv[1]) / "metrics.jsonl").exists():
        sys.exit(f"usage: python -m train.report RUN_FOLDER; given: {json.dumps(sys.argv[1:])}")
    print(write_report(Path(sys.argv[1])))
