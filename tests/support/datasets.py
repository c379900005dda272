"""Data sets in files."""

import json
from pathlib import Path

__all__ = ["write_data"]


def write_data(folder: Path) -> Path:
    """Write a data set of 40 documents; return its prefix."""
    from megatron_async.tools import data

    lines = [json.dumps({"text": f"{number} " * 40}) for number in range(40)]
    (folder / "text.jsonl").write_text("\n".join(lines))
    argv = ["--input", str(folder / "text.jsonl"), "--output", str(folder / "data")]
    assert data.main(argv) == 0
    return folder / "data"
