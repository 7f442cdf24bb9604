"""Which code of ppctl this is: one digest of the package's own files.

Knows the package's directory. Must not know runs. A job that starts hours after it was submitted must not run what
somebody has edited since.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent


def package_digest(package: Path = _PACKAGE) -> str:
    """16 hex digits of the SHA-256 over names and contents of the package's Python files."""
    total = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        content = hashlib.sha256(file.read_bytes()).hexdigest()
        total.update(f"{file.relative_to(package).as_posix()} {content}\n".encode())
    return total.hexdigest()[:16]
