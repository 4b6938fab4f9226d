"""A `shoal run --watch` in a process, its lines, and edits of its source."""

from __future__ import annotations

import queue
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

SECONDS = 180
ROOT = Path(__file__).resolve().parents[1]


class Watching:
    """A command with `--watch`, and its lines."""

    def __init__(self, words: Sequence[str | Path], source: Path) -> None:
        self.source, self.lines = source, queue.SimpleQueue[str]()
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(words, cwd=ROOT, stdout=pipe, stderr=subprocess.STDOUT, text=True)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            self.lines.put(line)

    def read_until(self, words: str) -> str:
        """Return the output up to a line with these words."""
        found = ""
        while words not in found:
            found += self.lines.get(timeout=SECONDS)
        return found

    def save(self, text: str, name: str = "train.py") -> None:
        """Write a file as many editors do."""
        scratch = self.source / f"{name}~"
        scratch.write_text(text)
        scratch.replace(self.source / name)

    def run_again(self, text: str, name: str = "train.py") -> str:
        """Save a file, and return the output of the run."""
        self.save(text, name)
        return self.read_until("watching for changes")
