"""How each code block of the documentation is checked.

``CHECKS`` has a list for each page with one check per block, in the order of the page. For a page with a single
``CheckedBy``, one test reads all blocks together. ``test_blocks.py`` carries out the checks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from . import prepared


@dataclass(frozen=True)
class Program:
    """The block is a Python program. It runs in a process of its own, in the folder of the page's test."""


@dataclass(frozen=True)
class Step:
    """The block is Python and continues the steps before it, in one event loop and with one set of names."""

    before: str = ""  # Python that creates names which the block expects
    after: str = ""  # Python that checks what the block did


@dataclass(frozen=True)
class Shell:
    """The block is a list of shell commands, which run in the folder of the page's test.

    Attributes:
        status: exit status of the last command. If it is not 0, what it prints to standard error counts as output.
        environment: variables that the page tells to set.
    """

    status: int = 0
    environment: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Output:
    """The block is what the block before it prints. Three dots stand for any text."""

    part: bool = False  # whether the block shows only some lines of the output
    measured: bool = False  # whether times, rates, ids and ports may differ. ``make docs`` then writes the block


@dataclass(frozen=True)
class Parsed:
    """The block is a list of commands that are not run. Their programs, options, targets and files must exist."""

    why: str  # the reason why they are not run


@dataclass(frozen=True)
class CheckedBy:
    """The block is read from the page by a test of its own."""

    path: str  # that test, ``tests/FILE::NAME``; or the module through which it reads the page, which names the page
    why: str  # what that test does with the block


@dataclass(frozen=True)
class Drawing:
    """The block is a drawing or a formula, with nothing to run."""


Check = Program | Step | Shell | Output | Parsed | CheckedBy | Drawing

LANGUAGES: dict[type[Check], set[str]] = {
    Program: {"python"},
    Step: {"python"},
    Shell: {"sh", "console"},
    Output: {"text"},
    Parsed: {"sh", "console"},
    CheckedBy: {"sh", "python", "py", "json", "yaml", "dockerfile", "text", ""},
    Drawing: {"text", ""},
}
"""The languages of the blocks that a check accepts."""

CHAT, SERVE = "tests/vllm/test_chat.py", "tests/vllm/test_serve.py"
VLLM_PAGE = CheckedBy("tests/docs/test_vllm_page.py", "parses it")
OFFLOAD = CheckedBy("tests/docs/test_vllm_page.py", "parses it; tests/vllm/test_offloading.py runs it with vLLM")
ROUTERS = CheckedBy("tests/docs/test_routers_page.py", "parses it; tests/vllm/routers.py runs it with released routers")
RAY = CheckedBy("tests/ray/cluster.py", "runs it with Ray, in an environment of its own")
KUBERNETES = CheckedBy("tests/docs/test_kubernetes.py", "compares it with the manifests; there is no cluster")
PLANNING = CheckedBy("tests/docs/planning_tables.py", "compares it with the planner's output")

DOCTOR = CheckedBy("tests/docs/test_doctor_page.py", "compares its codes and remedies with those of the doctor")

MEASURED = Output(measured=True)
SECRET = (("KVFLOW_CLUSTER_SECRET", prepared.FAILING_SECRET),)

