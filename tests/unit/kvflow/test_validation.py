"""One translator says what msgspec has refused: field, what it must be, what it is."""

from enum import Enum
from typing import Annotated, Literal

import msgspec
import numpy as np
import pytest
from msgspec import Meta, Struct

from kvflow.errors import suggest
from kvflow.validation import SuggestingMeta, describe_refusal, find_fault
from tests.helpers.loops import looped

Name = Annotated[str, Meta(min_length=1, max_length=4)]
Color = Enum("Color", {"RED": "red", "BLUE": "blue"})


class Left(Struct, array_like=True, tag="left"):
    """One of two kinds."""

    size: Annotated[int, Meta(ge=1)]


class Right(Struct, array_like=True, tag="right"):
    """The other kind."""

    share: Annotated[float, Meta(gt=0, lt=1)]


class Part(Struct, forbid_unknown_fields=True):
    """A nested object."""

    kind: Literal["full", "sliding"]
    sides: tuple[Left | Right, ...] = ()


class Whole(Struct, kw_only=True, metaclass=SuggestingMeta, forbid_unknown_fields=True):
    """Every kind of field."""

    name: Name = "a"
    count: Annotated[int, Meta(ge=0, le=9)] | None = None
    part: Part | None = None
    parts: Annotated[list[Part], Meta(max_length=2)] = []
    weights: dict[str, Annotated[int, Meta(ge=1)]] = {}
    color: Color = Color.RED
    address: Annotated[str, Meta(pattern="^tcp:", description="tcp://HOST:PORT")] = "tcp://a:1"
    switch: bool = False
    secret: Annotated[str, Meta(min_length=9)] = "0123456789"


@looped(
    "given, message",
    [
        ({"name": ""}, "name must be text of 1 to 4 characters, not ''"),
        ({"name": 3}, "name must be text of 1 to 4 characters, not 3"),
        ({"count": 10}, "count must be an integer from 0 to 9, not 10"),
        ({"count": 1.5}, "count must be an integer from 0 to 9, not 1.5"),
        ({"count": 1 << 80}, f"count must be an integer from 0 to 9, not {1 << 80}"),
        ({"address": "a:1"}, "address must be tcp://HOST:PORT, not 'a:1'"),
        ({"switch": "maybe"}, "switch must be true or false, not 'maybe'"),
        ({"color": "rad"}, "color must be one of 'red', 'blue', not 'rad'"),
        (
            {"part": {"kind": "slidng"}},
            "part.kind must be one of 'full', 'sliding', not 'slidng'; did you mean 'sliding'?",
        ),
        ({"part": 3}, "part must be an object with named fields, not 3"),
        ({"part": {}}, "part: kind is required"),
        ({"part": {"kind": "full", "side": 1}}, "part: side is unknown. Did you mean sides? Known are kind, sides."),
        (
            {"parts": [{"kind": "full", "sides": [["right", 0.5], ["left", 0]]}]},
            "parts[0].sides[1].size must be an integer of at least 1, not 0",
        ),
        ({"parts": {}}, "parts must be a list of at most 2 entries, each an object with named fields, not {}"),
        ({"weights": {"a": 0}}, "each value of weights must be an integer of at least 1, not {'a': 0}"),
        ({"weights": {3: 1}}, "each key of weights must be text, not {3: 1}"),
        ({"colr": "red"}, "colr is unknown. Did you mean color? Known are address, color, *"),
        ([1], "the value must be an object with named fields, not another list, which is not shown"),
        ({"secret": "0123"}, "secret must be text of at least 9 characters, not another str, which is not shown"),
    ],
)
def test_a_refusal_names_the_field_both_values_and_the_closest_name(given, message):
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert(given, type=Whole)
    said = describe_refusal(caught.value, given, Whole, hidden={"secret"})
    assert said.startswith(message.removesuffix("*")) if message.endswith("*") else said == message


@looped(
    "fields, message",
    [
        ({}, ""),
        ({"count": "3"}, "count must be an integer from 0 to 9, not '3'"),
        (
            {"count": np.int64(3)},
            "count must be an integer from 0 to 9, not np.int64(3); give Python's own numbers and texts",
        ),
        (
            {"parts": [Part("full", (Right(2.0),))]},
            "parts[0].sides[0].share must be a number above 0 and below 1, not 2.0",
        ),
        (
            {"secret": b"0123456789"},
            "secret must be text of at least 9 characters, not another bytes, which is not shown",
        ),
    ],
)
def test_an_object_is_checked_though_it_was_made_in_python(fields, message):
    assert find_fault(Whole(**fields), hidden={"secret"}) == message


def test_an_unknown_keyword_is_answered_with_the_known_ones():
    with pytest.raises(
        TypeError, match=r"Whole has no field 'colr'. Did you mean color\? Known are address, color, count"
    ):
        Whole(colr="red")
    with pytest.raises(TypeError, match="Missing required argument 'kind'"):
        Part()


def test_an_error_of_our_own_is_not_translated():
    class Even(Struct):
        value: int

        def __post_init__(self):
            if self.value % 2:
                raise ValueError("an odd value")

    class Holder(Struct):
        even: Even

    given = {"even": {"value": 3}}
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert(given, type=Holder)
    assert describe_refusal(caught.value, given, Holder) == "even: an odd value"


def test_a_long_value_is_cut():
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert({"name": "x" * 10000}, type=Whole)
    assert len(describe_refusal(caught.value, {"name": "x" * 10000}, Whole)) < 200


def test_a_suggestion_lists_what_is_known():
    assert suggest("leese", ["bind", "lease"]) == "Did you mean lease? Known are bind, lease."
    assert suggest("lease_seconds", ["lease", "lease_s", "lease_slots"]).startswith("Did you mean lease_s? ")
    assert suggest("xyz", ["bind", "lease"]) == "Known are bind, lease."
