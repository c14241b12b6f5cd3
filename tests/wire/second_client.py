"""A client written from docs/reference/protocol.md alone: nothing of ``lmcache_core`` is imported here."""

import array
import hashlib
import hmac
import mmap
import os
import socket
import struct

import msgspec

pack = msgspec.msgpack.encode
unpack = msgspec.msgpack.decode


class Second:
    """One connection. ``call`` sends a request and returns the fields of its reply."""

    def __init__(self, address, probe, token=None):
        self.id = 0
        self.segments = {}
        family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
        self.local = family == socket.AF_UNIX
        self.sock = socket.socket(family)
        self.sock.settimeout(5)
        self.sock.connect(address)
        welcome = self.call("hello", 1, probe, os.getpid(), ["shm"], descriptors=True)
        _, self.version, self.probe, self.boot, _, _, _, self.session, self.path = welcome[:9]
        self.challenge, self.writable, segments = welcome[9:12]
        self.map(segments)
        if token is not None:
            proof = hmac.new(token, self.challenge + self.boot, hashlib.sha256).digest()
            self.call("auth", proof)

    def map(self, segments):
        for (number, nbytes, _), descriptor in zip(segments, self.descriptors, strict=True):
            protection = mmap.PROT_READ | (mmap.PROT_WRITE if self.writable else 0)
            words = -(-(nbytes // 4096 * 8) // 4096) * 4096
            assert os.fstat(descriptor).st_size >= nbytes + words
            self.segments[number] = (
                nbytes, mmap.mmap(descriptor, nbytes + words, mmap.MAP_SHARED, protection),
            )  # fmt: skip
            os.close(descriptor)

    def send(self, *record, values=()):
        body = pack(list(record))
        self.sock.sendall(struct.pack("<I", len(body)) + body + b"".join(values))

    def call(self, name, *fields, values=(), descriptors=False):
        self.id += 1
        self.send(name, self.id, *fields, values=values)
        reply = self.receive(descriptors)
        assert reply[1] == self.id
        assert reply[0] != "failed", reply
        return reply[1:]

    def receive(self, descriptors=False):
        self.descriptors = []
        if descriptors and self.local:
            head, self.descriptors, _, _ = socket.recv_fds(self.sock, 4, 64)
        else:
            head = self.read(4)
        return unpack(self.read(struct.unpack("<I", head)[0]))

    def read(self, nbytes):
        data = b""
        while len(data) < nbytes:
            part = self.sock.recv(nbytes - len(data))
            assert part, "closed"
            data += part
        return data

    def view(self, extent):
        segment, base, nbytes, generation = extent
        if segment not in self.segments:
            self.map(self.call("segments", segment, descriptors=True)[1])
        size, mapped = self.segments[segment]
        (word,) = struct.unpack_from("<Q", mapped, size + base // 4096 * 8)
        assert word == generation
        return memoryview(mapped)[base : base + nbytes]

    def put(self, space, digest, data, identity=None):
        """Store one value; True when it became visible."""
        run = [[space, 0, digest]]
        _, grants, _, extents = self.call("reserve", run, struct.pack("<Q", len(data)))
        if not grants[0]:
            return False
        identity = identity or hashlib.sha256(data).digest()[:16]
        if self.local and self.writable:
            self.view(array.array("Q", extents))[:] = data
            return self.call("commit", grants, identity)[1][0]
        reply = self.call("commit", grants, identity, None, len(data), values=[data])
        return reply[1][0]

    def get(self, space, digest, identity=None):
        """Fetch one value, or None."""
        _, grant, extents, identities, _ = self.call(
            "load", [[space, 0, digest]], 1.0, 0, "", not self.local
        )
        if not extents:
            return None
        words = array.array("Q", extents)
        data = bytes(self.view(words)) if self.local else self.read(words[2])
        assert identities == (identity or hashlib.sha256(data).digest()[:16])
        if grant:
            self.send("release", [grant])
        return data
