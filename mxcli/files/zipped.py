"""Where the bytes of a stored zip member lie in the archive, so that they can be mapped."""

from __future__ import annotations

import struct
import zipfile
from typing import IO

LOCAL_HEADER_BYTES = 30
LOCAL_SIGNATURE = b"PK\x03\x04"


def member_start(file: IO[bytes], member: zipfile.ZipInfo) -> int:
    """Position of the first byte of a member: after its local header, name and extra field; raises
    BadZipFile.
    """
    file.seek(member.header_offset)
    header = file.read(LOCAL_HEADER_BYTES)
    if len(header) < LOCAL_HEADER_BYTES or not header.startswith(LOCAL_SIGNATURE):
        raise zipfile.BadZipFile("a member has no local header")
    name_bytes, extra_bytes = struct.unpack_from("<HH", header, LOCAL_HEADER_BYTES - 4)
    return member.header_offset + LOCAL_HEADER_BYTES + int(name_bytes) + int(extra_bytes)
