"""Multipart forms: split anywhere, bounded in size, and no field is silently ignored."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from python_multipart.multipart import MAX_BOUNDARY_LENGTH

from router.gateway.batches.uploads import MAX_FIELD_BYTES, UploadForm
from router.inbox.api_errors import ApiError
from tests.kits.router.batches import form_of


def read(body: bytes, headers: dict[str, str], *cuts: int) -> tuple[str, dict, bytes]:
    data = bytearray()
    form = UploadForm(headers["content-type"], data.extend)
    bounds = [0, *sorted(cuts), len(body)]
    for start, end in itertools.pairwise(bounds):
        form.feed(body[start:end])
    name, fields = form.finish()
    return name, dict(fields), bytes(data)


@given(st.binary(max_size=200), st.lists(st.integers(0, 300), max_size=6))
def test_a_form_is_the_same_in_any_pieces(content: bytes, cuts: list[int]) -> None:
    body, headers = form_of(content)
    cuts = [min(cut, len(body)) for cut in cuts]
    assert read(body, headers, *cuts) == ("in.jsonl", {"purpose": "batch"}, content)


def test_all_fields_are_read() -> None:
    fields = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
    _, found, _ = read(*form_of(b"x", **fields))
    assert found == {"purpose": "batch", **fields}


@pytest.mark.parametrize("length", [1, 70, MAX_BOUNDARY_LENGTH])
def test_long_boundaries_are_read(length: int) -> None:
    body, headers = form_of(b"x")
    long = "b" * length
    body = body.replace(b"--limit", b"--" + long.encode())
    kind = headers["content-type"].replace("limit", long)
    assert read(body, {"content-type": kind}) == ("in.jsonl", {"purpose": "batch"}, b"x")


@pytest.mark.parametrize("length", [MAX_BOUNDARY_LENGTH + 1, 5000])
def test_a_boundary_that_is_too_long_is_refused(length: int) -> None:
    with pytest.raises(ApiError, match="multipart form cannot be read") as refused:
        UploadForm(f"multipart/form-data; boundary={'b' * length}", bytearray().extend)
    assert refused.value.status == 400


@given(st.text(st.characters(max_codepoint=255), max_size=300))
def test_any_content_type_is_read_or_refused(said: str) -> None:
    for kind in (said, f"multipart/form-data; boundary={said}"):
        try:
            UploadForm(kind, bytearray().extend)
        except ApiError:
            continue


@pytest.mark.parametrize("kind", ["", "application/json", "multipart/form-data"])
def test_other_content_types_are_refused(kind: str) -> None:
    with pytest.raises(ApiError) as refused:
        UploadForm(kind, bytearray().extend)
    assert refused.value.status == 415


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"colour": "red"}, "unknown field 'colour'"),
        ({"purpose": "x" * (MAX_FIELD_BYTES + 1)}, "purpose is too long"),
        ({"a" * 5000: "x"}, "cannot be read"),
    ],
)
def test_what_no_upload_has_is_refused(change: dict[str, str], message: str) -> None:
    body, headers = form_of(b"x", **change)
    with pytest.raises(ApiError, match=message):
        read(body, headers)


def test_too_many_fields_and_two_files_are_refused() -> None:
    body, headers = form_of(b"x")
    part = body[: body.index(b"--limit", 7)]
    with pytest.raises(ApiError, match="more than 16 fields"):
        read(part * 17 + body, headers)
    file = body[len(part) : -len(b"--limit--\r\n")]
    with pytest.raises(ApiError, match="only one file"):
        read(part + file + body[len(part) :], headers)


def test_a_form_that_breaks_off_or_has_no_file_is_refused() -> None:
    body, headers = form_of(b"x")
    for end in (0, 30, len(body) - 8):
        with pytest.raises(ApiError, match="multipart form cannot be read"):
            read(body[:end], headers)
    only = body[: body.index(b"--limit", 7)] + b"--limit--\r\n"
    with pytest.raises(ApiError, match="file is missing"):
        read(only, headers)
    with pytest.raises(ApiError, match="multipart form cannot be read"):
        read(b"no form at all" * 10, headers)


@given(st.binary(max_size=300))
def test_any_bytes_are_a_form_or_an_error(body: bytes) -> None:
    with pytest.raises(ApiError):
        read(body, {"content-type": "multipart/form-data; boundary=limit"})
