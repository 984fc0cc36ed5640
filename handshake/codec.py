"""Messages to frames and back: the only place that knows the bytes.

A message is one frame: the format byte, then one MessagePack map whose ``type`` names the message. The format byte is
0xC1, the one byte that MessagePack never uses.
"""

from collections.abc import Sequence

from msgspec import MsgspecError, msgpack

from handshake.errors import LocalProtocolError, RemoteProtocolError
from handshake.messages import AnyMessage, Publish

FORMAT = b"\xc1"

_decoder: msgpack.Decoder[AnyMessage] = msgpack.Decoder(AnyMessage)
_encoder = msgpack.Encoder()
_DECODE_ERRORS = (MsgspecError, UnicodeDecodeError, RecursionError)  # the last: a skipped field is nested too deeply


def encode(message: AnyMessage, nbytes_max: int) -> list[bytes]:
    """Return the frames of a message.

    Structs do not check their fields when they are made, so the frames are decoded as the peer will decode them.

    Raises:
        LocalProtocolError: a field is out of its bounds, or the frame is too large.
    """
    try:
        frames = [FORMAT + _encoder.encode(message)]
        decode(frames, nbytes_max)
    except (MsgspecError, UnicodeEncodeError, TypeError, OverflowError) as error:
        raise LocalProtocolError(f"{type(message).__name__} cannot be encoded: {error}") from error
    except RemoteProtocolError as error:
        raise LocalProtocolError(f"{type(message).__name__} is invalid: {error.message}") from error
    return frames


def decode(frames: Sequence[bytes], nbytes_max: int) -> AnyMessage:
    """Return the message in the frames. Their number and size are checked first.

    Raises:
        RemoteProtocolError: they are no message, or a publication does not match its digest. Nothing else is raised.
    """
    if len(frames) != 1:
        raise RemoteProtocolError("a message is one frame, no fewer and no more", violation="frame_count")
    (frame,) = frames
    if len(frame) > nbytes_max:
        raise RemoteProtocolError(f"a frame of {len(frame)} bytes is above {nbytes_max}", violation="frame_size")
    if frame[:1] != FORMAT:
        raise RemoteProtocolError(f"format byte {frame[:1].hex() or 'missing'}, not c1", violation="format")
    try:
        message = _decoder.decode(memoryview(frame)[1:])
    except _DECODE_ERRORS as error:
        raise RemoteProtocolError(f"message cannot be decoded: {error}", violation="malformed") from error
    if isinstance(message, Publish) and not message.publication.is_intact():
        raise RemoteProtocolError("publication does not match its digest", violation="digest")
    return message
