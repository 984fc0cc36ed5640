"""``python -m tests.fuzz.guided TARGET [options of libFuzzer]``: input that looks for new code, with atheris.

Needs ``pip install atheris``, which has wheels for some releases of Python only. What it finds it writes to a file and
prints; the other options are libFuzzer's: ``-max_total_time=300``, ``-runs=100000``, a folder to keep input in.
"""

import sys

import atheris

with atheris.instrument_imports(include=["handshake", "kvflow"]):
    from tests.fuzz.targets import TARGETS, drawn

SEED = "guided"


def main():
    name = sys.argv.pop(1)
    take, _ = TARGETS[name]

    def mutate(data, max_size, seed):
        """Draw as the fuzzer without guidance does, now and then; else change what has reached new code."""
        return drawn(name, SEED, seed)[:max_size] if seed % 4 == 0 else atheris.Mutate(data, max_size)

    atheris.Setup(sys.argv, take, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
