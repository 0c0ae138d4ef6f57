#!/usr/bin/env python
"""The plan's closed form against published runs: one set of constants for each kind of device, nothing fitted to a row.

    python tools/bench/plan_accuracy.py published.csv            # the table, worst rows first
    python tools/bench/plan_accuracy.py published.csv --json

The CSV has the columns source, model, gpu, ngpu, dp, tp, pp, cp, local_batch, global_batch_tokens, seq_len, precision,
ac, tps_per_gpu, tflops_per_gpu, mfu, mem_gib, notes. Each stack's own rules (what it keeps in which type, whether it
compiles, how it counts the MFU) are in ``published.py`` beside this file.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import argparse
import csv
import json

import _environment  # noqa: F401
from published import measured, workload

from titanlite.plan.estimate import estimate


def rows(path: str) -> list[dict]:
    """Every row of the CSV with the plan's numbers and errors (predicted / measured - 1)."""
    found = []
    for number, row in enumerate(csv.DictReader(Path(path).read_text().splitlines())):
        w, device = workload(row)
        plan = estimate(w, device)
        tokens, memory = measured(row, w, device)
        peak = plan.peak_gib
        found.append(
            {
                "row": number,
                "source": row["source"].split()[0].split("@")[0],
                "model": row["model"],
                "gpu": device.name,
                "layout": f"{row['ngpu']} gpus, dp {row['dp']} tp {row['tp']} pp {row['pp']}",
                "precision": row["precision"],
                "tokens_per_second": {
                    "measured": tokens,
                    "predicted": plan.tokens_per_second_per_device,
                    "error": plan.tokens_per_second_per_device / tokens - 1,
                },
                "memory_gib": {"measured": memory, "predicted": peak, "error": peak / memory - 1} if memory else None,
                "seconds": plan.as_dict()["seconds"],
                "memory_parts": plan.memories[0].gib(),
            }
        )
    return found


def summary(found: list[dict], key: str) -> dict[str, float]:
    """Median and 90th percentile of the absolute error."""
    errors = sorted(abs(row[key]["error"]) for row in found if row[key])
    if not errors:
        return {"rows": 0}
    at = (len(errors) - 1) * 0.9
    low = int(at)
    high = min(low + 1, len(errors) - 1)
    return {
        "rows": len(errors),
        "median": (errors[(len(errors) - 1) // 2] + errors[len(errors) // 2]) / 2,
        "p90": errors[low] + (at - low) * (errors[high] - errors[low]),
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", help="table of published runs")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    found = rows(arguments.csv)
    totals = {key: summary(found, key) for key in ("tokens_per_second", "memory_gib")}
    if arguments.json:
        print(json.dumps({"summary": totals, "rows": found}))
        return
    print("| run | layout | tokens/s/device measured | predicted | error | GiB measured | predicted | error |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in sorted(found, key=lambda row: -abs(row["tokens_per_second"]["error"])):
        t, m = row["tokens_per_second"], row["memory_gib"]
        memory = f"{m['measured']:.1f} | {m['predicted']:.1f} | {m['error']:+.0%}" if m else " | | "
        name = f"{row['source'].split('/')[1]} {row['model']} {row['precision']} {row['gpu']}"
        print(
            f"| {name} | {row['layout']} | {t['measured']:.0f} | {t['predicted']:.0f} | {t['error']:+.0%} | {memory} |"
        )
    for key, total in totals.items():
        print(f"\n{key}: {total['rows']} rows, median error {total['median']:.1%}, 90th percentile {total['p90']:.1%}")


if __name__ == "__main__":
    main()
