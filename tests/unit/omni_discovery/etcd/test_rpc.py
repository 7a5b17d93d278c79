"""etcd3's messages on this protobuf, in a pool of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from omni_discovery.etcd._rpc import _serialized_descriptor, rpc, stubs
from omni_discovery.etcd.watch import prefix_end

ROOT = Path(__file__).resolve().parents[4]


def run_python(code: str) -> None:
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()


def test_messages_nest_travel_and_come_back() -> None:
    put = rpc.RequestOp(request_put=rpc.PutRequest(key=b"k", value=b"v", lease=5))
    sent = rpc.TxnRequest(compare=[rpc.Compare(target=rpc.Compare.CREATE, key=b"k")], success=[put])
    assert rpc.TxnRequest.FromString(sent.SerializeToString()) == sent


def test_fragments_are_known_although_the_schema_is_older() -> None:
    request = rpc.WatchCreateRequest(fragment=True)
    assert request.SerializeToString() == b"\x40\x01"
    assert rpc.WatchResponse.FromString(b"\x38\x01").fragment


def test_the_stubs_are_those_of_etcd3() -> None:
    assert stubs.KVStub.__module__ == "etcd3.etcdrpc.rpc_pb2_grpc"


def test_the_default_pool_is_left_alone() -> None:
    """Another etcd library may register the same names there."""
    run_python(
        "import omni_discovery.etcd._rpc\n"
        "from google.protobuf import descriptor_pool\n"
        "for name in ('kv.proto', 'auth.proto', 'rpc.proto'):\n"
        "    try:\n"
        "        descriptor_pool.Default().FindFileByName(name)\n"
        "    except KeyError:\n"
        "        continue\n"
        "    raise SystemExit(name)\n"
    )


def test_an_import_of_etcd3_that_failed_before_does_no_harm() -> None:
    run_python(
        "import contextlib\n"
        "with contextlib.suppress(Exception):\n"
        "    import etcd3\n"
        "from omni_discovery.etcd._rpc import rpc\n"
        "rpc.PutRequest(key=b'k')\n"
    )


def test_a_file_without_a_descriptor_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "kv_pb2.py"
    file.write_text("nothing = 1\n")
    with pytest.raises(ImportError, match="no serialized descriptor"):
        _serialized_descriptor(file)


@pytest.mark.parametrize(
    ("prefix", "end"), [(b"/a/", b"/a0"), (b"a\xff", b"b"), (b"\xff\xff", b"\0"), (b"", b"\0"), (b"a\x00", b"a\x01")]
)
def test_the_end_of_a_prefix_is_the_first_key_that_lacks_it(prefix: bytes, end: bytes) -> None:
    assert prefix_end(prefix) == end
