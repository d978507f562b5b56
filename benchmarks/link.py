"""Measure the link and the machine with the library's own probe and print it as a row: the bound of "offload everything"."""

from __future__ import annotations

import json

import graphoffload

if __name__ == "__main__":
    machine = graphoffload.Machine.measure()
    print(json.dumps({"variant": "machine", "machine": json.loads(machine.to_json())}))
