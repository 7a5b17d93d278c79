"""Messages that never end: ZMQ shows a message only when its last part has come, and bounds parts but not their number.

Only a registered hub with a ZMQ of its own could have a replica keep one.
"""

from __future__ import annotations

import socket
import struct
import time
from pathlib import Path

import pytest
import zmq

from omni_discovery.curve import KeyPair
from tests.support.child_replica import ChildReplica
from tests.support.replica_hub import RawHub

KEYS = KeyPair.generate()
PART = bytes(64 << 10)
#: 128 MiB.
PARTS = 2048
#: Signature and version of ZMTP 3.0, with the mechanism of no encryption.
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER" + b"\x08Identity" + struct.pack(">I", 0)


def resident_mib(replica: ChildReplica) -> int:
    pages = int(Path(f"/proc/{replica.pid}/statm").read_text().split()[1])
    return pages * 4096 >> 20


def pour(port: int) -> None:
    """Speak ZMTP by hand, and send parts for as long as the replica takes them."""
    with socket.create_connection(("127.0.0.1", port), timeout=5) as stream:
        try:
            stream.sendall(GREETING)
            stream.recv(64, socket.MSG_WAITALL)
            stream.sendall(b"\x04" + bytes([len(READY)]) + READY)
            for _ in range(PARTS):
                stream.sendall(b"\x03" + struct.pack(">Q", len(PART)) + PART)
        except OSError:
            return


@pytest.mark.attack("A15", "C2")
def test_a_stranger_has_a_replica_keep_nothing() -> None:
    with ChildReplica({KEYS.public: "hub-1"}) as replica:
        before_mib = resident_mib(replica)
        for addr in (replica.info.input_addr, replica.info.output_addr):
            pour(int(addr.rpartition(":")[2]))
        assert resident_mib(replica) - before_mib < 64
        assert replica.is_running


@pytest.mark.attack("A15")
def test_a_registered_hub_keeps_its_endless_message_itself() -> None:
    """Its ZMQ sends nothing of a message that has not ended; the hub beside it is served."""
    other = KeyPair.generate()
    with ChildReplica({KEYS.public: "hub-1", other.public: "hub-2"}) as replica:
        info = replica.info
        hubs = [
            RawHub(name, keys, info.input_addr, info.output_addr, info.curve_public_key, info.epoch)
            for name, keys in (("hub-1", KEYS), ("hub-2", other))
        ]
        try:
            for hub in hubs:
                hub.hello(30.0)
            before_mib = resident_mib(replica)
            for _ in range(PARTS):
                hubs[0].input.send(PART, zmq.SNDMORE)
            time.sleep(1.0)
            assert resident_mib(replica) - before_mib < 64
            hubs[1].submit("r", "fine")
            hubs[1].acknowledged(30.0)
            assert hubs[1].collect("r", 30.0)[1].finish_reason == "stop"
        finally:
            for hub in hubs:
                hub.close()
