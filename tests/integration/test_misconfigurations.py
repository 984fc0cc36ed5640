"""Every misconfiguration of the table is created for real, and named by a code and a remedy."""

from contextlib import AsyncExitStack

import pytest

from tests.docs.misconfigurations_page import PAGE, line_of, said_of

from .consuming import until
from .misconfigurations import ROWS
from .misconfigured import Scene
from .saying import Sayings

ALL = [row for rows in ROWS.values() for row in rows]
TOGETHER = {row.create: [each for each in ALL if each.create is row.create] for row in ALL}


@pytest.mark.nixl
@pytest.mark.processes
@pytest.mark.parametrize("rows", TOGETHER.values(), ids=[rows[0].wrong.replace("`", "") for rows in TOGETHER.values()])
async def test_it_is_named_with_a_code_and_a_remedy(rows, tmp_path):
    heard = await created(rows, tmp_path)
    lines = PAGE.read_text().splitlines()
    for row in rows:
        said = said_of(row, heard)
        assert all(each.message and each.remedy for each in said), said
        assert line_of(row, said) in lines, "run: make docs"


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
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and "| code |" not in line]
    assert [line.split(" | ")[0].removeprefix("| ") for line in lines] == [row.wrong for row in ALL]
    assert len(lines) >= 25
