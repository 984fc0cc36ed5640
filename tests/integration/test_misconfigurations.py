"""Every misconfiguration is created for real, and named by a code, a message and a remedy.

``tests/data/misconfigurations.json`` has message and remedy of each, as the first who names it says them.
"""

import json
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from .consuming import until
from .misconfigurations import ROWS
from .misconfigured import Scene, stable
from .saying import Sayings

SAID = json.loads((Path(__file__).parents[1] / "data" / "misconfigurations.json").read_text())
TOGETHER = {row.create: [each for each in ROWS if each.create is row.create] for row in ROWS}


@pytest.mark.nixl
@pytest.mark.processes
@pytest.mark.parametrize("rows", TOGETHER.values(), ids=[rows[0].wrong.replace("`", "") for rows in TOGETHER.values()])
async def test_it_is_named_with_a_code_and_a_remedy(rows, tmp_path):
    heard = await created(rows, tmp_path)
    found = {(each.who, each.code): each for each in heard}
    for row in rows:
        said = [found[named] for named in row.said.items()]
        assert all(each.message and each.remedy for each in said), said
        assert [stable(said[0].message), stable(said[0].remedy)] == SAID[row.wrong]


async def created(rows, folder):
    """Create the misconfigurations of one scene; return what is said."""
    async with AsyncExitStack() as stack:
        heard = stack.enter_context(Sayings())
        await rows[0].create(Scene(stack, folder, heard))
        missing = {named for row in rows for named in row.said.items()}
        try:
            await until(lambda: missing <= {(each.who, each.code) for each in heard.said})
        except TimeoutError:
            raise AssertionError(f"nobody names {missing}: {heard.said}") from None
        return heard.said


def test_the_table_has_every_row_and_no_other():
    assert sorted(SAID) == sorted(row.wrong for row in ROWS)
