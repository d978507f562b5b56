"""Run every file in `examples/`, each in a process of its own, and stop at the first that fails."""

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def main() -> int:
    """Run them in order of name; returns the exit code of the first that fails, else 0."""
    files = sorted(EXAMPLES.glob("*.py"))
    if not files:
        print(f"no examples in {EXAMPLES}", file=sys.stderr)
        return 1
    for file in files:
        print(f"-- {file.name}", flush=True)
        code = subprocess.run([sys.executable, str(file)], check=False).returncode
        if code:
            print(f"{file.name}: exit code {code}", file=sys.stderr)
            return code
    print(f"{len(files)} passed, 0 failed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
