from typing import get_args

import msgspec
import pytest

from handshake.limits import PUBLICATION_BYTES_MAX
from handshake.messages import AnyMessage, Hello, Identity, Message, Publication, Refuse
from tests.helpers.loops import looped

from .helpers import CONSUMER, EXAMPLES

ENCODED = msgspec.to_builtins(EXAMPLES["hello"])


def decode(changes, cls=Hello, base=ENCODED):
    return msgspec.convert(base | changes, cls)


def test_every_message_has_a_tag_and_an_example():
    kinds = get_args(AnyMessage)
    assert set(kinds) == set(Message.__subclasses__())
    assert {type(example) for example in EXAMPLES.values()} == set(kinds)
    assert {kind.__struct_config__.tag for kind in kinds} <= set(EXAMPLES)
    for name, example in EXAMPLES.items():
        assert type(example).__struct_config__.tag == name.partition("_with_")[0]
        assert type(example).__struct_config__.tag_field == "type"


def bounded(field_type):
    """Tell whether a field's type bounds it: nothing in it is text, bytes, a number or a list without end."""
    match field_type:
        case msgspec.inspect.IntType() | msgspec.inspect.FloatType():
            return field_type.ge is not None  # MessagePack itself bounds integers above
        case msgspec.inspect.StrType():
            return field_type.max_length is not None or field_type.pattern is not None
        case msgspec.inspect.BytesType():
            return field_type.max_length is not None
        case msgspec.inspect.VarTupleType():
            return field_type.max_length is not None and bounded(field_type.item_type)
        case msgspec.inspect.StructType():
            return all(bounded(field.type) for field in field_type.fields)
        case msgspec.inspect.LiteralType() | msgspec.inspect.BoolType():
            return True
        case _:
            raise AssertionError(field_type)


@looped("kind", get_args(AnyMessage))
def test_every_field_is_bounded(kind):
    assert bounded(msgspec.inspect.type_info(kind))


@looped(
    "changes",
    [
        {"engine_id": ""},
        {"engine_id": "e" * 257},
        {"rank": -1},
        {"rank": 1},
        {"num_ranks": 65537},
        {"incarnation": "0" * 31},
        {"incarnation": "0" * 32 + "\n"},
        {"incarnation": "A" * 32},
        {"role": "router"},
        {"software": "s" * 65},
    ],
)
def test_an_identity_out_of_bounds_is_not_decoded(changes):
    with pytest.raises(msgspec.ValidationError):
        decode(changes, Identity, msgspec.to_builtins(CONSUMER))


def test_a_range_of_versions_is_not_empty():
    with pytest.raises(msgspec.ValidationError, match="version_min 3 is above version_max 2"):
        decode({"version_min": 3})


def test_unknown_fields_are_skipped_and_missing_ones_need_a_default():
    assert decode({"added_later": [1, {"a": None}]}) == EXAMPLES["hello"]
    refusal = msgspec.convert({"type": "refuse", "code": "busy", "reason": "later"}, Refuse)
    assert refusal.remedy == ""


@looped("code", ["", "Busy", "busy now", "busy\n", "b" * 65])
def test_a_refusal_has_a_stable_code(code):
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"type": "refuse", "code": code, "reason": ""}, Refuse)


def test_a_publication_knows_whether_it_is_intact():
    publication = Publication.of(b"payload", schema=2)
    assert publication.is_intact()
    assert not msgspec.structs.replace(publication, payload=b"paybad!").is_intact()
    assert Publication.of(bytes(PUBLICATION_BYTES_MAX)).is_intact()
