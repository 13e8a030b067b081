"""The generated Python module matches the .proto file."""

from pathlib import Path

import pytest

from tests.kits.tree.documents import ROOT

PROTO = "router/gateway/inference/inference.proto"


def test_generated_code_is_up_to_date(tmp_path):
    protoc = pytest.importorskip("grpc_tools.protoc")
    assert protoc.main(["protoc", f"-I{ROOT}", f"--python_out={tmp_path}", str(ROOT / PROTO)]) == 0
    written = (tmp_path / PROTO.replace(".proto", "_pb2.py")).read_text()
    assert written == Path(ROOT / PROTO.replace(".proto", "_pb2.py")).read_text(), "`make proto`"