CHECKS: dict[str, list[Check] | CheckedBy] = {
    "README.md": [Parsed("test_wheel.py runs it"), Drawing(), CheckedBy("tests/docs/test_blocks.py", "runs it")],
    "CONTRIBUTING.md": [Parsed("runs the tests")],
    "docs/tutorial/first-transfer.md": [Program(), Output()],
    "docs/howto/adopt-tensors.md": [Step(), Output(), Program(), Output(), Step(), Step(), Output()],
    "docs/howto/debug.md": [
        *[Program(), Shell(), Output(), Parsed("reads the logs of the demo, as tests/demo do")],
        *[Shell(), MEASURED] * 2,
        *[Shell(status=1, environment=SECRET), MEASURED],
        *[Shell(), MEASURED],
        *[Shell(), Output()],
        *[Parsed("needs two hosts")] * 3,
        DOCTOR,
    ],
    "docs/howto/deploy.md": [
        *[Parsed("needs a package index, and would change the environment of the tests")] * 3,
        *[CheckedBy("tests/docs/test_deploy_page.py", "runs it with an address of this host")] * 3,
        *[Parsed("needs Docker")] * 3,
        *[KUBERNETES] * 5,
    ],
    "docs/howto/describe-a-model.md": [
        *[Step(), Step(before=prepared.RECORD_WARNINGS, after=prepared.WARNED), Step()],
        *[Program(), Output(), Shell(), Output(part=True)],
    ],
    "docs/howto/embed-a-worker.md": [
        *[Program(), Output()] * 3,
        *[Step(), Step(), Output()],
        *[Step(before=before, after=after) for before, after in prepared.EMBEDDED[:5]],
        *[Program(), Output()],
        *[Step(before=before, after=after) for before, after in prepared.EMBEDDED[5:]],
    ],
    "docs/howto/gpus.md": [
        Parsed("needs GPUs and network cards"),
        Parsed("needs Docker and a GPU"),
        Parsed("needs two GPUs"),
        *[Parsed("needs a GPU")] * 2,
    ],
    "docs/howto/monitor.md": [
        Parsed("would change the environment of the tests"),
        Step(before="import kvflow", after=prepared.CONFIG_CHECKED),
        *[CheckedBy("tests/docs/test_monitor_page.py", "parses it")] * 2,
        Step(before=prepared.CACHE_MADE, after="REGISTRY.unregister(metrics)"),
        Step(before=prepared.WORKER_OPENED, after="assert ticket.grants[0].trace"),
        Step(),
    ],
    "docs/howto/read-while-computing.md": CheckedBy("tests/vllm/test_rendezvous.py", "starts engines with it"),
    "docs/howto/routers.md": [
        *[ROUTERS] * 3,
        *[ROUTERS] * 3,
        *[Parsed("needs a package index"), *[RAY] * 6],
        *[Parsed("needs vLLM; tests/vllm/test_live.py runs it"), ROUTERS],
        *[OFFLOAD] * 3,
    ],
    "docs/howto/run-the-demo.md": [Parsed("runs the demo, as tests/demo do")] * 2,
    "docs/howto/share-prefixes.md": CheckedBy("tests/vllm/test_prefixes.py", "starts engines with its commands"),
    "docs/howto/vllm.md": [
        *[CheckedBy(f"{CHAT}::test_a_chat_of_two_turns_is_that_of_one_engine_and_finds_its_prefix", "runs it")] * 2,
        VLLM_PAGE,
        *[CheckedBy(f"{SERVE}::test_the_commands_of_the_page_work_in_its_order", "runs it")] * 9,
        *[VLLM_PAGE] * 5,
        CheckedBy("tests/vllm/test_failures.py::test_a_ticket_that_is_used_up_fails_or_is_computed_again", "logs it"),
        CheckedBy(f"{SERVE}::test_the_resets_of_the_page_succeed_while_a_ticket_is_out", "runs it"),
        CheckedBy("tests/vllm/test_plugin.py::test_the_alias_is_the_same_class_and_not_a_subclass", "loads it"),
    ],
    "docs/reference/api.md": CheckedBy("tests/docs/api_page.py", "generates it from the docstrings"),
    "docs/reference/api-values.md": CheckedBy("tests/docs/api_page.py", "generates it from the docstrings"),
    "docs/reference/wire.md": CheckedBy("tests/wire/test_page.py", "finds each example in a vector"),
    "docs/reference/models.md": [Step()],
    "docs/explanation/architecture.md": [Drawing()] * 4,
    "docs/explanation/performance.md": [Parsed("measures for minutes on an idle machine")],
    "docs/explanation/planning.md": [PLANNING] * 2,
    "docs/contributing/publish.md": [Parsed("tests/architecture/test_wheel.py builds and looks into it")],
    "docs/contributing/faults.md": [
        Parsed("runs for minutes; tests/simulation run a short form"),
        *[Parsed("runs for minutes; its tests run a short form")] * 5,
    ],
}
"""Page -> one check for each of its code blocks, in order."""

PREPARATIONS: dict[str, Callable[[Path], None]] = {
    "docs/howto/debug.md": prepared.write_logs_of_failures,
    "docs/howto/describe-a-model.md": prepared.write_models,
    "docs/reference/models.md": prepared.write_models,
}
"""Page -> what puts the files that its blocks read into the folder of its test."""
