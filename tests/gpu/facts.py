# ruff: noqa: T201 - standard output is its answer
"""Print what decides how kvflow runs on this machine's GPU, each part by itself: ``make test-gpu-facts``.

The parts settle what was read in sources and never seen: which thread has a context, how remote writes are ordered,
what the metadata of an agent with a GPU's memory is, how fast it is registered, how fast NIXL and kvflow read it.
"""

import ctypes
import subprocess
import sys
import threading
import time
import traceback

import numpy as np
import torch

from kvflow.layout.component import Region
from kvflow.memory.device import TorchDeviceOrder
from kvflow.reads.nixl.backend import DeviceNixlBackend, NixlBackend
from tests.devices import REAL

KVFLOW = (sys.executable, "-c", "import sys; from kvflow.tools.cli import main; sys.exit(main())")
COMMANDS = (
    ("nvidia-smi",),
    ("nvidia-smi", "topo", "-m"),
    ("nvidia-smi", "topo", "-p2p", "r"),
    ("nvidia-smi", "-q", "-d", "MEMORY"),
    ("sh", "-c", "ulimit -l; ls /dev/infiniband; lsmod | grep -e peermem -e nvidia_fs"),
    ("sh", "-c", "cat /proc/sys/kernel/yama/ptrace_scope; ls -l /proc/self/ns/pid"),
    (*KVFLOW, "doctor", "--device", "DEVICE"),
    (*KVFLOW, "bench", "pull", "--device", "DEVICE", "--source-device", "DEVICE"),
)
ATTRIBUTES = {116: "GPUDirect RDMA", 117: "flushes of remote writes", 118: "order of remote writes, 100 is OWNER"}
CACHE_BYTES = 1 << 30


def commands(device: str) -> None:
    """Run what other programs know."""
    for command in COMMANDS:
        words = [device if word == "DEVICE" else word for word in command]
        print("$", *words, flush=True)
        try:
            subprocess.run(words, check=False, timeout=200, stderr=subprocess.STDOUT)
        except (OSError, subprocess.TimeoutExpired) as error:
            print(error)


def contexts(_device: str) -> None:
    """Say when a new thread has a context of CUDA, and how the device orders remote writes."""
    driver, number = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    torch.zeros(1, device="cuda")
    for attribute, meaning in ATTRIBUTES.items():
        code = driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, 0)
        print(f"attribute {attribute} ({meaning}): {number.value}, code {code}")

    def say(when: str) -> None:
        context = ctypes.c_void_p()
        code = driver.cuCtxGetCurrent(ctypes.byref(context))
        print(f"{when}: a context is current: {bool(context.value)}, code {code}")

    def enter() -> None:
        say("new thread")
        torch.cuda.set_device(0)
        say("after set_device(0)")
        TorchDeviceOrder(0).enter()
        say("after enter()")

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()


def agents(device: str) -> None:
    """Register memory of the device, and say what a peer would read in the metadata."""
    cache, epochs = torch.zeros(CACHE_BYTES, dtype=torch.uint8, device=device), np.zeros(4096, np.uint8)
    table = Region(epochs.ctypes.data, epochs.nbytes)
    started = time.perf_counter()
    if cache.is_cuda:
        region = Region(cache.data_ptr(), cache.nbytes, "VRAM", cache.device.index)
        backend: NixlBackend = DeviceNixlBackend(TorchDeviceOrder(cache.device.index), "facts", [region], table)
    else:
        backend = NixlBackend("facts", [Region(cache.data_ptr(), cache.nbytes)], table)
    print(f"two agents that registered {CACHE_BYTES >> 20} MiB took {time.perf_counter() - started:.3f} s")
    print("metadata:", backend._ours)
    print("progress thread of the reader:", backend._reader.progress)
    backend.close()


def main() -> int:
    """Run every part, also if another one fails. Those of CUDA run where ``KVFLOW_TEST_MEMORY`` is VRAM."""
    device, failed = "cuda:0" if torch.cuda.is_available() else "cpu", []
    print("python", sys.version.split()[0], "torch", torch.__version__, "cuda", torch.version.cuda, "device", device)
    for part in (commands, contexts, agents) if REAL else (commands, agents):
        print(f"== {part.__name__}", flush=True)
        try:
            part(device)
        except Exception:  # noqa: BLE001 - the other parts are told nevertheless
            traceback.print_exc(file=sys.stdout)
            failed.append(part.__name__)
    print("failed:", *failed or ["nothing"])
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
