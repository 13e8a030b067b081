"""Reads the multipart form of an upload piece by piece, with limits on its fields.

`python-multipart` parses the form, and limits the size of the fields' headers. Only one piece is in
memory at a time. Pure: without sockets or a store.
"""

from collections.abc import Callable, Mapping

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from router.inbox.api_errors import ApiError, invalid_value

MAX_FIELDS = 16
MAX_FIELD_BYTES = 1024
FIELDS = frozenset({"purpose", "expires_after[anchor]", "expires_after[seconds]"})


class UploadForm:
    """The form of one upload. Passes file data to `on_data`, and keeps the small fields."""

    def __init__(self, content_type: str, on_data: Callable[[bytes], None]) -> None:
        """Raises ApiError if the body is not a multipart form."""
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            message = "content-type must be multipart/form-data with a boundary"
            raise ApiError(message, code="unsupported_media_type", status=415)
        self._on_data = on_data
        self._fields: dict[str, str] = {}
        self._filename: str | None = None
        self._is_complete = False
        self._header_name = b""
        self._header_value = b""
        self._headers: dict[bytes, bytes] = {}
        self._name = ""  # name of the part that is being read
        self._is_file = False
        self._value = bytearray()
        self._num_parts = 0
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin_part,
                    "on_part_data": self._take,
                    "on_part_end": self._end_part,
                    "on_header_field": self._take_header_name,
                    "on_header_value": self._take_header_value,
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._end_headers,
                    "on_end": self._end,
                },
            )
        except FormParserError as error:  # the boundary is malformed
            raise _malformed(str(error)) from error

    def feed(self, data: bytes) -> None:
        """Parses the next part of the body. Raises ApiError."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise _malformed(str(error)) from error

    def finish(self) -> tuple[str, Mapping[str, str]]:
        """Ends parsing.

        Returns the file's name and the other fields. Raises ApiError if the form is incomplete.
        """
        if not self._is_complete:
            raise _malformed("it ends in the middle")
        if self._filename is None:
            raise ApiError("file is missing", param="file", code="missing_required_parameter")
        return self._filename, self._fields

    def _begin_part(self) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_FIELDS:
            raise _malformed(f"it has more than {MAX_FIELDS} fields")
        self._headers = {}
        self._value = bytearray()

    def _take_header_name(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _take_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _end_header(self) -> None:
        self._headers[self._header_name.lower()] = self._header_value
        self._header_name = self._header_value = b""

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        self._name = options.get(b"name", b"").decode(errors="replace")
        self._is_file = self._name == "file"
        if self._is_file:
            if self._filename is not None:
                raise invalid_value("only one file can be uploaded at a time", "file")
            self._filename = options.get(b"filename", b"").decode(errors="replace") or "upload"
        elif self._name not in FIELDS:
            message = f"unknown field {self._name[:80]!r}"
            raise ApiError(message, param=self._name[:80], code="unknown_parameter")

    def _take(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self._on_data(data[start:end])
            return
        self._value += data[start:end]
        if len(self._value) > MAX_FIELD_BYTES:
            raise invalid_value(f"{self._name} is too long", self._name)

    def _end_part(self) -> None:
        if not self._is_file:
            self._fields[self._name] = self._value.decode(errors="replace")

    def _end(self) -> None:
        self._is_complete = True


def _malformed(why: str) -> ApiError:
    return ApiError(f"the multipart form cannot be read: {why}"[:300], code="invalid_form")
