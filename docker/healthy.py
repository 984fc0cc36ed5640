#!/usr/bin/env python3
"""Exit with 0 if the engine of this container answers on its request port.

It imports nothing of kvflow, so that a check costs a few milliseconds.
"""

import os
from http.client import HTTPConnection

port = int(os.environ.get("KVFLOW_DEMO_LISTEN", "0.0.0.0:8000").rpartition(":")[2])
connection = HTTPConnection("127.0.0.1", port, timeout=2)
connection.request("GET", "/health")
raise SystemExit(connection.getresponse().status != 200)
