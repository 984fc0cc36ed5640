"""The numbers of the page on planning are those that planning gives."""

from .planning_tables import PAGE, with_tables


def test_the_tables_of_planning_are_those_of_the_planner():
    """If they differ: ``PYTHONPATH=tests python -m docs.planning_tables``, and read what changed."""
    page = PAGE.read_text()
    assert page == with_tables(page)
