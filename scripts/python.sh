# Sourced by the other scripts: choose the Python that makes the environments, and say what is needed where there is none.
if [ -z "${PYTHON:-}" ]; then
  PYTHON=python3.11
  command -v "$PYTHON" >/dev/null 2>&1 || PYTHON=python3
fi
if ! "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
  echo "graphoffload needs Python 3.11 or newer; '$PYTHON' is not. Set PYTHON to one that is." >&2
  exit 2
fi
