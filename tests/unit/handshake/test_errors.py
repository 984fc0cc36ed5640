from handshake import errors


def subclasses(cls):
    for child in cls.__subclasses__():
        yield child
        yield from subclasses(child)


def test_every_error_has_its_own_code_and_a_remedy():
    found = list(subclasses(errors.HandshakeError))
    assert len({error.code for error in found}) == len(found) == 10
    assert all(error.default_remedy for error in found)


def test_the_docstring_lists_every_error():
    assert all(error.__name__ in errors.__doc__ for error in subclasses(errors.HandshakeError))


def test_the_text_ends_with_what_to_do():
    error = errors.ConnectionRefused("version_unsupported", "no common version", remedy="Upgrade.")
    assert str(error) == "the peer refused (version_unsupported): no common version [peer_refused] Upgrade."
    assert error.refusal == "version_unsupported"
    assert str(errors.Closed("gone")).endswith(errors.Closed.default_remedy)
