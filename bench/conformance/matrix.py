"""The results as one table in Markdown."""

from __future__ import annotations

from typing import Any

LEGEND = (
    "S: every step had the samples that it has undisturbed; W: the same final weights, bit for bit; M: every step once in "
    "the metrics; an ✗ says what differs. Seconds: from each fault until all ranks have "
    "begun a step that is new. In brackets: exit codes of the launches in their order, - one that the suite killed."
)

Results = dict[str, dict[str, dict[str, Any]]]
"""Trainer's title -> fault's title -> raw result."""


def matrix(results: Results) -> str:
    """Return the table: one row per fault, one column per trainer."""
    rows = list(dict.fromkeys(fault for column in results.values() for fault in column))
    lines = ["| fault | " + " | ".join(results) + " |", "|---" * (len(results) + 1) + "|"]
    for row in rows:
        cells = [cell(column[row]) if row in column else "" for column in results.values()]
        lines.append(f"| {row} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + f"\n\n{LEGEND}"


def cell(result: dict[str, Any]) -> str:
    """Return one result in the letters of the legend."""
    if "goodput" in result:
        return f"{result['goodput']:.2f}"
    codes = "[" + " ".join("-" if code is None else str(code) for code in result["exit_codes"]) + "]"
    seconds = " ".join(f"{value:.1f} s" for value in result["seconds"] if value is not None)
    return ", ".join(part for part in (judgement(result), seconds, codes) if part)


def judgement(result: dict[str, Any]) -> str:
    """Return marks that say whether samples, weights and metrics equal those of the undisturbed run."""
    if hung := result["facts"].get("hung"):
        return f"hung: {hung}"
    if not result["finished"]:
        return "does not finish"
    other, metrics = result["samples"]["other_steps"], result["metrics"]
    twice, missing = metrics["twice"], metrics["missing"]
    words = [f"S ✗ {other} steps" if other else "S ✓"]
    if result["weights_equal"] is not None:
        words.append("W ✓" if result["weights_equal"] else "W ✗")
    wrong = [f"{number} {word}" for number, word in ((twice, "twice"), (missing, "missing")) if number]
    words.append(f"M ✗ {', '.join(wrong)}" if wrong else "M ✓")
    if result["facts"].get("second trained too"):
        words.append("both train")
    return " ".join(words)
