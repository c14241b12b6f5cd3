"""A pretended S3 for tests without a server: moto behind a real socket. It takes any credentials."""

from __future__ import annotations

import logging
from typing import Self

from lmcache_backend_s3.serving import BUCKET, SeaweedServer
from lmcache_backend_s3.transport import Call


class PretendedServer(SeaweedServer):
    """moto's S3 on threads of this process (``Thread-...``), with the bucket of ``SeaweedServer``."""

    def __init__(self) -> None:
        from moto.server import ThreadedMotoServer

        logging.getLogger("werkzeug").setLevel(logging.ERROR)  # it logs every request
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)

    def start(self) -> Self:
        self._server.start()
        self.port = self._server.get_host_and_port()[1]
        self.bucket(BUCKET).make(Call())
        return self

    def kill(self) -> None:
        self._server.stop()
