#!/usr/bin/env bash
# Set up tox in a virtual environment beside the checkout (once) and run the tests, or the tox environments named.
#
#   bash scripts/test.sh                       the tests
#   bash scripts/test.sh lint,types,docs       these environments of tox.ini (`all`: every one that CI runs)
#   bash scripts/test.sh tests -- -k policy    arguments for pytest after --
#
# PYTHON  the Python that makes the environment (default: python3.11, or else python3)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

source scripts/python.sh
if ! [ -e .tox/runner/graphoffload-ready ]; then
  echo "Setting up tox (the first run of the tests installs torch: a few minutes, once)" >&2
  "$PYTHON" -m venv .tox/runner
  .tox/runner/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt tox
  touch .tox/runner/graphoffload-ready
fi

environments=${1:-tests}
[ $# -gt 0 ] && shift
if [ "$environments" = all ]; then
  exec .tox/runner/bin/tox run "$@"
fi
exec .tox/runner/bin/tox run -e "$environments" "$@"
