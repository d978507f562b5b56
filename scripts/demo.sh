#!/usr/bin/env bash
# Set up graphoffload in a virtual environment beside the checkout (once) and run its demo.
#
#   bash scripts/demo.sh [options of `graphoffload demo`]
#
# PYTHON             the Python that makes the environment (default: python3.11, or else python3)
# GRAPHOFFLOAD_PYTHON  a Python that already has torch and transformers (for a GPU, say): used as it is, nothing is installed
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ -n "${GRAPHOFFLOAD_PYTHON:-}" ]; then
  PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" exec "$GRAPHOFFLOAD_PYTHON" -m graphoffload demo "$@"
fi

source scripts/python.sh
if ! [ -e .venv-demo/graphoffload-ready ]; then
  echo "Setting up .venv-demo (torch takes a few minutes, once)" >&2
  "$PYTHON" -m venv .venv-demo
  .venv-demo/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[demo]'
  touch .venv-demo/graphoffload-ready
fi
exec .venv-demo/bin/graphoffload demo "$@"
