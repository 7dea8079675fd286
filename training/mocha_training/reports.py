"""What an evaluation found, on standard output: a table, or one JSON object. Measures nothing."""

import json
import sys
from typing import Any

from rich.console import Console
from rich.table import Table


def show_report(report: dict[str, Any], as_json: bool = False) -> None:
    """Write the report of `evaluate_corpus`."""
    if as_json:
        sys.stdout.write(json.dumps(report) + "\n")
        return
    table = Table("corpus", "utterances", "WER %", "CER %", "CTC WER %", "CTC CER %", "late p50 / p90 / p99 ms")
    for name, row in [*report["by_corpus"].items(), ("all", report)]:
        late = " / ".join("-" if v is None else f"{v:.0f}" for v in row["emission_latency_ms"].values())
        rates = ["-" if row[k] is None else f"{100 * row[k]:.1f}" for k in ("wer", "cer", "ctc_wer", "ctc_cer")]
        table.add_row(name, str(row["utterances"]), *rates, late)
    Console().print(table)
    Console().print(f"real-time factor {report['rtf']:.4f}, tokens per reference {report['tokens_per_reference']:.3f}")
